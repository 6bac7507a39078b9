"""The proof against an oracle that executes plans, on random schedules and on every kind of damage to them."""

import random
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from strategies import oracle, schedules

from schedlang import Actions, CompileError, Costs, Kind, Schedule, compile, prove, read_source, simulate
from schedlang.lowering import lower

TESTS = Path(__file__).parent
PROGRAMS = sorted((TESTS.parent / "programs").glob("*.sched"))


def proved(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except CompileError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_schedule_that_can_run_is_lowered_and_proved(schedule: Schedule) -> None:
    lowered = lower(schedule)
    prove(lowered)
    assert oracle(lowered)
    assert [each.compute().text() for each in lowered.ranks] == [each.text() for each in schedule.ranks]


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_a_lower_bound_of_the_makespan(schedule: Schedule) -> None:
    """No rank works faster than its work, and no microbatch passes faster than through all stages and back."""
    execution = simulate(lower(schedule), Costs(p2p=0.5))
    crossings = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    path = len(schedule.placement) * 2 + 2 * 0.5 * crossings
    assert execution.timeline.makespan >= max([path, *execution.timeline.busy]) - 1e-9


def mutate(schedule: Schedule, rng: random.Random) -> Schedule:
    """One action dropped, doubled, moved, swapped with another, or made another one."""
    rank = rng.choice([each for each, actions in enumerate(schedule.ranks) if len(actions)])
    actions = schedule.ranks[rank]
    rows = list(zip(actions.kind, actions.stage, actions.microbatch, actions.source, actions.group, strict=True))
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    kind, stage, microbatch, source, group = rows[i]
    match rng.choice(["drop", "double", "move", "swap", "kind", "stage", "microbatch", "ungroup"]):
        case "drop":
            del rows[i]
        case "double":
            rows.insert(j, rows[i])
        case "move":
            rows.insert(j, rows.pop(i))
        case "swap":
            rows[i], rows[j] = rows[j], rows[i]
        case "kind":
            if kind != Kind.U:
                rows[i] = (rng.choice([each for each in Kind if each != Kind.U]), stage, microbatch, source, group)
        case "stage":
            rows[i] = (kind, rng.randrange(len(schedule.placement)), microbatch, source, group)
        case "microbatch":
            other = schedule.layout.updates if kind == Kind.U else schedule.microbatches
            rows[i] = (kind, stage, rng.randrange(other), source, group)
        case "ungroup":
            rows[i] = (kind, stage, microbatch, source, 0)
    changed = Actions()
    transfers = {row[4] for row in rows if row[0] >= Kind.SEND_F}
    for row in rows:
        # A batch of transfers holds transfers only, by the form of a plan: the proof does not decide that.
        changed.add(*row[:4], row[4] if (row[0] >= Kind.SEND_F) == (row[4] in transfers) else 0)
    return evolve(schedule, ranks=(*schedule.ranks[:rank], changed, *schedule.ranks[rank + 1 :]))


SIZES = {
    "bitpipe": [(2, 2), (2, 4), (4, 4)],
    "chimera": [(2, 2), (2, 4), (4, 4)],
    "gems": [(2, 2), (2, 4), (3, 4)],
    "dualpipe": [(2, 4), (4, 8)],
    "dualpipe_v": [(2, 4), (3, 6)],
    "terapipe": [(2, 1), (3, 1)],
    "pipedream": [(2, 1), (3, 1)],
    "pipedream_vertical": [(2, 1), (3, 1)],
    "wpipe": [(2, 2)],
}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_mutated_plans_are_judged_as_by_the_oracle(path: Path, times: int) -> None:
    rng = random.Random(path.stem)
    verdicts = {True: 0, False: 0}
    for ranks, microbatches in SIZES.get(path.stem, [(2, 2), (2, 4), (3, 3), (4, 4)]):
        plan = compile(read_source(path), {"ranks": ranks, "microbatches": microbatches}, transport="blocking")
        for _ in range(150 * times):
            mutant = mutate(plan, rng)
            if rng.random() < 0.3:
                mutant = mutate(mutant, rng)
            verdict = proved(mutant)
            assert verdict == oracle(mutant), [each.text() for each in mutant.ranks]
            verdicts[verdict] += 1
    assert min(verdicts.values()) > 10  # some damage is harmless: the test sees both verdicts


def test_cost_of_a_proof_grows_with_the_actions_only() -> None:
    """Steps of the machine, not seconds: twice the microbatches take twice the steps."""
    import sys

    def steps(microbatches: int) -> int:
        plan = compile(read_source(PROGRAMS[0]), {"ranks": 4, "microbatches": microbatches})
        count = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(count_calls)
        try:
            prove(plan)
        finally:
            sys.setprofile(None)
        return count

    assert steps(64) < 2.1 * steps(32)
