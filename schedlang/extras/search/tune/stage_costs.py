"""What a plan's stages cost, from what the layers of a model cost."""

from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from attrs import evolve, frozen

from schedlang.extras.search.partition.balance import Sizes
from schedlang.extras.search.partition.layer_costs import layers_in, merged, of_layer
from schedlang.schedule.costs import Costs
from schedlang.schedule.fixed_point import added
from schedlang.schedule.layout import Layout

#: The kinds of ops whose times there are, as their components are called.
_OF_TIMES = {"forward_times": "F", "input_times": "I", "backward_times": "B"}
#: To how many digits layers are compared.
_DIGITS = 9


@frozen
class Experts:
    """How a model's experts are shared out: over so many replicas, each of which has a part.

    Of a microbatch, `sent[i]` bytes go from layer i to experts, and as many come back.
    `gradients[i]` are the bytes of the gradients of all experts of that layer.
    """

    over: int
    sent: tuple[float, ...]
    gradients: tuple[float, ...]


@frozen
class Layers:
    """A model's layers at one size of microbatch, of so many `samples`.

    `costs` has a number for each layer where it is said to have one for each stage. Beside what a
    plan counts, a rank holds `beside` bytes. `checkpointed` says that the layers keep their inputs
    only. `summed[i]` are the bytes of the gradients of layer i on a rank, which replicas sum.
    """

    costs: Costs
    samples: int = 1
    checkpointed: bool = False
    beside: float = 0.0
    summed: tuple[float, ...] = ()
    experts: Experts | None = None

    @cached_property
    def count(self) -> int:
        """How many layers there are."""
        return layers_in(self.costs)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The part of each layer in the time that a microbatch takes: at sizes that differ only by
        a factor, they are the same.
        """
        durations = self.costs.every_duration(self.count)
        names = ("forward", "backward", "input", "weight")
        times = [
            forward + max(whole, input + weight)
            for forward, whole, input, weight in zip(
                *(durations[name] for name in names), strict=True
            )
        ]
        return tuple(round(time / sum(times), _DIGITS) for time in times)

    def of_stages(self, sizes: Sizes, layout: Layout) -> Costs:
        """The costs of a plan whose stages have so many layers; each of several pipelines has all
        of them.
        """
        return merged(self.costs, sizes, layout)

    def passed_by_rank(
        self, sizes: Sizes, layout: Layout, replicas: int
    ) -> list[float]:
        """The bytes that each rank passes on while so many replicas sum their gradients."""
        of_ranks = [0.0] * (max(layout.placement) + 1)
        if self.summed:
            passed = self._passed(replicas)
            cuts = list(accumulate(sizes, initial=0))
            of_pieces = [added(passed[start:stop]) for start, stop in pairwise(cuts)]
            for stage, rank in enumerate(layout.placement):
                of_ranks[rank] += of_pieces[layout.piece(stage)]
        return of_ranks

    def _passed(self, replicas: int) -> list[float]:
        """The same for each layer. Experts are summed by the replicas that have the same ones."""
        if self.experts is None:
            return [_around_ring(replicas) * each for each in self.summed]
        over = self.experts.over
        passed = []
        for all_of_layer, of_experts in zip(
            self.summed, self.experts.gradients, strict=True
        ):
            own = of_experts / over
            rest = all_of_layer - own
            passed.append(
                _around_ring(replicas) * rest + _around_ring(replicas // over) * own
            )
        return passed

    def with_exchanges(self, ranks: int) -> "Layers":
        """These layers, if each replica has so many ranks, with the time in which tokens go to
        their experts on other replicas, and come back: an all-to-all each way, in the forward and
        in the backward. The rank waits, unless the program overlaps the op with another one.
        """
        if self.experts is None or self.experts.over == 1:
            return self
        per_byte = self._time_of_exchanged_byte(ranks)
        times = [2 * per_byte * sent for sent in self.experts.sent]
        # A checkpointed layer runs its forward again.
        again = 2 if self.checkpointed else 1
        more = {"forward_times": 1, "input_times": again, "backward_times": again}
        changed: dict[str, Any] = {}
        components: dict[str, list[str]] = {}
        for name, often in more.items():
            values = getattr(self.costs, name)
            changed[name] = tuple(
                of_layer(values, layer) + often * time
                for layer, time in enumerate(times)
            )
            whole = sum(changed[name])
            components[_OF_TIMES[name]] = _in_turn(1 - often * sum(times) / whole)
        costs = evolve(self.costs, **changed, components=components)
        return evolve(self, costs=costs)

    def _time_of_exchanged_byte(self, ranks: int) -> float:
        """How long it takes to send one byte to each expert's replica in turn: replicas on the
        same node are reached by its links, and at the same time others by the network.
        """
        assert self.experts is not None
        costs = self.costs
        over = self.experts.over
        near = over
        if costs.ranks_per_node:
            near = min(over, max(1, costs.ranks_per_node // ranks))
        inside = (near - 1) / over / (costs.bandwidth_in_node or inf)
        between = (over - near) / over / (costs.bandwidth_between_nodes or inf)
        return max(inside, between)


def _in_turn(computed: float) -> list[str]:
    """The components of an op that computes for some share of its time and exchanges tokens for the
    rest, there and back.
    """
    half = computed / 2
    way = (1 - computed) / 2
    return [
        f"compute {half:.9f} compute",
        f"there {way:.9f} all_to_all",
        f"experts {half:.9f} compute",
        f"back {way:.9f} all_to_all",
    ]


def _around_ring(replicas: int) -> float:
    """How often each byte goes over a link while a ring of replicas sums it (Patarasuk and Yuan
    2009, Bandwidth optimal all-reduce algorithms, section 3).
    """
    return 2 * (replicas - 1) / replicas
