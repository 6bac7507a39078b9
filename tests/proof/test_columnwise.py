"""What is done by columns for large schedules, against what is done action by action for all
others.
"""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings

from schedlang import CompileError, Costs, Kind, Schedule, Source, compile, read_source, simulate
from schedlang.lowering import lower
from schedlang.proof import columnwise
from schedlang.proof.columnwise import co_issue, execution, structure, text
from schedlang.proof.machine import has_batches
from schedlang.proof.structure import check_structure
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.transports import BLOCKING, GLOO
from tests.support.damage import changed, gallery
from tests.support.paths import GALLERY
from tests.support.strategies import schedules

#: Far more work than ops: of what is indexed by microbatch, a machine has not the memory.
FAR = "schedule s { param ranks = 2 param microbatches = 1000000000 rank r { for m in 0 .. 1500 { F(m) B(m) } } }"
#: Numbers that floats do not have, times that differ by stage, and transfers that take time.
UNEVEN = Costs(
    forward=(0.1,), input=(0.7,), weight=(0.3,), recompute=(0.2,), overlap=(1.1,), p2p=0.05
)


def everything(path: Path, costs: Costs) -> Any:
    """All that a command would say of a program."""
    try:
        plan = compile(read_source(path), {"ranks": 3, "microbatches": 7}, costs)
    except CompileError as error:
        return str(error)
    runs = [simulate(plan, each, ideal) for each in (Costs(), costs) for ideal in (False, True)]
    figures = [(run.timeline, run.memory, run.peak_memory, run.peak_activations) for run in runs]
    return plan.to_json(), plan.idle, plan.lowering, figures


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plans, to the letter, with the same times, to the last bit; and the same errors."""
    found = []
    for large in (10**9, 0):
        monkeypatch.setattr(columnwise, "LARGE", large)
        found.append([everything(path, costs) for costs in (Costs(), UNEVEN)])
    assert found[0] == found[1]


def test_what_is_held_is_no_more_than_there_are_actions() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(
            CompileError, match="never runs on stage 0, nor that of 999998499 other microbatches"
        ):
            compile(Source("far.sched", FAR))
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()


def usual() -> list[Schedule]:
    """The gallery without copies to the host, batches, skips, and updates that wait for those of
    replicas.
    """
    plans = [
        plan
        for plan in gallery(((4, 8),))
        if not plan.offloaded and not any(map(has_batches, plan.ranks))
    ]
    plans = [
        plan
        for plan in plans
        if len(plan.layout.pipelines) == 1 or Kind.U not in plan.ranks[0].kind
    ]
    return [plan for plan in plans if not plan.layout.skips]


def test_the_gallery_is_done_by_columns() -> None:
    """Or all would be the same because nothing is."""
    plans = usual()
    assert len(plans) > 20
    for plan in plans:
        assert structure.is_complete(plan), plan.name
        assert execution.timeline(plan, plan.costs, BLOCKING, ideal=True), plan.name
        assert execution.timeline(plan, plan.costs, GLOO, ideal=False), plan.name
        ops = evolve(plan, ranks=tuple(actions.compute() for actions in plan.ranks))
        assert co_issue.co_issued(ops), plan.name


def damaged() -> Iterator[Schedule]:
    rng = random.Random(0)
    plans = gallery(((2, 2), (3, 4)), slices=2)
    for _ in range(3000):
        plan = rng.choice(plans)
        for _ in range(rng.choice([1, 1, 2])):
            plan = changed(plan, rng, rng.choice([None, "transfers"]))
        yield evolve(plan, transport="blocking")


def test_nothing_wrong_is_right_by_columns() -> None:
    """Damaged plans: what the columns find complete, or run, is so for the other modules."""
    verdicts: Counter[str] = Counter()
    for plan in damaged():
        if structure.is_complete(plan):
            check_structure(plan)
            verdicts["complete"] += 1
        timeline = execution.timeline(plan, plan.costs, BLOCKING, ideal=True)
        try:
            check_structure(plan)
            other = simulate(plan, ideal=True).timeline
        except CompileError:
            other = None
        if timeline is not None:
            assert timeline == other, [actions.text() for actions in plan.ranks]
            verdicts["known to run"] += 1
        verdicts["runs" if other else "does not run"] += 1
    # Many of each kind.
    assert len(verdicts) == 4
    assert min(verdicts.values()) > 100, verdicts


@settings(max_examples=200, deadline=None)
@given(schedules(may_skip=False))
def test_random_schedules(schedule: Schedule) -> None:
    ranks = co_issue.co_issued(schedule)
    lowered = lower(schedule)
    assert ranks == lowered.ranks
    for costs in (Costs(), UNEVEN):
        timeline = execution.timeline(lowered, costs, GLOO, ideal=False)
        assert timeline == simulate(lowered, costs).timeline


def test_texts() -> None:
    """Of plans as they are, and with overlaps and batches of more than two."""
    rng = random.Random(0)
    for plan in gallery(((3, 6),), slices=2):
        ranks = [*plan.ranks, Actions()]
        joined = [changed_groups(actions, rng) for actions in ranks]
        for each in (ranks, joined):
            assert text.texts(each) == [actions.text() for actions in each]
        sources = [actions.source for actions in ranks]
        assert text.numbers_text(sources) == [" ".join(map(str, source)) for source in sources]


def changed_groups(actions: Actions, rng: random.Random) -> Actions:
    """The actions in other batches, each of transfers or of ops alone."""
    batches: list[list[int]] = []
    for index, kind in enumerate(actions.kind):
        if (
            batches
            and rng.random() < 0.5
            and is_transfer(kind) == is_transfer(actions.kind[batches[-1][-1]])
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
    return actions.issued_as(batches)
