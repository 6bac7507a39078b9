"""Stages whose weights and gradients hop from replica to replica.

All weights of a stage with the same type lie in one flat tensor, whose memory is allocated only
while the rank has the weights:

    recv weights     allocate the memory; a message fills it
    F, B             the module's parameters are views of it
    send weights     the flat tensor is the message
    reshard          free the memory

Weights that autograd has saved are in the same flat tensor. So nothing is held between a forward
and its backward, and the backward reads the weights that have arrived for it. They have the same
values, so this counts as no change of a weight.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.ranks.weight_homes import first_users, homes_of
from schedlang.runtime.communicators import use_pairs
from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import ExtraCall, Part, When, methods_of
from schedlang.runtime.processes import group_apart
from schedlang.runtime.shared_memory import sharing
from schedlang.runtime.shared_weights import put_gradient, type_of_gradient
from schedlang.runtime.updates_elsewhere import UpdatesElsewhere
from schedlang.runtime.wire import InFlight, Wire
from schedlang.schedule.kinds import OF_HOPS

#: After so many updates that leave a stage's weights as they were, there is a warning. The first
#: one may be of a warm-up that begins with a learning rate of 0.
_PATIENCE = 2


class Hops(Part):
    """All weights and gradients that hop from or to a rank. All messages have one `tag`, since
    sender and receiver come to them in the same order.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        wire: Wire,
        tag: int,
        device: torch.device,
    ) -> None:
        layout = plan.layout
        homes = homes_of(plan, modules)
        if device.type == "cuda" and not all(
            OF_HOPS & {*each.kind} for each in plan.ranks
        ):
            raise PipelineError(
                "weights travel between some ranks of the plan, and others have none that do: on "
                "GPUs they cannot yet, as all ranks make the communicators for them together"
            )
        #: The ranks of the replicas before and after each stage.
        peers = dict[int, tuple[int, int]]()
        for number in homes:
            replicas = layout.replicas(number)
            before = replicas[replicas.index(number) - 1]
            after = layout.next_replica(number)
            peers[number] = layout.placement[before], layout.placement[after]
        apart = _wire_apart(wire, device, {*chain.from_iterable(peers.values())})
        self._stages = dict[int, TravellingStage]()
        for number, home in homes.items():
            ring = Ring(apart, tag, *peers[number])
            name = plan.names.stage(number)
            where = f"stage {plan.names.stage(home)} on rank {layout.placement[home]}"
            elsewhere = None if home == number else where
            self._stages[number] = TravellingStage(
                name, modules[number], ring, elsewhere
            )
        self.ops = {
            (kind, number): _of_no_microbatch(call)
            for number, stage in self._stages.items()
            for kind, call in methods_of(stage).items()
        }

    def begin_step(self) -> None:
        """PipelineError if the weights no longer lie in their flat tensors."""
        for stage in self._stages.values():
            stage.check()
            stage.begin()

    def end_step(self) -> None:
        """Keep values of the weights, which the script is about to update."""
        for stage in self._stages.values():
            stage.updates.before_update()

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """Wait for weights before their first use, and end the step of each stage."""
        actions = plan.ranks[rank]
        for index, number in first_users(actions):
            yield ExtraCall(index, When.BEFORE, self._stages[number].arrive)
        for stage in self._stages.values():
            yield ExtraCall(len(actions), When.AFTER, stage.end)


def _wire_apart(wire: Wire, device: torch.device, peers: Collection[int]) -> Wire:
    """A wire for hops between this rank and its peers, apart from the plan's messages; all ranks
    build theirs together. With gloo, tags separate the two. NCCL matches the messages of two ranks
    by their order, so hops need their own process group there.
    """
    if device.type != "cuda":
        return wire
    apart = wire.in_group(group_apart(wire.processes))
    own = wire.processes.own
    pairs = {(min(own, peer), max(own, peer)) for peer in peers}
    use_pairs(pairs, apart.processes, device)
    return apart


