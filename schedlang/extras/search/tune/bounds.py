"""Lower bounds of time and memory for all schedules of a layout, known before any is compiled."""

from collections.abc import Iterable, Sequence
from operator import add

from attrs import frozen

from schedlang.schedule.costs import Costs
from schedlang.schedule.costs.component_costs import COMPUTE
from schedlang.schedule.costs.cost_tables import Durations
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout

#: The kinds of ops by the names of their times.
_KINDS = {"forward": Kind.F, "backward": Kind.B, "input": Kind.I, "weight": Kind.W}


@frozen
class Bounds:
    """Lower bounds of a training step: its time, in the unit of the costs, and the bytes that the
    fullest rank holds.
    """

    time: float
    bytes: float


def bounds_of(layout: Layout, costs: Costs) -> Bounds:
    """The bounds of a layout at these costs.

    Every microbatch goes forward and backward through all stages. So a rank's work can begin only
    when the first microbatch has reached it, and after its last input gradient the stages before
    it still have a backward to run. A rank holds at least its weights, and what there is while one
    of its stages runs a forward: its activations, and the messages that it takes and makes.
    """
    stages = range(len(layout.placement))
    durations = costs.durations(len(stages))
    times = costs.every_duration(len(stages))
    forward = times["forward"]
    # A schedule may split its backwards.
    gradient = _least(times["backward"], times["input"])
    whole = _least(times["backward"], map(add, times["input"], times["weight"]))
    # The times in which a rank can run no other op, even in an overlap.
    alone = {
        name: [_share_alone(durations, kind) * time for time in times[name]]
        for name, kind in _KINDS.items()
    }
    own_gradient = _least(alone["backward"], alone["input"])
    own_whole = _least(alone["backward"], map(add, alone["input"], alone["weight"]))
    reached, left = _ways(layout, costs, forward, gradient, whole)
    amounts = costs.bytes(len(stages))
    held = [0.0] * len(stages)
    if amounts:
        held = [
            amounts[Kind.F][stage]
            + sum(amounts.messages[earlier] for earlier in layout.before[stage])
            + amounts.messages[stage] * len(layout.after[stage])
            for stage in stages
        ]
    weights = costs.bytes_of_weights(len(stages))
    time = 0.0
    most = 0.0
    for rank in range(max(layout.placement) + 1):
        own = layout.stages_of(rank)
        # A rank works from the first forward that comes to it to the last gradient that it gives:
        #
        #     ├ first ┤──────── its own work ────────├ last ┤
        first = min(reached[stage] for stage in own)
        last = min(left[stage] for stage in own)
        work = 0.0
        chain = 0.0
        for stage in own:
            forwards = layout.units(stage) * alone["forward"][stage]
            work += forwards + layout.units(stage) * own_whole[stage]
            chain += forwards + layout.units(stage) * own_gradient[stage]
        time = max(time, first + work, first + chain + last, first + last)
        most = max(
            most,
            sum(weights[stage] for stage in own) + max(held[stage] for stage in own),
        )
    return Bounds(time, most)


def _share_alone(durations: Durations, kind: Kind) -> float:
    """The share of an op's time in which no other op can compute. In an overlap that is the share
    of its components that compute.
    """
    if durations.overlap is not None:
        return 0.0
    components = durations.components.get(kind)
    if components is None:
        return 1.0
    computed = sum(each.share for each in components if each.resource == COMPUTE)
    return computed / sum(each.share for each in components)


def _least(a: Iterable[float], b: Iterable[float]) -> list[float]:
    return list(map(min, zip(a, b, strict=True)))


def _ways(
    layout: Layout,
    costs: Costs,
    forward: Sequence[float],
    gradient: Sequence[float],
    whole: Sequence[float],
) -> tuple[list[float], list[float]]:
    """For each stage, the time of a microbatch from the start to this stage, and the time from the
    stage's input gradient to the end.
    """
    transfers = costs.transfers(len(layout.placement))
    reached = []
    left = []
    for stage in range(len(layout.placement)):
        if layout.is_first(stage):
            reached.append(0.0)
            left.append(0.0)
            continue
        before = stage - 1
        ranks = layout.placement[before], layout.placement[stage]
        way = transfers.time(Kind.F, before, *ranks)
        back = transfers.time(Kind.B, before, *reversed(ranks))
        reached.append(reached[before] + forward[before] + way)
        # The first stage sends no gradient, so the step ends after its whole backward.
        own = whole[before] if layout.is_first(before) else gradient[before]
        left.append(back + own + left[before])
    return reached, left
