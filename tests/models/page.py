"""docs/model-table.md from the rows that tests have left: `python -m tests.models.page FOLDER`, see
`make models`.
"""

import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import torch
import transformers

from tests.models.features import FEATURES
from tests.models.rows import random_rows, read_row
from tests.models.schedules import MAKERS, column
from tests.models.verdicts import (
    ASKED,
    EQUAL,
    NOT_ALONE,
    NOT_FOR,
    REFUSED,
    ROUNDING,
    Verdict,
)

PAGE = """# Models under schedules

What a model does in its forward, and what a script does around it, under schedules of every kind: trained in a pipeline
on 2 to 4 processes, and alone in one process, which takes each microbatch forward and back through all stages. Compared
are the losses of all microbatches, the gradients and whether there are any, the weights, the buffers, and what hooks
have seen. `make models` runs all of it and writes this page; `make test` runs a part. The models are in
`tests/models/families`.

- `=` is equal to the bit,
- `~` is equal to rounding: where the schedule adds up gradients in another order (two pipelines, slices), or the type is
  narrower than float64,
- a number is a refusal: the run ends with the message below that has this number,
- a number with a question mark is a question: the run trains what the stages say by themselves, and asks whether that is
  what is meant,
- `-` is where the schedule has no such stages: slices and skips ask for more than one tensor between stages can say.

{totals}

{random}

Written with torch {torch} and transformers {transformers}.

{sizes}

{tables}

## Refusals and questions

{notes}
"""


class Notes:
    """The messages, each with a number; those that differ in numbers only have one."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.words: list[str] = []

    def number(self, words: str) -> int:
        """The number of a message."""
        # Where it happened is another matter in each cell; what happened is the message.
        words = re.sub(r"^rank \d+ failed at \S+ \([^)]*\): ", "", words)
        key = re.sub(r"\d+", "0", words)
        if key not in self.numbers:
            self.numbers[key] = len(self.words) + 1
            self.words.append(words)
        return self.numbers[key]


def _cell(verdict: Verdict, notes: Notes) -> str:
    if verdict.kind in (EQUAL, ROUNDING, NOT_FOR):
        return verdict.kind
    if verdict.kind == REFUSED:
        return str(notes.number(verdict.words))
    if verdict.kind == ASKED:
        return f"{notes.number(verdict.words)}?"
    return f"**{verdict.kind}**"


def page(folder: Path) -> str:
    """The page of all rows; every feature must have one."""
    notes = Notes()
    counts: Counter[str] = Counter()
    tables = []
    for family, features in groupby(FEATURES.values(), lambda feature: feature.family):
        lines = [f"## {family.capitalize()}", ""]
        lines.append(f"| | {' | '.join(f'`{name}`' for name in MAKERS)} |")
        lines.append(f"| --- |{' :-: |' * len(MAKERS)}")
        for feature in features:
            row = read_row(folder, feature.name)
            if row is None:
                raise SystemExit(
                    f"there is no row of this code for `{feature.name}` in {folder}"
                )
            counts.update(verdict.kind for verdict in row.values())
            cells = " | ".join(_cell(row[name], notes) for name in MAKERS)
            lines.append(f"| {feature.words} | {cells} |")
        tables.append("\n".join(lines))
    return PAGE.format(
        totals=_totals(counts),
        random=_random(folder),
        torch=torch.__version__,
        transformers=transformers.__version__,
        sizes=_sizes(),
        tables="\n\n".join(tables),
        notes="\n".join(
            f"{number}. {words}" for number, words in enumerate(notes.words, 1)
        ),
    )


def _totals(counts: Counter[str]) -> str:
    cells = counts.total() - counts[NOT_FOR]
    others = cells - sum(counts[kind] for kind in (EQUAL, ROUNDING, REFUSED, ASKED))
    return (
        f"Of {cells:,} pairs, {counts[EQUAL]:,} are equal to the bit, {counts[ROUNDING]:,} to "
        f"rounding, {counts[REFUSED]:,} are refused, {counts[ASKED]:,} are asked about, and "
        f"{others:,} are none of these."
    )


def _random(folder: Path) -> str:
    """What became of random models; those with what a schedule cannot have are left out."""
    rows = random_rows(folder)
    if not rows:
        return "`make models RANDOM=20000` also tries models that hypothesis makes of these features."
    counts = Counter(verdict.kind for row in rows for verdict in row.values())
    counts = Counter(
        {kind: counts[kind] for kind in counts if kind not in (NOT_FOR, NOT_ALONE)}
    )
    others = counts.total() - sum(
        counts[kind] for kind in (EQUAL, ROUNDING, REFUSED, ASKED)
    )
    return (
        f"Of {counts.total():,} models that hypothesis made of these features, under schedules that "
        f"it picked, {counts[EQUAL]:,} are equal to the bit, {counts[ROUNDING]:,} to rounding, "
        f"{counts[REFUSED]:,} are refused, {counts[ASKED]:,} are asked about, and {others:,} are "
        "none of these."
    )


def _sizes() -> str:
    """Of each schedule the ranks, stages and microbatches."""
    lines = [
        "| schedule | ranks | stages | microbatches |",
        "| --- | --: | --: | --: |",
    ]
    for name in MAKERS:
        plan = column(name).plan
        sizes = len(plan.ranks), plan.layout.pieces, plan.microbatches
        lines.append(f"| `{name}` | {' | '.join(map(str, sizes))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
