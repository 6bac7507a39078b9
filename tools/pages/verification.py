"""docs/reports/verification.md from what the tests counted, see `make explore`."""

import json
import platform
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

from tests.proof.test_processes import HANGS
from tests.proof.test_transports import ALL, KINDS, PROGRAMS_OF_A_BLOCK, SMALL
from tools.pages.tables import table

#: Where `make explore` leaves what its tests counted.
TALLY = Path(__file__).parents[2] / "build" / "tally"
INTERLEAVINGS = "test_verdicts_are_those_of_every_interleaving"
ORACLE = "test_damaged_plans_are_judged_as_by_the_oracle"
PROVED = "test_what_is_proved_ends_with_the_right_gradients"
DEADLOCKS = "test_what_deadlocks_hangs"

WHAT = {
    "random": "random ops and transfers, on 2 and 3 ranks, some with skips",
    "batched": "random batches of GPipe's transfers, which each rank cuts its own way",
    "replicated": "random pipelines, two or three, whose optimizer steps wait for the gradients of each other",
    "featured": "random ops of stage graphs, of models with microbatches of their own, or with updates by every "
    "rule of weights; with some of these: ops made again, copies to the host or to other ranks, gathers and sums, "
    "ops that overlap, costs by microbatch or by component",
    "travelling": "random pipelines, two or three, between which weights and gradients hop, some with costs or ops that "
    "overlap; hops stand elsewhere too",
    "handed over": "pipelines that run ahead of another one, on other ranks, on the same, or on some of them, also for some "
    "of the stages alone",
    "gallery": f"plans of the gallery, for numbers of ranks and microbatches {', '.join(map(str, SMALL))}",
}

PAGE = """# The verifier, held to its word

`schedc` proves a plan by one execution of it. This page is what came of holding its verdicts against others that do not
share that idea. `make explore` writes it; the tests do the same on the first block. A block is {sizes} programs
for each transport, and its number is the seed, so that any of it can be run again: `make explore BLOCKS=12..13`. A
disagreement fails the test and prints the program; it is kept in `tests/cases/disagreements.json`.

Written on {date} with Python {python}.

## Against every interleaving

`tests/support/explorer.py` steps through all states that a program can come to on a transport, written from the rules in
[transports](../transports.md) and not from the verifier. Its programs are:

{kinds}

All have up to three actions dropped, doubled, moved, swapped, made another kind, stage or microbatch, batched or issued
alone; neighbouring ops also overlap. They are drawn in `tests/support/damage.py`, `features.py` and `travelling.py`. Lanes
(`pipeline lane(i) in …`) are pipelines in a plan, and amounts of memory change no verdict.

{verdicts}

## Against an oracle

An oracle in `tests/support/strategies.py` carries out what plans compute, on hashes, and looks at the gradients; here the plans
of the whole gallery go up to four ranks and eight microbatches, and there are replicated and featured ones, and such as
pass on weights. Blocks {oracle_blocks}.

{oracle}

## On real processes

Programs ran on 2 and 3 processes of torch's gloo: by a plain interpreter in `tests/proof/test_processes.py`, by the rules of
`blocking`, of `gloo` and of `nccl-edge` (gloo without tags) and with matrices for stages; and where it takes them, by this project's own runtime. They are
random ones, batched ones and those of the gallery, as above, as far as the interpreter knows what is in them. What is
proved for these rules, or for all, must end with the gradients of one process; what is a deadlock must still hang
{hangs} s after all ranks have started. Blocks {proved_blocks} of what is proved, {deadlock_blocks} of deadlocks.

{processes}
"""


def read(
    folder: Path,
) -> tuple[dict[str, Counter[str]], dict[tuple[str, ...], set[int]]]:
    """The counts of each test over its blocks; and these blocks, by test and its other parameters."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    blocks: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        block = found["params"].pop("block")
        counts[found["test"]] += Counter(found["counts"])
        blocks[found["test"], *found["params"].values()].add(block)
    return counts, blocks


def ranges(blocks: set[int]) -> str:
    """Blocks as `make explore` takes them: `0..200`."""
    # Blocks without the one before them begin a range, those without the next one end it.
    starts = [each for each in sorted(blocks) if each - 1 not in blocks]
    ends = [each + 1 for each in sorted(blocks) if each + 1 not in blocks]
    return ", ".join(f"{start}..{end}" for start, end in zip(starts, ends, strict=True))


def page(folder: Path) -> str:
    """The page, of the counts in a folder."""
    counts, blocks = read(folder)
    found, oracle, proved, dead = (
        counts[each] for each in (INTERLEAVINGS, ORACLE, PROVED, DEADLOCKS)
    )
    verdicts: list[tuple[object, ...]] = [
        ("transport", "programs", "right", "wrong", "the verifier says otherwise")
    ]
    for each in ALL:
        right = found[f"{each} right"]
        wrong = found[f"{each} wrong"]
        verdicts.append(
            (each, right + wrong, right, wrong, found[f"{each} disagreements"])
        )
    kinds = [
        f"- {found[f'{each} programs']:,} {WHAT[each]}: blocks {ranges(blocks[INTERLEAVINGS, each])}"
        for each in KINDS
    ]
    total = oracle["right"] + oracle["wrong"]
    ran = [
        ("", "proved", "of these hang", "wrong gradients", "deadlocks", "of these end")
    ]
    for how, name in (
        ("blocking", "`blocking`"),
        ("gloo", "`gloo`"),
        ("nccl-edge", "`nccl-edge`"),
        ("runtime", "our runtime"),
    ):
        hung = (
            (dead[f"{how} deadlocks"], dead[f"{how} ended after deadlock"])
            if how != "runtime"
            else ("", "")
        )
        ran.append(
            (
                name,
                proved[f"{how} proved"],
                proved[f"{how} hangs"],
                proved[f"{how} wrong gradients"],
                *hung,
            )
        )
    return PAGE.format(
        sizes=len(KINDS) * PROGRAMS_OF_A_BLOCK,
        date=date.today(),
        python=platform.python_version(),
        kinds="\n".join(kinds),
        verdicts=table(*verdicts),
        oracle_blocks=ranges(blocks[ORACLE,]),
        oracle=table(
            ("programs", "right", "wrong", "the verifier says otherwise"),
            (total, oracle["right"], oracle["wrong"], oracle["disagreements"]),
        ),
        hangs=HANGS,
        proved_blocks=ranges(blocks[PROVED, "portable"]),
        deadlock_blocks=ranges(blocks[DEADLOCKS,]),
        processes=table(*ran),
    )


def files() -> dict[str, str]:
    """The page, by its path in the repository; the tests must have left their counts."""
    if not any(TALLY.glob("*.json")):
        raise SystemExit(f"no counts in {TALLY}: `make explore` leaves them there")
    return {"docs/reports/verification.md": page(TALLY)}
