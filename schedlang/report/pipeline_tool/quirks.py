"""How the visualizer's later version counts time, for `--compat`, where that is not by what ops
need.

- It charges a transfer for every change of stage, also on one device, and between the two halves of
  a backward.
- After an op whose result goes to another device, it starts no other op of the same stage and
  direction before the transfer is over; unless the result goes to ops that overlap.
- Its ideal time has a whole backward, also where halves or overlaps ran.
"""

from itertools import pairwise

from attrs import evolve

from schedlang.passes.graph import Graph
from schedlang.plan.plan import Plan
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import MAKES, SENDS, Op, needs
from schedlang.schedule.timeline import Bars, Timeline


def quirky_timeline(plan: Plan, costs: Costs, gaps: bool = True) -> Timeline:
    """When the visualizer runs each op of a plan; before its commit 56a94ad, without `gaps` after
    transfers.

    ValueError for a plan with copies to the host.
    """
    costs = costs.over(plan.costs)
    compute = tuple(actions.compute() for actions in plan.ranks)
    graph = Graph(evolve(plan, ranks=compute, costs=costs))
    graph.needs = _needs(graph, costs.p2p or 0.0, gaps)
    ends = graph.ends(graph.order)
    durations = costs.durations(len(plan.placement))
    ranks: list[Bars] = []
    for order in graph.order:
        bars = Bars()
        for node in order:
            # Ops that overlap are one node; each is drawn behind the one before.
            start = begin = ends[node] - graph.time[node]
            for row, after in zip(graph.ops[node], durations.ends(graph.ops[node]), strict=True):
                bars.add(*row[:3], begin, start + after)
                begin = start + after
        ranks.append(bars)
    return Timeline(tuple(ranks))


def quirky_bubble_rate(plan: Plan, timeline: Timeline, costs: Costs) -> float:
    """The bubble over the time of forwards and whole backwards; it is below 0 where overlaps take
    less than that.
    """
    durations = costs.over(plan.costs).durations(len(plan.placement))
    work = 0.0
    for stage in range(len(plan.placement)):
        once = durations[Kind.F][stage] + durations[Kind.B][stage]
        work += once * plan.layout.units(stage)
    ideal = work / len(plan.ranks)
    return (timeline.makespan - ideal) / ideal


def _needs(graph: Graph, p2p: float, gaps: bool) -> list[list[tuple[int, float]]]:
    """What each node of a graph waits for, with the time that passes from its end."""
    makers: dict[Op, int] = {
        (made, stage, unit): node
        for node, ops in enumerate(graph.ops)
        for kind, stage, unit, *_ in ops
        for made in MAKES[kind]
    }
    found: list[list[tuple[int, float]]] = []
    for node, ops in enumerate(graph.ops):
        found.append([])
        for kind, stage, unit, *_ in ops:
            for need in needs(graph.schedule, kind, stage, unit):
                charged = need[1] != stage or (
                    kind == Kind.W and not graph.schedule.layout.is_last(stage)
                )
                found[node].append((makers[need], p2p * charged))
        found[node] = [(maker, latency) for maker, latency in found[node] if maker != node]
    for order in graph.order:
        for earlier, later in pairwise(order):
            if gaps and _keeps_apart(graph, makers, earlier, later):
                found[later].append((earlier, p2p))
    return found


def _keeps_apart(graph: Graph, makers: dict[Op, int], earlier: int, later: int) -> bool:
    """Whether a node starts only when the transfer of the one before it on its rank is over."""
    if len(graph.ops[earlier]) > 1 or len(graph.ops[later]) > 1:
        return False
    (kind, stage, unit, *_) = graph.ops[earlier][0]
    (other_kind, other_stage, *_) = graph.ops[later][0]
    if stage != other_stage or (kind == Kind.F) != (other_kind == Kind.F):
        return False
    for made in MAKES[kind]:
        if made in SENDS and graph.schedule.peer(SENDS[made], stage) is not None:
            receiver = makers[made, stage + (1 if made == Kind.F else -1), unit]
            return len(graph.ops[receiver]) == 1
    return False
