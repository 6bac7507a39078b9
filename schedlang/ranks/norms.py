"""Updates that are clipped by the norm of all gradients: when they are made, and that no rank waits
for it in vain.

A rank's part of the norm of an update is there at its last `U` of that update, and the sum over all
ranks begins. The update itself is put off to the first action that needs it: a forward that reads
the weights that it makes, or the next `U` of the stage. Only there does the rank wait for all
others. In PipeDream-2BW they have long come that far by then.
"""

from heapq import heappop, heappush

from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE


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
        needed = kind == Kind.U or (
            kind == Kind.F and schedule.version_read(stage, microbatch, made) >= made
        )
        if needed and stage in pending:
            places[pending.pop(stage)] = index
        if kind == Kind.U:
            done[stage] = made + 1
            pending[stage] = index
    return places | dict.fromkeys(pending.values(), len(actions))


def why_not(plan: Schedule) -> str | None:
    """Why the updates of a plan cannot be clipped by the norm of all gradients, if so.

    That is seen where every send waits for its receive: what comes to its end there does so on all
    transports.
    """
    if plan.transport != PORTABLE:
        return f"the plan is proved for `{plan.transport}` alone, and must be for all transports"
    if len(plan.layout.pipelines) > 1:
        return "its stages have replicas in other pipelines, whose gradients they also wait for"
    for stage, rank in enumerate(plan.placement):
        ops = list(zip(plan.ranks[rank].kind, plan.ranks[rank].stage, strict=True))
        if ops.count((Kind.U, stage)) != plan.layout.updates:
            return f"the plan does not update stage {stage} itself (`U`)"
    return _Walk(plan).run()


class _Walk:
    """An execution in which a rank waits at each batch of transfers for the other sides, and at
    updates for all ranks.

    A rank that waits does so for one rank at a time, until that has come to some place; it may be
    itself.
    """

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.position = [0 for _ in plan.ranks]
        self.batches = [{each.start: each for each in actions.batches()} for actions in plan.ranks]
        #: For each rank where its transfers are issued: the start of their batch.
        self.issued = [
            {actions.row(index)[:3]: start for start, batch in batches.items() for index in batch}
            for actions, batches in zip(plan.ranks, self.batches, strict=True)
        ]
        #: For each rank the place of its last `U` of each update; and the updates that it waits
        #: for, by place.
        self.parts = [_last_updates(actions) for actions in plan.ranks]
        self.waits = [_waits(plan, rank) for rank in range(len(plan.ranks))]
        #: For each rank those that wait for it, with the place to which it must come.
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in plan.ranks]

    def run(self) -> str | None:
        """What is wrong where it comes to a standstill, if it does not come to the end."""
        ready = list(range(len(self.position)))
        while ready:
            rank = ready.pop()
            while (held := self.held_by(rank)) is None and self.position[rank] in self.batches[
                rank
            ]:
                self.position[rank] = self.batches[rank][self.position[rank]].stop
                while self.waiting[rank] and self.waiting[rank][0][0] <= self.position[rank]:
                    ready.append(heappop(self.waiting[rank])[1])
            if held is not None:
                heappush(self.waiting[held[0]], (held[1], rank))
        found = (self.explain(rank) for rank in range(len(self.position)))
        return next((each for each in found if each is not None), None)

    def held_by(self, rank: int) -> tuple[int, int] | None:
        """The rank that this one waits for where it stands, and the place to which that must
        come.
        """
        position = self.position[rank]
        actions = self.plan.ranks[rank]
        late = self.late_for(rank)
        if late is not None:
            return late[1], late[2] + 1
        for index in self.batches[rank].get(position, ()):
            kind, stage, microbatch, *_ = actions.row(index)
            other = self.plan.peer(kind, stage) if is_transfer(kind) else None
            if other is not None:
                place = self.issued[other][(*self.plan.layout.counterpart(kind, stage), microbatch)]
                if self.position[other] < place:
                    return other, place
        return None

    def late_for(self, rank: int) -> tuple[int, int, int] | None:
        """The update whose norm a rank waits for where it stands; a rank without its part of it,
        and the place of that.

        None if nothing is missing.
        """
        position = self.position[rank]
        for index in self.batches[rank].get(position, (position,)):
            for update in self.waits[rank].get(index, ()):
                for other, parts in enumerate(self.parts):
                    if self.position[other] <= parts[update]:
                        return update, other, parts[update]
        return None

    def explain(self, rank: int) -> str | None:
        """What a rank waits for in vain, if that is a norm."""
        late = self.late_for(rank)
        position = self.position[rank]
        if late is None:
            return None
        update, other, place = late
        own, theirs = (self.plan.ranks[each] for each in (rank, other))
        return (
            f"before `{own.word(position)}` ({self.plan.where(rank, position)}) rank {rank} would "
            "wait in vain for the "
            f"norm of update {update}: rank {other} has its part of it only after "
            f"`{theirs.word(place)}` "
            f"({self.plan.where(other, place)})"
        )


def _last_updates(actions: Actions) -> dict[int, int]:
    ops = enumerate(zip(actions.kind, actions.microbatch, strict=True))
    return {max(update, 0): index for index, (kind, update) in ops if kind == Kind.U}


def _waits(plan: Schedule, rank: int) -> dict[int, list[int]]:
    found = dict[int, list[int]]()
    for update, place in put_off(plan, rank).items():
        found.setdefault(place, []).append(max(plan.ranks[rank].microbatch[update], 0))
    return found
