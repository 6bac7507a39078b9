"""Stages that FSDP2 has sharded: their weights are gathered and resharded by the plan's order.

By itself, FSDP gathers weights before each forward and backward, and reduces gradients after each
backward: in a pipeline, for every microbatch. Here its hooks find the weights already gathered, and
leave weights and gradients alone:

    UNSHARD ─► F F B F B … ─► REDUCE_GRAD ─► RESHARD

If the plan has these actions, they run at their places; otherwise
`schedlang.ranks.gather_order` decides.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from schedlang.plan.plan import Plan
from schedlang.ranks.gather_order import shards
from schedlang.runtime.door import Rank
from schedlang.runtime.part import ExtraCall, Part, When, methods_of
from schedlang.runtime.torch_private.fsdp import check_fsdp, fsdp_roots
from schedlang.runtime.torch_private.wrappers import (
    is_sharded,
    left_whole,
    sharded_parts,
)
from schedlang.schedule.kinds import Kind


class Shards(Part):
    """The sharded stages of a rank; at most `max_gathered` are gathered at once, by default all."""

    def __init__(
        self, modules: Mapping[int, nn.Module], max_gathered: int | None
    ) -> None:
        self._stages = {
            number: ShardedModule(module)
            for number, module in modules.items()
            if is_sharded(module)
        }
        self._max_gathered = max_gathered or len(self._stages)
        self.ops = {
            (kind, number): partial(stage.do_written, kind)
            for number, stage in self._stages.items()
            for kind in methods_of(stage)
        }

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """The steps of the policy; and around each W, the work of FSDP's hooks, which W does not
        call.
        """
        actions = plan.ranks[rank]
        policy = shards(actions, self._stages, self._max_gathered)
        for index, steps in policy.before.items():
            for kind, number in steps:
                call = partial(self._stages[number].do, kind)
                yield ExtraCall(index, When.BEFORE, call)
        for index, (op, number) in enumerate(
            zip(actions.kind, actions.stage, strict=True)
        ):
            # FSDP waits for gathered weights in its hooks of a forward and a backward; W calls
            # neither.
            if op == Kind.W and number in self._stages:
                module = self._stages[number]
                yield ExtraCall(index, When.BEFORE, module.wait)
                yield ExtraCall(index, When.AFTER, module.end_backward)
        for index, steps in policy.after.items():
            for kind, number in steps:
                call = partial(self._stages[number].do, kind)
                yield ExtraCall(index, When.AFTER, call)


class ShardedModule:
    """The parts of a stage's module that `fully_shard` has sharded, under a pipeline's control."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = sharded_parts(module)
        check_fsdp(self._parts)
        #: The gathers that have begun, one for each part.
        self._gathers: list[Any] = []
        for part in self._parts:
            with suppress(
                AssertionError
            ):  # of `replicate`, which has no shards to go back to
                part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        self._reduce_in_backward(False)

    def do_written(self, kind: Kind, _: int) -> None:
        """Do a step that the plan writes; it has no microbatch."""
        self.do(kind)

    def do(self, kind: Kind) -> None:
        """Do a step of the policy."""
        methods_of(self)[kind]()

    def unshard(self) -> None:
        """Begin to gather the weights; FSDP's hooks wait for each part when it is used."""
        self._gathers = [part.unshard(async_op=True) for part in self._parts]

    def wait(self) -> None:
        """Wait until all weights are gathered."""
        for gather in self._gathers:
            gather.wait()

    def reshard(self) -> None:
        """Free the gathered weights, also of parts that no op has used."""
        self.wait()
        for part in self._parts:
            part.reshard()

    def reduce(self) -> None:
        """Reduce and scatter the gradients, which add up in the gradients of the shards."""
        self._reduce_in_backward(True)
        self.end_backward()
        self._reduce_in_backward(False)

    def end_backward(self) -> None:
        """Run FSDP's hooks for the end of a backward."""
        for end in fsdp_roots(self._parts):
            end()

    def _reduce_in_backward(self, now: bool) -> None:
        """Set whether the next end of a backward reduces gradients."""
        for part in self._parts:
            part.set_requires_gradient_sync(now, recurse=False)
            part.set_is_last_backward(now)


def of_rank(rank: Rank) -> Iterator[Shards]:
    """Make one part for all sharded stages of this rank; warn of weights that are not sharded."""
    for number, module in rank.site.modules.items():
        names = left_whole(module)
        if names:
            warnings.warn(
                f"stage {number} has weights that FSDP has not sharded (`{names[0]}`), so their "
                "gradients are those of this process alone: shard the whole stage, "
                "`fully_shard(stage)` after its layers, if replicas are to train them together",
                stacklevel=2,
            )
    yield Shards(rank.site.modules, rank.site.setup.max_gathered)
