"""The files that CONTRIBUTING.md and docs/architecture.md name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {
        path for quoted in re.findall(r"`([^`]+)`", text) for path in quoted.split()
    }
    # Of a package of the compiler, a path begins in the package.
    roots = (ROOT, ROOT / "schedlang")
    missing = [
        path
        for path in sorted(named)
        if re.fullmatch(r"[\w.]+(/[\w.]+)*/([\w]+\.[a-z]+)?|[\w]+(/[\w.]+)+", path)
        and not any((root / path).exists() for root in roots)
    ]
    assert not [path for path in missing if not re.search("NAME|CODE|bin/", path)]
