"""The door: a part is loaded where it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

from schedlang import Source, compile
from schedlang.plan.write import write_plan
from schedlang.runtime.door import FEATURES
from tests.support.paths import PROGRAMS, ROOT

#: Files of parts that every training needs.
ALWAYS = {
    "added_losses",
    "buffers",
    "compared",
    "foreign_weights",
    "shared_draws",
    "shared_hooks",
    "unknown_scalers",
    "weights",
}

#: Modules for failures, for GPUs, for what a script may ask for between two steps, and for other
#: plans and models.
ON_DEMAND = {
    "schedlang.plan.other_files",
    "schedlang.plan.writer",
    "schedlang.ranks.gpu_streams",
    "schedlang.ranks.hazards",
    "schedlang.ranks.warm_up",
    "schedlang.runtime.clock",
    "schedlang.runtime.communicators",
    "schedlang.runtime.containers",
    "schedlang.runtime.failure",
    "schedlang.runtime.failure_report",
    "schedlang.runtime.gpu_progress",
    "schedlang.runtime.named_losses",
    "schedlang.runtime.precision",
    "schedlang.runtime.shared_weights",
    "schedlang.runtime.torch_private.grad_scaler",
    "schedlang.runtime.torch_private.hidden_hooks",
    "schedlang.schedule.costs.model",
    "schedlang.schedule.forward_only",
    "schedlang.schedule.timeline",
}

#: Builds a pipeline, makes a step, and prints the files of `runtime/` and their lines.
SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from schedlang.plan.reader import open_plan
from schedlang.runtime import Pipeline

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
modules = {0: nn.Sequential(nn.Linear(4, 4), nn.Tanh())}
pipeline = Pipeline(open_plan(sys.argv[1]), modules, nn.functional.mse_loss)
pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
print(*(name for name in sys.modules if name.startswith("schedlang.")))
dist.destroy_process_group()
"""


def loaded(program: str, tmp_path: Path) -> set[str]:
    """The modules of the project that one step of a program on one rank loads."""
    text = (PROGRAMS / f"{program}.sched").read_text()
    plan = compile(Source(program, text), {"ranks": 1, "microbatches": 4})
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    return set(run.stdout.split())


def parts(modules: set[str]) -> set[str]:
    """The files of parts among some modules."""
    room = "schedlang.runtime.parts."
    return {name.removeprefix(room) for name in modules if name.startswith(room)}


@pytest.mark.slow
def test_a_plain_pipeline_loads_no_part_that_it_does_not_need(tmp_path: Path) -> None:
    modules = loaded("1f1b", tmp_path)
    assert parts(modules) <= ALWAYS
    assert "schedlang.runtime.model.split" not in modules
    assert modules & ON_DEMAND == set()
    assert not [name for name in modules if name.startswith("schedlang.proof")]


@pytest.mark.slow
def test_a_part_is_loaded_where_the_plan_asks_for_it(tmp_path: Path) -> None:
    assert parts(loaded("1f1b_recompute", tmp_path)) - ALWAYS == {
        "repeats",
        "without_graph",
    }


def test_every_part_has_a_row() -> None:
    rows = {feature.file for feature in FEATURES.values()} - {None}
    files = {path.stem for path in (ROOT / "runtime" / "parts").glob("*.py")}
    # What makes layers and blocks whose backward is split, what a part starts over from, what parts
    # have ranks compare, and the wire of a transport.
    assert files - rows == {
        "__init__",
        "again",
        "compared",
        "compiled",
        "edge_wire",
        "gpu_copies",
        "layers",
    }


def test_a_feature_goes_together_only_with_what_there_is() -> None:
    for feature in FEATURES.values():
        assert feature.not_with.keys() <= FEATURES.keys()
