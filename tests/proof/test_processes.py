"""Verdicts against real processes: what is proved runs to its end with the right gradients, a
deadlock does hang.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count, product
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve

from schedlang import CompileError, Kind, Plan, Schedule, prove, write_plan
from schedlang.plan.reader import parse_actions
from tests.support.damage import batched_plan, damaged_plans, gallery, one_of, random_plan
from tests.support.own_order import is_in_order
from tests.support.paths import ROOT, TESTS

pytest.importorskip("torch", reason="real processes need torch", exc_type=ImportError)

pytestmark = [pytest.mark.processes, pytest.mark.blocks(4)]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SIZES = ((2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4))
TRANSPORTS = ("blocking", "gloo")
#: By whose rules processes run what is proved for a transport; schedlang's runtime, where it takes
#: the plan.
RUN_BY = {
    "blocking": ("blocking", "runtime"),
    "gloo": ("gloo", "runtime"),
    "portable": ("blocking", "gloo", "runtime"),
}
#: Plans of one block, for each transport and number of ranks: so many that are proved.
PROVED = 5
#: In seconds, from when all ranks have started: for a plan that should hang, and for many that
#: should not.
HANGS = 1.0
RUNS = 30.0
#: What keeps ranks waiting; other mistakes compute something wrong.
WAITS = {"deadlock", "unmatched-send", "unmatched-receive"}

Launch = Callable[[str, list[Schedule], float], dict[str, Any]]


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen]:
    """The process that forks the ranks of all launches, so that torch is imported once."""
    command = [sys.executable, str(TESTS / "support" / "process_worker.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def launch(worker: subprocess.Popen, tmp_path: Path) -> Launch:
    """Run plans one after the other on fresh processes."""
    numbers = count()

    def launch(how: str, plans: list[Schedule], seconds: float) -> dict[str, Any]:
        files = [str(tmp_path / f"{next(numbers)}.json") for _ in plans]
        for plan, file in zip(plans, files, strict=True):
            write_plan(as_plan(plan), file)
        worker.stdin.write(json.dumps([how, files, seconds]) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    return launch


def as_plan(schedule: Schedule) -> Plan:
    if isinstance(schedule, Plan):
        return schedule
    return Plan(**asdict(schedule, recurse=False))


def can_run(plan: Schedule) -> bool:
    """Whether the interpreter knows all that is in a plan, and does not fail before it
    communicates.
    """
    kinds = set(chain.from_iterable(actions.kind for actions in plan.ranks))
    plain = plan.layout.slices == plan.layout.updates == 1 and not plan.is_forward_only
    return (
        plain
        and Kind.U not in kinds
        and any(kind >= Kind.SEND_F for kind in kinds)
        and is_in_order(plan)
    )


def codes(plan: Schedule) -> set[str]:
    try:
        prove(plan)
    except CompileError as error:
        return {each.code for each in error.diagnostics}
    return set()


def samples(block: int, transport: str) -> Iterator[Schedule]:
    """Random and damaged plans for a transport that processes can run."""
    rng = random.Random(f"{transport} {block}")
    while True:
        draw = (
            one_of(gallery(SIZES))
            if rng.random() < 0.5
            else rng.choice([random_plan, batched_plan])
        )
        for plan in damaged_plans(draw, 1, rng):
            if can_run(plan):
                yield evolve(plan, transport=transport)


@pytest.mark.parametrize("transport", RUN_BY)
def test_what_is_proved_ends_with_the_right_gradients(
    launch: Launch, transport: str, block: int, tally: Counter[str]
) -> None:
    found: dict[int, list[Schedule]] = {2: [], 3: []}
    candidates = (plan for plan in samples(block, transport) if not codes(plan))
    while min(map(len, found.values())) < PROVED:
        plan = next(candidates)
        if len(found[len(plan.ranks)]) < PROVED:
            found[len(plan.ranks)].append(plan)
    for how, plans in product(RUN_BY[transport], found.values()):
        runs = plans if how != "runtime" else [plan for plan in plans if runtime_takes(plan)]
        if runs:
            run_all(launch, how, runs, tally)


def runtime_takes(plan: Schedule) -> bool:
    """Whether schedlang's runtime runs a plan, and the worker knows how to give it its batch."""
    return len(plan.layout.pipelines) == 1


def run_all(launch: Launch, how: str, plans: list[Schedule], tally: Counter[str]) -> None:
    """Run plans that are proved; all must end, on all ranks, with the right gradients."""
    outcome = launch(how, plans, RUNS)
    texts = [[each.text() for each in plan.ranks] for plan in plans]
    tally[f"{how} proved"] += len(plans)
    ended = min(outcome["finished"])
    tally[f"{how} hangs"] += len(plans) - ended
    assert ended == len(plans), (outcome, texts[ended])
    for text, differences in zip(texts, zip(*outcome["differences"], strict=True), strict=True):
        tally[f"{how} wrong gradients"] += max(differences) > 1e-9
        assert max(differences) <= 1e-9, (differences, text)


def test_what_deadlocks_hangs(launch: Launch, block: int, tally: Counter[str]) -> None:
    """One plan of each block, for the transports in turn: fresh processes for each, as a hang
    leaves its threads.
    """
    transport = TRANSPORTS[block % 2]
    plan = next(each for each in samples(block, transport) if codes(each) and codes(each) <= WAITS)
    outcome = launch(transport, [plan], HANGS)
    tally[f"{transport} deadlocks"] += 1
    assert outcome["started"]
    assert outcome["alive"], "a rank failed"
    tally[f"{transport} ended after deadlock"] += all(outcome["finished"])
    assert not all(outcome["finished"]), [each.text() for each in plan.ranks]


def test_wrong_gradients_and_hangs_are_seen(launch: Launch) -> None:
    """Microbatches received for one another: where messages come in order, that trains wrong; with
    tags it is right.
    """
    right = next(each for each in gallery(((2, 2),)) if Path(each.source.path).stem == "gpipe")
    text = right.ranks[1].text()
    assert text.startswith("1RECV_F0 1F0 1RECV_F1 1F1")
    swapped = text.replace("1RECV_F0 1F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0")
    wrong = evolve(
        right, ranks=(right.ranks[0], parse_actions(swapped, list(right.ranks[1].source)))
    )
    assert max(map(max, launch("blocking", [right], RUNS)["differences"])) < 1e-9
    assert max(map(max, launch("blocking", [wrong], RUNS)["differences"])) > 0.01
    assert max(map(max, launch("gloo", [wrong], RUNS)["differences"])) < 1e-9
