"""The messages of a plan on the sender and on the receiver; each is prepared once for all steps.

gloo and NCCL fill a buffer of the wrong size without an error, so a sender compares every message
with the spec that it has announced:

    first step     spec of the output ─► header ─► activation ─► …          through the CPU
    later steps                                    activation ─► …          device to device

Microbatches may differ in their shapes. So each channel has *forms*: a form is for all microbatches
whose inputs have the same shapes and types, in any step. The first step with such a microbatch is
the first step of its form.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.message_gradients import Gradients
from schedlang.runtime.tags import Tags
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
    """The format of a channel's activations and gradients, for microbatches whose inputs have the
    same shapes and types.

    The first step with such a microbatch finds out the shapes and types in the channel. In that
    step the form is `new`: its first activation comes after a header, with a `tag` of this form,
    and all its messages go through the CPU. Their receives begin only when the rank waits for them,
    in any order, since gloo matches messages by tags.
    """

    tag: int = 0
    new: bool = True
    spec: ValueSpec | None = None
    activation: WireFormat = field(init=False)
    gradients: Gradients = field(init=False)
    headers: InFlight = field(factory=list)


@define(eq=False)
class Channel:
    """The messages between a stage of this rank and one on another rank: activations, which error
    messages call `what`, and their gradients.

    Each of the `messages` has the form of this step. If one batch of NCCL may have messages of
    several forms (`are_batched`), all forms of a step are new if one is, since a batch cannot go
    through the CPU in part.
    """

    wire: Wire
    number: int
    earlier: int
    what: str
    peer: int
    tags: Tags
    rounding: "Rounding | None"
    device: torch.device
    are_batched: bool = False
    messages: "list[Message]" = field(factory=list)
    _forms: Sequence[Form] = ()
    _inputs: Sequence[Hashable] = ()
    _known: dict[Hashable, Form] = field(factory=dict)
    _new: dict[Hashable, Form] = field(factory=dict)

    def begin(self, inputs: Sequence[Hashable]) -> None:
        """Begin a step. `inputs` has a number for each microbatch, or one for all; equal numbers
        mean inputs of the same shapes and types.
        """
        if inputs == self._inputs:
            return
        # Messages of one form share an object, so the first one learns the spec for all others.
        forms = {number: self._known.get(number) or Form() for number in inputs}
        self._inputs = inputs
        self._forms = [forms[number] for number in inputs]
        if len(inputs) == 1:
            self._forms *= self.tags.units
        for message in self.messages:
            self._give_form(message)
        are_all_new = self.are_batched and any(form.new for form in forms.values())
        self._new = {
            number: form for number, form in forms.items() if form.new or are_all_new
        }
        # Both ranks have the same order of new forms, so they assign the same tags.
        headers = self.tags.headers(self.number)
        for tag, form in zip(headers, self._new.values(), strict=False):
            form.tag = tag
            form.new = True

    def forget_inputs(self) -> None:
        """Give forms anew in the next step, which may have more microbatches than any before."""
        self._inputs = ()

    def add(self, message: "Message") -> None:
        """Add a message, which may be part of the current step."""
        self.messages.append(message)
        self._give_form(message)

    def _give_form(self, message: "Message") -> None:
        # This step may have fewer microbatches; messages of others are not sent.
        if message.microbatch < len(self._forms):
            message.form = self._forms[message.microbatch]

    def end(self) -> None:
        """End a step: its new forms are known from now on."""
        if not self._new:
            return
        for number, form in self._new.items():
            # An evaluation of few microbatches may send nothing over this channel.
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
        """Send the spec of activations to the peer, before the first one of a new form."""
        self._set(form, spec)
        form.headers = self.wire.send_object(spec, self.peer, form.tag)

    def learn(self, form: Form) -> None:
        """Wait for the spec from the peer."""
        spec = self.wire.receive_object(self.peer, form.tag)
        assert isinstance(spec, ValueSpec)
        self._set(form, spec)

    def _set(self, form: Form, spec: ValueSpec) -> None:
        form.spec = spec
        form.activation = WireFormat.of(spec.models(), self.rounding)
        form.gradients = Gradients.first(spec, self.rounding, self.device)


class Message:
    """A message, which takes its value from a box of a stage on this rank, or puts it there."""

    __slots__ = (
        "box",
        "channel",
        "form",
        "in_flight",
        "microbatch",
        "peer",
        "tagged",
        "wire",
    )

    #: Whether it has gradients, and goes from the later stage to the earlier one.
    is_gradient = False
    #: The form of the message in this step.
    form: Form

    def __init__(
        self, channel: Channel, microbatch: int, box: dict[int, Value]
    ) -> None:
        self.channel = channel
        self.wire = channel.wire
        self.peer = channel.peer
        self.box = box
        self.microbatch = microbatch
        self.in_flight: InFlight = []
        #: The units for which its tags were made, and these tags.
        self.tagged = 0, range(0)
        channel.add(self)

    @property
    def tags(self) -> range:
        """Tags for the tensors of the message, more than are needed."""
        channel = self.channel
        units, tags = self.tagged
        if units != channel.tags.units:
            microbatch = self.microbatch
            tags = channel.tags.tensors(channel.number, microbatch, self.is_gradient)
            self.tagged = channel.tags.units, tags
        return tags

    def tensors(self) -> list[Tensor]:
        """The tensors to send, or empty ones to receive into."""
        raise NotImplementedError


class Send(Message):
    """A send, which the rank posts, and for which it waits later."""

    __slots__ = ("changes", "samples")

    #: For each tensor, its count of changes in place when the send began; and in a new step a
    #: sample of its values, since autograd does not count all changes.
    changes: list[int]
    samples: list[Tensor]

    def post(self) -> None:
        """Begin to send."""
        tensors = self.tensors()
        send = self.wire.post_send
        if self.form.new:
            # Through gloo, which matches messages by tags: in a new step the peer begins a receive
            # only when it waits for it, and NCCL would need the order of the plan.
            tensors = [tensor.cpu() for tensor in tensors]
            send = self.wire.send
        peer = self.peer
        self.note(tensors)
        self.in_flight = [
            (send(tensor, peer, tag), tensor)
            for tensor, tag in zip(tensors, self.tags, strict=False)
        ]

    def note(self, tensors: list[Tensor]) -> None:
        """Keep the state of the tensors, to detect changes while they are on their way."""
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
        """Wait until the tensors have been received, and free them."""
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
        """Complete the send, unless the step is new: then its receive may begin later."""
        if not self.form.new:
            self.complete()


class ActivationSend(Send):
    """The send of an output."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The tensors of the output. The first output of a new form is announced, and others are
        compared with the announced spec.
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
    is_gradient = True

    def tensors(self) -> list[Tensor]:
        """The gradients, with the shapes and types of their tensors."""
        return self.form.gradients.pack(
            self.box.pop(self.microbatch), self.channel.what
        )


