"""The messages of a plan, as sender or receiver: each is prepared once, and made in every step.

gloo and NCCL fill a buffer of the wrong size without an error, so a sender compares every message
with what it has announced:

    first step     spec of the output ─► header ─► activation ─► …          by way of the CPU
    later steps                                    activation ─► …          device to device

Microbatches may have other shapes than the ones before them. So all of this is said of a form: what
passes through a channel for those microbatches whose inputs look alike, in this step or another.
The first step with such a microbatch is the first step of its form.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.message_gradients import Gradients
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import (
    Value,
    ValueSpec,
    are_same,
    check_plain,
    flatten,
    sample,
    unflatten,
    wants_others,
)
from schedlang.runtime.wire import InFlight, Wire
from schedlang.runtime.wire_format import WireFormat

if TYPE_CHECKING:
    from schedlang.runtime.precision import Rounding


@define(eq=False)
class Form:
    """What passes through a channel for microbatches whose inputs look alike, and the gradients
    that come back.

    Shapes and types are known from the first step with such a microbatch. In that step, in which
    the form is `new`, its first activation brings a header, with a `tag` for this form alone, and
    all its messages go by way of the CPU: their receives are begun when they are waited for, in
    whichever order, which gloo does not mind.
    """

    tag: int = 0
    new: bool = True
    spec: ValueSpec | None = None
    activation: WireFormat = field(init=False)
    gradients: Gradients = field(init=False)
    headers: InFlight = field(factory=list)


@define(eq=False)
class Channel:
    """The messages between a stage of this rank and one on another rank: activations, which are
    `what` passes in an error, and their gradients.

    `messages` are all of them, each with the form that it has in this step. `tags` are those of
    headers, one for each microbatch, so for each form that a step may have. Where messages of
    several forms may be in one batch of NCCL (`are_batched`), which cannot go by two ways, all of a
    step are new if one is.
    """

    wire: Wire
    number: int
    earlier: int
    what: str
    peer: int
    tags: range
    rounding: "Rounding | None"
    device: torch.device
    are_batched: bool = False
    messages: "list[Message]" = field(factory=list)
    _forms: Sequence[Form] = ()
    _inputs: Sequence[Hashable] = ()
    _known: dict[Hashable, Form] = field(factory=dict)
    _new: dict[Hashable, Form] = field(factory=dict)

    def begin(self, inputs: Sequence[Hashable]) -> None:
        """Begin a step, whose microbatches have inputs of these numbers, of which those of the same
        shapes and types have the same: a number for each microbatch, or one for all.
        """
        if inputs == self._inputs:
            return
        # The same objects for the whole step: what the first message of a form learns, the others
        # know.
        forms = {number: self._known.get(number) or Form() for number in inputs}
        self._inputs = inputs
        self._forms = [forms[number] for number in inputs]
        if len(inputs) == 1:
            self._forms *= len(self.tags)
        for message in self.messages:
            self._give_form(message)
        are_all_new = self.are_batched and any(form.new for form in forms.values())
        self._new = {
            number: form for number, form in forms.items() if form.new or are_all_new
        }
        # Both ranks are told of them in this order, so they give the same tags.
        for tag, form in zip(self.tags, self._new.values(), strict=False):
            form.tag = tag
            form.new = True

    def add(self, message: "Message") -> None:
        """Take note of a message, perhaps of the step that has begun."""
        self.messages.append(message)
        self._give_form(message)

    def _give_form(self, message: "Message") -> None:
        # A message of a microbatch that this step does not have is not made.
        if message.microbatch < len(self._forms):
            message.form = self._forms[message.microbatch]

    def end(self) -> None:
        """End a step: the shapes and types that it has found out are known from now on."""
        if not self._new:
            return
        for number, form in self._new.items():
            # An evaluation of a few microbatches may pass none by this channel.
            if form.spec is not None:
                form.new = False
                if form.gradients.is_first:
                    form.gradients = form.gradients.of_later_steps()
                self._known[number] = form
                self.wire.wait(form.headers, self.peer)
                form.headers = []
        self._new = {}
        self._inputs = ()

    def announce(self, form: Form, spec: ValueSpec) -> None:
        """Tell the other rank the shapes and types of activations, before the first one of a new
        form.
        """
        self._set(form, spec)
        form.headers = self.wire.send_object(spec, self.peer, form.tag)

    def learn(self, form: Form) -> None:
        """Wait until the other rank has announced them."""
        spec = self.wire.receive_object(self.peer, form.tag)
        assert isinstance(spec, ValueSpec)
        self._set(form, spec)

    def _set(self, form: Form, spec: ValueSpec) -> None:
        form.spec = spec
        form.activation = WireFormat.of(spec.models(), self.rounding)
        form.gradients = Gradients.first(spec, self.rounding, self.device)


class Message:
    """A message, which takes its value from a box of one of this rank's stages, or puts it into
    one.
    """

    __slots__ = (
        "box",
        "channel",
        "form",
        "in_flight",
        "microbatch",
        "peer",
        "tags",
        "wire",
    )

    #: What passes in this step.
    form: Form

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
        channel.add(self)

    def tensors(self) -> list[Tensor]:
        """The tensors to send, or empty ones to receive into."""
        raise NotImplementedError


class Send(Message):
    """A send, begun and later waited for."""

    __slots__ = ("changes", "samples")

    #: How often each tensor had been changed in place when the send began; and in a new step some
    #: of its numbers, for what autograd does not count.
    changes: list[int]
    samples: list[Tensor]

    def post(self) -> None:
        """Begin to send."""
        tensors = self.tensors()
        send = self.wire.post_send
        if self.form.new:
            # By gloo, which matches messages by tags: in a new step the other rank begins a receive
            # only when it waits for it, and that is another order than NCCL would need.
            tensors = [tensor.cpu() for tensor in tensors]
            send = self.wire.send
        peer = self.peer
        self.note(tensors)
        self.in_flight = [
            (send(tensor, peer, tag), tensor)
            for tensor, tag in zip(tensors, self.tags, strict=False)
        ]

    def note(self, tensors: list[Tensor]) -> None:
        """Note what is sent, to see whether it was changed on its way."""
        self.changes = [*map(changes_of, tensors)]
        self.samples = (
            [sample(tensor).clone() for tensor in tensors] if self.form.new else []
        )

    def _is_as_noted(self) -> bool:
        for (_, tensor), changes in zip(self.in_flight, self.changes, strict=True):
            if changes_of(tensor) != changes:
                return False
        if not self.samples:
            return True
        samples = zip(self.samples, self.in_flight, strict=False)
        return all(are_same(before, sample(tensor)) for before, (_, tensor) in samples)

    def complete(self) -> None:
        """Wait until the tensors have been received, and let go of them."""
        if self.in_flight:
            self.wire.wait(self.in_flight, self.peer)
            if not self._is_as_noted():
                raise PipelineError(
                    f"{self.channel.what} was changed in place while microbatch {self.microbatch} "
                    "was on its way, perhaps by the next forward: return a copy of what the stage "
                    "keeps"
                )
            self.in_flight = []

    def complete_if_posted(self) -> None:
        """The same, but not in a new step, whose receives are not begun where the plan has them."""
        if not self.form.new:
            self.complete()


class ActivationSend(Send):
    """The send of an output."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The tensors of the output: announced if it is the first one of a new step, and else
        compared with what was announced.
        """
        channel = self.channel
        form = self.form
        tensors, tree = flatten(self.box.pop(self.microbatch), channel.what)
        check_plain(tensors, channel.what)
        if form.spec is None:
            channel.announce(form, ValueSpec.of(tensors, tree))
        elif not form.spec.matches(tensors, tree):
            raise PipelineError(
                f"{channel.what} is {ValueSpec.of(tensors, tree)} for microbatch "
                f"{self.microbatch}, but {form.spec} in the first step with inputs of this shape"
            )
        else:
            wants = tuple(tensor.requires_grad for tensor in tensors)
            told = form.spec.want_gradients
            if wants != told:
                raise wants_others(channel.what, self.microbatch, wants, told)
        return form.activation.pack(tensors)


class GradientSend(Send):
    """The send of the gradients of an input."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The gradients, which have the shapes and types of the tensors that they are of."""
        return self.form.gradients.pack(
            self.box.pop(self.microbatch), self.channel.what
        )


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

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors, for those that come."""
        raise NotImplementedError

    def put(self, tensors: list[Tensor]) -> None:
        """Put what has come where the stage takes it from."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Empty tensors to receive into."""
        return self.room(self.device)

    def post(self) -> None:
        """Begin to receive, if it is known what comes."""
        if not self.form.new:
            self._begin(self.tensors(), self.wire.post_receive)

    def arrive(self) -> None:
        """Wait for the tensors, and give them to the stage."""
        form = self.form
        if form.new:
            if form.spec is None:
                self.channel.learn(form)
            self._begin(self.room(torch.device("cpu")), self.wire.receive)
        self.wire.wait(self.in_flight, self.peer)
        tensors = [tensor for _, tensor in self.in_flight]
        self.in_flight = []
        if form.new:
            tensors = [tensor.to(self.device) for tensor in tensors]
        self.put(tensors)

    def _begin(self, tensors: list[Tensor], receive: Callable[..., dist.Work]) -> None:
        peer = self.peer
        self.in_flight = [
            (receive(tensor, peer, tag), tensor)
            for tensor, tag in zip(tensors, self.tags, strict=False)
        ]


