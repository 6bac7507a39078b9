"""What holds of the project as a whole: the grammar, the package, the limits of its style."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from lark import Lark

from tests.support.paths import PROGRAMS, ROOT

MODULES = [
    path
    for folder in ("schedlang", "runtime")
    for path in sorted((ROOT / folder).glob("**/*.py"))
]


def test_the_grammar_has_no_conflict_and_no_colliding_terminals() -> None:
    grammar = (ROOT / "grammars" / "sched.lark").read_text()
    Lark(grammar, parser="lalr", lexer="basic", start="schedule", strict=True)


#: What the page of `schedc view` is made of.
PAGE = sorted(
    path
    for ending in ("html", "css", "js")
    for path in (ROOT / "schedlang" / "report" / "views").glob(f"*.{ending}")
)


@pytest.mark.slow
def test_the_wheel_is_whole(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "schedlang"
    }
    data = [
        path
        for glob in ("grammars/*.lark", "programs/*.sched", "docs/**/*.md")
        for path in ROOT.glob(glob)
    ]
    for path in [*MODULES, *PAGE, *data]:
        inside = path.relative_to(ROOT).as_posix()
        assert (
            inside if inside.startswith("schedlang/") else f"schedlang/{inside}"
        ) in names
    assert "schedlang/py.typed" in names
    assert not any("docs/pictures/" in name for name in names)
    # Nothing in it needs the checkout.
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [
        sys.executable,
        "-m",
        "schedlang",
        "view",
        str(PROGRAMS / "1f1b.sched"),
        "-o",
        "view.html",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path, env=environment)
    assert "class Timeline" in (tmp_path / "view.html").read_text(encoding="utf-8")


def test_the_oldest_and_the_newest_torch_are_tested() -> None:
    """Those of pyproject.toml, in CI; `make test` has one between them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    accepted = project["project"]["optional-dependencies"]["runtime"]
    (tested,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = yaml.safe_load(workflow)["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    oldest, newest = matrix
    assert f"TORCH ?= {newest}" in (ROOT / "Makefile").read_text()
    assert oldest < tested < newest
    first = oldest.removesuffix(".0")
    last = newest.removesuffix(".0")
    major, minor = map(int, last.split("."))
    assert f"torch>={first},<{major}.{minor + 1}" in accepted
    assert f"torch {first} to {last}" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )
