"""A schedule whose kernels are repeated, proved for any number of updates.

A plan without a flush shows some updates, and says which actions of each rank, its kernel, are done
once more for each further update. So it stands for endlessly many schedules: S(0) is what it shows,
and S(n) has every kernel n more times, each for microbatches of one update later, and all that
follows n updates later. They are proved by induction over n.

**The cut.** In S(k), let each rank go on to some place within its kernels, such that all ranks can
come that far with none going further: that is a cut. Beyond it lies what is to be done, which is
the same list in S(k) beyond the cut as in S(k + 1) beyond the cut one kernel later, but for
microbatches one update later:

    S(k)        rank 0   ──────────┃─────────────────
                rank 1   ───────┃────────────────────

    S(k + 1)    rank 0   ──────────┃ one kernel ┃─────────────────
                rank 1   ───────┃ one kernel ┃────────────────────

**The state.** What happens beyond a cut follows from these lists and from what has been left by
then. Let all of that be the same at the cut one kernel later, but for one more update that is
complete:

- on each rank the transfers that are issued and not over, in order;
- versions of weights that matter to what is to come are one later.

Nothing else counts. Which actions of an update have been done follows from the lists: those that
are not to be done, since each update has the same actions, as S(k) and S(k + 1) are right. What an
action needs is of its own update, and so are sums over replicas. Messages that wait in a channel
are told by what was sent and not received, and stand in the order of their receives, again since
S(k) and S(k + 1) are right. How long anything takes counts for no verdict.

**The step.** Beyond its first cut, S(k + 1) does what S(k + 2) does beyond the cut one kernel
later, where all has been left as it is here. So if S(k + 1) comes to its end and is right, S(k + 2)
does and is; and so on. Those before are proved one by one.

The first use of a communicator is no matter of repeating: a kernel that is repeated uses what it
has used before.
"""

from collections.abc import Iterable

import numpy as np
from attrs import define, evolve, field

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.proof.channels import NO_PARTNER, channels_of
from schedlang.proof.execution import Execution
from schedlang.proof.graph import NOTHING, Graph
from schedlang.proof.message_edges import transport_events
from schedlang.proof.prove import Proof
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.arrays import Flags, Ints
from schedlang.schedule.columns import Columns, actions_of
from schedlang.schedule.costs import UNIT
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.kinds import ROWS, USES_WEIGHTS, Kind
from schedlang.schedule.needed_gradients import sums_of
from schedlang.schedule.needs import needs_of
from schedlang.schedule.periods import repeat, steps_of
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.transports import Transport, transports

#: By the rule of a stage's weights, the ops to come for which it counts what forwards have read.
_COUNTS = {
    "latest": USES_WEIGHTS,
    "stash": frozenset({Kind.F}),
    "unstashed": frozenset[Kind](),
    "delay": frozenset[Kind](),
}


def prove_for_all_updates(
    schedule: Schedule, kernels: tuple[Kernel, ...], walked: Iterable[Graph] = ()
) -> Execution:
    """`prove` a schedule, and every schedule in which its kernels are repeated more often.

    CompileError says what is wrong with the shortest one that is wrong, or that the ranks never
    come back to the same state. Without kernels nothing is repeated. The execution is that of the
    schedule itself.
    """
    return _Updates(schedule, kernels, walked).on(schedule.transport)


def proofs(
    schedule: Schedule,
    names: Iterable[str],
    kernels: tuple[Kernel, ...] = (),
    walked: Iterable[Graph] = (),
) -> dict[str, Execution | CompileError]:
    """For each transport, what `prove_for_all_updates` returns or raises there.

    What is the same on all transports is checked once.
    """
    updates = _Updates(schedule, kernels, walked)
    outcomes: dict[str, Execution | CompileError] = {}
    for name in names:
        try:
            outcomes[name] = updates.on(name)
        except CompileError as error:
            outcomes[name] = error
    return outcomes


