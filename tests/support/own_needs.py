"""What each op needs, one op at a time: written from the rules of pipeline training, apart from
`schedlang.schedule.needs`, which has them for all actions at once.
"""

from schedlang import Kind, Schedule
from schedlang.schedule.kinds import RECEIVES
from schedlang.schedule.needs import Op
from tests.support.graph import handovers, is_near

#: What passes weights and gradients on, which needs nothing that an op makes for it.
HOPS = (Kind.SEND_WEIGHTS, Kind.RECV_WEIGHTS, Kind.SEND_GRADIENTS, Kind.RECV_GRADIENTS)


def needs(schedule: Schedule, kind: int, stage: int, microbatch: int) -> list[Op]:
    """The ops whose results an op needs; Kind.B is the gradient of an input, whoever makes it."""
    layout = schedule.layout
    exchanged = _exchanged(schedule, kind, stage, microbatch)
    if kind == Kind.F:
        found: list[Op] = [
            (Kind.F, before, microbatch) for before in layout.before[stage]
        ]
        found += exchanged
        return found + (
            [(Kind.F, stage, microbatch - 1)] if microbatch % layout.slices else []
        )
    if kind in (Kind.B, Kind.I):
        # The activations: from the forward, or made again, or brought back from the host.
        own = Kind.R if (stage, microbatch) in schedule.recomputed else Kind.F
        own = Kind.RELOAD if (stage, microbatch) in schedule.offloaded else own
        found = [(own, stage, microbatch)]
        # Where other pipelines run ahead, gradients come from the next stage of the own one alone.
        after = [stage + 1] if handovers(layout) else [*layout.after[stage]]
        found += [
            (Kind.B, other, microbatch)
            for other in after
            if not handovers(layout) or is_near(layout, stage)
        ]
        found += exchanged
        is_last_slice = (microbatch + 1) % layout.slices == 0
        return found + ([] if is_last_slice else [(Kind.B, stage, microbatch + 1)])
    if kind == Kind.U:
        update = max(microbatch, 0)
        return [
            (Kind.W, replica, unit)
            for replica in layout.replicas(stage)
            for unit in range(layout.units(replica))
            if layout.update_of(replica, unit) == update
        ]
    if kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, *HOPS):
        return []
    if kind == Kind.EXCHANGE_F:
        return [(Kind.F, stage - 1, microbatch)]
    if kind == Kind.EXCHANGE_B:
        return [(Kind.B, stage + 1, microbatch)]
    of_own = {
        Kind.W: Kind.B,
        Kind.R: Kind.F,
        Kind.OFFLOAD: Kind.F,
        Kind.RELOAD: Kind.OFFLOAD,
    }
    return [(of_own[Kind(kind)], stage, microbatch)]


def _exchanged(schedule: Schedule, kind: int, stage: int, microbatch: int) -> list[Op]:
    """The exchange of what an op takes, if there is one."""
    exchange = Kind.EXCHANGE_F if kind == Kind.F else Kind.EXCHANGE_B
    columns = schedule.columns
    rows = columns.where(exchange)
    is_it = (columns.stage[rows] == stage) & (columns.microbatch[rows] == microbatch)
    return [(exchange, stage, microbatch)] if is_it.any() else []


def receive_of(schedule: Schedule, need: Op, stage: int) -> Op:
    """The receive that brings what an op of a stage needs from a stage of another rank."""
    kind, maker, microbatch = need
    return RECEIVES[Kind(kind)], schedule.layout.number(stage, maker), microbatch
