"""A kind of op from outside is one row and one file (`tests/support/compression.py`): programs with
it are compiled, proved, simulated, drawn, and run.

Each test has processes of its own, since a kind is added before schedlang is imported.
"""

import json
import re
from pathlib import Path

import pytest

from schedlang.schedule.kinds import Kind
from tests.support.paths import ROOT
from tests.support.processes import python, torchrun

#: A kind is known by its row. More source files than these do not name one, but for the forward
#: and the backward, whole and of the weights.
MOST_FILES = 4

PROGRAM = """schedule door {
    param ranks = 1
    param microbatches = 2
    cost compress = 3
    memory compress = 0 - 0.75
    memory B = 0 - 0.25
    rank r {
        for m in 0 .. microbatches { F(m)  compress(m) }
        for m in 0 .. microbatches { B(m) }
    }
}
"""
#: What stands before each script: the kind is there, and `compiled` gives a plan of a program.
BEGIN = f"""
import json, sys
from tests.support import compression
from schedlang import CompileError, Costs, Source, compile, read_plan, simulate, write_plan

PROGRAM = {PROGRAM!r}

def compiled(program=PROGRAM, **params):
    return compile(Source("door.sched", program), params)
"""


def told(script: str, *arguments: object) -> object:
    """What a script prints last, as JSON."""
    outcome = python("-c", BEGIN + script, *arguments)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[-1])


def test_it_takes_time_and_memory_on_a_stream_of_its_own() -> None:
    """A second of both copies begins once the first is over, and each backward waits for its own:

    rank          F0 F1 ┄┄┄┄┄ B0 B0 ┄┄ B1 B1
    compression      C0 C0 C0 C1 C1 C1
    """
    script = """
execution = simulate(compiled())
bars = [list(bar)[1:] for bar in (*execution.timeline.ranks[0], *execution.timeline.copies[0])]
print(json.dumps([bars, execution.peak_memory, execution.timeline.makespan]))
"""
    bars, peak, makespan = told(script)  # type: ignore[misc]
    forwards = [[0, 0, 0.0, 1.0], [0, 1, 1.0, 2.0]]
    backwards = [[0, 0, 4.0, 6.0], [0, 1, 7.0, 9.0]]
    compressions = [[0, 0, 1.0, 4.0], [0, 1, 4.0, 7.0]]
    assert bars == [*forwards, *backwards, *compressions]
    assert peak == [2.0]
    assert makespan == 9


def test_it_has_a_stream_of_a_gpu_and_events() -> None:
    """A backward waits for it; without any of its events, two streams use one activation."""
    script = """
from schedlang.ranks.gpu_streams import Record, Wait, gpu_steps
from schedlang.ranks.hazards import hazards
from schedlang.schedule.transports import NCCL

plan = compiled()
steps = gpu_steps(plan, 0, NCCL)
found = [len(list(hazards(plan, 0, steps)))]
for at, step in enumerate(steps):
    if isinstance(step, Record | Wait):
        found.append(len(list(hazards(plan, 0, [*steps[:at], *steps[at + 1 :]]))) > 0)
print(json.dumps([sorted({each.stream for each in steps if hasattr(each, "stream")}), found]))
"""
    streams, found = told(script)  # type: ignore[misc]
    assert streams == ["compression", "compute"]
    # Two events for each of two, which are recorded and waited for.
    assert found == [0] + [True] * 8


def test_costs_have_its_duration_and_its_memory() -> None:
    script = """
costs = Costs(compress_times=[1, 2], compress_memory=[-0.5])
print(json.dumps([costs.to_json(), simulate(compiled(ranks=2), costs).timeline.busy]))
"""
    given, _ = told(script)  # type: ignore[misc]
    assert given == {"compress_times": [1.0, 2.0], "compress_memory": [-0.5]}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("F(m)  compress(m)", "F(m)  compress(m)  compress(m)"), "repeated-op"),
        (("F(m)  compress(m)", "compress(m)  F(m)"), "order"),
        (("B(m)", "B(m)  compress(m)"), "repeated-op"),
        (("compress(m)", "compress(m + 9)"), "no-such-microbatch"),
    ],
)
def test_its_place_is_proved(change: tuple[str, str], code: str) -> None:
    script = """
try:
    compiled(PROGRAM.replace(*sys.argv[1:]), microbatches=6)
except CompileError as error:
    print(json.dumps(sorted({each.code for each in error.diagnostics})))
"""
    assert told(script, *change) == [code]


def test_a_plan_with_it_is_written_read_checked_and_drawn(tmp_path: Path) -> None:
    script = """
from pathlib import Path
from schedlang.cli.main import main

folder = Path(sys.argv[1])
plan = compiled(ranks=2, microbatches=4)
write_plan(plan, folder / "plan.json")
again = read_plan(folder / "plan.json")
assert again.ranks == plan.ranks
assert plan.ranks[1].text().startswith("1RECV_F0 1F0 1COMPRESS0 1RECV_F1 1F1 1COMPRESS1")
for name in ("plan.svg", "plan.html"):
    assert main(["view", str(folder / "plan.json"), "-o", str(folder / name)]) == 0
assert "compression" in (folder / "plan.svg").read_text()
assert "#c9b1e8" in (folder / "plan.svg").read_text()
assert "compression" in (folder / "plan.html").read_text()
(folder / "door.sched").write_text(PROGRAM)
assert main(["check", str(folder / "door.sched"), "--transport", "all"]) == 0
assert main(["fmt", "--check", str(folder / "door.sched")]) == 0
print("[]")
"""
    assert told(script, tmp_path) == []


def test_a_kind_that_comes_too_late_is_refused() -> None:
    outcome = python("-c", "import schedlang.compiler, tests.support.compression")
    assert "`COMPRESS` comes too late" in outcome.stderr


#: What a process does: a step of two layers, and whether all is as in one process.
TRAINING = f"""{BEGIN}
import torch
import torch.distributed as dist
from torch import nn
from schedlang.runtime import Pipeline

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
alone = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
for one, other in zip(layers, alone):
    other.load_state_dict(one.state_dict())
inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)
plan = compiled(ranks=2, microbatches=4)
pipeline = Pipeline(plan, {{rank: layers[rank]}}, nn.functional.mse_loss)
pipeline.step(inputs, targets)
nn.functional.mse_loss(nn.Sequential(*alone)(inputs), targets).backward()
torch.testing.assert_close(layers[rank].weight.grad, alone[rank].weight.grad)
assert compression.COMPRESSED == [(rank, microbatch) for microbatch in range(4)]
print(f"trained {{rank}}")
"""


@pytest.mark.processes
def test_processes_run_it_by_its_method(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the runtime needs torch")
    (tmp_path / "training.py").write_text(TRAINING)
    outcome = torchrun(2, tmp_path / "training.py")
    assert outcome.returncode == 0, outcome.stderr
    # Two processes may print into one line.
    assert all(f"trained {rank}" in outcome.stdout for rank in range(2))


def test_few_files_name_a_kind() -> None:
    files: dict[str, list[str]] = {}
    for room in ("schedlang", "runtime", "examples", "tools"):
        for path in (ROOT / room).rglob("*.py"):
            if path.resolve().is_relative_to(ROOT / room):
                for name in set(re.findall(r"\bKind\.(\w+)", path.read_text("utf-8"))):
                    files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    named = {name: files.get(name, []) for name in Kind.__members__.keys() - set("FBW")}
    assert {name: of for name, of in named.items() if len(of) > MOST_FILES} == {}
    assert {"OFFLOAD", "UNSHARD"} <= {name for name, of in named.items() if of}
