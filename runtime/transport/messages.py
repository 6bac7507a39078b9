"""The messages of a plan at one of their ends: each is prepared once, and goes in every step.

gloo and NCCL fill a buffer of the wrong size without a word, so a sender holds every message to
what it has announced.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from schedlang.runtime.stage.values import Look, Value, flatten, has_gradient, unflatten
from schedlang.runtime.transport.precision import Form, Rounding
from schedlang.runtime.transport.wire import InFlight, Wire
from schedlang.runtime.watch.watchdog import PipelineError


@define(eq=False)
class Edge:
    """Between a stage of this rank and one on another rank: `what` passes it looks like this.

    What it looks like is known from the first step with such inputs. In that step, which is `new`,
    the first activation brings a header, and all goes by way of the CPU: its receives are begun
    when they are waited for, and gloo does not mind in which order.
    """

    wire: Wire
    number: int
    earlier: int
    what: str
    peer: int
    tag: int
    rounding: Rounding | None
    new: bool = True
    look: Look | None = None
    activation: Form = field(init=False)
    gradient: Form = field(init=False)
    _known: dict[int, Look] = field(factory=dict)
    _headers: InFlight = field(factory=list)

    def begin(self, inputs: int) -> None:
        """Begin a step with inputs of this number; all that look the same have the same."""
        look = self._known.get(inputs)
        self.new = look is None
        if look is not self.look:
            self._set(look)

    def end(self, inputs: int) -> None:
        """End a step: what it has found out is known from now on."""
        if self.new and self.look is not None:
            self._known[inputs] = self.look
            self.wire.wait(self._headers, self.peer)
            self._headers = []

    def announce(self, look: Look) -> None:
        """Tell the other rank, before the first activation of a new step, what activations look
        like.
        """
        self._set(look)
        self._headers = self.wire.send_object(look, self.peer, self.tag)

    def learn(self) -> None:
        """Wait until the other rank has told."""
        look = self.wire.receive_object(self.peer, self.tag)
        assert isinstance(look, Look)
        self._set(look)

    def _set(self, look: Look | None) -> None:
        self.look = look
        models = look.models() if look else []
        self.activation = Form.of(models, self.rounding)
        self.gradient = Form.of([each for each in models if has_gradient(each)], self.rounding)


class Message:
    """A message, which goes from a box of one of this rank's stages, or into one."""

    __slots__ = ("box", "edge", "in_flight", "microbatch", "peer", "tags", "wire")

    def __init__(self, edge: Edge, microbatch: int, tags: range, box: dict[int, Value]) -> None:
        self.edge = edge
        self.wire = edge.wire
        self.peer = edge.peer
        self.box = box
        #: A tag for each tensor, more than there will be.
        self.microbatch = microbatch
        self.tags = tags
        self.in_flight: InFlight = []

    def tensors(self) -> list[Tensor]:
        """What is to be sent, or room for what is to be received."""
        raise NotImplementedError


class Send(Message):
    """A send: begun, and later waited for."""

    __slots__ = ()

    def post(self) -> None:
        """Begin it."""
        tensors = self.tensors()
        if self.edge.new:
            tensors = [each.cpu() for each in tensors]
        send = self.wire.send
        peer = self.peer
        self.in_flight = [
            (send(each, peer, tag), each) for each, tag in zip(tensors, self.tags, strict=False)
        ]

    def complete(self) -> None:
        """Wait until it has been received, and let go of what was sent."""
        if self.in_flight:
            self.wire.wait(self.in_flight, self.peer)
            self.in_flight = []

    def complete_if_posted(self) -> None:
        """The same where its receive was begun at its place in the plan: not in a new step."""
        if not self.edge.new:
            self.complete()


class ActivationSend(Send):
    """The send of an output."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The tensors of the output, announced if it is the first of a new step, and else like what
        was.
        """
        edge = self.edge
        tensors, tree = flatten(self.box.pop(self.microbatch), edge.what)
        if edge.look is None:
            edge.announce(Look.of(tensors, tree))
        elif not edge.look.is_of(tensors, tree):
            raise PipelineError(
                f"{edge.what} is {Look.of(tensors, tree)} for microbatch {self.microbatch}, "
                f"but {edge.look} in the first step with inputs of this shape"
            )
        return edge.activation.pack(tensors)


class GradientSend(Send):
    """The send of the gradients of an input."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The gradients, which look like the tensors that they are of."""
        return self.edge.gradient.pack(self.box.pop(self.microbatch))


class Receive(Message):
    """A receive: begun where the plan has it, or in a new step when it is waited for."""

    __slots__ = ("device",)

    def __init__(
        self, edge: Edge, microbatch: int, tags: range, box: dict[int, Value], device: torch.device
    ) -> None:
        super().__init__(edge, microbatch, tags, box)
        self.device = device

    def form(self) -> Form:
        """What the tensors look like that come."""
        raise NotImplementedError

    def put(self, tensors: list[Tensor]) -> None:
        """Put what has come where its stage takes it from."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Room for them."""
        device = self.device
        return [torch.empty_like(each, device=device) for each in self.form().packed]

    def post(self) -> None:
        """Begin it."""
        if not self.edge.new:
            self._begin(self.tensors())

    def arrive(self) -> None:
        """Wait for it."""
        edge = self.edge
        device = self.device
        if edge.new:
            if edge.look is None:
                edge.learn()
            self._begin([torch.empty_like(each) for each in self.form().packed])
        self.wire.wait(self.in_flight, self.peer)
        tensors = [each for _, each in self.in_flight]
        self.in_flight = []
        self.put(self.form().unpack([each.to(device) for each in tensors] if edge.new else tensors))

    def _begin(self, tensors: list[Tensor]) -> None:
        receive = self.wire.receive
        peer = self.peer
        self.in_flight = [
            (receive(each, peer, tag), each) for each, tag in zip(tensors, self.tags, strict=False)
        ]


class ActivationReceive(Receive):
    """The receive of an input."""

    __slots__ = ()

    def form(self) -> Form:
        """As announced."""
        return self.edge.activation

    def put(self, tensors: list[Tensor]) -> None:
        """Put it together again."""
        look = self.edge.look
        assert look is not None
        self.box[self.microbatch] = unflatten(tensors, look.tree)


class GradientReceive(Receive):
    """The receive of the gradients of an output."""

    __slots__ = ()

    def form(self) -> Form:
        """As this rank has announced what they are of."""
        return self.edge.gradient

    def put(self, tensors: list[Tensor]) -> None:
        """As they are."""
        self.box[self.microbatch] = tensors


def post_as_one(messages: Sequence[Send | Receive]) -> None:
    """Begin messages as one batch of NCCL; in a new step, by gloo, one by one."""
    if any(each.edge.new for each in messages):
        for each in messages:
            each.post()
        return
    tensors = [each.tensors() for each in messages]
    operations = [
        message.wire.operation(
            dist.isend if isinstance(message, Send) else dist.irecv, tensor, message.peer
        )
        for message, parts in zip(messages, tensors, strict=True)
        for tensor in parts
    ]
    in_flight = iter(messages[0].wire.as_one(operations))
    for message, parts in zip(messages, tensors, strict=True):
        message.in_flight = [next(in_flight) for _ in parts]
