"""The weights of a stage that FSDP2 has sharded, gathered and let go of when the plan's order says
so.

FSDP gathers weights before a forward and a backward, and reduces gradients after a backward: in a
pipeline, for each microbatch. Here its hooks find the weights gathered, and keep both them and the
gradients. `schedlang.ranks.shards` has the policy. FSDP has no public call that reduces the
gradients; torch's own pipelining takes the same private one.
"""

import sys
from contextlib import suppress
from typing import Any

from torch import nn

from schedlang.ranks.shards import Does


class Sharded:
    """The parts of a stage's module that `fully_shard` has sharded, under the hand of a
    pipeline.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        #: The gathers that have begun, one for each part.
        self._gathers: list[Any] = []
        for each in parts:
            with suppress(AssertionError):  # of `replicate`, which has no shards to go back to
                each.set_reshard_after_forward(False, recurse=False)
            each.set_reshard_after_backward(False, recurse=False)
        self._reduces(False)

    def do(self, what: Does) -> None:
        """One of the steps of the policy."""
        {Does.UNSHARD: self.unshard, Does.RESHARD: self.reshard, Does.REDUCE_GRAD: self.reduce}[
            what
        ]()

    def unshard(self) -> None:
        """Begin to gather the weights; FSDP's hooks wait for each part when it is used."""
        self._gathers = [each.unshard(async_op=True) for each in self._parts]

    def wait(self) -> None:
        """Wait for all of them."""
        for each in self._gathers:
            each.wait()

    def reshard(self) -> None:
        """Let go of them, also of a part that nothing has used."""
        self.wait()
        for each in self._parts:
            each.reshard()

    def reduce(self) -> None:
        """Reduce the gradients, which then add up in those of the shards."""
        self._reduces(True)
        self.end_backward()
        self._reduces(False)

    def end_backward(self) -> None:
        """What FSDP does at the end of a backward, also of one that it has not seen, as a weight
        half.
        """
        for state in (each._get_fsdp_state() for each in self._parts):
            if state._is_root:
                state._root_post_backward_final_callback()

    def _reduces(self, now: bool) -> None:
        """Whether the end of a backward is the last one before the gradients are reduced."""
        for each in self._parts:
            each.set_requires_gradient_sync(now, recurse=False)
            each.set_is_last_backward(now)


def sharded(module: nn.Module) -> Sharded | None:
    """What of a module is sharded, if anything; the import of FSDP for it alone would take a
    second.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    parts = (
        []
        if fsdp is None
        else [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]
    )
    return Sharded(parts) if parts else None
