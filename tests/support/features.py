"""Random plans with what the language has beside forwards, backwards and transfers: ops made again,
copies that other ranks keep, gathers and sums, ops that overlap, updates by every rule of weights,
and costs by microbatch.
"""

import random
from collections.abc import Callable, Collection
from itertools import pairwise

from attrs import evolve

from schedlang import Actions, Costs, Kind, Schedule
from schedlang.lowering import lower
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.schedule import WeightRule
from tests.support.damage import Row, in_form, random_ops, scattered, updated_ops
from tests.support.graph import pieces

#: Some ops take no time.
TIMES = (0.0, 0.5, 1.0, 1.0, 2.0, 3.5)
#: What ops are made of, so that two of them overlap; each of these uses the two resources.
COMPONENTS = {
    "F": ["attention 1 compute", "dispatch 2 network"],
    "B": ["combine 1 network", "attention 2 compute"],
    "I": ["attention 1 compute"],
}
USES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
GRADIENTS = (Kind.B, Kind.W)


def featured_plan(rng: random.Random) -> Schedule:
    """A plan with some of all these, of a stage graph or several models, or with updates; its
    transfers where the compiler puts them, or scattered.
    """
    schedule = random_ops(rng)
    if rng.random() < 0.5:
        sizes = rng.choice(
            [(2, 1, 2), (3, 1, 2), (1, 2, 2), (1, 3, 3), (2, 2, 2), (2, 2, 3)]
        )
        schedule = _with_rules(updated_ops(sizes, rng.choice([1, 2]), rng), rng)
    schedule = with_features(schedule, rng)
    if rng.random() < 0.5:
        schedule = with_overlaps(schedule, rng)
    if rng.random() < 0.05:
        # A rank may be to keep its own.
        keepers = tuple(rng.randrange(len(schedule.ranks)) for _ in schedule.ranks)
        schedule = evolve(schedule, layout=evolve(schedule.layout, keepers=keepers))
    plan = lower(schedule)
    return scattered(plan, rng) if rng.random() < 0.3 else plan


def _with_rules(schedule: Schedule, rng: random.Random) -> Schedule:
    """With rules of weights: mostly one for all stages, or else any for each."""
    rules = [*map(WeightRule, ("latest", "stash", "unstashed")), WeightRule("delay", 1)]
    stages = len(schedule.placement)
    is_one = rng.random() < 0.8
    weights = (
        (rng.choice(rules),) * stages if is_one else tuple(rng.choices(rules, k=stages))
    )
    return evolve(schedule, weights=weights)


def with_features(schedule: Schedule, rng: random.Random) -> Schedule:
    """The ops of a schedule with more beside them, all in their places, but where replicas come to
    gathers and sums; and with costs.
    """
    ranks = len(schedule.ranks)
    layout = schedule.layout
    if ranks > 1 and rng.random() < 0.5:
        keepers = tuple(
            rng.choice([other for other in range(ranks) if other != rank])
            for rank in range(ranks)
        )
        layout = evolve(layout, keepers=keepers)
    if rng.random() < 0.3:
        layout = evolve(layout, links=tuple(rng.randrange(ranks) for _ in range(ranks)))
    schedule = evolve(schedule, layout=layout, costs=random_costs(schedule, rng))
    # Replicas in two orders of both are mostly wrong: they have one of them.
    chosen = rng.choice([(), ("gathers",), ("sums",), ("gathers", "sums")])
    if _has_replicas(schedule):
        chosen = chosen[:1]
    lists = [
        [actions.row(i) for i in range(len(actions))] for actions in schedule.ranks
    ]
    lists = [_again(schedule, rows, rng) for rows in lists]
    order = [stage for stage in range(layout.pieces) if rng.random() < 0.8]
    rng.shuffle(order)
    return with_events(
        evolve(schedule, ranks=tuple(map(in_form, lists))), chosen, order, rng
    )


def with_events(
    schedule: Schedule, chosen: Collection[str], order: list[int], rng: random.Random
) -> Schedule:
    """The ops of a schedule with `gathers` or `sums` of some stages, or both; all ranks in one order
    of the stages.
    """
    lists = [
        [actions.row(i) for i in range(len(actions))] for actions in schedule.ranks
    ]
    for what, write in (("gathers", _gathered), ("sums", _summed)):
        if what in chosen:
            twice = rng.random() < 0.5
            lists = [write(schedule, rows, order, twice, rng) for rows in lists]
    return evolve(schedule, ranks=tuple(map(in_form, lists)))


def _has_replicas(schedule: Schedule) -> bool:
    return len(pieces(schedule.layout, 0)) > 1


def _again(schedule: Schedule, rows: list[Row], rng: random.Random) -> list[Row]:
    """With recomputations and copies of some activations, anywhere between forward and backward."""
    backwards = [row for row in rows if row[0] in (Kind.B, Kind.I)]
    for backward in backwards:
        _, stage, unit, *_ = backward
        if not schedule.layout.has_backward[stage]:
            continue
        more = rng.choice([(), (), (), (), (Kind.R,), (Kind.OFFLOAD, Kind.RELOAD)])
        at = (
            next(i for i, row in enumerate(rows) if row[:3] == (Kind.F, stage, unit))
            + 1
        )
        for kind in more:
            at = rng.randint(at, rows.index(backward))
            rows.insert(at, (kind, stage, unit, 0, 0))
            at += 1
    return rows


#: What is put before some place of a list.
Insertions = list[tuple[int, Row]]


def _with(rows: list[Row], insertions: Insertions) -> list[Row]:
    """Rows with others before some of their places; those of one place in the order of a list."""
    found: list[Row] = []
    for place in range(len(rows) + 1):
        found += [row for at, row in insertions if at == place]
        found += rows[place : place + 1]
    return found


