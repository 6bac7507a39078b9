"""What each op needs: the one place where the rules of pipeline training stand.

Ops are named here by (kind, stage, microbatch), with Kind.B for the input half of a backward and for a whole one alike:
what others need of a backward is the gradient of its input.
"""

from schedlang.schedule import Kind, Schedule

Op = tuple[Kind, int, int]


def needs(schedule: Schedule, kind: int, stage: int, microbatch: int) -> list[Op]:
    """The ops whose results an op needs; those of stages on other ranks reach it by a transfer."""
    if kind == Kind.F:
        return [(Kind.F, stage - 1, microbatch)] if stage > 0 else []
    if kind in (Kind.B, Kind.I):
        own: list[Op] = [(Kind.F, stage, microbatch)]
        return own if stage == len(schedule.placement) - 1 else [*own, (Kind.B, stage + 1, microbatch)]
    if kind == Kind.W:
        return [(Kind.B, stage, microbatch)]
    return [(Kind.W, stage, each) for each in range(schedule.microbatches)]


#: What is there once an op of a kind has ended: an activation (F), a gradient of the input (B), of the weights (W).
MAKES: dict[int, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B, Kind.W),
    Kind.I: (Kind.B,),
    Kind.W: (Kind.W,),
    Kind.U: (),
}

#: The send that brings what was made to another rank; gradients of weights stay.
SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
