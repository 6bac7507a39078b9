"""What passes between this rank and others: every message tagged, every shape announced, every wait limited.

gloo fills a buffer of the wrong shape without a word, and NCCL ignores tags; so in every step the first activation
between two stages is preceded by a header that says which one it is and what it looks like, and the sender holds all
later ones to that. A gradient looks as its activation did.

A plan is proved for transfers that block, so it is safe to wait anywhere at or after an action's own place. Receives
are waited for by the action that uses them, sends `WINDOW` messages later, and all by the end of the step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from schedlang.actions import is_send
from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.stage import Stage
from schedlang.runtime.watchdog import GRACE, LostRank, PipelineError, Watchdog

#: A send that is this many messages old has long been received in any pipeline that runs, so the wait for it costs
#: nothing; it bounds the tensors that are kept because gloo may still read them.
WINDOW = 16

# A header is plan, receiving stage, microbatch, type, number of dimensions, dimensions.
_DIMENSIONS = 8
_WORDS = 5 + _DIMENSIONS
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Look = tuple[torch.Size, torch.dtype]


@frozen
class Transfer:
    """One message, ready to be issued: `tensor` gives what to send, or the buffer to receive into."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int
    tag: int
    tensor: Callable[[], Tensor]


class Exchange:
    """The messages of one rank."""

    def __init__(
        self, plan: Plan, stages: dict[int, Stage], device: torch.device, timeout: float, watchdog: Watchdog
    ) -> None:
        self._plan, self._stages, self._device, self._watchdog = plan, stages, device, watchdog
        # The watchdog is to find out first: it knows whose fault a wait is, gloo does not.
        self._limit = timedelta(seconds=timeout + 2 * GRACE)
        self._digest = int(plan.digest()[:15], 16)
        #: What has been announced in this step, by the later stage of each two.
        self._looks: dict[int, Look] = {}
        #: gloo loses a message whose handle or tensor is dropped.
        self._sent: deque[tuple[dist.Work, Tensor, int]] = deque()
        self._arriving: dict[int, tuple[dist.Work, Tensor, int]] = {}

    def transfer(self, kind: Kind, stage: int, microbatch: int) -> Transfer:
        """The message of an action."""
        peer = self._plan.peer(kind, stage)
        assert peer is not None
        tensor = {
            Kind.SEND_F: self._activation,
            Kind.RECV_F: self._activation_buffer,
            Kind.SEND_B: self._gradient,
            Kind.RECV_B: self._gradient_buffer,
        }[kind]
        tag = self._tag(kind, stage, microbatch)
        return Transfer(kind, stage, microbatch, peer, tag, partial(tensor, stage, microbatch, peer))

    def issue(self, batch: Sequence[Transfer]) -> None:
        """Issue messages as one batch: sends first, since a peer may wait for their headers before it sends ours."""
        tensors = [each.tensor() for each in batch]
        operations = [
            dist.P2POp(dist.isend if is_send(each.kind) else dist.irecv, tensor, each.peer, tag=each.tag)
            for each, tensor in zip(batch, tensors, strict=True)
        ]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise LostRank({each.peer for each in batch}, str(error)) from error
        if len(works) < len(batch):
            # NCCL gives one handle for the whole batch.
            works = works * len(batch)
        for each, tensor, work in zip(batch, tensors, works, strict=True):
            if is_send(each.kind):
                self._sent.append((work, tensor, each.peer))
            else:
                self._arriving[each.tag] = work, tensor, each.peer
        while len(self._sent) > WINDOW:
            self._wait(*self._sent.popleft())

    def arrive(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Wait for a message that has been issued, and put it where its stage takes it from."""
        work, tensor, peer = self._arriving.pop(self._tag(kind, stage, microbatch))
        self._wait(work, tensor, peer)
        box = self._stages[stage].inputs if kind == Kind.RECV_F else self._stages[stage].gradients
        box[microbatch] = tensor

    def finish(self) -> None:
        """End a step: wait until all sends are received. The next step announces its shapes anew."""
        while self._sent:
            self._wait(*self._sent.popleft())
        self._looks.clear()

    def _tag(self, kind: Kind, stage: int, microbatch: int) -> int:
        """A number for what is sent, the same at both ends: three for each microbatch between each two stages."""
        later = stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage
        return 3 * (later * self._plan.microbatches + microbatch) + (kind in (Kind.SEND_B, Kind.RECV_B))

    def _wait(self, work: dist.Work, tensor: Tensor, peer: int) -> None:
        self._watchdog.waits_for = peer
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise LostRank({peer}, str(error)) from error
        self._watchdog.waits_for = None

    def _activation(self, stage: int, microbatch: int, peer: int) -> Tensor:
        """The output to send, announced if it is the first of this step, and else like the first."""
        tensor = self._stages[stage].outputs.pop(microbatch).contiguous()
        look = tensor.shape, tensor.dtype
        first = self._looks.setdefault(stage + 1, look)
        if first is look:
            self._announce(stage + 1, microbatch, look, peer)
        elif first != look:
            raise PipelineError(
                f"the output of stage {stage} is {_text(look)} for microbatch {microbatch}, "
                f"its first in this step was {_text(first)}"
            )
        return tensor

    def _announce(self, stage: int, microbatch: int, look: Look, peer: int) -> None:
        """Send the header of an activation for a stage."""
        shape, dtype = look
        if dtype not in _TYPES or len(shape) > _DIMENSIONS:
            raise PipelineError(f"the output of stage {stage - 1} is {_text(look)}, which cannot be sent")
        header = torch.zeros(_WORDS, dtype=torch.int64)
        words = [self._digest, stage, microbatch, _TYPES.index(dtype), len(shape), *shape]
        header[: len(words)] = torch.tensor(words)
        self._sent.append((self._post_header(dist.isend, header, peer, stage, microbatch), header, peer))

    def _activation_buffer(self, stage: int, microbatch: int, peer: int) -> Tensor:
        """Room for an input, as its header says, for which the first of this step waits."""
        if stage not in self._looks:
            header = torch.empty(_WORDS, dtype=torch.int64)
            self._wait(self._post_header(dist.irecv, header, peer, stage, microbatch), header, peer)
            self._looks[stage] = self._read(header, stage, microbatch, peer)
        shape, dtype = self._looks[stage]
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _read(self, header: Tensor, stage: int, microbatch: int, peer: int) -> Look:
        """What a header announces, which must be the activation that the plan has here."""
        *named, code, dimensions = words = header[:5].tolist()
        expected = [self._digest, stage, microbatch]
        if named != expected or not 0 <= code < len(_TYPES) or not 0 <= dimensions <= _DIMENSIONS:
            raise PipelineError(f"rank {peer} announced {words}, where the plan has {expected}")
        return torch.Size(header[5 : 5 + dimensions].tolist()), _TYPES[code]

    def _post_header(
        self, call: Callable[..., dist.Work | None], header: Tensor, peer: int, stage: int, microbatch: int
    ) -> dist.Work:
        """Send or receive a header; it takes the third tag of its activation."""
        try:
            work = call(header, peer, tag=self._tag(Kind.RECV_F, stage, microbatch) + 2)
        except RuntimeError as error:
            raise LostRank({peer}, str(error)) from error
        assert work is not None
        return work

    def _gradient(self, stage: int, microbatch: int, peer: int) -> Tensor:
        return self._stages[stage].input_gradients.pop(microbatch).contiguous()

    def _gradient_buffer(self, stage: int, microbatch: int, peer: int) -> Tensor:
        like = self._stages[stage].output_like(microbatch)
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)


def _text(look: Look) -> str:
    return f"{str(look[1]).removeprefix('torch.')} {list(look[0])}"