def _of_stage(kind: Kind, stage: int) -> Row:
    return (kind, stage, NO_MICROBATCH, 0, 0)


def _held(schedule: Schedule, rows: list[Row], order: list[int]) -> list[int]:
    """The stages of a rank's rows, by an order of the pieces that they are."""
    found = {row[1] for row in rows}
    piece = {stage: pieces(schedule.layout, stage)[0] for stage in found}
    return sorted(
        (s for s in found if piece[s] in order), key=lambda s: order.index(piece[s])
    )


def _gathered(
    schedule: Schedule,
    rows: list[Row],
    order: list[int],
    twice: bool,
    rng: random.Random,
) -> list[Row]:
    """With the gathers of some stages, dropped before each update, and if `twice` between forwards
    and backwards; all ranks in one order of the stages.
    """
    begins: list[tuple[int, int, int, int]] = []
    ends: Insertions = []
    for stage in _held(schedule, rows, order):
        runs = [[]]
        for at, (kind, own, *_) in enumerate(rows):
            if own != stage or kind not in (*USES, Kind.U):
                continue
            if kind == Kind.U or (
                twice and runs[-1] and kind != Kind.F and _is_first(rows, at)
            ):
                runs.append([])
            if kind != Kind.U:
                runs[-1].append(at)
        before = 0
        for number, run in enumerate(filter(None, runs)):
            begins.append((number, stage, before, run[0]))
            bound = next(
                (i for i in range(run[-1] + 1, len(rows)) if rows[i][1] == stage), None
            )
            before = rng.randint(run[-1] + 1, len(rows) if bound is None else bound)
            ends.append((before, _of_stage(Kind.RESHARD, stage)))
    inserted: Insertions = []
    at = 0
    for _, stage, before, first in sorted(begins, key=lambda each: each[0]):
        # Those of replicas one behind the other, where that is not too late.
        at = (
            rng.randint(min(max(at, before), first), first)
            if rng.random() < 0.8
            else first
        )
        inserted.append((at, _of_stage(Kind.UNSHARD, stage)))
    return _with(rows, ends + inserted)


def _is_first(rows: list[Row], at: int) -> bool:
    """Whether an op is the first backward, or the first op made again, of its stage."""
    stage = rows[at][1]
    return not any(
        row[1] == stage and row[0] in (*GRADIENTS, Kind.I, Kind.R) for row in rows[:at]
    )


def _summed(
    schedule: Schedule,
    rows: list[Row],
    order: list[int],
    twice: bool,
    rng: random.Random,
) -> list[Row]:
    """With the sums of some stages, before each update and at the end; and without replicas, if
    `twice`, others between.
    """
    inserted: Insertions = []
    at = 0
    for stage in _held(schedule, rows, order):
        own = [(i, row[0]) for i, row in enumerate(rows) if row[1] == stage]
        updates = [i for i, kind in own if kind == Kind.U]
        for begin, bound in pairwise([0, *updates, len(rows)]):
            adds = [i for i, kind in own if kind in GRADIENTS and begin <= i < bound]
            if not adds:
                continue
            after = adds[-1] + 1
            at = (
                rng.randint(after, bound)
                if rng.random() < 0.3
                else min(max(at, after), bound)
            )
            inserted.append((at, _of_stage(Kind.REDUCE_GRAD, stage)))
            if twice and len(adds) > 1 and not _has_replicas(schedule):
                early = rng.choice(adds[:-1]) + 1
                inserted.append((early, _of_stage(Kind.REDUCE_GRAD, stage)))
    return _with(rows, inserted)


def with_overlaps(schedule: Schedule, rng: random.Random) -> Schedule:
    """With a few neighbours that run as one, mostly such as need nothing of each other."""

    def overlapped(actions: Actions) -> Actions:
        rows = [actions.row(i) for i in range(len(actions))]
        for at in (
            rng.sample(range(1, len(rows)), min(2, len(rows) - 1)) if rows else ()
        ):
            pair = rows[at - 1 : at + 1]
            is_alike = pair[0][1:3] == pair[1][1:3]
            if any(kind not in (*USES, Kind.U) for kind, *_ in pair) or is_alike:
                continue
            for place in (at - 1, at):
                rows[place] = (*rows[place][:4], rows[at - 1][4] or at)
        return in_form(rows)

    return evolve(schedule, ranks=tuple(map(overlapped, schedule.ranks)))


def random_costs(schedule: Schedule, rng: random.Random) -> Costs:
    """Costs of which some are by microbatch, and some are left open."""
    layout = schedule.layout
    stages = range(len(layout.placement))

    def time() -> float:
        return rng.choice(TIMES)

    def by_stage() -> tuple[float, ...]:
        return tuple(time() for _ in stages)

    def by_microbatch() -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(time() for _ in range(layout.units_of_update(stage)))
            for stage in stages
        )

    drawn: dict[str, Callable[[], object]] = {
        **{
            f"{op}_times": by_microbatch
            for op in ("forward", "backward", "input", "weight")
        },
        **{f"{op}_times": by_microbatch for op in ("recompute", "offload", "reload")},
        **{f"{what}_times": by_stage for what in ("update", "sum", "gather")},
        "p2p_time": time,
    }
    costs = {name: draw() for name, draw in drawn.items() if rng.random() < 0.4}
    together = rng.choice(["overlap_times", "components", None])
    if together == "overlap_times":
        costs[together] = by_stage()
    elif together == "components":
        costs[together] = COMPONENTS
    return Costs(**costs)
