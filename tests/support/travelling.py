"""Random plans in which the weights and gradients of some stages hop from replica to replica, and
messages go beside them.
"""

import random
from itertools import pairwise

from attrs import define, evolve, field

from schedlang import Actions, Kind, Schedule
from schedlang.lowering import lower
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.damage import Row, in_form, scattered
from tests.support.features import random_costs, with_events, with_overlaps
from tests.support.own_hops import travelling
from tests.support.own_needs import HOPS
from tests.support.strategies import make_schedule

#: Stages of a pipeline, pipelines, ranks.
SIZES = ((1, 3, 3), (2, 2, 2), (2, 2, 2), (2, 2, 3), (2, 2, 3), (2, 3, 3))
#: A row of a rank, as kind and stage; of its one microbatch if it is an op.
Step = tuple[Kind, int]


def travelling_plan(rng: random.Random) -> Schedule:
    """Two or three pipelines of a microbatch each, some also without backwards, or with costs, ops
    that overlap, or gathers or sums of stages that do not hop. Their transfers are where the compiler
    puts them, or scattered; some hops stand elsewhere.
    """
    schedule = travelling_ops(rng)
    hopping = travelling(schedule)
    others = [each for each in range(schedule.layout.pieces) if each not in hopping]
    if rng.random() < 0.5:
        chosen = (rng.choice(["gathers", "sums"]),)
        schedule = with_events(schedule, chosen, others, rng)
    if rng.random() < 0.4:
        schedule = evolve(schedule, costs=random_costs(schedule, rng))
    if rng.random() < 0.2:
        schedule = with_overlaps(schedule, rng)
    plan = lower(schedule)
    if rng.random() < 0.4:
        plan = scattered(plan, rng)
    for _ in range(rng.choice([0, 1, 2, 3, 4])):
        plan = evolve(plan, ranks=tuple(_moved(each, rng) for each in plan.ranks))
    return plan


def travelling_ops(rng: random.Random, in_one_order: float = 0.9) -> Schedule:
    """The ops and hops of such a plan. So many come to their hops in one order on all ranks: those
    can all run.
    """
    size, count, ranks = rng.choice(SIZES)
    stages = size * count
    hopping = [piece for piece in range(size) if rng.random() < 0.7] or [0]
    placement = [rng.randrange(ranks) for _ in range(stages)]
    for piece in hopping:
        placement[piece::size] = rng.sample(range(ranks), count)
    pipelines = tuple(
        Pipeline(f"p{each}", each * size, (each + 1) * size, 1) for each in range(count)
    )
    work = _Work(together=rng.random() < in_one_order)
    trains = rng.random() < 0.8
    for each in pipelines:
        _add_chain(work, each, trains, rng)
    for piece in hopping:
        _add_ring(work, [*range(piece, stages, size)], rng)
    lists: list[list[Row]] = [[] for _ in range(ranks)]
    for kind, stage in work.in_random_order(rng):
        unit = NO_MICROBATCH if kind in (*HOPS, Kind.RESHARD) else 0
        lists[placement[stage]].append((kind, stage, unit, 0, 0))
    schedule = make_schedule(tuple(placement), count, tuple(map(in_form, lists)))
    return evolve(schedule, layout=Layout(tuple(placement), pipelines))


@define
class _Work:
    """Steps, and for each which ones come before it. The two sides of a hop are one step if they
    come `together`.
    """

    together: bool
    steps: list[tuple[Step, ...]] = field(factory=list)
    after: list[set[int]] = field(factory=list)

    def add(self, *rows: Step, after: set[int] | None = None) -> int:
        self.steps.append(rows)
        self.after.append(after or set())
        return len(self.steps) - 1

    def hop(
        self, send: Step, receive: Step, sends: set[int], receives: set[int]
    ) -> tuple[int, int]:
        """A hop after some steps at each side; the steps that its two sides are."""
        if self.together:
            both = self.add(send, receive, after=sends | receives)
            return both, both
        return self.add(send, after=sends), self.add(receive, after=receives)

    def uses(self, stage: int) -> list[int]:
        """The ops of a stage, in order."""
        is_use = [step[0][1] == stage and step[0][0] not in HOPS for step in self.steps]
        return [number for number, use in enumerate(is_use) if use]

    def in_random_order(self, rng: random.Random) -> list[Step]:
        left = {*range(len(self.steps))}
        order: list[Step] = []
        while left:
            ready = [each for each in sorted(left) if not self.after[each] & left]
            chosen = rng.choice(ready)
            left.remove(chosen)
            order += self.steps[chosen]
        return order


