"""Which package imports which. `make test` runs the contracts of pyproject.toml with `lint-imports`;
here is what they leave open.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]

#: What may be imported where it is used, since it is an extra that not everybody installs, or
#: slow to load and seldom needed.
LATE_IMPORTS = {
    "difflib": "only a message about a misspelt name needs it",
    "fractions": "loads regular expressions; only decimal numbers need it",
    "matplotlib": "the extra `plot`",
    "ortools.linear_solver": "loads the extra `prove`",
    "resvg_py": "the extra `png`",
    "typst": "the extra `pdf`",
    "schedlang.advice.advice": "only a program that is wrong needs it",
    "schedlang.files.documents": "loads yaml; only costs in a file need it",
    "schedlang.extras.editor.server": "loads the extra `lsp`",
    "schedlang.language.formatting": "loads lark and its tables; only `schedc fmt` needs it",
    "schedlang.language.parser": "loads lark and its tables; only a text that is new needs it",
    "schedlang.extras.prove.sets.reread": "loads the extra `prove`",
    "schedlang.extras.search.optimize.exact": "loads the extra `optimize`",
    "schedlang.extras.search.optimize.exact_evictions": "loads the extra `optimize`",
    "schedlang.extras.search.optimize.periodic": "loads the extra `optimize`",
    "schedlang.extras.search.optimize.windows": "loads the extra `optimize`",
    "schedlang.schedule.costs.component_costs": "only a plan whose costs have components needs it",
    "schedlang.schedule.costs.measured": "a plan is read without what measures costs",
    "schedlang.schedule.costs.traces": "a plan is read without what measures costs",
    "schedlang.passes": "many modules; most programs have no pass",
    "schedlang.runtime.model": "what cuts and saves models; only a script that saves needs it",
    "schedlang.runtime.named_losses": "only a script that asks for losses by name needs it",
    "torch._functorch.config": "takes seconds; only a block that is compiled needs it",
    "torch._inductor": "takes seconds; only a block that is compiled needs it",
    "torch.utils._device": "private: a version of torch may not have it",
    "torch.utils._pytree": "private: a version of torch may not have it",
    "torch.fx.experimental.symbolic_shapes": "takes a second; only who builds a pipeline needs it",
    "tempfile": "loads packers of archives; only a command that writes needs it",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of schedlang and of the runtime: its path and its syntax tree."""
    for folder in ("schedlang", "runtime", "examples"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_the_contract_of_the_compiler_lists_all_of_it() -> None:
    (contract,) = [
        each for each in CONTRACTS if each["name"].startswith("The compiler knows")
    ]
    parts = {
        f"schedlang.{path.stem}"
        for path in (ROOT / "schedlang").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    # What stands on both of them.
    others = {
        "schedlang.__init__",
        "schedlang.__main__",
        "schedlang.examples",
        "schedlang.runtime",
        "schedlang.torch",
    }
    assert set(contract["source_modules"]) == parts - others


@pytest.mark.slow
def test_imports_stand_at_the_top_of_a_module() -> None:
    """The commands alone import what they need when they run, for a quick `schedc --help`."""
    # An extra has its command in a file of its own.
    late = [
        (path, name)
        for path, tree in modules()
        if not path.startswith("schedlang/cli/") and not path.endswith("_command.py")
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in imported(node)
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in LATE_IMPORTS)
    ]
    assert not late


@pytest.mark.slow
def test_a_pipeline_loads_nothing_of_the_compiler() -> None:
    """Also what is imported by its name, which the contracts cannot see."""
    command = "from schedlang.runtime import *; import sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    loaded = set(run.stdout.split())
    (contract,) = [
        each for each in CONTRACTS if each["name"].startswith("The runtime runs plans")
    ]
    assert "schedlang.runtime.pipeline" in loaded
    assert not loaded & set(contract["forbidden_modules"])


def test_the_compiler_loads_no_torch() -> None:
    command = "import schedlang.cli.commands, schedlang.advice.compiling, sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(run.stdout.split())
    assert "schedlang.compiler" in loaded
    assert not loaded & {"torch", "schedlang.runtime"}


def test_the_page_tells_of_all_packages_that_are_drawn() -> None:
    (drawn,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.M | re.S)
    packages = set(re.findall(r"^    (\S+) -->", drawn, re.M)) | {"on_demand"}
    assert len(packages) <= 20
    assert set(re.findall(r"^\| `([\w.]+)` \|", PAGE, re.M)) == packages
