"""The messages of a plan, as sender or receiver: each is prepared once, and made in every step.

gloo and NCCL fill a buffer of the wrong size without an error, so a sender compares every message
with what it has announced:

    first step     spec of the output ─► header ─► activation ─► …          by way of the CPU
    later steps                                    activation ─► …          device to device
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.transport.precision import Rounding, WireFormat
from schedlang.runtime.transport.wire import InFlight, Wire
from schedlang.runtime.values import Value, ValueSpec, flatten, has_gradient, unflatten


@define(eq=False)
class Channel:
    """The messages between a stage of this rank and one on another rank: activations, which are
    `what` passes in an error, and their gradients.

    Their shapes and types are known from the first step with such inputs. In that step, which is
    `new`, the first activation brings a header, and all messages go by way of the CPU: their
    receives are begun when they are waited for, in whichever order, which gloo does not mind.
    """

    wire: Wire
    number: int
    earlier: int
    what: str
    peer: int
    tag: int
    rounding: Rounding | None
    new: bool = True
    spec: ValueSpec | None = None
    activation: WireFormat = field(init=False)
    gradient: WireFormat = field(init=False)
    _known: dict[int, ValueSpec] = field(factory=dict)
    _headers: InFlight = field(factory=list)

    def begin(self, inputs: int) -> None:
        """Begin a step with inputs of this number: those of the same shapes and types have the
        same.
        """
        spec = self._known.get(inputs)
        self.new = spec is None
        if spec is not self.spec:
            self._set(spec)

    def end(self, inputs: int) -> None:
        """End a step: the shapes and types that it has found out are known from now on."""
        if self.new and self.spec is not None:
            self._known[inputs] = self.spec
            self.wire.wait(self._headers, self.peer)
            self._headers = []

    def announce(self, spec: ValueSpec) -> None:
        """Tell the other rank the shapes and types of activations, before the first one of a new
        step.
        """
        self._set(spec)
        self._headers = self.wire.send_object(spec, self.peer, self.tag)

    def learn(self) -> None:
        """Wait until the other rank has announced them."""
        spec = self.wire.receive_object(self.peer, self.tag)
        assert isinstance(spec, ValueSpec)
        self._set(spec)

    def _set(self, spec: ValueSpec | None) -> None:
        self.spec = spec
        models = spec.models() if spec else []
        self.activation = WireFormat.of(models, self.rounding)
        with_gradient = [model for model in models if has_gradient(model)]
        self.gradient = WireFormat.of(with_gradient, self.rounding)


class Message:
    """A message, which takes its value from a box of one of this rank's stages, or puts it into
    one.
    """

    __slots__ = ("box", "channel", "in_flight", "microbatch", "peer", "tags", "wire")

    def __init__(
        self, channel: Channel, microbatch: int, tags: range, box: dict[int, Value]
    ) -> None:
        self.channel = channel
        self.wire = channel.wire
        self.peer = channel.peer
        self.box = box
        self.microbatch = microbatch
        #: A tag for each tensor, more than there will be.
        self.tags = tags
        self.in_flight: InFlight = []

    def tensors(self) -> list[Tensor]:
        """The tensors to send, or empty ones to receive into."""
        raise NotImplementedError


class Send(Message):
    """A send, begun and later waited for."""

    __slots__ = ()

    def post(self) -> None:
        """Begin to send."""
        tensors = self.tensors()
        if self.channel.new:
            tensors = [tensor.cpu() for tensor in tensors]
        send = self.wire.send
        peer = self.peer
        self.in_flight = [
            (send(tensor, peer, tag), tensor)
            for tensor, tag in zip(tensors, self.tags, strict=False)
        ]

    def complete(self) -> None:
        """Wait until the tensors have been received, and let go of them."""
        if self.in_flight:
            self.wire.wait(self.in_flight, self.peer)
            self.in_flight = []

    def complete_if_posted(self) -> None:
        """The same, but not in a new step, whose receives are not begun where the plan has them."""
        if not self.channel.new:
            self.complete()


class ActivationSend(Send):
    """The send of an output."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The tensors of the output: announced if it is the first one of a new step, and else
        compared with what was announced.
        """
        channel = self.channel
        tensors, tree = flatten(self.box.pop(self.microbatch), channel.what)
        if channel.spec is None:
            channel.announce(ValueSpec.of(tensors, tree))
        elif not channel.spec.matches(tensors, tree):
            raise PipelineError(
                f"{channel.what} is {ValueSpec.of(tensors, tree)} for microbatch "
                f"{self.microbatch}, but {channel.spec} in the first step with inputs of this shape"
            )
        return channel.activation.pack(tensors)


class GradientSend(Send):
    """The send of the gradients of an input."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The gradients, which have the shapes and types of the tensors that they are of."""
        return self.channel.gradient.pack(self.box.pop(self.microbatch))


class Receive(Message):
    """A receive: begun where the plan has it, or in a new step when it is waited for."""

    __slots__ = ("device",)

    def __init__(
        self,
        channel: Channel,
        microbatch: int,
        tags: range,
        box: dict[int, Value],
        device: torch.device,
    ) -> None:
        super().__init__(channel, microbatch, tags, box)
        self.device = device

    def format(self) -> WireFormat:
        """Shapes and types of the tensors that come."""
        raise NotImplementedError

    def put(self, tensors: list[Tensor]) -> None:
        """Put what has come where the stage takes it from."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Empty tensors to receive into."""
        device = self.device
        return [torch.empty_like(model, device=device) for model in self.format().packed]

    def post(self) -> None:
        """Begin to receive, if it is known what comes."""
        if not self.channel.new:
            self._begin(self.tensors())

    def arrive(self) -> None:
        """Wait for the tensors, and give them to the stage."""
        channel = self.channel
        device = self.device
        if channel.new:
            if channel.spec is None:
                channel.learn()
            self._begin([torch.empty_like(model) for model in self.format().packed])
        self.wire.wait(self.in_flight, self.peer)
        tensors = [tensor for _, tensor in self.in_flight]
        self.in_flight = []
        if channel.new:
            tensors = [tensor.to(device) for tensor in tensors]
        self.put(self.format().unpack(tensors))

    def _begin(self, tensors: list[Tensor]) -> None:
        receive = self.wire.receive
        peer = self.peer
        self.in_flight = [
            (receive(tensor, peer, tag), tensor)
            for tensor, tag in zip(tensors, self.tags, strict=False)
        ]


class ActivationReceive(Receive):
    """The receive of an input."""

    __slots__ = ()

    def format(self) -> WireFormat:
        """The format that was announced."""
        return self.channel.activation

    def put(self, tensors: list[Tensor]) -> None:
        """Nest the tensors as they were, and give them to the stage."""
        spec = self.channel.spec
        assert spec is not None
        self.box[self.microbatch] = unflatten(tensors, spec.tree)


class GradientReceive(Receive):
    """The receive of the gradients of an output."""

    __slots__ = ()

    def format(self) -> WireFormat:
        """The format of the outputs that they are of, which this rank has announced."""
        return self.channel.gradient

    def put(self, tensors: list[Tensor]) -> None:
        """Give the tensors to the stage."""
        self.box[self.microbatch] = tensors


def post_as_one(messages: Sequence[Send | Receive]) -> None:
    """Begin messages as one batch of NCCL; in a new step, by gloo, one by one."""
    if any(message.channel.new for message in messages):
        for message in messages:
            message.post()
        return
    tensors = [message.tensors() for message in messages]
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
