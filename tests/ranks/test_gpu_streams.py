"""What ranks give their GPUs, stream by stream: no tensor is written or freed while another stream
may use it; and of damaged steps, the proof finds what an explorer of orders finds.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from schedlang import CompileError, Schedule, Source, compile, prove, read_source
from schedlang.ranks.gpu_streams import Free, Record, Run, Step, Take, Wait, gpu_steps
from schedlang.ranks.hazards import hazards
from schedlang.schedule.transports import (
    LOOSEST,
    NCCL,
    NCCL_EAGER,
    NCCL_EDGE,
    Transport,
)
from tests.support.damage import gallery
from tests.support.features import featured_plan
from tests.support.paths import GALLERY
from tests.support.stream_explorer import damaged, has_conflict
from tests.support.travelling import travelling_plan

TRANSPORTS = (NCCL, NCCL_EAGER, NCCL_EDGE, LOOSEST)
SMALL = ((2, 1), (2, 2), (3, 2))
#: Of each kind.
PLANS_OF_A_BLOCK = 40


def is_right(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except CompileError:
        return False
    return True


KINDS = {
    "gallery": lambda rng: rng.choice(gallery(SMALL, slices=2)),
    "featured": featured_plan,
    "travelling": travelling_plan,
}


def right_plans(kind: str, rng: random.Random) -> Iterator[Schedule]:
    """Plans that are proved, so that each has all that its actions need."""
    while True:
        plan = KINDS[kind](rng)
        if is_right(plan):
            yield plan


def text(schedule: Schedule, rank: int, steps: list[Step]) -> str:
    """Steps as words: `+` takes memory, `-` frees it, `!` records an event, `?` waits for it."""
    name = schedule.names.of
    actions = schedule.ranks[rank]
    words = []
    for step in steps:
        match step:
            case Take(tensor):
                words.append(f"+{name(actions, tensor)}")
            case Free(tensor):
                words.append(f"-{name(actions, tensor)}")
            case Run(stream, indices):
                runs = ",".join(name(actions, index) for index in indices)
                words.append(f"{stream}:{runs}")
            case Record(stream, event):
                end = "end" if event.is_end else "begin"
                words.append(f"{stream}!{end}({name(actions, event.action)})")
            case Wait(stream, event):
                end = "end" if event.is_end else "begin"
                words.append(f"{stream}?{end}({name(actions, event.action)})")
    return "\n".join(words)


def own(ops: str, microbatches: int = 2) -> Schedule:
    """The plan of one rank."""
    head = f"schedule s {{ param ranks = 1 param microbatches = {microbatches}"
    return compile(Source("s.sched", f"{head} rank r {{ {ops} }} }}"))


COPIED = """
+0F0
compute:0F0
+0OFFLOAD0
compute!begin(0OFFLOAD0)
copies out?begin(0OFFLOAD0)
copies out:0OFFLOAD0
copies out!end(0OFFLOAD0)
+0F1
compute:0F1
compute?end(0OFFLOAD0)
-0F0
+0OFFLOAD1
compute!begin(0OFFLOAD1)
copies out?begin(0OFFLOAD1)
copies out:0OFFLOAD1
copies out!end(0OFFLOAD1)
+0RELOAD1
compute!begin(0RELOAD1)
copies in?begin(0RELOAD1)
copies in?end(0OFFLOAD1)
copies in:0RELOAD1
copies in!end(0RELOAD1)
+0RELOAD0
compute!begin(0RELOAD0)
copies in?begin(0RELOAD0)
copies in?end(0OFFLOAD0)
copies in:0RELOAD0
copies in!end(0RELOAD0)
compute?end(0RELOAD1)
-0F1
-0OFFLOAD1
compute:0B1
-0RELOAD1
compute?end(0RELOAD0)
-0OFFLOAD0
compute:0B0
-0RELOAD0
"""


def test_copies_by_hand() -> None:
    """0F0 is free when the next copy begins, and 0F1 before the backward that needs it again."""
    plan = own("F(0) offload(0) F(1) offload(1) reload(1) reload(0) B(1) B(0)")
    assert text(plan, 0, gpu_steps(plan, 0, NCCL_EDGE)) == COPIED.strip()


def test_messages_by_hand() -> None:
    """0SEND_F0 is free when the gradient shows that it was received."""
    plan = compile("1f1b", {"ranks": 2, "microbatches": 1})
    first, second = (
        text(plan, rank, gpu_steps(plan, rank, NCCL_EDGE)).split("\n")
        for rank in range(2)
    )
    assert first[:6] == [
        "+0F0",
        "+0SEND_F0",
        "compute:0F0",
        "compute!begin(0SEND_F0)",
        "lane 5?begin(0SEND_F0)",
        "lane 5:0SEND_F0",
    ]
    assert first[-7:] == [
        "lane 4!end(0RECV_B0)",
        "compute?end(0RECV_B0)",
        "compute?end(0SEND_F0)",
        "-0SEND_F0",
        "compute:0B0",
        "-0F0",
        "-0RECV_B0",
    ]
    assert second[0] == "+1RECV_F0"
    assert second[-2:] == ["compute?end(1SEND_B0)", "-1SEND_B0"]


def test_each_event_of_a_copy_is_needed() -> None:
    """Without any one of them there is a hazard, but for one: where 0RELOAD0 begins, the compute
    stream has waited for 0OFFLOAD0 already.
    """
    plan = own("F(0) offload(0) F(1) offload(1) reload(1) reload(0) B(1) B(0)")
    steps = gpu_steps(plan, 0, NCCL_EDGE)
    spared = []
    for at, step in enumerate(steps):
        if isinstance(step, Wait | Record):
            left = [*steps[:at], *steps[at + 1 :]]
            if not list(hazards(plan, 0, left)):
                spared.append(text(plan, 0, [step]))
    assert spared == ["copies in?end(0OFFLOAD0)"]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs_have_no_hazard(path: object) -> None:
    plan = compile(read_source(path))
    for rank in range(len(plan.ranks)):
        for transport in TRANSPORTS:
            assert list(hazards(plan, rank, gpu_steps(plan, rank, transport))) == []


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.core) for kind in KINDS],
)
@pytest.mark.blocks(2, large=True)
@pytest.mark.slow
def test_verdicts_are_those_of_the_explorer(
    kind: str, block: int, tally: Counter[str]
) -> None:
    rng = random.Random(f"{kind} {block}")
    plans = right_plans(kind, rng)
    for _ in range(PLANS_OF_A_BLOCK):
        plan = next(plans)
        rank = rng.randrange(len(plan.ranks))
        transport: Transport = rng.choice(TRANSPORTS)
        steps = gpu_steps(plan, rank, transport)
        assert not list(hazards(plan, rank, steps)), text(plan, rank, steps)
        assert not has_conflict(plan, rank, steps, rng), text(plan, rank, steps)
        for _ in range(rng.choice([1, 1, 2])):
            steps = damaged(steps, rng)
        found = next(hazards(plan, rank, steps), None)
        tally[f"{kind} {'wrong' if found else 'right'}"] += 1
        is_wrong = has_conflict(plan, rank, steps, rng)
        assert is_wrong == (found is not None), f"{found}\n{text(plan, rank, steps)}"
    assert min(tally[f"{kind} wrong"], tally[f"{kind} right"]) > 0
