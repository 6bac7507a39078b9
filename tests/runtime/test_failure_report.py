"""What a user sees of a training that fails: one report, and a file with the tracebacks."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

from tests.support.processes import torchrun
from tests.support.ranks import Run
from tests.support.training import run_script

pytestmark = pytest.mark.processes

SCRIPT = """
import os
import sys
import tempfile
import time
import torch
import torch.distributed as dist
from torch import nn

import schedlang
from schedlang.runtime import Pipeline

FAILS = "{fails}"
tempfile.tempdir = os.path.dirname(__file__)
dist.init_process_group("gloo")


# Between the end of another rank and the report, torchrun would have time to print.
class SlowTerminal:
    def write(self, text):
        time.sleep(0.5)
        return sys.__stderr__.write(text)

    def __getattr__(self, name):
        return getattr(sys.__stderr__, name)


if dist.get_rank() == 1:
    sys.stderr = SlowTerminal()


class Model(nn.Linear):
    def forward(self, x):
        if FAILS == "in a forward" and dist.get_rank() == 1:
            self.look_up("key")
        return super().forward(x)

    def look_up(self, key):
        return {{}}[key]


def batches():
    yield torch.ones(2, 4)
    if FAILS == "between two steps" and dist.get_rank() == 1:
        raise OSError("a truncated file")
    if FAILS == "by Ctrl-C" and dist.get_rank() == 1:
        raise KeyboardInterrupt
    yield torch.ones(2, 4)


plan = schedlang.compile("1f1b", {{"ranks": 3, "microbatches": 2}})
stages = {{dist.get_rank(): Model(4, 4)}}
pipeline = Pipeline(plan, stages, nn.functional.mse_loss, timeout=20)
for batch in batches():
    pipeline.step(batch, batch)
"""

CAUSES = {
    "in a forward": r"rank 1 failed at 1F0 \(\S*1f1b\.sched:\d+\): KeyError: 'key'",
    "between two steps": "rank 1 failed: OSError: a truncated file",
    "by Ctrl-C": "rank 1 was interrupted between two steps",
}
INNERMOST = {
    "in a forward": r"script\.py:\d+, in look_up: return {}\[key\]",
    "between two steps": r'script\.py:\d+, in batches: raise OSError\("a truncated file"\)',
    "by Ctrl-C": r"script\.py:\d+, in batches: raise KeyboardInterrupt",
}


@pytest.mark.parametrize(
    "fails", [pytest.param("in a forward", marks=pytest.mark.core), *[*CAUSES][1:]]
)
def test_a_training_that_fails_prints_one_report(tmp_path: Path, fails: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fails=fails))
    done = torchrun(3, script)
    assert done.returncode == 1
    # torchrun's own summary, behind the report, has a traceback of itself.
    begin = r"^[WE]\d{4} .*(?:closing signal|failed \(exitcode).*$"
    ours, summary = re.split(begin, done.stderr, maxsplit=1, flags=re.M)
    (path,) = re.findall(r"^  tracebacks of all ranks: (.*)$", ours, re.M)
    assert re.search(rf"^{CAUSES[fails]}$", ours, re.M), ours
    assert re.search(rf"^  \S*{INNERMOST[fails]}$", ours, re.M), ours
    assert len(re.findall(CAUSES[fails], ours)) == 1, ours
    assert "Traceback" not in ours
    kept = Path(path).read_text()
    assert sorted(re.findall(r"^=== (rank \d)", kept, re.M)) == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    assert "Traceback" in kept
    # Each process says so, also the one that torchrun takes for the cause since it ended first.
    causes = re.findall(rf"traceback : {CAUSES[fails]}$", summary, re.M)
    assert len(causes) == 3, summary


READING = """
import torch.distributed as dist

import schedlang
from schedlang.runtime import Pipeline

{before}
{reading}
"""
#: How a script gets a plan that is wrong, and what the report says.
MISTAKES = {
    "read_plan": (
        'schedlang.read_plan("plan.json")',
        "error[unreadable]: cannot read `plan.json`: No such file or directory",
    ),
    "open_plan": (
        'schedlang.open_plan("plan.json")',
        "error[unreadable]: cannot read `plan.json`: No such file or directory",
    ),
    "compile": (
        'schedlang.compile("1f1b", {"ranks": 0})',
        "error[parameter]: `ranks` is 0, it must be 1 or more",
    ),
}


@pytest.mark.parametrize(
    ("name", "joins"),
    [
        pytest.param("read_plan", False, marks=pytest.mark.core),
        ("open_plan", True),
        ("compile", False),
        ("compile", True),
    ],
)
def test_a_wrong_plan_is_one_report_of_all_ranks(
    run_ranks: Run, tmp_path: Path, name: str, joins: bool
) -> None:
    reading, said = MISTAKES[name]
    script = tmp_path / "script.py"
    before = 'dist.init_process_group("gloo")' if joins else ""
    script.write_text(READING.format(before=before, reading=reading))
    done = run_script(run_ranks, tmp_path, 3, script)
    assert any(done.codes)
    assert done.stderr.count(said) == 1, done.stderr
    line = len(READING.format(before=before, reading="").splitlines())
    assert f"script.py:{line}, in <module>: {reading}" in done.stderr
    assert "Traceback" not in done.stderr
