"""The checks of `make gpu`, as far as a CPU can do them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checks need torch", exc_type=ImportError)

#: In `make test`: two ranks, of which one has no weights.
CORE = ("versions", "without_weights")
REST = (
    "programs,random_numbers,split_backwards,exchanges,copies_to_the_host,norms_and_updates,not_finite,recorded,lazily,eagerly,by_edges",
    "by_edges_that_are_split,replicas,sharded,gallery,step_time,host_time,busy,death",
    "scaled,bad_batches,transformers_model,checkpoints,train_script,report",
    "graphs,graphs_that_draw,graphs_of_autocast,graph_time,graphs_of_two,graphs_of_replicas",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [",".join(CORE), *(pytest.param(each, marks=pytest.mark.large) for each in REST)],
)
def test_a_cpu_passes_what_it_can(names: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--only", names, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [*found["checks"]] == names.split(",")


def test_all_checks_that_need_no_gpu_are_tried() -> None:
    from tests.gpu import against_torch, loops, one_rank, several_ranks, verdicts
    from tests.gpu.checks import CHECKS

    assert {against_torch, loops, one_rank, several_ranks, verdicts}
    tried = [*CORE, *(name for each in REST for name in each.split(","))]
    assert sorted(tried) == sorted(
        name for name, check in CHECKS.items() if not check.needs_gpu
    )