def _add_chain(
    work: _Work, pipeline: Pipeline, trains: bool, rng: random.Random
) -> None:
    """The ops of a pipeline's microbatch, some backwards in halves."""
    before: set[int] = set()
    for stage in range(pipeline.start, pipeline.stop):
        before = {work.add((Kind.F, stage), after=before)}
    for stage in reversed(range(pipeline.start, pipeline.stop)):
        if trains and rng.random() < 0.3:
            before = {work.add((Kind.I, stage), after=before)}
            work.add((Kind.W, stage), after=before)
        elif trains:
            before = {work.add((Kind.B, stage), after=before)}


def _add_ring(work: _Work, replicas: list[int], rng: random.Random) -> None:
    """The hops of the replicas of a stage, from one of them on, which is their home: its weights go
    round once or twice, its gradients once.
    """
    home = rng.randrange(len(replicas))
    ring = replicas[home:] + replicas[:home]
    runs = {stage: [work.uses(stage)] for stage in ring}
    if rng.random() < 0.3 and len(runs[ring[0]][0]) > 1:
        runs = {stage: [uses[:1], uses[1:]] for stage, (uses,) in runs.items()}
    dropped: dict[int, set[int]] = {stage: set() for stage in ring}
    for number in range(len(runs[ring[0]])):
        there: set[int] = set()
        sent: dict[int, set[int]] = {}
        for sender, receiver in pairwise(ring):
            send, receive = work.hop(
                (Kind.SEND_WEIGHTS, sender),
                (Kind.RECV_WEIGHTS, receiver),
                there,
                dropped[receiver],
            )
            sent[sender] = {send}
            work.after[runs[receiver][number][0]].add(receive)
            there = {receive}
        for stage in ring[1:]:
            after = {*runs[stage][number], *sent.get(stage, set())}
            dropped[stage] = {work.add((Kind.RESHARD, stage), after=after)}
    if work.steps[runs[ring[0]][-1][-1]][0][0] == Kind.F:
        return
    # The home may pass its own on as well.
    first = ring[:1] if rng.random() < 0.25 else []
    there = set()
    for sender, receiver in pairwise([*first, *ring[1:], ring[0]]):
        made = {runs[sender][-1][-1]}
        back = made if receiver == ring[0] and first else set()
        send, receive = work.hop(
            (Kind.SEND_GRADIENTS, sender),
            (Kind.RECV_GRADIENTS, receiver),
            there | made,
            back,
        )
        there = {receive}
        # Half of those that drop the weights last do so once what they sent is received.
        if rng.random() < 0.5:
            for drop in dropped[sender]:
                work.after[drop].add(send)


def _moved(actions: Actions, rng: random.Random) -> Actions:
    """The actions with one of their hops, or of their ends of weights, at any other place between
    what there is of its stage before and after it; hops stay in one order.
    """
    rows = [actions.row(index) for index in range(len(actions))]
    beside = [at for at, row in enumerate(rows) if row[0] in (*HOPS, Kind.RESHARD)]
    if beside:
        at = rng.choice(beside)
        row = rows.pop(at)
        is_hop = row[0] in HOPS
        own = [
            place
            for place, other in enumerate(rows)
            if other[1] == row[1] or (is_hop and other[0] in HOPS)
        ]
        begin = max((place + 1 for place in own if place < at), default=0)
        end = min((place for place in own if place >= at), default=len(rows))
        rows.insert(rng.choice([begin, end, rng.randint(begin, end)]), row)
    return in_form(rows)
