"""What ranks hold while a step runs, on real processes: to the tensor what the plan says."""

import gc
import re
from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.ranks.lifetimes import Holds, Lifetime, lifetimes
from schedlang.runtime.messages import Receive
from schedlang.schedule.actions import is_transfer
from tests.support.models import (
    ROWS,
    WIDTH,
    batch,
    modules,
    pipeline,
    program,
    replicated,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def activations() -> int:
    """How many tensors as large as an activation there are, in storages of their own: not those of
    a batch.
    """
    tensors = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)
    ]
    # A view of a whole batch lies in a larger storage, and does not count.
    storages = [
        each.untyped_storage() for each in tensors if each.shape == (ROWS, WIDTH)
    ]
    return len(
        {each.data_ptr() for each in storages if each.nbytes() == 8 * ROWS * WIDTH}
    )


def boundary() -> list[int]:
    """The most activations and gradients that are held at once in a step of 1F1B, for more and more
    microbatches.
    """
    found = []
    for microbatches in (8, 16, 32):
        plan = program("1f1b", ranks=3, microbatches=microbatches)
        model = modules(3)
        held: list[int] = []
        model[dist.get_rank()].register_forward_hook(
            lambda *_, held=held: held.append(activations())
        )
        ours = pipeline(plan, model)
        for step in range(2):
            ours.step(*batch(plan, step))
        found.append(max(held))
    return found


def test_what_is_held_does_not_grow_with_the_microbatches(run_ranks: Run) -> None:
    for few, more, most in run_ranks(boundary, 3).results():
        assert few == more == most


HOLDS = [
    "1f1b",
    "interleaved_1f1b",
    "1f1b_recompute",
    "gpipe",
    "chimera",
    "zb_h1",
    "zb_v",
    "dualpipe",
    "unet_1f1b",
]


def holds() -> dict[str, list[int]]:
    """After each op of a step, how many more tensors are held, beside batch and weights, than the
    plan says; and how many more buffers of receives.

    For each schedule, the least and the most of the tensors, and the most of the buffers.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    found = {}
    for name in HOLDS:
        plan = program(name, ranks=ranks, microbatches=4 * ranks)
        ours = pipeline(plan, replicated(plan))
        # A step with new inputs finds out what they look like: it begins receives later, and waits
        # for sends later.
        ours.step(*batch(plan, 0))
        assert activations() == 0
        counts: dict[int, int] = {}
        buffers: dict[int, int] = {}
        messages = ours._exchange._messages.values()
        received = [each for each in messages if isinstance(each, Receive)]
        count_buffers = partial(lambda received: sum(map(is_there, received)), received)
        ours._training = [
            (
                index,
                partial(
                    counting, call, index, {activations: counts, count_buffers: buffers}
                )
                if op and not is_transfer(op[0])
                else call,
                op,
            )
            for index, call, op in ours._training
        ]
        ours.step(*batch(plan, 1))
        more = [
            counts[index] - tensors
            for index, tensors in tensors_after(plan, rank).items()
        ]
        planned = [
            each for each in lifetimes(plan, rank) if each.what == Holds.RECEIVED
        ]
        more_buffers = [
            held - sum(each.start <= index < each.stop for each in planned)
            for index, held in buffers.items()
        ]
        found[name] = [min(more), max(more), max(more_buffers)]
    return found


def is_there(message: Receive) -> bool:
    """Whether the buffer of a message is there: it is being received, or waits for its op."""
    return bool(message.in_flight) or message.microbatch in message.box


def counting(
    call: Callable[[], None],
    index: int,
    counts: dict[Callable[[], int], dict[int, int]],
) -> None:
    call()
    for count, found in counts.items():
        found[index] = count()


def tensors_after(plan: Plan, rank: int) -> dict[int, int]:
    """How many tensors there are by the plan when an op has ended."""
    actions = plan.ranks[rank]
    words = {
        plan.names.of(actions, index): actions.word(index)
        for index in range(len(actions))
    }
    found = [
        (each, tensors_of(plan, each, words[each.name.partition(">")[0]]))
        for each in lifetimes(plan, rank)
    ]
    return {
        index: len(
            set().union(
                *(tensors for each, tensors in found if each.start <= index < each.stop)
            )
        )
        for index, kind in enumerate(plan.ranks[rank].kind)
        if not is_transfer(kind)
    }


def tensors_of(plan: Plan, lifetime: Lifetime, word: str) -> set[object]:
    """The tensors of an activation or a message, of this action: outputs of ops, or gradients of their inputs, by
    stage, microbatch.

    An activation is input and output of its stage, and the inputs of a pipeline's first stage are
    those of the batch. Where there is a skip, which brings a copy of an output, the input is also
    the sum with that.
    """
    stage, kind, microbatch = re.match(r"(\d+)([A-Z_]+)(\d+)", word).groups()
    stage = int(stage)
    microbatch = int(microbatch)
    if lifetime.what == Holds.ACTIVATION:
        input = set() if plan.layout.is_first(stage) else {("F", stage - 1, microbatch)}
        skips = [
            number
            for number, (_, later) in plan.layout.far_edges.items()
            if later == stage
        ]
        input |= {
            (what, number, microbatch) for number in skips for what in ("RECV_F", "sum")
        }
        return input | {(kind, stage, microbatch)}
    if stage in plan.layout.far_edges:
        earlier, _ = plan.layout.far_edges[stage]
        return {
            ("F", earlier, microbatch)
            if kind == "SEND_F"
            else (kind, stage, microbatch)
        }
    maker = {
        "RECV_F": ("F", stage - 1),
        "RECV_B": ("B", stage + 1),
        "SEND_F": ("F", stage),
        "F": ("F", stage),
    }
    return {(*maker.get(kind, ("B", stage)), microbatch)}


def test_what_is_held_is_what_the_plan_says(run_ranks: Run) -> None:
    """To the tensor. Of a backward that is split less: its output is let go of with the first half."""
    splits = ("zb_h1", "zb_v", "dualpipe")
    for rank in run_ranks(holds, 4).results():
        assert len(rank) == 9
        assert {
            name: least
            for name, (least, *_) in rank.items()
            if least < 0 and name not in splits
        } == {}
        assert {name: most for name, (_, *most) in rank.items() if most != [0, 0]} == {}
