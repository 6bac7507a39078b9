"""The rows of the table as files, so that a run that was broken off goes on where it was."""

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

from tests.models.verdicts import Verdict
from tests.support.paths import PROGRAMS, ROOT, TESTS


@cache
def digest() -> str:
    """A hash of all that a row depends on: a row of other code counts for nothing."""
    code = hashlib.sha256(torch.__version__.encode())
    for folder in (ROOT / "runtime", ROOT / "schedlang", TESTS / "models", PROGRAMS):
        for path in sorted(folder.glob("**/*")):
            if path.suffix in (".py", ".sched"):
                code.update(path.read_bytes())
    return code.hexdigest()


def random_row(number: int) -> str:
    """The name of the row that has a block of random models."""
    return f"random {number}"


def random_rows(folder: Path) -> list[dict[str, Verdict]]:
    """Those blocks of random models that are there and of this code."""
    names = [
        path.stem.replace("_", " ")
        for path in sorted(folder.glob("random_[0-9]*.json"))
    ]
    return [row for name in names if (row := read_row(folder, name)) is not None]


def path_of(folder: Path, feature: str) -> Path:
    return folder / f"{feature.replace(' ', '_')}.json"


def read_row(folder: Path | None, feature: str) -> dict[str, Verdict] | None:
    """The verdicts by column, if they are there and of this code."""
    if folder is None or not path_of(folder, feature).exists():
        return None
    row = json.loads(path_of(folder, feature).read_text(encoding="utf-8"))
    if row["digest"] != digest():
        return None
    return {column: Verdict(*verdict) for column, verdict in row["cells"].items()}


def write_row(folder: Path | None, feature: str, verdicts: dict[str, Verdict]) -> None:
    """Keep a row, if there is a folder for it."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    cells = {
        column: [verdict.kind, verdict.words] for column, verdict in verdicts.items()
    }
    text = json.dumps({"digest": digest(), "cells": cells}, indent=1)
    path_of(folder, feature).write_text(text, encoding="utf-8")
