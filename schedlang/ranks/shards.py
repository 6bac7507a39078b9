"""When a rank gathers the weights of stages that are sharded, as by FSDP2: from the rank's own
order alone.

The ops of a stage, all but its update and copies to the host, use its weights: W adds to gradients
that lie beside them. At most `places` stages have theirs gathered at once.

- UNSHARD gathers them before an op that does not find them. It begins an op early, and overlaps
  with that one, where a place is free by then, or one other than that op's own can be given up.
- RESHARD lets go of them after the last op that uses them before they change: before `U`, or at
  the end of a step. And where all places are taken, of those whose next use is farthest away
  (Belady 1966, "A study of replacement algorithms for a virtual-storage computer"): so no policy
  gathers less often with as many places.
- REDUCE_GRAD sums the gradients over the shards once per update, after the last op that adds to
  them, B or W. Until then the rank holds all of them.

What a program says itself is not said again: a stage that has any UNSHARD or RESHARD of its own, or
whose weights hop from replica to replica, has all of them, and one that has a REDUCE_GRAD, or whose
gradients hop, is reduced by that. Ops that run as one count one after
the other. The words are those of torch's action tables. It takes n log n steps for n actions.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from attrs import define, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.actions import Actions, is_transfer, is_update
from schedlang.schedule.kinds import GATHERS, MAKERS, SUMS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

#: What is done, UNSHARD, RESHARD or REDUCE_GRAD, and with which stage.
Step = tuple[Kind, int]


@frozen
class Shards:
    """What is done right before, and right after, actions of a rank, by their indices."""

    before: dict[int, list[Step]] = field(factory=dict)
    after: dict[int, list[Step]] = field(factory=dict)
    #: The gathers in order: the action before which each begins, the stage, and the first op that
    #: needs it.
    gathers: list[tuple[int, int, int]] = field(factory=list)

    def __iter__(self) -> Iterator[Step]:
        """All, in order."""
        for index in sorted(self.before.keys() | self.after.keys()):
            yield from self.before.get(index, ())
            yield from self.after.get(index, ())

    def count(self, kind: Kind) -> int:
        """How often something is done in a step."""
        return sum(what == kind for what, _ in self)

    def total(self, sizes: Sequence[float]) -> float:
        """All that is gathered in a step, where the weights of stage s are `sizes[s]`."""
        return sum(sizes[stage] for what, stage in self if what == Kind.UNSHARD)

    def peak(self, sizes: Sequence[float] | None = None) -> float:
        """The most that is gathered at once, in stages or by such sizes."""
        sign = {Kind.UNSHARD: 1, Kind.RESHARD: -1, Kind.REDUCE_GRAD: 0}
        changes = (sign[what] * (sizes[stage] if sizes else 1) for what, stage in self)
        return max(accumulate(changes), default=0)


def shards(actions: Actions, stages: Container[int], places: int) -> Shards:
    """When a rank gathers the weights of some stages, those that are sharded, with as many places,
    at least one.
    """
    walk = _Walk(actions, places)
    following, whole = _ahead(actions, stages)
    pairs = [*zip(actions.kind, actions.stage, strict=True)]
    gathered = {stage for kind, stage in pairs if kind in GATHERS}
    reduced = {stage for kind, stage in pairs if kind in SUMS}
    for index, (kind, stage) in enumerate(pairs):
        if stage not in stages:
            continue
        if is_update(kind):
            walk.updated[stage] = index
        elif kind in USES_WEIGHTS:
            if stage not in gathered:
                walk.use(index, stage, following.get(index))
            if index in whole and stage not in reduced:
                walk.steps.after.setdefault(index, []).insert(
                    0, (Kind.REDUCE_GRAD, stage)
                )
    return walk.steps


def shards_text(schedule: Schedule, rank: int, places: int) -> str:
    """The ops of a rank, with what is done in between if all its stages are sharded; a gather
    begins a line.
    """
    actions = schedule.ranks[rank]
    steps = shards(actions, schedule.stages_of(rank), places)
    text = ""
    for index in range(len(actions)):
        if not is_transfer(actions.kind[index]):
            before = [_name(schedule, step) for step in steps.before.get(index, ())]
            after = [_name(schedule, step) for step in steps.after.get(index, ())]
            text += "\n" if before and text else " "
            text += " ".join([*before, schedule.name_of(rank, index), *after])
    return text.strip()


def shards_figures(
    schedule: Schedule, rank: int, places: int, sizes: Sequence[float] | None = None
) -> str:
    """What that costs in a step; with `sizes`, the bytes of each stage's weights, in bytes too."""
    steps = shards(schedule.ranks[rank], schedule.stages_of(rank), places)
    gathers = counted(steps.count(Kind.UNSHARD), "gather")
    reductions = counted(steps.count(Kind.REDUCE_GRAD), "reduction")
    most = f"at most {counted(int(steps.peak()), 'stage')} at once"
    if sizes is not None:
        gathers += f" of {steps.total(sizes):,.0f} bytes"
        most += f", {steps.peak(sizes):,.0f} bytes"
    return f"{gathers}, {most}, {reductions}"


