"""Which weights each op reads, and how many versions of them a rank must hold.

Version v of a stage's weights is what they are after v of its updates. The microbatches of update k
(counted from 0) add up to the gradient that makes version k + 1 from version k. All that is asked
here is answered by each rank's own order, without time. The rules are those of PipeDream (arXiv
1806.03377), PipeDream-2BW (arXiv 2006.09503) and WPipe (ICLR 2022).
"""

from heapq import heappop, heappush

from attrs import define, field, frozen

from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.costs import Costs
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

# What reads weights again after the forward, and what ends a microbatch's part in the gradient.
_READS_AGAIN = (Kind.B, Kind.I, Kind.W, Kind.R)
_ADDS_GRADIENT = (Kind.B, Kind.W)


@frozen
class Versions:
    """What the ranks hold and how late their gradients are.

    `held[r]` is the most versions of one stage's weights that rank r holds at once, `held_of[s]`
    the most of stage s; `staleness` is the most updates by which a forward's weights are behind: 0
    for a synchronous schedule. `read[stage, microbatch]` is the version that the forward reads, and
    the backward again; without updates, it is empty: there is one version.
    """

    held: tuple[int, ...]
    held_of: tuple[int, ...]
    staleness: int
    read: dict[tuple[int, int], int]
    findings: tuple[Finding, ...]


def follow_weights(schedule: Schedule) -> Versions:
    """Follow the weight versions through every rank's actions."""
    if schedule.layout.updates == 1 and not schedule.has_updates:
        return Versions((1,) * len(schedule.ranks), (1,) * len(schedule.placement), 0, {}, ())
    ranks = [_Rank(schedule, rank, actions) for rank, actions in enumerate(schedule.ranks)]
    for rank in ranks:
        rank.run()
    findings = [finding for rank in ranks for finding in rank.findings]
    # Where updates themselves are amiss, so are the versions that they make.
    updates = [finding for finding in findings if finding.code == "update"]
    held = [rank.most_held() for rank in ranks]
    return Versions(
        tuple(max(each.values(), default=1) for each in held),
        tuple(held[rank].get(stage, 1) for stage, rank in enumerate(schedule.placement)),
        max(rank.staleness for rank in ranks),
        {op: version for rank in ranks for op, version in rank.read.items()},
        tuple(updates or findings),
    )


def bytes_of_weights(schedule: Schedule, costs: Costs) -> list[float]:
    """What the weights take on each rank: the most versions of each of its stages."""
    found = [0.0] * len(schedule.ranks)
    each = costs.bytes_of_weights(len(schedule.placement))
    for rank, bytes, held in zip(
        schedule.placement, each, follow_weights(schedule).held_of, strict=True
    ):
        found[rank] += bytes * held
    return found


@define
class _Rank:
    schedule: Schedule
    rank: int
    actions: Actions
    staleness: int = 0
    findings: list[Finding] = field(factory=list)
    #: Updates done, per stage; the version that each forward read, and that each update's
    #: microbatches read.
    updates: dict[int, int] = field(factory=dict)
    read: dict[tuple[int, int], int] = field(factory=dict)
    read_by_update: dict[tuple[int, int], int] = field(factory=dict)
    #: The action that makes each stage's version, and the last one that reads it.
    made: dict[tuple[int, int], int] = field(factory=dict)
    last_read: dict[tuple[int, int], int] = field(factory=dict)

    def run(self) -> None:
        for index, kind in enumerate(self.actions.kind):
            stage = self.actions.stage[index]
            if is_transfer(kind):
                continue
            if kind == Kind.U:
                self.updates[stage] = self.updates.get(stage, 0) + 1
                self.made[stage, self.updates[stage]] = index
            else:
                self.use(index, kind, stage, self.actions.microbatch[index])

    def use(self, index: int, kind: int, stage: int, microbatch: int) -> None:
        """A forward chooses its version; what follows reads it again, and its gradient belongs to
        one update.
        """
        update = self.schedule.layout.update_of(stage, microbatch)
        if kind == Kind.F:
            self.read[stage, microbatch] = self.choose(index, stage, microbatch, update)
        version = self.read.get((stage, microbatch), 0)
        self.last_read[stage, version] = index
        done = self.updates.get(stage, 0)
        if (
            kind in _READS_AGAIN
            and self.schedule.weights_of(stage).name == "latest"
            and version != done
        ):
            message = (
                f"`{self.actions.word(index)}` reads version {done} of the weights, its "
                f"forward read {version}"
            )
            help = "keep what the forward read: `weights stash`, or `weights delay 1`"
            self.find("weight-version", message, index, help)
        if kind in _ADDS_GRADIENT and update != done:
            message = (
                f"`{self.actions.word(index)}` of update {update} adds to the gradient of "
                f"update {done}"
            )
            help = "a `U` is missing or too early: it follows the last gradient of its update"
            self.find("update", message, index, help)

    def choose(self, index: int, stage: int, microbatch: int, update: int) -> int:
        """The version that a forward of some update reads, by the rule of its stage."""
        rule = self.schedule.weights_of(stage)
        done = self.updates.get(stage, 0)
        version = self.schedule.version_read(stage, microbatch, done)
        if version > done:
            message = (
                f"`{self.actions.word(index)}` reads version {version} of the weights, but only "
                f"{done} "
                f"{'update precedes' if done == 1 else 'updates precede'} it on rank {self.rank}"
            )
            help = (
                f"delay the weights by more than {rule.delay}, or run fewer forwards "
                "before the "
                "update"
            )
            self.find("weight-version", message, index, help)
        first = self.read_by_update.setdefault((stage, update), version)
        if first != version:
            reads = f"`{self.actions.word(index)}` reads version {version} of the weights"
            help = "let all microbatches of an update read the same version: `weights delay 1`"
            self.find(
                "weight-version", f"{reads}, the first of its update read {first}", index, help
            )
        self.staleness = max(self.staleness, update - version)
        return version

    def most_held(self) -> dict[int, int]:
        """The most versions of each updated stage at once: the newest, and older ones that are read
        again.

        An update happens in place if the version it starts from is not read again.
        """
        most: dict[int, int] = {}
        #: For each stage, the last reads of its older versions that are still to come.
        to_come: dict[int, list[int]] = {}
        for (stage, newest), index in self.made.items():
            reads = to_come.setdefault(stage, [])
            heappush(reads, self.last_read.get((stage, newest - 1), -1))
            while reads and reads[0] < index:
                heappop(reads)
            most[stage] = max(most.get(stage, 1), 1 + len(reads))
        return most

    def find(self, code: str, message: str, index: int, help: str) -> None:
        self.findings.append(
            Finding(code, message, self.rank, self.actions.source[index], help=help)
        )
