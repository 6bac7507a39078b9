"""The columns of the table: schedules at small sizes, and what they mean for a training."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from random import Random

from attrs import frozen

from schedlang import CompileError, Source
from schedlang.plan.plan import Plan
from schedlang.schedule.kinds import Kind
from tests.support.models import DELAYS, program
from tests.support.paths import GALLERY
from tests.support.plans import compiled

# Nothing in the gallery has all of these: recomputed forwards whose backwards are split,
SPLIT_RECOMPUTE = """schedule split_recompute {
    param ranks = 2
    param microbatches = 4
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { R(m)  I(m) }
        for m in 0 .. microbatches { W(m) }
    }
}
"""
# and the same with late weights.
LATE_SPLIT = """schedule late_split {
    param ranks = 3
    param microbatches = 2
    weights delay(1)
    rank r {
        let ahead = ranks - 1 - r
        warmup { for m in 0 .. ahead { F(m) } }
        steady {
            for m in 0 .. microbatches { F(m + ahead)  if m % 2 == 0 { R(m) }  I(m) }
            for m in 0 .. microbatches { W(m) }
            U
        }
    }
}
"""
# A fork and a join, of which one way is recomputed.
DIAMOND = """schedule diamond {
    param ranks = 4
    param microbatches = 3
    edge s in 1 .. 3 from 0 to s
    edge s in 1 .. 3 from s to 3
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { if r == 2 { R(m) }  I(m) }
        for m in 0 .. microbatches { W(m) }
    }
}
"""

# Two stages on each rank, which hand on within it, too; every second microbatch is recomputed.
CHUNKS_RECOMPUTE = """schedule chunks_recompute {
    param ranks = 2
    param microbatches = 4
    import "lib/v.sched"
    rank r {
        for m in 0 .. microbatches { F(stage(0), m) }
        for m in 0 .. microbatches { F(stage(1), m) }
        for m in 0 .. microbatches { if m % 2 == 1 { R(stage(1), m) }  B(stage(1), m) }
        for m in 0 .. microbatches { if m % 2 == 0 { R(stage(0), m) }  B(stage(0), m) }
    }
}
"""
# Skips, and slices, whose stages are recomputed.
SKIPS_RECOMPUTE = """schedule skips_recompute {
    param ranks = 3
    param microbatches = 3
    skip s in 0 .. 1 from s to 2
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { R(m)  B(m) }
    }
}
"""
SLICES_RECOMPUTE = """schedule slices_recompute {
    param ranks = 2
    param microbatches = 2
    param slices = 2
    rank r {
        for m in 0 .. microbatches { for s in 0 .. slices { F(m, s) } }
        for m in 0 .. microbatches {
            for s in 0 .. slices { let back = slices - 1 - s  R(m, back)  B(m, back) }
        }
    }
}
"""
# Stages before the first trained one, which have no backward.
FROZEN_RECOMPUTE = """schedule frozen_recompute {
    param ranks = 4
    param microbatches = 3
    frozen 0 .. 2
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { if r > 1 { R(m)  B(m) } }
    }
}
"""

#: Its forwards read the same versions as PipeDream's; only its backwards read others.
_DELAYS = DELAYS | {"pipemare": DELAYS["pipedream"]}


@frozen(eq=False)
class Column:
    """A schedule at one size; by how many updates the weights of each stage of a pipeline are late."""

    name: str
    plan: Plan
    delays: list[int]


def gallery(name: str, updates: int = 1, **params: int) -> Column:
    """A program of the gallery; one without a flush is for some updates."""
    plan = _for_updates(program(name, **params), updates)
    ranks = len(plan.ranks)
    delays = _DELAYS[name](ranks) if name in _DELAYS else [0] * plan.layout.pieces
    return Column(name, plan, delays)


def own(text: str, updates: int = 1, delay: int = 0) -> Column:
    """A program that stands here."""
    name = text.split()[1]
    plan = _for_updates(compiled(Source(f"{name}.sched", text), {}), updates)
    return Column(name, plan, [delay] * plan.layout.pieces)


def _for_updates(plan: Plan, updates: int) -> Plan:
    return plan.for_updates(max(updates, plan.layout.updates)) if plan.kernels else plan


MAKERS: Mapping[str, Callable[[], Column]] = {
    "gpipe": partial(gallery, "gpipe", ranks=2, microbatches=4),
    "1f1b": partial(gallery, "1f1b", ranks=3, microbatches=4),
    "interleaved_1f1b": partial(gallery, "interleaved_1f1b", ranks=2, microbatches=4),
    "zb_h1": partial(gallery, "zb_h1", ranks=3, microbatches=4),
    "zb_v": partial(gallery, "zb_v", ranks=2, microbatches=4),
    "1f1b_recompute": partial(gallery, "1f1b_recompute", ranks=3, microbatches=4),
    "split_recompute": partial(own, SPLIT_RECOMPUTE),
    "pipe_offload": partial(gallery, "pipe_offload", ranks=2, microbatches=4),
    "pipedream_2bw": partial(gallery, "pipedream_2bw", 3, ranks=3, microbatches=2),
    "pipedream": partial(gallery, "pipedream", 4, ranks=3, microbatches=1),
    "pipemare": partial(gallery, "pipemare", 4, ranks=3, microbatches=1),
    "late_split": partial(own, LATE_SPLIT, 3, delay=1),
    "dualpipe": partial(gallery, "dualpipe", ranks=2, microbatches=4),
    "chimera": partial(gallery, "chimera", ranks=4, microbatches=4),
    "unet_1f1b": partial(gallery, "unet_1f1b", ranks=3, microbatches=4),
    "frozen_1f1b": partial(gallery, "frozen_1f1b", ranks=3, microbatches=4),
    "diamond": partial(own, DIAMOND),
    "seq1f1b": partial(gallery, "seq1f1b", ranks=2, microbatches=3, slices=2),
}

#: Schedules that recompute forwards: all of the gallery, and of every kind of what stages hand on.
RECOMPUTING: Mapping[str, Callable[[], Column]] = {
    "infinipipe": partial(gallery, "infinipipe", ranks=3, microbatches=4),
    "mario": partial(gallery, "mario", ranks=3, microbatches=4),
    "chunks_recompute": partial(own, CHUNKS_RECOMPUTE),
    "skips_recompute": partial(own, SKIPS_RECOMPUTE),
    "slices_recompute": partial(own, SLICES_RECOMPUTE),
    "frozen_recompute": partial(own, FROZEN_RECOMPUTE),
    **{
        name: MAKERS[name]
        for name in ("1f1b_recompute", "split_recompute", "late_split", "diamond")
    },
}


#: Programs of the gallery that no random column is made of: other trainings than that of one model
#: on one batch, or with weights that are late by rules of their own; WPipe, whose updates cannot be
#: clipped; and RoundPipe, which runs forwards twice, and refuses random numbers.
_NOT_DRAWN = {
    "decoding",
    "distillation",
    "forward_only",
    "pipedream_replicated",
    "pipemare",
    "rlhf",
    "roundpipe",
    "terapipe",
    "two_encoders",
    "weipipe",
    "wpipe",
}


def draw_column(draw: Random) -> str:
    """The name of a column at random: a schedule at a size that it is for, on 2 to 4 ranks."""
    programs = [path.stem for path in GALLERY if path.stem not in _NOT_DRAWN]
    own = [
        name for name in RECOMPUTING | MAKERS if name not in {*programs, *_NOT_DRAWN}
    ]
    program = draw.choice([*programs, *own])
    while program in programs:
        sizes = f"ranks={draw.randint(2, 4)} microbatches={draw.randint(1, 8)}"
        try:
            column(f"{program} {sizes}")
        except CompileError:
            continue
        return f"{program} {sizes}"
    return program


#: How many updates a plan has that goes on without a flush: more than the oldest weights are late.
_UPDATES = 4


@cache
def column(name: str) -> Column:
    """A column by its name, or a program of the gallery with its parameters: `zb_v ranks=2`. The
    process that asks for the trainings compiles, and no rank does.
    """
    if name in RECOMPUTING | MAKERS:
        return (RECOMPUTING | MAKERS)[name]()
    of_gallery, *params = name.split()
    sizes = {
        key: int(value) for key, _, value in (each.partition("=") for each in params)
    }
    return gallery(of_gallery, _UPDATES, **sizes)


Op = tuple[int, int]


def forwards(plan: Plan) -> list[Op]:
    """All forwards, as stage and microbatch (or slice of one), in an order in which each rank runs
    its own as the plan says: the earliest microbatches first.
    """
    ahead = [
        [
            (stage, unit)
            for kind, stage, unit in zip(
                rank.kind, rank.stage, rank.microbatch, strict=True
            )
            if kind == Kind.F
        ]
        for rank in plan.ranks
    ]
    done: list[Op] = []
    layout = plan.layout
    # The next forward of each rank whose inputs are all there; of these the earliest microbatch.
    while any(ahead):
        ready = [
            ops
            for ops in ahead
            if ops
            and all(
                (earlier, ops[0][1]) in done for earlier in layout.before[ops[0][0]]
            )
        ]
        rank = min(ready, key=lambda ops: (ops[0][1], ops[0][0]))
        done.append(rank.pop(0))
    return done


def natural(plan: Plan) -> list[Op]:
    """All forwards as a script has them: one microbatch after the other, through all stages."""
    ops = [op for op in forwards(plan)]
    pipeline_of = plan.layout.pipeline_of
    return sorted(ops, key=lambda op: (op[1], pipeline_of[op[0]].start, op[0]))
