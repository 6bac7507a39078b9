"""Updates that are clipped by the norm of all gradients: when they are applied, and whether waiting
for the norm makes a deadlock.

A rank's part of an update's norm is known at its last `U` of that update; then the all-reduce over
all ranks begins. The update itself is put off to the first action that needs it: an op that reads
the new weights, or the next `U` of the stage. Only there does the rank wait for all others. In
PipeDream-2BW, the other ranks have long come that far by then. In a plan in which they have not,
there is a deadlock if another rank waits for this one:

    rank 0   …  waits for the norm    F4    SEND_F4
                     ▲                         │
                     │                         ▼
    rank 1   …       │                      RECV_F4   …   U0, its part of the norm
                     └────────────────────────────────────┘
"""

from schedlang.schedule.actions import Actions, is_transfer, is_update
from schedlang.schedule.kinds import USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE


def put_off(schedule: Schedule, rank: int) -> dict[int, int]:
    """For each `U` of a rank, the action before which it is applied, both by index, or the end."""
    actions = schedule.ranks[rank]
    places = dict[int, int]()
    #: For each stage, the number of updates so far, and the index of the one that is put off.
    done = dict[int, int]()
    pending = dict[int, int]()
    for index, (kind, stage, microbatch) in enumerate(actions.each()):
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
    """Whether an op reads the newest weights of its stage, after `done` updates, and is the first
    op of its microbatch to do so.
    """
    # Later ops of a microbatch read the version of its forward, which has waited for it, unless the
    # stage keeps no versions.
    if schedule.weights_of(stage).keeps_none:
        return kind in USES_WEIGHTS
    return kind == Kind.F and schedule.version_read(stage, microbatch, done) >= done


def why_not(plan: Schedule) -> str | None:
    """The reason why a plan's updates cannot be clipped by the norm of all gradients; None if they
    can.

    The plan is executed with sends that wait for their receives: a plan that ends then ends on all
    transports.
    """
    if plan.transport != PORTABLE:
        return f"the plan is proved for `{plan.transport}` alone, and must be for all transports"
    if plan.layout.models:
        return "it trains several models, of which each has a norm of its own"
    if len(plan.layout.pipelines) > 1:
        return "its stages have replicas in other pipelines, whose gradients they also wait for"
    for stage, rank in enumerate(plan.placement):
        ops = zip(plan.ranks[rank].kind, plan.ranks[rank].stage, strict=True)
        updates = sum(is_update(kind) and number == stage for kind, number in ops)
        if plan.layout.trains(stage) and updates != plan.layout.updates:
            return f"the plan does not update stage {stage} itself (`U`)"
    return _Walk(plan).stopped_by()


class _Walk:
    """An execution of all ranks: a rank waits at a batch of transfers for the ranks at their other
    ends, and before an action that needs an update for all parts of the norm.
    """

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        #: For each rank and update, the index of its last `U`, which completes its part of the
        #: norm.
        self.parts = [_last_updates(actions) for actions in plan.ranks]
        #: For each rank, the actions before which updates are applied, with these updates.
        self.waits: list[dict[int, list[int]]] = []
        for rank, actions in enumerate(plan.ranks):
            waits = dict[int, list[int]]()
            for update, index in put_off(plan, rank).items():
                number = max(actions.microbatch[update], 0)
                waits.setdefault(index, []).append(number)
            self.waits.append(waits)
        #: For each rank and transfer, the index at which the batch of that transfer begins.
        self.heads = [
            {
                actions.at(index): batch.start
                for batch in actions.batches()
                for index in batch
                if is_transfer(actions.kind[index])
            }
            for actions in plan.ranks
        ]
        #: The index of the action at which each rank is.
        self.at = [0 for _ in plan.ranks]

    def stopped_by(self) -> str | None:
        """The error of the first rank that waits for a norm in vain; None if no rank does."""
        # The ranks take turns until none of them advances.
        while any([self._gets_on(rank) for rank in range(len(self.at))]):
            pass
        texts = map(self._missing, range(len(self.at)))
        return next((text for text in texts if text is not None), None)

    def _gets_on(self, rank: int) -> bool:
        """Let a rank run as far as it can while the others stand; return whether it advanced."""
        begin = self.at[rank]
        batch = self._next(rank)
        while batch and not self._late(rank, batch):
            if not all(self._meets(rank, index) for index in batch):
                break
            self.at[rank] = batch.stop
            batch = self._next(rank)
        return self.at[rank] > begin

    def _next(self, rank: int) -> range:
        """The next batch of a rank; an empty one at the end."""
        actions = self.plan.ranks[rank]
        at = self.at[rank]
        return actions.batch(at) if at < len(actions) else range(0)

    def _meets(self, rank: int, index: int) -> bool:
        """Whether the peer of a transfer has come to its other end; always for an op."""
        if not is_transfer(self.plan.ranks[rank].kind[index]):
            return True
        peer = self.plan.peer_of(rank, index)
        assert peer is not None
        return self.heads[peer][self.plan.other_end(rank, index)] <= self.at[peer]

    def _late(self, rank: int, batch: range) -> list[tuple[int, int, int]]:
        """The missing parts of norms for which a rank waits before a batch: the update, and the
        rank and the index of the `U` that completes the part.
        """
        return [
            (update, other, parts[update])
            for index in batch
            for update in self.waits[rank].get(index, ())
            for other, parts in enumerate(self.parts)
            if parts.get(update, -1) >= self.at[other]
        ]

    def _missing(self, rank: int) -> str | None:
        """The error for a rank that waits for a norm; None if it waits for a transfer."""
        # Transfers alone cannot deadlock in a proved plan: some other rank waits for a norm then.
        plan = self.plan
        at = self.at[rank]
        late = self._late(rank, self._next(rank))
        if not late:
            return None
        update, other, place = late[0]
        return (
            f"before `{plan.name_of(rank, at)}` ({plan.where(rank, at)}) rank {rank} would wait in "
            f"vain for the norm of update {update}: rank {other} has its part of it only after "
            f"`{plan.name_of(other, place)}` ({plan.where(other, place)})"
        )


def _last_updates(actions: Actions) -> dict[int, int]:
    """The index of the last `U` of each update."""
    ops = enumerate(zip(actions.kind, actions.microbatch, strict=True))
    return {max(update, 0): index for index, (kind, update) in ops if is_update(kind)}
