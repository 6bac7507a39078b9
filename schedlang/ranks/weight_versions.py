"""Which version of its stage's weights each op reads, and how many versions a rank must hold.

Version v is the weights after v updates of the stage. The gradients of update k (counted from 0)
turn version k into version k + 1. Everything here follows from each rank's own order, without
times. The rules are those of PipeDream (arXiv 1806.03377), PipeDream-2BW (arXiv 2006.09503), WPipe
(ICLR 2022) and PipeMare (arXiv 1910.05124).
"""

from functools import cached_property

import numpy as np
from attrs import field, frozen

from schedlang.schedule.arrays import Flags, Ints, is_any
from schedlang.schedule.costs import Costs
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import MAKERS, REPEATS, STEPS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

# A stage with one microbatch an update, which runs one forward ahead; and the version that its ops
# read by each rule:
#
#                   F0  F1  B0  U   F2  B1  U   F3  B2  U
#     updates done   0   0   0       1   1       2   2
#     update         0   1   0       2   1       3   2
#     delay(1)       0   0   0       1   0       2   1
#     stash          0   0   0       1   0       2   1
#     latest         0   0   0       1   1!      2   2!      not what the forward read
#     unstashed      0   0   0       1   1       2   2

#: Kinds of ops that read the weights again after the forward.
_READS_AGAIN = tuple(USES_WEIGHTS - {Kind.F})


@frozen(eq=False)
class Versions:
    """The weight versions that the ranks of a schedule read and hold, and their staleness; each is
    computed on demand.
    """

    _schedule: Schedule = field(repr=False)
    #: None for a schedule without updates, which has one version.
    _reads: "_Reads | None" = field(repr=False)

    @cached_property
    def held_of(self) -> tuple[int, ...]:
        """For each stage, the largest number of versions that its rank holds at once."""
        if self._reads is None:
            return (1,) * len(self._schedule.placement)
        return tuple(self._reads.most_held())

    @cached_property
    def held(self) -> tuple[int, ...]:
        """For each rank, the largest number of versions of one of its stages."""
        held = [1] * len(self._schedule.ranks)
        for stage, rank in enumerate(self._schedule.placement):
            held[rank] = max(held[rank], self.held_of[stage])
        return tuple(held)

    @cached_property
    def staleness(self) -> int:
        """The largest number of updates that the weights of a forward lack; 0 for a synchronous
        schedule.
        """
        return 0 if self._reads is None else self._reads.staleness()

    @cached_property
    def findings(self) -> list[Finding]:
        """The ops that read a wrong version of the weights, or add to the wrong update."""
        if self._reads is None:
            return []
        # If updates are wrong, so are the versions that they make.
        return self._reads.updates_amiss() or self._reads.versions_amiss()

    @cached_property
    def read(self) -> dict[tuple[int, int, int], int]:
        """The version that an op reads, by its kind, stage and microbatch; empty without
        updates.
        """
        if self._reads is None:
            return {}
        columns = self._reads.kind, self._reads.stage, self._reads.microbatch
        ops = zip(*(column.tolist() for column in columns), strict=True)
        return dict(zip(ops, self._reads.version.tolist(), strict=True))

    @property
    def forwards(self) -> tuple[Ints, Ints, Ints]:
        """The stage and the microbatch of each forward, and the version that it reads."""
        if self._reads is None:
            nothing = np.zeros(0, np.int32)
            return nothing, nothing, nothing
        return self._reads.of_forwards()


def follow_weights(schedule: Schedule) -> Versions:
    """The weight versions of a schedule whose structure is correct."""
    has_updates = schedule.layout.updates > 1 or schedule.has_updates
    return Versions(schedule, _Reads(schedule) if has_updates else None)


def bytes_of_weights(schedule: Schedule, costs: Costs) -> list[float]:
    """The bytes of weights on each rank, with all versions of its stages."""
    of_ranks = [0.0] * len(schedule.ranks)
    of_stages = costs.bytes_of_weights(len(schedule.placement))
    versions = follow_weights(schedule).held_of
    for stage, rank in enumerate(schedule.placement):
        of_ranks[rank] += of_stages[stage] * versions[stage]
    return of_ranks


