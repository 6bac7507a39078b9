"""Damaged plans: the gallery's at small sizes and random ones, each with some actions changed, from
a fixed seed.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from attrs import evolve

from schedlang import (
    Actions,
    CompileError,
    Kind,
    Schedule,
    Source,
    compile,
    read_source,
)
from schedlang.lowering import lower
from schedlang.schedule.actions import (
    NO_MICROBATCH,
    is_collective,
    is_send,
    is_transfer,
)
from schedlang.schedule.columns import actions_of
from schedlang.schedule.frozen import in_use
from schedlang.schedule.kinds import OPS, TRANSFERS
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.graph import far_edges
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.strategies import make_schedule

#: The kinds of action that a plan can have.
KINDS = tuple(map(Kind, (*OPS, *TRANSFERS)))

Row = tuple[int, int, int, int, int]


def changed(
    schedule: Schedule, rng: random.Random, only: str | None = None
) -> Schedule:
    """One action of a schedule dropped, doubled, moved, swapped, made another one, or issued
    otherwise.

    `only` = "transfers" leaves the ops as they are.
    """
    places = [
        (rank, index)
        for rank, actions in enumerate(schedule.ranks)
        for index, kind in enumerate(actions.kind)
        if only is None or is_transfer(kind)
    ]
    if not places:
        return schedule
    rank, index = rng.choice(places)
    rows = [schedule.ranks[rank].row(each) for each in range(len(schedule.ranks[rank]))]
    CHANGES[rng.choice(list(CHANGES))](schedule, rows, index, rng)
    return evolve(
        schedule,
        ranks=(*schedule.ranks[:rank], in_form(rows), *schedule.ranks[rank + 1 :]),
    )


def in_form(rows: list[Row]) -> Actions:
    """The actions in the form of a plan: transfers are batched among themselves, and so are ops
    that overlap.
    """
    actions = Actions()
    # A change may have put ops and transfers next to each other with one number: the ops then stand
    # alone.
    batches = {row[4] for row in rows if is_transfer(row[0])}
    for row in rows:
        actions.add(
            *row[:4], row[4] if is_transfer(row[0]) == (row[4] in batches) else 0
        )
    for batch in actions.batches():
        if len(batch) == 1:
            actions.group[batch.start] = 0
    return actions


def _drop(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    del rows[index]


def _duplicate(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    rows.insert(rng.randrange(len(rows)), rows[index])


def _move(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    # Half of them a step or two away, as mistakes of people are, half of them anywhere.
    near = index + rng.choice([-2, -1, 1, 2])
    rows.insert(rng.choice([max(0, near), rng.randrange(len(rows))]), rows.pop(index))


def _swap(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    alike = [
        each
        for each, row in enumerate(rows)
        if is_transfer(row[0]) == is_transfer(rows[index][0])
    ]
    other = rng.choice(alike)
    rows[index], rows[other] = rows[other], rows[index]


def _other_kind(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    if rows[index][0] != Kind.U:
        kind = rng.choice([each for each in KINDS if each != Kind.U])
        microbatch = NO_MICROBATCH if is_collective(kind) else rows[index][2]
        rows[index] = (kind, rows[index][1], microbatch, *rows[index][3:])


def _retarget(
    schedule: Schedule, rows: list[Row], index: int, rng: random.Random
) -> None:
    rows[index] = (
        rows[index][0],
        rng.randrange(len(schedule.placement) + len(far_edges(schedule.layout))),
        *rows[index][2:],
    )


def _other_microbatch(
    schedule: Schedule, rows: list[Row], index: int, rng: random.Random
) -> None:
    if is_collective(rows[index][0]):
        return
    count = (
        schedule.layout.updates
        if rows[index][0] == Kind.U
        else schedule.microbatches * schedule.layout.slices
    )
    rows[index] = (*rows[index][:2], rng.randrange(count), *rows[index][3:])


def _group(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    run = range(index, min(index + rng.choice([2, 3]), len(rows)))
    # Transfers go as one batch, and ops overlap.
    if len({is_transfer(rows[each][0]) for each in run}) == 1:
        group = max(row[4] for row in rows) + 1
        for each in run:
            rows[each] = (*rows[each][:4], group)


def _ungroup(_: Schedule, rows: list[Row], index: int, rng: random.Random) -> None:
    rows[index] = (*rows[index][:4], 0)


CHANGES = {
    "drop": _drop,
    "duplicate": _duplicate,
    "move": _move,
    "swap": _swap,
    "kind": _other_kind,
    "retarget": _retarget,
    "microbatch": _other_microbatch,
    "group": _group,
    "ungroup": _ungroup,
}


@cache
def gallery(sizes: tuple[tuple[int, int], ...], **params: int) -> tuple[Schedule, ...]:
    """The plans of all programs at some numbers of ranks and microbatches, where these are for
    them.
    """
    plans = (_compiled(path, *size, **params) for path in GALLERY for size in sizes)
    return tuple(plan for plan in plans if plan is not None)


def _compiled(
    path: Path, ranks: int, microbatches: int, **params: int
) -> Schedule | None:
    """A program at a size, with those of some parameters that it has; None where it is for others."""
    text = read_source(path).text
    own = {name: value for name, value in params.items() if f"param {name} " in text}
    return _plan(
        path, tuple({"ranks": ranks, "microbatches": microbatches, **own}.items())
    )


@cache
def _plan(path: Path, params: tuple[tuple[str, int], ...]) -> Schedule | None:
    """Tests ask for other sizes, many of them the same."""
    try:
        return compile(read_source(path), dict(params))
    except CompileError:
        return None


#: A pipeline that runs ahead of another one, on other ranks, on the same, or on some of them.
_HANDOVERS = """schedule handovers {{
    param ranks = 2
    param microbatches = 2
    fn home(s) = {back}
    fn place(s) = {ahead}
    pipeline back runs microbatches stage s in 0 .. 3 on home(s)
    pipeline ahead runs microbatches stage s in 0 .. 2 on place(s)
    edge s in 1 .. 3 from ahead(s - 1) to back(s)
    rank r {{
        for s in 0 .. 2 {{ for m in 0 .. microbatches {{ if place(s) == r {{ F(ahead(s), m) }} }} }}
        for s in 0 .. 3 by -1 {{
            for m in 0 .. microbatches {{ if home(s) == r {{ F(back(s), m)  B(back(s), m) }} }}
        }}
    }}
}}
"""


@cache
def handed_over() -> tuple[Schedule, ...]:
    """Plans in which a pipeline runs ahead, also for some of the stages alone."""
    texts = [
        _HANDOVERS.format(back=back, ahead=ahead)
        for back, ahead in (
            ("s % 2", "1 - s"),
            ("(s + 1) % 2", "s"),
            ("s / 2", "s"),
            ("s % 2", "s"),
        )
    ]
    small = {"ranks": 2, "microbatches": 2, "layers": 2}
    return (
        *(compile(Source("handovers.sched", text)) for text in texts),
        *(
            compile(
                PROGRAMS / "roundpipe.sched",
                small | {"forwards": ahead, "backwards": back},
            )
            for ahead, back in ((1, 1), (1, 2))
        ),
    )


def handed_over_plan(rng: random.Random) -> Schedule:
    """A plan in which a pipeline hands microbatches over to another one."""
    return rng.choice(handed_over())


def random_plan(rng: random.Random) -> Schedule:
    """A plan of a few random ops and transfers, the transfers near their places, some of them in
    batches.
    """
    return scattered(lower(random_ops(rng)), rng)


def random_ops(rng: random.Random) -> Schedule:
    """A few random ops. Of three or four stages, some have a skip, or several, or are a graph, or
    two models, also with unlike numbers of microbatches. Some stages are frozen.
    """
    stages, microbatches = rng.choice([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
    ranks = rng.randint(2, min(stages, 3))
    # Every rank has a stage, in any order, and who has more of them is drawn.
    placement = tuple(
        rng.sample(
            [*range(ranks), *rng.choices(range(ranks), k=stages - ranks)], stages
        )
    )
    cut = rng.randrange(1, stages) if rng.random() < 0.3 else 0
    whole = Pipeline("", 0, stages, microbatches)
    models = (whole,)
    if cut:
        other = rng.choice([microbatches, microbatches, 1, 2])
        models = (
            Pipeline("first", 0, cut, microbatches),
            Pipeline("second", cut, stages, other),
        )
    is_one = models[0].microbatches == models[-1].microbatches
    # Nothing leads to a model with another number of microbatches.
    every = [
        (earlier, later)
        for later in range(stages)
        for earlier in range(later)
        if is_one or later < cut or cut <= earlier
    ]
    pairs = [pair for pair in every if pair[0] < pair[1] - 1 or pair[1] == cut]
    skips = tuple(rng.sample(pairs, rng.randint(0, len(pairs))))
    edges: tuple[tuple[int, int], ...] = ()
    if stages > 2 and every and rng.random() < 0.5:
        edges = tuple(rng.sample(every, rng.randint(1, len(every))))
        skips = tuple(skip for skip in skips if skip not in edges)
    frozen: tuple[int, ...] = ()
    if rng.random() < 0.4:
        frozen = tuple(sorted(rng.sample(range(stages), rng.randint(1, stages - 1))))
    # Where something may lead from one model to the other, ops are done in the order of one.
    ops = _ops((whole,) if is_one else models, placement, ranks, rng)
    schedule = make_schedule(placement, microbatches, ops, skips, edges=edges)
    layout = evolve(schedule.layout, pipelines=models, models=bool(cut))
    return with_frozen(evolve(schedule, layout=layout), frozen)


def scattered(schedule: Schedule, rng: random.Random) -> Schedule:
    """A plan with some of its transfers elsewhere, or in batches."""
    return evolve(
        schedule,
        ranks=tuple(_scattered(schedule, each, rng) for each in schedule.ranks),
    )


def with_frozen(schedule: Schedule, frozen: tuple[int, ...]) -> Schedule:
    """The ops of a schedule that are left where some stages are frozen."""
    layout = evolve(schedule.layout, frozen=frozen)
    left = in_use(schedule.columns, layout)
    return evolve(schedule, layout=layout, ranks=actions_of(len(schedule.ranks), left))


def batched_plan(rng: random.Random) -> Schedule:
    """GPipe with its transfers in batches, which each rank cuts its own way: a batch meets parts of
    several.
    """
    stages, microbatches = rng.choice([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3)])
    ranks = []
    for stage in range(stages):
        ops = {
            kind: [(kind, stage, each, 0) for each in range(microbatches)]
            for kind in Kind
        }
        before = stage > 0
        after = stage < stages - 1
        # All forwards, then all transfers with the next rank, then all backwards.
        turn = [*ops[Kind.SEND_F], *ops[Kind.RECV_B]] if after else []
        if rng.random() < 0.5:
            turn.sort(key=lambda op: op[2])
        rows = [(*op, 0) for op in ops[Kind.F]]
        rows = (
            _in_batches(ops[Kind.RECV_F] if before else [], 100, rng)
            + rows
            + _in_batches(turn, 200, rng)
        )
        rows += [(*op, 0) for op in ops[Kind.B]] + _in_batches(
            ops[Kind.SEND_B] if before else [], 300, rng
        )
        ranks.append(in_form(rows))
    return make_schedule(tuple(range(stages)), microbatches, tuple(ranks))


def replicated_plan(rng: random.Random) -> Schedule:
    """Two or three pipelines of one or two stages each, whose optimizer steps stand anywhere behind
    their gradients.
    """
    sizes = rng.choice([(1, 2, 2), (1, 3, 2), (1, 3, 3), (2, 2, 2), (2, 2, 3)])
    return lower(updated_ops(sizes, 1, rng))


def updated_ops(
    sizes: tuple[int, int, int], updates: int, rng: random.Random
) -> Schedule:
    """Pipelines of some stages each, so many, on some ranks, with a microbatch for each update."""
    pieces, count, ranks = sizes
    stages = pieces * count
    placement = tuple(
        rng.sample(
            [*range(ranks), *rng.choices(range(ranks), k=stages - ranks)], stages
        )
    )
    pipelines = tuple(
        Pipeline(f"p{each}", each * pieces, (each + 1) * pieces, updates)
        for each in range(count)
    )
    programs = _ops(pipelines, placement, ranks, rng)
    ranks_updated = tuple(_updated(each, updates, rng) for each in programs)
    schedule = make_schedule(placement, count * updates, ranks_updated)
    return evolve(schedule, layout=Layout(placement, pipelines, updates=updates))


def _updated(actions: Actions, updates: int, rng: random.Random) -> Actions:
    """The ops of a rank with optimizer steps, each mostly right behind the last gradient of its
    stage and update, or further back.
    """
    rows = [actions.row(index) for index in range(len(actions))]
    for stage in {row[1] for row in rows}:
        for update in range(updates):
            gradients = [
                (row[2], index)
                for index, row in enumerate(rows)
                if row[0] in (Kind.B, Kind.W) and row[1] == stage
            ]
            last = max(index for unit, index in gradients if unit == update)
            bound = min(
                (index for _, index in gradients if index > last), default=len(rows)
            )
            at = last + 1 if rng.random() < 0.4 else rng.randint(last + 1, bound)
            rows.insert(
                at, (Kind.U, stage, update if updates > 1 else NO_MICROBATCH, 0, 0)
            )
    return in_form(rows)


def _in_batches(
    ops: list[tuple[int, int, int, int]], group: int, rng: random.Random
) -> list[Row]:
    """Transfers cut into batches of two and more."""
    cuts = [at for at in range(2, len(ops) - 1, 2) if rng.random() < 0.5]
    return [(*op, group + sum(at >= cut for cut in cuts)) for at, op in enumerate(ops)]


def _ops(
    pipelines: tuple[Pipeline, ...],
    placement: tuple[int, ...],
    ranks: int,
    rng: random.Random,
) -> tuple[Actions, ...]:
    """Ops in the order in which one random execution does them."""
    programs = tuple(Actions() for _ in range(ranks))
    chains = [
        _chain(pipeline, each, rng)
        for pipeline in pipelines
        for each in range(pipeline.microbatches)
    ]
    _interleave(chains, placement, programs, rng)
    return programs


def _chain(
    pipeline: Pipeline, microbatch: int, rng: random.Random
) -> list[tuple[Kind, int, int]]:
    """The forwards and backwards of a microbatch, some of these in halves."""
    stages = range(pipeline.start, pipeline.stop)
    halves = {stage: rng.random() < 0.3 for stage in stages}
    chain = [(Kind.F, stage) for stage in stages]
    chain += [
        (Kind.I if halves[stage] else Kind.B, stage) for stage in reversed(stages)
    ]
    return [(kind, stage, microbatch) for kind, stage in chain]


def _interleave(
    work: list[list[tuple[Kind, int, int]]],
    placement: tuple[int, ...],
    programs: tuple[Actions, ...],
    rng: random.Random,
) -> None:
    """Do chains of ops, a random one's next op at a time, with weight halves at any time after."""
    while work := [each for each in work if each]:
        order = rng.choice(work)
        kind, stage, microbatch = order.pop(0)
        programs[placement[stage]].add(kind, stage, microbatch, 0)
        if kind == Kind.I:
            work.append([(Kind.W, stage, microbatch)])