@define
class _Updates:
    """A schedule, its kernels, and the proofs so far of the schedules that have each kernel 0, 1,
    2, … more times.
    """

    schedule: Schedule
    kernels: tuple[Kernel, ...]
    walked: Iterable[Graph]
    _proofs: list[Proof] = field(factory=list)

    def proof(self, times: int) -> Proof:
        """The proof of the schedule that has each kernel so many more times. The shorter ones are
        proved by then.
        """
        if times == len(self._proofs):
            longer = self.schedule
            if times:
                longer = repeat(self.schedule, self.kernels, times)
            self._proofs.append(Proof(longer, self.walked))
        return self._proofs[times]

    def on(self, name: str) -> Execution:
        """The execution of the schedule, if it and all longer ones are right on a transport."""
        execution = self.proof(0).on(name)
        if not self.kernels:
            return execution
        before = self._for(self.schedule, name)
        # A rank is ahead of another one by no more updates than the schedule shows.
        most = self.schedule.layout.updates + 2
        for times in range(1, most + 1):
            longer = self._longer(times, name)
            if goes_on(before, longer, self.kernels, times):
                return execution
            before = longer
        # The search is bounded, so this says how far the proof has come, rather than that the plan
        # is wrong.
        first = self.schedule.layout.updates
        message = (
            f"what repeats is proved for {first} to {before.layout.updates} updates, and for no "
            "more: the ranks never come back to the same state"
        )
        raise CompileError(diagnose(self.schedule, [Finding("steady", message, 0)]))

    def _longer(self, times: int, name: str) -> Schedule:
        """A longer schedule, proved on a transport."""
        updates = self.schedule.layout.updates + times
        try:
            proof = self.proof(times)
            proof.on(name)
        except CompileError as error:
            note = f"in the plan of {updates} updates"
            raise CompileError(
                [each.with_note(note) for each in error.diagnostics]
            ) from None
        return self._for(proof.schedule, name)

    @staticmethod
    def _for(schedule: Schedule, name: str) -> Schedule:
        is_for_it = schedule.transport == name
        return schedule if is_for_it else evolve(schedule, transport=name)


def goes_on(
    before: Schedule, longer: Schedule, kernels: tuple[Kernel, ...], times: int
) -> bool:
    """Whether a proof of two schedules holds for all longer ones. `longer` has each kernel once
    more than `before`, and `times` times more than the schedule itself.
    """
    start = np.array([kernel.start for kernel in kernels])
    length = np.array([kernel.stop for kernel in kernels]) - start
    for rules in transports(longer.transport, longer.columns.has_batches):
        partner = channels_of(longer, rules).partner
        most = start + times * length
        first, pending = _come_to(longer, partner, most, start, rules)
        # A rank that has not come to its kernel yet shows nothing of what repeats.
        if (first < start).any():
            return False
        next_update = first + length
        second, pending_later = _come_to(
            longer, partner, next_update, next_update, rules
        )
        if (second != next_update).any():
            return False
        if not np.array_equal(
            _waiting(longer, pending_later, 1), _waiting(longer, pending, 0)
        ):
            return False
        if longer.has_updates and not _reads_later(before, longer, first):
            return False
    return True


def _waiting(schedule: Schedule, pending: Ints, earlier: int) -> Ints:
    """Pending transfers in the order of their ranks, as if their updates were so many `earlier`,
    and whether each one begins a batch.
    """
    columns = schedule.columns
    update, number = _updates(schedule, pending)
    is_head = columns.batch[pending] == pending
    return np.stack([columns.rank[pending], update - earlier, number, is_head])


def _updates(schedule: Schedule, rows: Ints) -> tuple[Ints, Ints]:
    """For each action its update, and a number that the same action of every update has."""
    columns = schedule.columns
    step = steps_of(schedule.layout)
    kind = columns.kind[rows]
    stage = columns.stage[rows]
    update, rest = np.divmod(np.maximum(columns.microbatch[rows], 0), step[kind, stage])
    kinds, numbers = step.shape
    return update, (rest * kinds + kind) * numbers + stage


def _is_before(schedule: Schedule, places: Ints) -> Flags:
    """The actions that stand before the place of their rank."""
    columns = schedule.columns
    ends = columns.first[:-1] + places
    is_before: Flags = np.arange(len(columns)) < ends[columns.rank]
    return is_before


