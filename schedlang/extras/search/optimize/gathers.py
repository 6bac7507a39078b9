"""Where a rank gathers the weights of its sharded stages, lets go of them, and sums gradients.

A search chooses the ops before which the weights of a stage are gathered anew, and how early each
gather begins. The rest follows: weights are let go of right behind their last use before the next
gather, since that takes no time, and gradients are summed right behind the last of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from attrs import frozen

from schedlang.extras.search.optimize.problem import Problem
from schedlang.passes.op_graph import Op
from schedlang.ranks.gather_order import shards
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import FREE, GATHER, MAKERS, OPS, SUM, USES_WEIGHTS, Kind
from schedlang.schedule.ops import COMPUTE

#: A node of a graph, or an op beside the graph.
Item = int | Op
#: A node before which the weights of a stage may be gathered, and that stage.
Need = tuple[int, int]
#: The lead of a gather for which none is chosen: it begins one op early, so that it overlaps.
LEAD = 1


@frozen(eq=False)
class Gathers:
    """The gathers and sums of a problem's stages. `backwards` has the node that uses an activation
    for its backward, by stage and microbatch: a forward that runs again before it has the gather of
    that node.

    Gathers are chosen by their `leads`: for a node and a stage, before how many ops in front of the
    node the weights of the stage are gathered anew. The first use of a stage always has a gather.
    """

    problem: Problem
    backwards: Mapping[tuple[int, int], int]

    @cached_property
    def used(self) -> list[list[int]]:
        """By node: the stages whose gathered weights it uses."""
        return [self._used(ops) for ops in self.problem.graph.ops]

    @cached_property
    def added(self) -> list[list[int]]:
        """By node: the stages to whose sums it adds a gradient."""
        summed = self.problem.summed
        return [
            [
                stage
                for kind, stage, _ in ops
                if kind in MAKERS[Kind.W] and stage in summed
            ]
            for ops in self.problem.graph.ops
        ]

    @cached_property
    def needs(self) -> list[Need]:
        """All nodes before which weights may be gathered, in the order of the graph."""
        return [
            (node, stage) for node, stages in enumerate(self.used) for stage in stages
        ]

    @cached_property
    def most(self) -> int:
        """The most gathered stages that a rank has."""
        placement = self.problem.graph.schedule.placement
        counts = Counter(placement[stage] for stage in self.problem.gathered)
        return max(counts.values(), default=0)

    @cached_property
    def times(self) -> list[float]:
        """By stage: how long a gather of its weights takes."""
        return self._costs.gathers(self._stages)

    @cached_property
    def sums(self) -> list[float]:
        """By stage: how long a sum of its gradients takes."""
        return self._costs.sums(self._stages)

    @cached_property
    def memory(self) -> list[float]:
        """By stage: what its gathered weights take."""
        amounts = self._costs.memory(self.problem.graph.schedule.layout)
        stages = np.arange(self._stages)
        kinds = np.full(self._stages, int(GATHER))
        taken = amounts.of(kinds, stages, np.full(self._stages, NO_MICROBATCH))
        return list(map(float, taken))

    @property
    def _costs(self) -> Costs:
        return self.problem.graph.schedule.costs

    @property
    def _stages(self) -> int:
        return len(self.problem.graph.schedule.placement)

    def least_limits(self, places: int) -> tuple[float, ...]:
        """What is left of the limits of ranks for activations, while the weights of so many stages
        are gathered, the smallest ones. With one place, no schedule leaves more.
        """
        memory = self.memory
        graph = self.problem.graph
        limits = []
        for order, limit in zip(graph.order, self.problem.limits, strict=True):
            # An op that takes memory without gathered weights may have all of it.
            takers = [self.used[node] for node in order if graph.rise[node] > 0]
            sizes = sorted(memory[stage] for stage in {*chain(*takers)})
            taken = sum(sizes[:places]) if all(takers) else 0.0
            limits.append(graph.fixed_memory.difference(taken, limit))
        return tuple(limits)

    def bound_of(self, bound: float) -> float:
        """The bound of the objective, if `bound` is one of the graph alone. A makespan also has a
        gather before the first op of all, and a sum behind the last one.
        """
        graph = self.problem.graph
        if graph.schedule.objective == "span":
            return bound
        first = [
            max((self.times[stage] for stage in stages), default=0.0)
            for stages, needs in zip(self.used, graph.needs, strict=True)
            if not needs
        ]
        last = [
            max((self.sums[stage] for stage in stages), default=0.0)
            for stages, users in zip(self.added, graph.users, strict=True)
            if not users
        ]
        counts = graph.fixed.counts([bound, min(first), min(last)])
        return float(graph.fixed.numbers(counts.sum()))

    def uses(self, item: Item) -> list[int]:
        """The stages whose gathered weights a node or an op uses."""
        return self.used[item] if isinstance(item, int) else self._used([item])

    def _used(self, ops: Iterable[Op]) -> list[int]:
        gathered = self.problem.gathered
        return [
            stage
            for kind, stage, _ in ops
            if kind in USES_WEIGHTS and stage in gathered
        ]

    def need(self, item: Item, stage: int) -> Need:
        """The need for which a stage is gathered before a node or an op that uses it."""
        return (item if isinstance(item, int) else self.backwards[item[1:]]), stage

    def placed(self, items: Sequence[Item], leads: Mapping[Need, int]) -> list[Item]:
        """A rank's nodes and ops with all gathers and sums."""
        # Stage 0 is gathered anew before its backward, with a lead of 1; other leads are 0:
        #
        #     items      0F0       1F0       1B0     0B0
        #     placed  +0 0F0 -0 +1 1F0    +0 1B0 -1  0B0 -0      + gathers, - lets go
        before: dict[int, list[Op]] = {}
        last: dict[int, int] = {}
        done: set[Need] = set()
        summed: dict[int, int] = {}
        for index, item in enumerate(items):
            for stage in self.uses(item):
                need = self.need(item, stage)
                if stage not in last or (need in leads and need not in done):
                    begin = last.get(stage, -1) + 1
                    at = _back(items, index, leads.get(need, LEAD), begin)
                    gather = int(GATHER), stage, NO_MICROBATCH
                    before.setdefault(at, []).append(gather)
                done.add(need)
                last[stage] = index
            if isinstance(item, int):
                summed.update(dict.fromkeys(self.added[item], index))
        after: dict[int, list[Op]] = {}
        for stage, index in summed.items():
            reduction = int(SUM), stage, NO_MICROBATCH
            after.setdefault(index, []).append(reduction)
        found: list[Item] = []
        for index, item in enumerate(items):
            found += before.get(index, ())
            found.append(item)
            found += after.get(index, ())
        return self.released(found)

    def released(self, items: Sequence[Item]) -> list[Item]:
        """A rank's items, in which gathered weights are let go of behind each last use."""
        found: list[Item] = []
        kept: set[int] = set()
        for item in reversed(items):
            if not isinstance(item, int) and item[0] == GATHER:
                kept.discard(item[1])
            for stage in self.uses(item):
                if stage not in kept:
                    kept.add(stage)
                    found.append((int(FREE), stage, NO_MICROBATCH))
            found.append(item)
        return found[::-1]

    def leads_of(self, items: Sequence[Item]) -> dict[Need, int]:
        """The leads of the gathers among a rank's items."""
        leads = {}
        # Stages whose gather has been met, each with the number of ops since then.
        coming: dict[int, int] = {}
        for item in items:
            if not isinstance(item, int) and item[0] == GATHER:
                coming[item[1]] = 0
            for stage in self.uses(item):
                if stage in coming:
                    leads[self.need(item, stage)] = coming.pop(stage)
            if _is_computed(item):
                coming = {stage: count + 1 for stage, count in coming.items()}
        return leads

    def leads_within(self, order: Sequence[int], places: int) -> dict[Need, int]:
        """The leads with which `gather within` a number of places gathers on a rank."""
        actions = Actions()
        place_of = []
        for place, node in enumerate(order):
            for op in self.problem.graph.ops[node]:
                actions.add(*op, source=0)
                place_of.append(place)
        found = shards(actions, self.problem.gathered, places).gathers
        return {
            (order[place_of[user]], stage): place_of[user] - place_of[begin]
            for begin, stage, user in found
        }


def _is_computed(item: Item) -> bool:
    """Whether a rank does nothing else while an item runs."""
    return isinstance(item, int) or OPS[item[0]].stream == COMPUTE


def _back(items: Sequence[Item], index: int, count: int, begin: int) -> int:
    """The index that lies some computed items before another one, but not before `begin`."""
    while count and index > begin:
        index -= 1
        count -= _is_computed(items[index])
    return index
