"""What plans are told that cannot run, as the proof finds it, without a repair: the whole messages are
in `refusals.txt`, one of each form. `pytest --update-golden` writes them.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from schedlang import (
    Actions,
    CompileError,
    Kind,
    Schedule,
    Source,
    compile,
    read_source,
)
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.plan.text import parse_actions
from schedlang.proof.prove import prove
from schedlang.schedule.findings import edge_text
from schedlang.schedule.transports import NAMES
from tests.proof.test_transports import KINDS
from tests.support.damage import changed
from tests.support.paths import DIAGNOSTICS, PROGRAMS
from tests.support.sections import section
from tests.support.strategies import make_schedule

HERE = Path(__file__).parent
#: So many plans of a kind.
PLANS = 250


def refused(schedule: Schedule) -> CompileError | None:
    try:
        prove(schedule)
    except CompileError as error:
        return error
    return None


def form(diagnostic: Diagnostic) -> str:
    """What a message says, whatever stages, ranks and microbatches it is about."""
    texts = (diagnostic.code, diagnostic.message, diagnostic.help)
    waits = [
        (wait.reason, *(label.text for label in wait.labels()))
        for wait in diagnostic.waits
    ]
    return re.sub(
        r"`.*?`|[a-z]*\d*\(?\d+\)?", "…", "\n".join(map(str, (*texts, *waits)))
    )


def is_circle(diagnostic: Diagnostic) -> bool:
    """Whether each rank of a deadlock waits for the one of the next wait, and the last for the
    first.
    """
    waits = diagnostic.waits
    until = [wait.until.rank for wait in waits if wait.until is not None]
    return until == [wait.at.rank for wait in (*waits[1:], waits[0])]


def unexplained(diagnostic: Diagnostic, schedule: Schedule) -> list[int]:
    """The far edges that a diagnostic names, as in `7SEND_F0`, without saying what 7 is."""
    said = " ".join([diagnostic.message, *(label.text for label in diagnostic.labels)])
    return [
        number
        for number in schedule.layout.far_edges
        if re.search(rf"`{number}(SEND|RECV)_", said)
        and edge_text(schedule, number) not in diagnostic.notes
    ]


def damaged() -> Iterator[tuple[str, Schedule]]:
    """Plans with a change or two, each for some transport."""
    for kind, draw in KINDS.items():
        rng = Random(f"refusals {kind}")
        for number in range(PLANS):
            plan = draw(rng)
            for _ in range(rng.choice([1, 1, 2])):
                plan = changed(plan, rng, rng.choice([None, "transfers", "transfers"]))
            # A plan that was read again has no program to show.
            spans = () if rng.random() < 0.2 else plan.spans
            plan = evolve(plan, transport=rng.choice(NAMES), spans=spans)
            yield f"{kind} plan {number} on {plan.transport}", plan


@pytest.mark.slow
def test_damaged_plans(golden: Callable[[str, Path], None]) -> None:
    sections = {}
    for name, plan in damaged():
        error = refused(plan)
        if error is not None:
            assert all(
                is_circle(each) for each in error.diagnostics if each.code == "deadlock"
            )
            assert [
                *chain(*(unexplained(each, plan) for each in error.diagnostics))
            ] == []
            told = str(error).replace(f"{PROGRAMS}/", "")
            sections.setdefault(form(error.diagnostics[0]), section(name, told))
    golden("".join(sections.values()), HERE / "refusals.txt")


def test_a_send_that_is_only_waited_for(golden: Callable[[str, Path], None]) -> None:
    """As tables of torch have it: rank 0 waits until a message is received, and rank 1 receives the
    one behind it first.
    """
    first, second = Actions(), Actions()
    for microbatch in (0, 1):
        for kind in (Kind.F, Kind.SEND_F, Kind.WAIT_SEND_F):
            first.add(kind, 0, microbatch, source=0)
    for microbatch in (1, 0):
        for kind in (Kind.RECV_F, Kind.F):
            second.add(kind, 1, microbatch, source=0)
    for microbatch in (0, 1):
        for kind in (Kind.RECV_B, Kind.B):
            first.add(kind, 0, microbatch, source=0)
        for kind in (Kind.B, Kind.SEND_B, Kind.WAIT_SEND_B):
            second.add(kind, 1, microbatch, source=0)
    ranks = (first, second)
    error = refused(evolve(make_schedule((0, 1), 2, ranks), transport="gloo"))
    shown = "\n".join(actions.text() for actions in ranks)
    golden(section(shown, str(error)), HERE / "waits.txt")


def test_a_transfer_by_a_skip_within_a_rank() -> None:
    """Which needs none; the message says what 3 is."""
    program = """schedule within {
        param ranks = 2
        param microbatches = 1
        stage s in 0 .. 3 on s % 2
        skip s in 0 .. 1 from s to 2
        rank r { F(r, 0)  if r == 0 { F(2, 0)  B(2, 0) }  B(r, 0) }
    }"""
    plan = compile(Source("within.sched", program))
    first, second = plan.ranks
    text = f"{first.text()} 3SEND_F0"
    more = parse_actions(text, [0] * len(text.split()))
    error = refused(evolve(plan, ranks=(more, second)))
    assert error is not None
    (found,) = error.diagnostics
    assert found.message == "`3SEND_F0` has no other rank to reach"
    assert found.notes == ("3 is the skip from stage 0 to stage 2",)


def test_programs() -> None:
    """The text of an error in Python is what the command prints, with the repair."""
    programs = sorted(DIAGNOSTICS.glob("*.sched"))
    assert programs
    for path in programs:
        with pytest.raises(CompileError) as refusal:
            compile(read_source(path))
        told = str(refusal.value).replace(f"{DIAGNOSTICS}/", "")
        assert f"{told}\n" == path.with_suffix(".txt").read_text(), path.name
