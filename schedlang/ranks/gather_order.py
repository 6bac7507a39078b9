"""When a rank gathers the weights of sharded stages, as with FSDP2. It follows from the rank's own
order.

All ops of a stage but its update and copies to the host use its weights; W does because gradients
lie beside them. At most `places` stages of a rank have gathered weights at once.

- UNSHARD gathers the weights before an op that needs them. It begins one op early and overlaps with
  that op, if there is a free place by then, or a place of another stage than that op's.
- RESHARD frees the weights after the last op that uses them before they change: before `U`, or at
  the end of a step. If all places are taken, it frees the weights whose next use is farthest away
  (Belady 1966, "A study of replacement algorithms for a virtual-storage computer"); no policy
  gathers less often with as many places.
- REDUCE_GRAD reduces and scatters the gradients over the shards once per update, after the last op
  that adds to them, B or W. Until then the rank holds whole gradients.

Nothing is added to what a program writes itself: a stage with any UNSHARD or RESHARD, or whose
weights hop from replica to replica, gets no other one, and likewise one with a REDUCE_GRAD, or
whose gradients hop. Ops that overlap count one after the other. The words are those of torch's
action tables. The walk takes n log n steps for n actions.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from attrs import define, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.actions import Actions, is_transfer, is_update
from schedlang.schedule.kinds import GATHERS, MAKERS, SUMS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

#: UNSHARD, RESHARD or REDUCE_GRAD, and the stage.
Step = tuple[Kind, int]


@frozen
class Shards:
    """The steps right before, and right after, the actions of a rank, by index."""

    before: dict[int, list[Step]] = field(factory=dict)
    after: dict[int, list[Step]] = field(factory=dict)
    #: The gathers in order: the action before which one begins, its stage, and the first op that
    #: needs the weights.
    gathers: list[tuple[int, int, int]] = field(factory=list)

    def __iter__(self) -> Iterator[Step]:
        """Iterate over all steps in order."""
        for index in sorted(self.before.keys() | self.after.keys()):
            yield from self.before.get(index, ())
            yield from self.after.get(index, ())

    def count(self, kind: Kind) -> int:
        """The number of steps of this kind."""
        return sum(what == kind for what, _ in self)

    def total(self, sizes: Sequence[float]) -> float:
        """The sum of all gathered weights in a step, where `sizes[s]` is the size of stage s."""
        return sum(sizes[stage] for what, stage in self if what == Kind.UNSHARD)

    def peak(self, sizes: Sequence[float] | None = None) -> float:
        """The peak of gathered weights: the number of stages, or the sum of their sizes."""
        sign = {Kind.UNSHARD: 1, Kind.RESHARD: -1, Kind.REDUCE_GRAD: 0}
        changes = (sign[what] * (sizes[stage] if sizes else 1) for what, stage in self)
        return max(accumulate(changes), default=0)


def shards(actions: Actions, stages: Container[int], places: int) -> Shards:
    """When a rank gathers, frees and reduces its sharded `stages`, with `places` of at least 1."""
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
    """The ops of a rank, with the steps between them if all its stages are sharded. A line begins
    before each gather.
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
    """The number of gathers and reductions in a step, and the peak; with `sizes`, the bytes of each
    stage's weights, also the bytes.
    """
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
    """Walks over the ops of a rank, and remembers which stages are gathered."""

    # Two places for three stages. Stage 1 makes room for stage 2, since its next use is after that
    # of stage 0.
    #
    #     uses         0    1    0    2    0    1
    #     gathered     0    0 1  0 1  0 2  0    0 1
    actions: Actions
    places: int
    steps: Shards = field(factory=Shards)
    gathered: set[int] = field(factory=set)
    #: A heap of the next uses of gathered stages, the farthest first; uses that are over lie below
    #: these.
    ahead: list[tuple[int, int]] = field(factory=list)
    #: The last update of each stage, the last use of any stage, and the number of places that were
    #: taken during that use.
    updated: dict[int, int] = field(factory=dict)
    last: int = -1
    taken: int = 0

    def use(self, index: int, stage: int, following: int | None) -> None:
        """Let an op use a stage's weights. `following` is the next op that uses them before they
        change, if any.
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
        """Gather a stage for an op: before the previous use of any stage, if the weights are up to
        date and a place is free by then.
        """
        begins = self.last if self.last > self.updated.get(stage, -1) else index
        steps = [(Kind.UNSHARD, stage)]
        if len(self.gathered) == self.places:
            _, farthest = heappop(self.ahead)
            self.gathered.remove(farthest)
            steps.insert(0, (Kind.RESHARD, farthest))
            # The previous use still needs the weights that make room.
            if farthest == self.actions.stage[self.last]:
                begins = index
        # The place became free only after the previous use.
        elif self.taken == self.places:
            begins = index
        self.gathered.add(stage)
        self.steps.before.setdefault(begins, []).extend(steps)
        self.steps.gathers.append((begins, stage, index))


def _ahead(
    actions: Actions, stages: Container[int]
) -> tuple[Mapping[int, int], Container[int]]:
    """For each use of weights, the next use of the same weights; and the ops after which a stage's
    gradients are complete for an update.
    """
    # The walk goes backwards. An update changes the weights, so it ends a chain of uses; the last
    # op before it that adds to the gradients completes them. `used` and `added` start anew there.
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