def _name(schedule: Schedule, step: Step) -> str:
    kind, stage = step
    return f"{schedule.names.stage(stage)}{kind.name}"


@define
class _Walk:
    """Goes over the uses of a rank, with what is gathered by then."""

    # Two places for three stages. Of 0 and 1, stage 1 makes room for 2: it is used after 0.
    #
    #     uses         0    1    0    2    0    1
    #     gathered     0    0 1  0 1  0 2  0    0 1
    actions: Actions
    places: int
    steps: Shards = field(factory=Shards)
    gathered: set[int] = field(factory=set)
    #: When each gathered stage is used next, the farthest first; behind these are uses that are
    #: over.
    ahead: list[tuple[int, int]] = field(factory=list)
    #: The last update of a stage, and the last use of any; and how many places were taken during
    #: that one.
    updated: dict[int, int] = field(factory=dict)
    last: int = -1
    taken: int = 0

    def use(self, index: int, stage: int, following: int | None) -> None:
        """An op uses a stage's weights, and another one after it, or none does before they
        change.
        """
        if stage not in self.gathered:
            self.gather(index, stage)
        self.last = index
        self.taken = len(self.gathered)
        if following is None:
            self.gathered.remove(stage)
            self.steps.after.setdefault(index, []).append((Kind.RESHARD, stage))
        else:
            heappush(self.ahead, (-following, stage))

    def gather(self, index: int, stage: int) -> None:
        """Gather for an op: before the use before it, where the weights are up to date and there is
        a place by then.
        """
        begins = self.last if self.last > self.updated.get(stage, -1) else index
        steps = [(Kind.UNSHARD, stage)]
        if len(self.gathered) == self.places:
            _, farthest = heappop(self.ahead)
            self.gathered.remove(farthest)
            steps.insert(0, (Kind.RESHARD, farthest))
            # The use before still needs the weights that go.
            if farthest == self.actions.stage[self.last]:
                begins = index
        # The place became free only after the use before.
        elif self.taken == self.places:
            begins = index
        self.gathered.add(stage)
        self.steps.before.setdefault(begins, []).extend(steps)
        self.steps.gathers.append((begins, stage, index))


def _ahead(
    actions: Actions, stages: Container[int]
) -> tuple[Mapping[int, int], Container[int]]:
    """For each use the next one of the same weights; and the ops after which the gradients of an
    update are whole.
    """
    # From the end to the begin, an update is the border: weights change there, and the gradients
    # of the update are whole. `used` and `added` are of each stage since then.
    following = dict[int, int]()
    used = dict[int, int]()
    whole = set[int]()
    added = set[int]()
    for index in reversed(range(len(actions))):
        kind = actions.kind[index]
        stage = actions.stage[index]
        if is_update(kind):
            used.pop(stage, None)
            added.discard(stage)
        elif kind in USES_WEIGHTS and stage in stages:
            if stage in used:
                following[index] = used[stage]
            used[stage] = index
            if kind in MAKERS[Kind.W] and stage not in added:
                added.add(stage)
                whole.add(index)
    return following, whole
