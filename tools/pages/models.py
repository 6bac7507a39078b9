"""docs/reports/model-table.md from the rows that tests have left, see `make models`."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
import transformers

from tests.models.model import FEATURES
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

#: Where `make models` leaves its rows.
ROWS = Path(__file__).parents[2] / "build" / "models"

PAGE = """# Models under schedules

What a model may do in its forward, and a script around it, under schedules of every kind: each is trained in a pipeline
on 2 to 4 processes, and alone in one process, which takes each microbatch forward and back through all stages. Compared
are the losses of all microbatches, the gradients and whether there are any, the weights, the buffers, and what hooks
have seen. The models are in `tests/models/families`. `make models` runs all of it and writes this page.

{totals}

{random}

Written with torch {torch} and transformers {transformers}.

{sizes}

Below, what trains alike under every schedule is *equal to the bit*, or to *rounding* where the schedule adds up gradients
in another order or the type is narrower than float64. Pairs are left out where the schedule has no such stages: slices and
skips ask for more than one tensor between stages can say. A number is a refusal with the message of that number, at the
end of the page. A number with a question mark is a question: the run trains what the stages say by themselves, and asks
whether that is what is meant.

{families}

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


Row = dict[str, Verdict]


def page(
    rows: dict[str, Row], random: list[Row], versions: tuple[str, str] | None = None
) -> str:
    """The page, of the rows of all features and those of random models."""
    notes = Notes()
    families = []
    for family, features in groupby(FEATURES.values(), lambda feature: feature.family):
        words = {feature.words: rows[feature.name] for feature in features}
        families.append(f"## {family.capitalize()}\n\n{_family(words, notes)}")
    versions = versions or (torch.__version__, transformers.__version__)
    return PAGE.format(
        totals=_totals(rows.values()),
        random=_random(random),
        torch=versions[0],
        transformers=versions[1],
        sizes=_sizes(),
        families="\n\n".join(families),
        notes="\n".join(
            f"{number}. {words}" for number, words in enumerate(notes.words, 1)
        ),
    )


def _family(rows: dict[str, Row], notes: Notes) -> str:
    """What trains alike under every schedule, then a table of the rest."""
    others = {words: told for words, row in rows.items() if (told := _told(row, notes))}
    alike = [f"- {words}" for words in rows if words not in others]
    parts = []
    if alike:
        parts.append("Alike under every schedule:\n\n" + "\n".join(alike))
    if others:
        lines = [f"| {words} | {told} |" for words, told in others.items()]
        parts.append("\n".join(["| | refused, or asked about |", "|---|---|", *lines]))
    return "\n\n".join(parts)


def _told(row: Row, notes: Notes) -> str:
    """The schedules under which a feature does not train alike, by what becomes of it there."""
    by_cell: dict[str, list[str]] = {}
    for name in MAKERS:
        if row[name].kind not in (EQUAL, ROUNDING, NOT_FOR):
            by_cell.setdefault(_cell(row[name], notes), []).append(f"`{name}`")
    told = {cell: ", ".join(names) for cell, names in by_cell.items()}
    possible = sum(verdict.kind != NOT_FOR for verdict in row.values())
    if sum(map(len, by_cell.values())) == possible:
        most = max(by_cell, key=lambda cell: len(by_cell[cell]))
        told.pop(most)
        told[most] = "all others" if told else "all"
    return "; ".join(f"{cell} under {names}" for cell, names in told.items())


def _cell(verdict: Verdict, notes: Notes) -> str:
    if verdict.kind == REFUSED:
        return str(notes.number(verdict.words))
    if verdict.kind == ASKED:
        return f"{notes.number(verdict.words)}?"
    return f"**{verdict.kind}**"


def _totals(rows: Iterable[Row]) -> str:
    pairs, words = _counted(rows, NOT_FOR)
    return f"Of {pairs:,} pairs of a model and a schedule, {words}."


def _random(rows: list[Row]) -> str:
    """What became of random models; those with what a schedule cannot have are left out."""
    if not rows:
        return "`make models RANDOM=20000` also tries models that hypothesis makes of these features."
    models, words = _counted(rows, NOT_FOR, NOT_ALONE)
    return f"Of {models:,} models that hypothesis made of these features, {words}."


def _counted(rows: Iterable[Row], *left_out: str) -> tuple[int, str]:
    """How many pairs there are, and what became of them."""
    counts = Counter(verdict.kind for row in rows for verdict in row.values())
    for kind in left_out:
        counts.pop(kind, None)
    known = (EQUAL, ROUNDING, REFUSED, ASKED)
    others = counts.total() - sum(counts[kind] for kind in known)
    return counts.total(), (
        f"{counts[EQUAL]:,} are equal to the bit, {counts[ROUNDING]:,} to rounding, "
        f"{counts[REFUSED]:,} are refused, {counts[ASKED]:,} are asked about, and "
        f"{others:,} are none of these"
    )


def _sizes() -> str:
    """The schedules with their ranks, stages and microbatches."""
    told = []
    for name in MAKERS:
        plan = column(name).plan
        sizes = len(plan.ranks), plan.layout.pieces, plan.microbatches
        told.append(f"`{name}` {' / '.join(map(str, sizes))}")
    return (
        f"The schedules, with their ranks / stages / microbatches: {', '.join(told)}."
    )


def files() -> dict[str, str]:
    """The page, by its path in the repository; every feature must have a row of this code."""
    rows = {name: read_row(ROWS, name) for name in FEATURES}
    missing = [name for name, row in rows.items() if row is None]
    if missing:
        raise SystemExit(f"no row of this code in {ROWS} for {', '.join(missing)}")
    found = {name: row for name, row in rows.items() if row is not None}
    return {"docs/reports/model-table.md": page(found, random_rows(ROWS))}
