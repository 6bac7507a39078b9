"""The costs of a plan's stages, from the costs of a model's layers."""

from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from attrs import evolve, frozen

from schedlang.extras.search.exact_numbers import added
from schedlang.extras.search.partition.balance import Sizes
from schedlang.extras.search.partition.layer_costs import layers_in, merged, of_layer
from schedlang.schedule.costs import Costs
from schedlang.schedule.layout import Layout

#: The fields of `Costs` with times of ops, and the names of these ops for their components.
_OF_TIMES = {"forward_times": "F", "input_times": "I", "backward_times": "B"}
#: The number of digits by which layers are compared.
_DIGITS = 9


@frozen
class Experts:
    """The experts of a model, sharded over `over` replicas.

    For a microbatch, layer i sends `sent[i]` bytes to experts, and receives as many. `gradients[i]`
    are the bytes of the gradients of all experts of that layer.
    """

    over: int
    sent: tuple[float, ...]
    gradients: tuple[float, ...]


@frozen
class Layers:
    """The layers of a model for microbatches of `samples`.

    `costs` has a number for each layer, in the fields that have one for each stage elsewhere. A
    rank holds `beside` bytes that a plan does not count. `checkpointed` layers keep only their
    inputs. `summed[i]` are the bytes of the gradients of layer i, which replicas all-reduce.
    """

    costs: Costs
    samples: int = 1
    checkpointed: bool = False
    beside: float = 0.0
    summed: tuple[float, ...] = ()
    experts: Experts | None = None

    @cached_property
    def count(self) -> int:
        """The number of layers."""
        return layers_in(self.costs)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The share of each layer in the time of a microbatch. Sizes whose times differ only by a
        factor have the same shares.
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
        """The costs of a plan whose stages have `sizes[i]` layers; each pipeline has all layers."""
        return merged(self.costs, sizes, layout)

    def passed_by_rank(
        self, sizes: Sizes, layout: Layout, replicas: int
    ) -> list[float]:
        """The bytes that each rank sends while replicas all-reduce their gradients in a ring."""
        of_ranks = [0.0] * (max(layout.placement) + 1)
        if self.summed:
            passed = self._passed(replicas)
            cuts = list(accumulate(sizes, initial=0))
            of_pieces = [added(passed[start:stop]) for start, stop in pairwise(cuts)]
            for stage, rank in enumerate(layout.placement):
                of_ranks[rank] += of_pieces[layout.piece(stage)]
        return of_ranks

    def _passed(self, replicas: int) -> list[float]:
        """The bytes sent for each layer. Experts are summed only by replicas that have the same
        ones.
        """
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
        """The layers with the time in which tokens go to experts on other replicas and come back,
        if each replica has so many ranks. There is an all-to-all each way, in the forward and in
        the backward. The rank waits for it, unless the program overlaps the op with another one.
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
        """The time to exchange one byte in an all-to-all among the experts' replicas. Links inside
        a node and the network between nodes work at the same time.
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
    """The components of an op that computes for this share of its time, and exchanges tokens in the
    rest: to the experts and back.
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
    """The bytes that a link carries in a ring all-reduce, for each byte that is summed (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3).
    """
    return 2 * (replicas - 1) / replicas
