"""What each op needs: the one place where the rules of pipeline training stand.

Ops are named here by (kind, stage, microbatch), with Kind.B for the input half of a backward and
for a whole one alike: what others need of a backward is the gradient of its input.
"""

from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule

Op = tuple[Kind, int, int]


def needs(schedule: Schedule, kind: int, stage: int, microbatch: int) -> list[Op]:
    """The ops whose results an op needs; those of stages on other ranks reach it by a transfer.

    Gradients of weights reach it by the sum over all replicas of a stage.
    """
    if kind == Kind.F:
        return _forward_needs(schedule, stage, microbatch)
    if kind in (Kind.B, Kind.I):
        return _backward_needs(schedule, stage, microbatch)
    if kind == Kind.W:
        return [(Kind.B, stage, microbatch)]
    if kind in (Kind.R, Kind.OFFLOAD):
        return [(Kind.F, stage, microbatch)]
    if kind == Kind.RELOAD:
        return [(Kind.OFFLOAD, stage, microbatch)]
    return _update_needs(schedule.layout, stage, max(microbatch, 0))


def _update_needs(layout: Layout, stage: int, update: int) -> list[Op]:
    """All gradients of a stage and update, and those of its replicas."""
    found: list[Op] = []
    for each in layout.replicas(stage):
        units = layout.units(each) // layout.updates
        found += [(Kind.W, each, unit) for unit in range(update * units, (update + 1) * units)]
    return found


def _forward_needs(schedule: Schedule, stage: int, microbatch: int) -> list[Op]:
    """The activations of the stages before; and what attention keeps of the slice before (TeraPipe,
    section 3).
    """
    found = [(Kind.F, each, microbatch) for each in schedule.layout.before[stage]]
    return (
        found
        if microbatch % schedule.layout.slices == 0
        else [*found, (Kind.F, stage, microbatch - 1)]
    )


def _backward_needs(schedule: Schedule, stage: int, microbatch: int) -> list[Op]:
    """The own activation, run again if it was dropped, or brought back; the gradients of the stages
    and slice after.
    """
    own = Kind.R if (stage, microbatch) in schedule.recomputed else Kind.F
    if (stage, microbatch) in schedule.offloaded:
        own = Kind.RELOAD
    found: list[Op] = [
        (own, stage, microbatch),
        *((Kind.B, each, microbatch) for each in schedule.layout.after[stage]),
    ]
    if (microbatch + 1) % schedule.layout.slices:
        found.append((Kind.B, stage, microbatch + 1))
    return found


class Numbers:
    """The ops of a schedule as whole numbers below `count`, and what each needs, for walks over
    many.

    Ops of one kind and stage have the numbers from `first` on, in the order of their microbatches.
    `made` has the first numbers of what an op of a kind and stage makes.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages = len(schedule.placement)
        self.stride = max(map(schedule.layout.units, range(self.stages)))
        self.count = (max(Kind) + 1) * self.stages * self.stride
        self.made = {
            (kind, stage): tuple(self.first(made, stage) for made in makes)
            for kind, makes in MAKES.items()
            for stage in range(self.stages)
        }
        alike = schedule.layout.slices == 1 and not schedule.recomputed and not schedule.offloaded
        #: For each kind and stage of which all microbatches have like needs, the first numbers of
        #: these.
        self._firsts: dict[tuple[int, int], tuple[int, ...]] = {
            (kind, stage): tuple(
                self.first(made, holder) for made, holder, _ in needs(schedule, kind, stage, 0)
            )
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            for stage in range(self.stages if alike else 0)
        }

    def first(self, kind: int, stage: int) -> int:
        """The number of an op of a kind and stage on microbatch 0."""
        return (kind * self.stages + stage) * self.stride

    def needs(self, kind: int, stage: int, microbatch: int) -> list[int]:
        """The ops whose results an op needs, see the function `needs`."""
        firsts = self._firsts.get((kind, stage))
        if firsts is not None:
            return [first + microbatch for first in firsts]
        return [
            self.first(made, holder) + each
            for made, holder, each in needs(self.schedule, kind, stage, microbatch)
        ]


#: What is there once an op of a kind has ended: an activation (F, R, RELOAD, or on the host
#: OFFLOAD), a gradient of the input (B), of the weights (W).
MAKES: dict[int, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B, Kind.W),
    Kind.I: (Kind.B,),
    Kind.W: (Kind.W,),
    Kind.R: (Kind.R,),
    Kind.U: (),
    Kind.OFFLOAD: (Kind.OFFLOAD,),
    Kind.RELOAD: (Kind.RELOAD,),
}

#: The send that brings what was made to another rank, and its receive there; of weights, gradients
#: are summed.
SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
RECEIVES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}


def receive_of(schedule: Schedule, need: Op, stage: int) -> Op:
    """The receive that brings what an op of a stage needs from another stage, if that is on another
    rank.
    """
    kind, maker, microbatch = need
    return RECEIVES[kind], schedule.layout.number(stage, maker), microbatch
