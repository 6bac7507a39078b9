"""What ranks hold and let go: against what every action needs, looked up anew, and against the
machine's memory.
"""

import re
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given

from schedlang import Costs, Kind, Schedule, compile, prove, read_source
from schedlang.cli.main import main
from schedlang.lowering import lower
from schedlang.ranks.lifetimes import Holds, lifetimes, peak, peak_messages
from tests.schedule.test_offload import offloaded
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.strategies import schedules


def activations(schedule: Schedule) -> tuple[int, ...]:
    """The peak of each rank's activations."""
    return tuple(
        peak(
            each for each in lifetimes(schedule, rank) if each.what == Holds.ACTIVATION
        )
        for rank in range(len(schedule.ranks))
    )


def messages_in(
    schedule: Schedule, kind: int, stage: int, microbatch: int
) -> list[re.Pattern[str]]:
    """The names of the messages that an op needs; of one inside a rank, the last op that uses it
    may be another one.
    """
    name_of = schedule.names.stage
    forward = kind in (Kind.F, Kind.R)
    layout = schedule.layout
    others = layout.before[stage] if forward else layout.after[stage]
    edges = {other: layout.number(stage, other) for other in others}
    names = []
    for other, number in edges.items():
        if schedule.placement[other] != schedule.placement[stage]:
            kind_of = "RECV_F" if forward else "RECV_B"
            names.append(f"{re.escape(name_of(number))}{kind_of}{microbatch}")
        else:
            maker = (
                f"{re.escape(name_of(other))}{'F' if forward else '[BI]'}{microbatch}"
            )
            names.append(f"{maker}>{re.escape(name_of(stage))}[A-Z]+{microbatch}")
    return list(map(re.compile, names))


@examples(200)
@given(schedules())
def test_nothing_is_used_after_it_is_let_go(schedule: Schedule) -> None:
    """Nor held for longer than to its last use, the end of the step for what is sent apart."""
    lowered = lower(schedule)
    for rank, actions in enumerate(lowered.ranks):
        found = lifetimes(lowered, rank)
        last = {each.name: each.start for each in found}
        assert len(last) == len(found)
        for index in range(len(actions)):
            kind, stage, microbatch, *_ = actions.row(index)
            names = []
            if kind in (Kind.SEND_F, Kind.SEND_B):
                names = [re.compile(re.escape(lowered.name_of(rank, index)))]
            if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                names = [
                    re.compile(
                        re.escape(lowered.names.action(Kind.F, stage, microbatch))
                    ),
                    *messages_in(lowered, kind, stage, microbatch),
                ]
            for name in names:
                (each,) = [each for each in found if name.fullmatch(each.name)]
                assert each.start <= index <= each.stop <= len(actions)
                last[each.name] = index
        used = {each.name: each.stop for each in found if each.what != Holds.SENT}
        assert used == {name: index for name, index in last.items() if name in used}


@examples(200)
@given(schedules())
def test_the_peak_of_activations_is_the_machines(schedule: Schedule) -> None:
    lowered = lower(schedule)
    assert activations(lowered) == prove(lowered).peak_activations
    copied = lower(
        evolve(offloaded(schedule), costs=Costs(offload_times=(0,), reload_times=(0,)))
    )
    assert activations(copied) == prove(copied).peak_activations


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_the_peak_of_activations_of_programs_is_the_machines(path: Path) -> None:
    """Copies count as over at once, so where they take time a rank holds more."""
    plan = compile(read_source(path))
    if plan.offloaded:
        assert all(map(int.__le__, activations(plan), prove(plan).peak_activations))
    else:
        assert activations(plan) == prove(plan).peak_activations


@pytest.mark.parametrize(
    ("transport", "peaks"),
    [
        # When rank 0 waits for 0RECV_B0, it holds 0SEND_F0 and 0SEND_F1.
        ("nccl", {"1f1b": [3, 3], "gpipe": [17, 16]}),
        ("nccl-edge", {"1f1b": [3, 3], "gpipe": [17, 16]}),
        # Receives are begun two ops early: there is also 0RECV_B1.
        ("gloo", {"1f1b": [4, 4], "gpipe": [19, 16]}),
        # At most eight sends wait.
        ("portable", {"1f1b": [4, 4], "gpipe": [11, 9]}),
        ("blocking", {"1f1b": [3, 3], "gpipe": [9, 9]}),
    ],
)
def test_messages_by_hand(transport: str, peaks: dict[str, list[int]]) -> None:
    sizes = {"1f1b": 4, "gpipe": 16}
    for path in (each for each in GALLERY if each.stem in peaks):
        plan = compile(
            read_source(path),
            {"ranks": 2, "microbatches": sizes[path.stem]},
            transport=transport,
        )
        assert peak_messages(plan) == peaks[path.stem]


SHOWN = """
rank 0, stages 0, 3
  0F0 0SEND_F0 3RECV_F0 3F0 free(3RECV_F0, 0SEND_F0)
  3B0 free(3F0)
  3SEND_B0 0RECV_B0 0B0 free(0F0, 0RECV_B0, 3SEND_B0)

rank 1, stages 1, 2
  1RECV_F0 1F0 free(1RECV_F0)
  2F0 free(1F0>2F0)
  2SEND_F0 2RECV_B0 2B0 free(2F0, 2RECV_B0, 2SEND_F0)
  1B0 free(1F0, 2B0>1B0)
  1SEND_B0 end free(1SEND_B0)
"""


def test_what_each_action_lets_go_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "v.sched"
    program.write_text(
        "schedule v { param ranks = 2 param microbatches = 1"
        " stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s"
        " rank r { F(r, 0) F(2 * ranks - 1 - r, 0) B(2 * ranks - 1 - r, 0) B(r, 0) } }"
    )
    assert main(["show", str(program), "--frees"]) == 0
    assert capsys.readouterr().out.endswith(SHOWN)
    assert main(["show", str(program), "--frees", "--ranks"]) == 0
    assert [
        line.split(" free(")[0] for line in capsys.readouterr().out.splitlines()
    ] == [
        "0F0 0SEND_F0 3RECV_F0 3F0",
        "1RECV_F0 1F0",
    ]
