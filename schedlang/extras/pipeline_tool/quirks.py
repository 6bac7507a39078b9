"""How the visualizer's later version counts time, for `--compat`, where that is not by what ops
need.

- It charges a transfer for every change of stage, also on one device, and between the two halves of
  a backward.
- After an op whose result goes to another device, it starts no other op of the same stage and
  direction before the transfer is over; unless the result goes to ops that overlap.
- Its ideal time has a whole backward, also where halves or overlaps ran.
"""

from itertools import pairwise

import numpy as np
from attrs import evolve

from schedlang.passes.op_graph import Graph
from schedlang.plan.plan import Plan
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.timeline import Bars, Timeline


def quirky_timeline(plan: Plan, costs: Costs, gaps: bool = True) -> Timeline:
    """When the visualizer runs each op of a plan; before its commit 56a94ad, without `gaps` after
    transfers.

    ValueError for a plan with copies to the host.
    """
    costs = costs.over(plan.costs)
    compute = tuple(actions.compute() for actions in plan.ranks)
    graph = Graph(evolve(plan, ranks=compute, costs=costs))
    graph.wait_for(_needs(graph, float(costs.p2p_time or 0), gaps))
    ends = graph.ends(graph.order)
    durations = costs.durations(plan.layout)
    ranks: list[Bars] = []
    for order in graph.order:
        bars = Bars()
        for node in order:
            # Ops that overlap are one node; each is drawn behind the one before.
            start = begin = ends[node] - graph.time[node]
            for row, after in zip(
                graph.ops[node], durations.ends(graph.ops[node]), strict=True
            ):
                bars.add(*row, begin, start + after)
                begin = start + after
        ranks.append(bars)
    return Timeline(tuple(ranks), fixed=graph.fixed)


def quirky_bubble_rate(plan: Plan, timeline: Timeline, costs: Costs) -> float:
    """The bubble over the time of forwards and whole backwards; it is below 0 where overlaps take
    less than that.
    """
    durations = costs.over(plan.costs).durations(plan.layout)
    work = 0.0
    for stage in range(len(plan.placement)):
        once = durations[Kind.F][stage] + durations[Kind.B][stage]
        work += once * plan.layout.units(stage)
    ideal = work / len(plan.ranks)
    return (timeline.makespan - ideal) / ideal


def _needs(graph: Graph, p2p: float, gaps: bool) -> list[list[tuple[int, float]]]:
    """What each node of a graph waits for, with the time that passes from its end."""
    schedule = graph.schedule
    columns = schedule.columns
    needs = all_needs_of(schedule)
    found: list[list[tuple[int, float]]] = [[] for _ in graph.ops]
    receivers: dict[int, int] = {}
    items = np.argsort(needs.user, kind="stable").tolist()
    for item in items:
        user = int(needs.user[item])
        maker = int(needs.maker[item])
        stage = int(columns.stage[user])
        is_weight = columns.kind[user] == Kind.W and not schedule.layout.is_last(stage)
        node = int(graph.node_of[user])
        needed = int(graph.node_of[maker])
        if needed != node:
            charged = bool(needs.stage[item] != stage or is_weight)
            found[node].append((needed, p2p * charged))
        # The first one that needs it: its transfer is the one that keeps the stage from going on.
        if needs.is_message[item]:
            receivers.setdefault(needed, node)
    for order in graph.order:
        for earlier, later in pairwise(order):
            if gaps and _keeps_apart(graph, receivers.get(earlier), earlier, later):
                found[later].append((earlier, p2p))
    return found


def _keeps_apart(graph: Graph, receiver: int | None, earlier: int, later: int) -> bool:
    """Whether a node starts only when the transfer of the one before it on its rank is over."""
    if receiver is None or len(graph.ops[earlier]) > 1 or len(graph.ops[later]) > 1:
        return False
    (kind, stage, *_) = graph.ops[earlier][0]
    (other_kind, other_stage, *_) = graph.ops[later][0]
    if stage != other_stage or (kind == Kind.F) != (other_kind == Kind.F):
        return False
    return len(graph.ops[receiver]) == 1