class _Reads:
    """The reads of weights as columns, with an item for each op that is no update, in the order of
    the plan.

    Op i is the action `row[i]`, and belongs to the update `update[i]`. Its stage has had `done[i]`
    updates before it, and it reads `version[i]` of the weights.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        columns = schedule.columns
        layout = schedule.layout
        rows = np.flatnonzero(~columns.is_transfer & ~columns.is_collective)
        done = _updates_before(columns.kind[rows], columns.stage[rows])
        is_read = ~columns.is_update[rows]
        self.row: Ints = rows[is_read]
        self.done = done[is_read]
        self.kind = columns.kind[self.row]
        self.stage = columns.stage[self.row]
        self.microbatch = columns.microbatch[self.row]
        self.is_forward = self.kind == Kind.F
        per_update = [
            layout.units_of_update(stage) for stage in range(len(layout.placement))
        ]
        self.update = self.microbatch // np.array(per_update, np.int32)[self.stage]
        #: The version that the forward of the same microbatch reads.
        self.of_forward = self._of_forward()
        # Later ops read that version, too. Stages without stashed versions read the newest one.
        self.version = np.where(self._has_rule("unstashed"), self.done, self.of_forward)

    def _of_forward(self) -> Ints:
        """For each op, the version that its microbatch's forward reads by the rule of its stage.
        The forward comes before the op, as was checked.
        """
        stages = range(len(self.schedule.placement))
        rules = map(self.schedule.weights_of, stages)
        delay = np.array([rule.delay for rule in rules], np.int32)
        delayed = np.maximum(self.update - delay[self.stage], 0)
        by_rule = np.where(self._has_rule("delay"), delayed, self.done)
        units = int(self.microbatch.max(initial=0)) + 1
        slot = self.stage * np.int64(units) + self.microbatch
        forwards = np.flatnonzero(self.is_forward)
        forward_at = np.zeros(len(stages) * units, np.int32)
        forward_at[slot[forwards]] = forwards
        of_forward: Ints = by_rule[forward_at[slot]]
        return of_forward

    def _has_rule(self, name: str) -> Flags:
        """Which ops belong to a stage that has this weight rule."""
        rules = map(self.schedule.weights_of, range(len(self.schedule.placement)))
        is_named = np.array([rule.name == name for rule in rules])
        has_rule: Flags = is_named[self.stage]
        return has_rule

    def of_forwards(self) -> tuple[Ints, Ints, Ints]:
        """The stage and the microbatch of each forward, and the version that it reads."""
        rows = self.is_forward
        return self.stage[rows], self.microbatch[rows], self.version[rows]

    def staleness(self) -> int:
        """The largest number of updates that the weights of a forward lack."""
        stages = range(len(self.schedule.placement))
        is_trained = np.array(list(map(self.schedule.layout.trains, stages)))
        behind = (self.update - self.version)[self.is_forward & is_trained[self.stage]]
        return int(behind.max(initial=0))

    def most_held(self) -> list[int]:
        """For each stage, the largest number of versions at once: the newest one, and older ones
        that are read again.

        An update happens in place if the version from which it starts is not read again.
        """
        stages = len(self.schedule.placement)
        versions = 1 + int(max(self.done.max(initial=0), self.version.max(initial=0)))
        # For each version, the number of updates before the last op that reads it.
        seen = np.zeros((stages, versions), np.int32)
        seen[self.stage, self.version] = self.done
        stage, version = np.nonzero(seen > np.arange(versions))
        # A version is an old one from the update that makes its successor until that last op.
        change = np.zeros((stages, versions + 1), np.int32)
        change[stage, version + 1] = 1
        np.subtract.at(change, (stage, seen[stage, version] + 1), 1)
        most: list[int] = np.cumsum(change, axis=1).max(axis=1).tolist()
        return [1 + older for older in most]

    def updates_amiss(self) -> list[Finding]:
        """The ops that add to the gradients of a wrong update."""
        is_amiss = is_any(self.kind, *MAKERS[Kind.W]) & (self.update != self.done)
        help = (
            "a `U` is missing or too early: it follows the last gradient of its update"
        )
        return [
            self._wrong_read(
                "update",
                op,
                f"of update {self.update[op]} adds to the gradient of update {self.done[op]}",
                help,
            )
            for op in np.flatnonzero(is_amiss).tolist()
        ]

    def versions_amiss(self) -> list[Finding]:
        """The ops that read a version that does not exist yet, or a wrong one."""
        # All forwards of an update must read the same version as its first one, unless the stage's
        # rule lets each read the newest.
        update = self.stage * np.int64(self.update.max(initial=0) + 1) + self.update
        first = np.zeros(int(update.max(initial=0)) + 1, np.int32)
        forwards = np.flatnonzero(self.is_forward)[::-1]
        first[update[forwards]] = self.version[forwards]
        first = np.where(self._has_rule("unstashed"), self.version, first[update])
        is_again = is_any(self.kind, *_READS_AGAIN) & self._has_rule("latest")
        # With other weights, a recomputation would not repeat its forward.
        is_again |= is_any(self.kind, *REPEATS) & self._has_rule("unstashed")
        findings = {}
        for op in np.flatnonzero(self.is_forward & (self.version > self.done)).tolist():
            findings[op] = self._too_new(op)
        for op in np.flatnonzero(self.is_forward & (self.version != first)).tolist():
            findings[op] = self._unlike_the_first(op, int(first[op]))
        for op in np.flatnonzero(is_again & (self.of_forward != self.done)).tolist():
            findings[op] = self._unlike_the_forward(op)
        # Sorted by op, not by fault.
        return [findings[op] for op in sorted(findings)]

    def _too_new(self, op: int) -> Finding:
        done = self.done[op]
        rank = self.schedule.columns.rank[self.row[op]]
        delay = self.schedule.weights_of(int(self.stage[op])).delay
        return self._wrong_read(
            "weight-version",
            op,
            f"reads version {self.version[op]} of the weights, but only {done} "
            f"{'update precedes' if done == 1 else 'updates precede'} it on rank {rank}",
            f"delay the weights by more than {delay}, or run fewer forwards before the update",
        )

    def _unlike_the_first(self, op: int, first: int) -> Finding:
        return self._wrong_read(
            "weight-version",
            op,
            f"reads version {self.version[op]} of the weights, the first of its update read "
            f"{first}",
            "let all microbatches of an update read the same version: `weights delay(1)`",
        )

    def _unlike_the_forward(self, op: int) -> Finding:
        return self._wrong_read(
            "weight-version",
            op,
            f"reads version {self.done[op]} of the weights, its forward read {self.of_forward[op]}",
            "keep what the forward read: `weights stash`, or `weights delay(1)`",
        )

    def _wrong_read(self, code: str, op: int, does: str, help: str) -> Finding:
        """A finding about a single op."""
        columns = self.schedule.columns
        row = self.row[op]
        of_op = int(self.kind[op]), int(self.stage[op]), int(self.microbatch[op])
        name = self.schedule.names.action(*of_op)
        rank = int(columns.rank[row])
        return Finding(
            code, f"`{name}` {does}", rank, int(columns.source[row]), help=help
        )


def _updates_before(kind: Ints, stage: Ints) -> Ints:
    """For each action, the number of updates of its stage before it; `kind` and `stage` are those
    of all actions, in order.
    """
    # A prefix sum of updates, stage by stage, less the sum over the stages before. Sorting small
    # integers is faster.
    order = np.argsort(
        stage.astype(np.min_scalar_type(int(stage.max(initial=0)))), kind="stable"
    )
    is_update = is_any(kind[order], *STEPS)
    before = np.cumsum(is_update, dtype=np.int32) - is_update
    is_first = np.diff(stage[order], prepend=-1) != 0
    of_other_stages = np.maximum.accumulate(np.where(is_first, before, 0))
    updates = np.empty(len(kind), np.int32)
    updates[order] = before - of_other_stages
    return updates
