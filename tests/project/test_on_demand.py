"""What is imported on demand: the names are right, and a plain program needs none of it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from schedlang.proof.features import FEATURES
from tests.support.paths import PROGRAMS, ROOT

PACKAGE = ROOT / "schedlang"
#: Modules for programs that claim something of their schedule, as 1F1B does.
CLAIMS = {
    "schedlang.language.claims",
    "schedlang.proof.claim_figures",
    "schedlang.proof.memory",
    "schedlang.schedule.findings",
    # `schedlang` itself says what draws in notebooks, and what compiles.
    "schedlang.plan.compiled_again",
    "schedlang.schedule.notebook_views",
}


def paths_in(file: Path) -> Iterator[str]:
    """The paths of the functions that a module asks for on demand."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(ast.Name("on_demand"), [ast.Constant(str(path))]):
                yield path


def imported_for_types(file: Path) -> set[str]:
    """The paths that a module imports for type checkers alone."""
    paths = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.If(ast.Name("TYPE_CHECKING"), body):
                for each in body:
                    if isinstance(each, ast.ImportFrom):
                        paths |= {f"{each.module}.{name.name}" for name in each.names}
    return paths


FILES = [
    file
    for file in sorted(PACKAGE.rglob("*.py"))
    if any(True for _ in paths_in(file)) and file.name != "on_demand.py"
]


@pytest.mark.core
def test_functions_on_demand_exist() -> None:
    assert FILES
    for file in FILES:
        for path in paths_in(file):
            module, _, name = path.rpartition(".")
            assert callable(getattr(import_module(module), name)), (file, path)
            # Importing a module gives its package a name, in place of one that is there.
            if file.name == "__init__.py":
                assert not (file.parent / f"{name}.py").exists(), (file, path)


@pytest.mark.core
def test_type_checkers_and_python_see_the_same_functions() -> None:
    # Within a function there is no import beside it: there a type checker sees no more than Any.
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        at_top = {
            ast.unparse(node.value.args[0]).strip("'")
            for part in tree.body
            if isinstance(part, ast.If)
            for node in part.orelse
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        }
        assert at_top <= imported_for_types(file), file


@pytest.mark.core
def test_files_of_features_have_their_functions() -> None:
    names = {"wrong_structure", "wrong_plan", "wrong_reads", "place"}
    for feature in FEATURES:
        file = import_module(f"schedlang.proof.{feature.file}")
        assert names & vars(file).keys(), feature.file


@pytest.mark.core
def test_compiling_1f1b_loads_of_these_modules_those_for_claims() -> None:
    code = f"""
import sys, schedlang
for _ in range(2):
    schedlang.compile({str(PROGRAMS / "1f1b.sched")!r}, dict(ranks=2, microbatches=4))
print(*sys.modules, sep=chr(10))
"""
    # The first run may have to parse the program; the second one finds its tree in the cache.
    for _ in range(2):
        command = [sys.executable, "-P", "-c", code]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(printed.stdout.split())
    rooms = ("compiler", "diagnostics", "language", "lowering", "plan", "proof")
    files = [
        file for file in FILES if file.relative_to(PACKAGE).parts[0].startswith(rooms)
    ]
    modules = {path.rpartition(".")[0] for file in files for path in paths_in(file)}
    modules |= {f"schedlang.proof.{feature.file}" for feature in FEATURES}
    assert loaded & modules == CLAIMS