class Receive(Message):
    """A receive, which begins at its place in the plan, or in a new step at the wait for it."""

    __slots__ = ("device",)

    def __init__(
        self,
        channel: Channel,
        microbatch: int,
        box: dict[int, Value],
        device: torch.device,
    ) -> None:
        super().__init__(channel, microbatch, box)
        self.device = device

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors for this message, on a device."""
        raise NotImplementedError

    def put(self, tensors: list[Tensor]) -> None:
        """Put the received tensors into the stage's box."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Empty tensors to receive into."""
        return self.room(self.device)

    def post(self) -> None:
        """Begin to receive, if the form is known."""
        if not self.form.new:
            self._begin(self.tensors(), self.wire.post_receive)

    def arrive(self) -> None:
        """Wait for the tensors, and pass them to the stage."""
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
        """Empty tensors of the announced shapes and types."""
        packed = self.form.activation.packed
        return [torch.empty_like(model, device=device) for model in packed]

    def put(self, tensors: list[Tensor]) -> None:
        """Restore the nesting of the tensors, and pass them to the stage as leaves, which want a
        gradient if the sender's tensors did.
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
    is_gradient = True

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors for the gradients of the outputs that this rank has announced."""
        return self.form.gradients.room(device)

    def put(self, tensors: list[Tensor]) -> None:
        """Pass the gradients to the stage."""
        self.box[self.microbatch] = self.form.gradients.unpack(tensors)
