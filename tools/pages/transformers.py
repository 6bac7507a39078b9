"""docs/reports/transformers.md from the rows that tests have left, see `make explore
WHAT=transformers`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers

from tests.models.rows import read_row
from tests.models.test_tiny_models import NOT_BUILT, SCHEDULES
from tests.models.tiny_models import LANGUAGE_MODELS, TOWERS
from tests.models.verdicts import EQUAL, REFUSED, ROUNDING, Verdict

#: Where `make explore WHAT=transformers` leaves its rows.
ROWS = Path(__file__).parents[2] / "build" / "transformers"

PAGE = """# Models of transformers

What `split` makes of the models of transformers, each as the library builds it from a tiny config. A step is trained
under {schedules} on 2 processes, with stages by `split(model, plan)` alone or with a batch as `inputs`, and in one
process. Compared are all losses and all gradients. `make explore WHAT=transformers` runs all of it and writes this
page.

Written with torch {torch} and transformers {transformers}.

## Language models

Of {count} causal language models, {tried} were tried, and {built} of these are built from a tiny config. {words}

{table}

## Encoders with decoders, and towers

{towers}

{table_of_towers}

## Not built

Transformers builds no model from the tiny config, or its forward fails with it:

{missing}
"""

Row = Mapping[str, Verdict]


def files() -> dict[str, str]:
    """The page, by its path in the repository, of the models that have a row of this code."""
    rows = {name: read_row(ROWS, name) for name in [*LANGUAGE_MODELS, *TOWERS]}
    found = {name: row for name, row in rows.items() if row is not None}
    if not found:
        raise SystemExit(f"no row of this code in {ROWS}")
    versions = torch.__version__, transformers.__version__
    return {"docs/reports/transformers.md": page(found, versions)}


def page(rows: Mapping[str, Row], versions: tuple[str, str]) -> str:
    """The page, of the rows of the models that were tried."""
    not_built = [name for name, row in rows.items() if _kinds(row) == {NOT_BUILT}]
    built = [name for name in rows if name not in not_built]
    models = {name: rows[name] for name in built if name not in TOWERS}
    towers = {name: rows[name] for name in built if name in TOWERS}
    return PAGE.format(
        schedules=" and ".join(f"`{name}`" for name in SCHEDULES),
        torch=versions[0],
        transformers=versions[1],
        count=len(LANGUAGE_MODELS),
        tried=sum(name not in TOWERS for name in rows),
        built=len(models),
        words=_counted(models.values()),
        table=_table(models),
        towers=_counted(towers.values()),
        table_of_towers=_table(towers),
        missing="\n".join(
            f"- {name}: {_plain(rows[name][SCHEDULES[0]].words)}" for name in not_built
        ),
    )


def _kinds(row: Row) -> set[str]:
    return {verdict.kind for verdict in row.values()}


def _counted(rows: Iterable[Row]) -> str:
    """How many models train alike under all schedules, and how many are refused."""
    kinds = [_kinds(row) for row in rows]
    bits = sum(kind == {EQUAL} for kind in kinds)
    alike = sum(kind <= {EQUAL, ROUNDING} for kind in kinds)
    refused = sum(REFUSED in kind for kind in kinds)
    return (
        f"Of these, {bits} are equal to the bit under each schedule; {alike - bits} up to the order "
        "of additions, since copies of a tied weight add up their gradients. Refused: "
        f"{refused}; neither alike nor refused: {len(kinds) - alike - refused}."
    )


def _table(rows: Mapping[str, Row]) -> str:
    """The models that train alike, and a table of the others."""
    alike = [name for name, row in rows.items() if _kinds(row) <= {EQUAL, ROUNDING}]
    parts = [f"Alike: {', '.join(alike)}."]
    others = [
        f"| {name} | {'; '.join(dict.fromkeys(_told(verdict) for verdict in row.values()))} |"
        for name, row in rows.items()
        if name not in alike
    ]
    if others:
        parts.append("\n".join(["| model | what is told |", "|---|---|", *others]))
    return "\n\n".join(parts)


def _told(verdict: Verdict) -> str:
    return _plain(verdict.words) if verdict.words else verdict.kind


def _plain(words: str) -> str:
    """A message without the folder in which transformers is, for a table."""
    return re.sub(r"[^\s(]*/site-packages/", "", words).replace("|", r"\|")
