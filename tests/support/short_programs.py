"""Programs of a few ops in any order, right and wrong ones, from a fixed seed."""

import random
from collections.abc import Iterator

from schedlang import Source

_STAGES = "stage t in 0 .. 4 on min(t, 3 - t)"
_PIPELINES = "pipeline a runs 1 stage t in 0 .. 2 on t pipeline b runs 3 stage t in 0 .. 2 on 1 - t"


def _op(rng: random.Random, names_stage: bool, microbatches: list[str]) -> str:
    """An op; sometimes wrong."""
    # As often as in programs, more or less: most programs should come as far as their expansion.
    word = rng.choice(
        ["F"] * 8 + ["B"] * 6 + ["BW"] * 2 + ["W"] * 4 + ["R", "U", "offload"]
    )
    if rng.random() < 0.1:
        word = rng.choice(["send F", "recv F", "send B"])
    if word in ("W", "U") and rng.random() < 0.5:
        return word
    stage = [rng.choice(["r", "3 - r"] if rng.random() < 0.97 else ["0", "-1", "9"])]
    if word == "U":
        return f"U({stage[0]})" if names_stage else "U"
    return f"{word}({', '.join([*(stage if names_stage else []), rng.choice(microbatches)])})"


def short_programs() -> Iterator[Source]:
    """Programs of one or two stages per rank, of ops that say all or leave some open."""
    rng = random.Random(0)
    for number in range(1000):
        names_stage = rng.random() < 0.5
        microbatches = rng.choice(
            [["next"], ["next"], ["0", "1", "2", "3"], ["next", "0", "9"]]
        )
        lines = []
        for _ in range(rng.randrange(1, 9)):
            ops = [
                _op(rng, names_stage, microbatches)
                for _ in range(rng.choice([1, 1, 2, 3]))
            ]
            # `send F` and others with a blank cannot overlap.
            alone = len(ops) == 1 or any(" " in each.partition("(")[0] for each in ops)
            line = ops[0] if alone else f"overlap {{ {' '.join(ops)} }}"
            lines.append(
                f"repeat {rng.choice('123')} {{ {line} }}"
                if rng.random() < 0.3
                else line
            )
        head = rng.choice(
            [_STAGES, _PIPELINES] if names_stage else ["", "", "", _STAGES]
        )
        head = f"param ranks = 2 param microbatches = 4 {head}"
        yield Source(
            f"{number}.sched", f"schedule s {{ {head} rank r {{ {' '.join(lines)} }} }}"
        )