def _scattered(schedule: Schedule, actions: Actions, rng: random.Random) -> Actions:
    """The actions with a few transfers moved, sends to later places and receives to any; neighbours
    made batches.
    """
    rows = [actions.row(index) for index in range(len(actions))]
    if rng.random() < 0.5:
        rows = _received_late(schedule, rows)
    # Plans of all sorts: as they are, with some transfers moved, and with many.
    moved = rng.choice([0, 0.1, 0.4])
    batched = rng.choice([0, 0.3, 0.7])
    for row in [row for row in rows if is_transfer(row[0]) and rng.random() < moved]:
        at = rows.index(row)
        step = 1 if is_send(row[0]) else rng.choice([-1, 1])
        rows.insert(max(0, at + step * rng.randint(1, 3)), rows.pop(at))
    for at in range(1, len(rows)):
        if (
            is_transfer(rows[at - 1][0])
            and is_transfer(rows[at][0])
            and rng.random() < batched
        ):
            group = rows[at - 1][4] or at
            for place in (at - 1, at):
                rows[place] = (*rows[place][:4], group)
    return in_form(rows)


def _received_late(schedule: Schedule, rows: list[Row]) -> list[Row]:
    """The actions with every receive right before the op that needs it, as people write them first."""
    receives = {row[:3]: row for row in rows if row[0] in (Kind.RECV_F, Kind.RECV_B)}
    found: list[Row] = []
    for row in (row for row in rows if row[:3] not in receives):
        if row[0] in (Kind.F, Kind.B, Kind.I):
            need = Kind.RECV_F if row[0] == Kind.F else Kind.RECV_B
            wanted = [
                (need, number, row[2])
                for number in schedule.layout.numbers(need, row[1])
            ]
            found += [receives[each] for each in wanted if each in receives]
        found.append(row)
    return found


def damaged_plans(
    draw: Callable[[random.Random], Schedule],
    count: int,
    rng: random.Random,
    only: str | None = "transfers",
) -> Iterator[Schedule]:
    """Plans as they are drawn, with up to three changes, of which most are `only` so."""
    for _ in range(count):
        plan = draw(rng)
        which = rng.choice([None, only, only, only])
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            plan = changed(plan, rng, which)
        yield plan


def one_of(plans: tuple[Schedule, ...]) -> Callable[[random.Random], Schedule]:
    return lambda rng: rng.choice(plans)