def _reads_later(before: Schedule, longer: Schedule, places: Ints) -> bool:
    """Whether all versions that matter beyond a cut are one later in the longer schedule, one
    update later. `places` is the cut.

    The versions that matter are those that forwards read, if other forwards of the same update are
    still to come; by the rule `latest`, also those that backwards read again. Versions of delayed
    weights, and of frozen ones, do not matter.
    """
    step = steps_of(longer.layout)[Kind.F]
    stages = len(before.placement)
    trained = filter(before.layout.trains, range(stages))
    counting = {stage: _COUNTS[before.weights_of(stage).name] for stage in trained}
    counts = np.array(
        [
            [kind in counting.get(stage, ()) for stage in range(stages)]
            for kind in range(ROWS)
        ]
    )
    columns = before.columns
    rows = np.flatnonzero(~_is_before(before, places) & ~columns.is_transfer)
    rows = rows[counts[columns.kind[rows], columns.stage[rows]]]
    stage = columns.stage[rows]
    # By stage and update: whether anything that reads a version of it is still to come.
    is_to_come = np.zeros((stages, before.layout.updates), bool)
    is_to_come[stage, columns.microbatch[rows] // step[stage]] = True
    # By stage and microbatch: the version that the forward reads in the longer schedule.
    later = np.zeros((stages, max(map(longer.layout.units, range(stages)))), np.int32)
    stage, microbatch, version = follow_weights(longer).forwards
    later[stage, microbatch] = version
    stage, microbatch, version = follow_weights(before).forwards
    is_as_before = later[stage, microbatch + step[stage]] == version + 1
    return bool((is_as_before | ~is_to_come[stage, microbatch // step[stage]]).all())


def _come_to(
    schedule: Schedule, partner: Ints, places: Ints, least: Ints, rules: Transport
) -> tuple[Ints, Ints]:
    """How far all ranks come on a transport if none goes beyond its place, and none issues a part
    of a batch; with the transfers that are pending then. `partner` is the other side of each
    transfer.

    If the ranks can stop earlier, but not before the `least` places, with nothing pending, they
    stop there.
    """
    closed = _closed(schedule, partner, places, least)
    if (closed >= least).all():
        return closed, np.zeros(0, np.int64)
    columns = schedule.columns
    places = _ends_of_batches(columns, columns.first[:-1] + places) - columns.first[:-1]
    # Cutting one rank short may leave another one waiting for what is now missing, so it is cut
    # short as well, and so on. Places only ever go back, so this ends.
    while True:
        before = np.flatnonzero(_is_before(schedule, places))
        cut = evolve(schedule, ranks=actions_of(len(places), columns.taken(before)))
        come_to, pending = reached(cut, rules)
        if (come_to == places).all():
            shift = columns.first[:-1] - cut.columns.first[:-1]
            return places, pending + shift[cut.columns.rank[pending]]
        places = come_to


def _closed(schedule: Schedule, partner: Ints, places: Ints, least: Ints) -> Ints:
    """The last places, none beyond those given, such that nothing before them waits for anything
    beyond. Since the whole schedule ends, this part of it ends too, and leaves nothing pending. If
    there are none behind the `least` places, some of the result is before these.
    """
    columns = schedule.columns
    needs = needs_of(schedule)
    sums = sums_of(schedule)
    begins = columns.first[:-1] + least
    ends = _ends_of_batches(columns, columns.first[:-1] + places)
    is_before = _is_before(schedule, places)
    # What is before the least places is there wherever ranks stop; what is nowhere, the row behind
    # all, never is.
    is_open = np.append(~_is_before(schedule, least), True)
    transfers = np.flatnonzero(is_before & columns.is_transfer)
    transfers = transfers[is_open[partner[transfers]]]
    used = np.flatnonzero(is_before[needs.user] & is_open[needs.maker])
    added = np.flatnonzero(is_before[sums.step] & is_open[sums.last])
    waiter = np.concatenate([transfers, needs.user[used], sums.step[added]])
    other = np.concatenate([partner[transfers], needs.maker[used], sums.last[added]])
    rank = columns.rank[waiter]
    of_other = columns.rank[other]
    while (ends >= begins).all():
        is_missing = (other < 0) | (other >= ends[of_other])
        is_cut_short = is_missing & (waiter < ends[rank])
        if not is_cut_short.any():
            break
        np.minimum.at(ends, rank[is_cut_short], waiter[is_cut_short])
        ends = _ends_of_batches(columns, ends)
    return ends - columns.first[:-1]


def _ends_of_batches(columns: Columns, ends: Ints) -> Ints:
    """For each rank the row before which it stops, moved to the begin of a batch: a batch is issued
    as a whole or not at all.
    """
    # Behind the last action of a rank there is the first one of another, with which a batch begins.
    return np.append(columns.batch, len(columns))[ends]


def reached(cut: Schedule, rules: Transport) -> tuple[Ints, Ints]:
    """The first action of each rank that never runs, or is never over if ranks wait for it, by its
    index; and the rows of the transfers that are not over.
    """
    columns = cut.columns
    events = transport_events(cut, UNIT, rules)
    assert events.channels is not None
    # What has no item of its own takes no time.
    over = np.append(events.graph.over, NOTHING)[events.item]
    is_over = np.isfinite(events.graph.times_of(over))
    # Of a sum, the graph has the parts that are there.
    sums = sums_of(cut)
    is_over[sums.step[sums.is_far & ~sums.is_whole]] = False
    is_on_rank = ~columns.is_beside & (rules.blocks | ~columns.is_transfer)
    stopped = np.append(np.flatnonzero(is_on_rank & ~is_over), len(columns))
    begin = columns.first[:-1]
    end = columns.first[1:]
    reached = np.minimum(stopped[np.searchsorted(stopped, begin)], end) - begin
    is_alone = events.channels.partner == NO_PARTNER
    return reached, np.flatnonzero(columns.is_transfer & (is_alone | ~is_over))
