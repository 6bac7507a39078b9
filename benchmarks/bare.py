"""The least that a rank's actions can cost: a loop over them that sends, receives, runs modules and
autograd, no more.

It checks nothing, finds nothing out about shapes, and holds every message until the end of the
step. Where a backward is split, it does all of it in the first half.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import Plan
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.kinds import Kind

# Far from those of other messages of the process group.
_TAGS = 10**6

_Key = tuple[int, int]


class Bare:
    """A rank's loop. Messages and inputs have the shape of a microbatch of `batch`, which is also
    the target.
    """

    def __init__(
        self,
        plan: Plan,
        model: list[nn.Module],
        batch: Tensor,
        loss_fn: Callable[..., Tensor],
    ) -> None:
        actions = plan.ranks[dist.get_rank()]
        self.rows = [
            (
                Kind(kind),
                stage,
                microbatch,
                plan.peer(kind, stage) if is_transfer(kind) else None,
            )
            for kind, stage, microbatch in zip(
                actions.kind, actions.stage, actions.microbatch, strict=True
            )
        ]
        self.model = model
        self.loss_fn = loss_fn
        self.last = len(plan.placement) - 1
        self.parts = batch.chunk(plan.microbatches)
        self.microbatches = plan.microbatches
        #: What passes between stages, by the stage that makes it and microbatch, until it is used.
        self.outputs: dict[_Key, Tensor] = {}
        self.gradients: dict[_Key, Tensor] = {}
        self.graphs: dict[_Key, tuple[Tensor, Tensor]] = {}
        self.receives: dict[tuple[bool, int, int], tuple[dist.Work, Tensor]] = {}

    def step(self) -> None:
        """All actions, one after the other."""
        group = dist.group.WORLD
        sends = []
        for kind, stage, microbatch, peer in self.rows:
            key = stage, microbatch
            if kind == Kind.F:
                self.forward(*key)
            # No branch for W: its work is in I already.
            elif kind in (Kind.B, Kind.I):
                self.backward(*key)
            elif kind in (Kind.SEND_F, Kind.SEND_B):
                sent = (self.outputs if kind == Kind.SEND_F else self.gradients).pop(
                    key
                )
                tag = self.tag(kind == Kind.SEND_F, *key)
                sends.append((group.send([sent], peer, tag), sent))
            elif kind in (Kind.RECV_F, Kind.RECV_B):
                is_forward = kind == Kind.RECV_F
                room = torch.empty_like(self.parts[0])
                made = stage - 1 if is_forward else stage + 1
                receive = group.recv(
                    [room], peer, self.tag(is_forward, made, microbatch)
                )
                self.receives[is_forward, made, microbatch] = receive, room
        for work, _ in sends:
            work.wait()

    def tag(self, is_forward: bool, stage: int, microbatch: int) -> int:
        """The tag of a message that a stage makes."""
        return _TAGS + 2 * (stage * self.microbatches + microbatch) + is_forward

    def take(self, made: dict[_Key, Tensor], stage: int, microbatch: int) -> Tensor:
        """A message that a stage has made, here or on another rank."""
        if (stage, microbatch) in made:
            return made.pop((stage, microbatch))
        # Not in the dictionary, so it came from another rank: the receive was posted when its
        # action came.
        work, tensor = self.receives.pop((made is self.outputs, stage, microbatch))
        work.wait()
        return tensor

    def forward(self, stage: int, microbatch: int) -> None:
        """F."""
        input = self.parts[microbatch]
        if stage:
            input = self.take(self.outputs, stage - 1, microbatch).requires_grad_()
        output = self.model[stage](input)
        if stage == self.last:
            # The mean over all microbatches, as a whole batch has it.
            output = self.loss_fn(output, self.parts[microbatch]) / self.microbatches
        else:
            self.outputs[stage, microbatch] = output.detach()
        self.graphs[stage, microbatch] = input, output

    def backward(self, stage: int, microbatch: int) -> None:
        """B, or both halves of it."""
        input, output = self.graphs.pop((stage, microbatch))
        gradient = (
            None
            if stage == self.last
            else self.take(self.gradients, stage + 1, microbatch)
        )
        torch.autograd.backward(output, gradient)
        if stage:
            assert input.grad is not None
            self.gradients[stage, microbatch] = input.grad