def _of_no_microbatch(call: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: call()


class Ring:
    """The connections of a stage to its next replica (rank `after`) and from its previous one."""

    def __init__(self, wire: Wire, tag: int, before: int, after: int) -> None:
        self._wire = wire
        self._tag = tag
        self._before = before
        self._after = after

    def send(self, tensors: Sequence[Tensor]) -> InFlight:
        """Begin to send tensors to the next replica."""
        return [
            (self._wire.send(tensor, self._after, self._tag), tensor)
            for tensor in tensors
        ]

    def receive(self, tensors: Sequence[Tensor]) -> InFlight:
        """Begin to receive tensors from the previous replica."""
        return [
            (self._wire.receive(tensor, self._before, self._tag), tensor)
            for tensor in tensors
        ]

    def end_sends(self, in_flight: InFlight) -> None:
        """Wait until sends have completed."""
        self._wire.wait(in_flight, self._after)

    def end_receives(self, in_flight: InFlight) -> None:
        """Wait until receives have completed."""
        self._wire.wait(in_flight, self._before)


class TravellingStage:
    """A stage in a ring. `elsewhere` names its home in words; None if it is at home here."""

    def __init__(
        self, name: str, module: nn.Module, ring: Ring, elsewhere: str | None
    ) -> None:
        _check_memory(name, module)
        self._name = name
        self._ring = ring
        self._elsewhere = elsewhere
        by_type = _by_type(module.parameters(), attrgetter("dtype"))
        self._weights = list(map(FlatWeights, by_type))
        trained = [each for each in module.parameters() if each.requires_grad]
        self._gradients = list(map(FlatGradients, _by_type(trained, type_of_gradient)))
        self._frozen = [
            weight for weight in module.parameters() if not weight.requires_grad
        ]
        #: Away from home there are no gradients, and so no updates.
        self.updates = UpdatesElsewhere(
            name,
            dict(module.named_parameters()),
            "the plan sends them from rank to rank",
            _PATIENCE,
        )
        self._arriving: InFlight = []
        self._sent: InFlight = []
        #: Gradients that have not been passed on, in the order in which they were received.
        self._received: list[InFlight] = []
        if elsewhere is not None:
            # Without this error, a checkpoint would silently have empty weights.
            for register, done in (
                (module.register_state_dict_pre_hook, "saved"),
                (module.register_load_state_dict_pre_hook, "loaded"),
            ):
                register(partial(self._refuse, done))  # type: ignore[no-untyped-call]
            self.reshard()

    def _refuse(self, done: str, *_: Any) -> None:
        raise PipelineError(
            f"the weights of stage {self._name} travel, and are at home as {self._elsewhere}: "
            f"there they are {done}, or by `Pipeline.save` and `Pipeline.save_model` on all ranks"
        )

    def check(self) -> None:
        """PipelineError if a weight has been moved to other memory, or thawed."""
        self._check_frozen()
        self._check_place()

    def _check_frozen(self) -> None:
        """PipelineError if a frozen weight has been thawed, by a script or by a forward."""
        if any(weight.requires_grad for weight in self._frozen):
            raise PipelineError(
                f"a weight of stage {self._name} was thawed, and its gradients would not travel: "
                "thaw weights before the pipeline is built, or build a new one then"
            )

    def _check_place(self) -> None:
        """PipelineError if a weight has been moved to other memory."""
        if not all(
            weights.are_in_place(self._elsewhere is None) for weights in self._weights
        ):
            raise PipelineError(
                f"the weights of stage {self._name} travel, and lie in other memory than that in "
                "which they do: change them in place, and move or convert modules before the "
                "pipeline is built"
            )

    def begin(self) -> None:
        """The begin of a step. At home, warn if updates have left the weights as they were, and
        keep the gradients of earlier steps; elsewhere there are none.
        """
        if self._elsewhere is not None:
            for gradients in self._gradients:
                gradients.drop()
            return
        # A script drops the gradients after an update.
        if self.updates.gradients_are_gone():
            self.updates.after_update()
        for gradients in self._gradients:
            gradients.begin()

    def receive_weights(self) -> None:
        """Begin to receive the weights."""
        for weights in self._weights:
            weights.take()
        self._arriving = self._ring.receive([weights.flat for weights in self._weights])

    def arrive(self) -> None:
        """Wait until the weights have arrived."""
        if self._arriving:
            self._ring.end_receives(self._arriving)
            self._arriving = []

    def send_weights(self) -> None:
        """Begin to send the weights to the next replica, once they have arrived. PipelineError if
        those at home are in other memory, as after a swap with averages for an evaluation.
        """
        self.arrive()
        if self._elsewhere is None:
            self._check_place()
        self._sent += self._ring.send([weights.flat for weights in self._weights])

    def reshard(self) -> None:
        """Free the weights, once all sends have completed."""
        self.arrive()
        self._end_sends()
        for weights in self._weights:
            weights.drop()

    def receive_gradients(self) -> None:
        """Begin to receive gradients."""
        buffers = [gradients.buffer() for gradients in self._gradients]
        self._received.append(self._ring.receive(buffers))

    def send_gradients(self) -> None:
        """Begin to send the sum of the gradients here and of those received; then drop them."""
        self._check_frozen()
        total = self._total()
        for gradients in self._gradients:
            gradients.drop()
        self._sent += self._ring.send(total)

    def end(self) -> None:
        """The end of a step: at home, add the gradients that were received to those here."""
        self._check_frozen()
        self._end_sends()
        if self._received:
            for gradients, total in zip(self._gradients, self._total(), strict=True):
                gradients.put(total)

    def _total(self) -> list[Tensor]:
        """The sum of the gradients here and of those received, in the order of their receives."""
        sums = []
        if not self._received or any(
            gradients.are_there for gradients in self._gradients
        ):
            sums.append([gradients.in_one_piece() for gradients in self._gradients])
        for in_flight in self._received:
            self._ring.end_receives(in_flight)
            sums.append([tensor for _, tensor in in_flight])
        self._received = []
        return [reduce(torch.add, same) for same in zip(*sums, strict=True)]

    def _end_sends(self) -> None:
        self._ring.end_sends(self._sent)
        self._sent = []


class FlatWeights:
    """Weights of one type as views of a flat tensor, whose memory can be freed and allocated."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.flat = torch.cat([weight.detach().flatten() for weight in parameters])
        sizes = [weight.numel() for weight in parameters]
        self._places = [
            part.view(weight.shape)
            for part, weight in zip(
                self.flat.split_with_sizes(sizes), parameters, strict=True
            )
        ]
        self._bytes = self.flat.untyped_storage().nbytes()
        #: Stands in for weights that are elsewhere; an op that reads it fails.
        self._nothing = self.flat.new_empty(0)
        self._put(self._places)

    def _put(self, places: Sequence[Tensor]) -> None:
        # To set `data` does not count as a change in place, so autograd accepts the weights that it
        # has saved.
        for weight, place in zip(self._parameters, places, strict=True):
            weight.data = place

    def take(self) -> None:
        """Allocate the memory."""
        self.flat.untyped_storage().resize_(self._bytes)
        self._put(self._places)

    def drop(self) -> None:
        """Free the memory."""
        self.flat.untyped_storage().resize_(0)
        self._put([self._nothing] * len(self._places))

    def are_in_place(self, are_there: bool) -> bool:
        """Whether the weights are views of the flat tensor, or empty unless they `are_there`."""
        if not are_there:
            return all(weight.numel() == 0 for weight in self._parameters)
        places = zip(self._parameters, self._places, strict=True)
        return all(weight.data_ptr() == place.data_ptr() for weight, place in places)


class FlatGradients:
    """Gradients of one type, which are sent as one flat tensor. Behind them it has, for each
    weight, the number of replicas that had a gradient.
    """

    # An optimizer applies weight decay for a gradient of zeros, but not without a gradient. So
    # weights without a gradient on any replica are marked, as in `schedlang.runtime.parts.sums`.

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._type = type_of_gradient(parameters[0])
        # The weights are empty while they are elsewhere, so their shapes are kept.
        self._shapes = [weight.shape for weight in parameters]
        self._sizes = [*(shape.numel() for shape in self._shapes), len(parameters)]
        #: As a step begins, the gradients of earlier ones.
        self._earlier: list[Tensor | None] = [None] * len(parameters)

    @property
    def are_there(self) -> bool:
        """Whether any weight has a gradient."""
        return any(weight.grad is not None for weight in self._parameters)

    def begin(self) -> None:
        """Keep the gradients of earlier steps, whose memory the script may have views of."""
        self._earlier = [weight.grad for weight in self._parameters]

    def buffer(self) -> Tensor:
        """A buffer to receive into."""
        return self._parameters[0].new_empty(sum(self._sizes), dtype=self._type)

    def in_one_piece(self) -> Tensor:
        """All gradients as one flat tensor."""
        piece = self._parameters[0].new_zeros(sum(self._sizes), dtype=self._type)
        *parts, counts = piece.split_with_sizes(self._sizes)
        for number, (weight, part) in enumerate(
            zip(self._parameters, parts, strict=True)
        ):
            if weight.grad is not None:
                gradient = (
                    weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                )
                part.copy_(gradient.flatten())
                counts[number] = 1
        return piece

    def put(self, total: Tensor) -> None:
        """Set the gradients of the weights from a flat tensor, in the memory of earlier ones."""
        *parts, counts = total.split_with_sizes(self._sizes)
        gradients = zip(
            self._parameters,
            self._earlier,
            parts,
            self._shapes,
            counts.tolist(),
            strict=True,
        )
        for weight, earlier, part, shape, count in gradients:
            weight.grad = earlier
            # A weight that is frozen by now has no gradient of this step.
            if not weight.requires_grad:
                continue
            if earlier is not None:
                put_gradient(weight, part.view(shape))
            elif count:
                weight.grad = part.view(shape)
        self._earlier = []

    def drop(self) -> None:
        """Drop the gradients."""
        for weight in self._parameters:
            weight.grad = None


def _check_memory(name: str, module: nn.Module) -> None:
    """PipelineError if a trained weight of a stage shares memory with another weight."""
    weights = dict(module.named_parameters())
    for group in sharing(weights):
        if any(weights[each].requires_grad for each in group):
            raise PipelineError(
                f"the weights `{group[0]}` and `{group[1]}` of stage {name} share memory, and each "
                "would travel by itself: make them one parameter, or give each memory of its own"
            )


def _by_type(
    weights: Iterable[nn.Parameter], type_of: Callable[[nn.Parameter], torch.dtype]
) -> list[list[nn.Parameter]]:
    """Group weights by their types, or by those of their gradients: a flat tensor has one type."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(type_of(weight), []).append(weight)
    return list(found.values())


def of_rank(rank: Rank) -> Iterator[Hops]:
    """Make the part for all hops from and to this rank."""
    site = rank.site
    tag = rank.exchange.tags.hops
    yield Hops(site.plan, site.modules, rank.wire, tag, site.device)
