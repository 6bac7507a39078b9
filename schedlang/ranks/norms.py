"""Updates that are clipped by the norm of all gradients: when they are made.

A rank's part of the norm of an update is there at its last `U` of that update, and the sum over all
ranks begins. The update itself is put off to the first action that needs it: an op that reads the
weights that it makes, or the next `U` of the stage. Only there does the rank wait for all others.
In PipeDream-2BW they have long come that far by then. Whether no rank waits in vain is asked of
`schedlang.proof.norms`.
"""

from schedlang.schedule.actions import is_update
from schedlang.schedule.kinds import USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule


def put_off(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each `U` of a rank the action before which it is made, both by index; or else the end."""
    actions = schedule.ranks[rank]
    places = dict[int, int]()
    #: For each stage the updates done, and the one that is put off.
    done = dict[int, int]()
    pending = dict[int, int]()
    for index, (kind, stage, microbatch) in enumerate(
        zip(actions.kind, actions.stage, actions.microbatch, strict=True)
    ):
        made = done.get(stage, 0)
        needed = is_update(kind) or _reads_newest(
            schedule, kind, stage, microbatch, made
        )
        if needed and stage in pending:
            places[pending.pop(stage)] = index
        if is_update(kind):
            done[stage] = made + 1
            pending[stage] = index
    return places | dict.fromkeys(pending.values(), len(actions))


def _reads_newest(
    schedule: Schedule, kind: int, stage: int, microbatch: int, done: int
) -> bool:
    """Whether an op needs the last of so many updates of its stage, as the first of its microbatch
    that can.
    """
    # What follows a forward reads again what that has waited for, unless nothing is kept for it.
    if schedule.weights_of(stage).keeps_none:
        return kind in USES_WEIGHTS
    return kind == Kind.F and schedule.version_read(stage, microbatch, done) >= done