class ActivationReceive(Receive):
    """The receive of an input."""

    __slots__ = ()

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors of the shapes and types that were announced."""
        packed = self.form.activation.packed
        return [torch.empty_like(model, device=device) for model in packed]

    def put(self, tensors: list[Tensor]) -> None:
        """Nest the tensors as they were, and give them to the stage, as leaves that want a gradient
        where the other rank's did.
        """
        form = self.form
        spec = form.spec
        assert spec is not None
        unpacked = form.activation.unpack(tensors)
        for index in spec.wanting:
            unpacked[index].requires_grad_()
        self.box[self.microbatch] = unflatten(unpacked, spec.tree)


class GradientReceive(Receive):
    """The receive of the gradients of an output."""

    __slots__ = ()

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors, for gradients of the outputs that this rank has announced."""
        return self.form.gradients.room(device)

    def put(self, tensors: list[Tensor]) -> None:
        """Give the gradients to the stage."""
        self.box[self.microbatch] = self.form.gradients.unpack(tensors)


def post_as_one(messages: Sequence[Send | Receive]) -> None:
    """Begin messages as one batch of NCCL; in a new step, by gloo, one by one."""
    # In a new step `post` sends by gloo, and leaves receives for where they are needed.
    if any(message.form.new for message in messages):
        for message in messages:
            message.post()
        return
    tensors = [message.tensors() for message in messages]
    operations = [
        message.wire.operation(
            dist.isend if isinstance(message, Send) else dist.irecv,
            tensor,
            message.peer,
        )
        for message, parts in zip(messages, tensors, strict=True)
        for tensor in parts
    ]
    in_flight = iter(messages[0].wire.as_one(operations) if operations else [])
    for message, parts in zip(messages, tensors, strict=True):
        if isinstance(message, Send):
            message.note(parts)
        message.in_flight = [next(in_flight) for _ in parts]
