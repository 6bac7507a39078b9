"""What holds of the project as a whole: the grammar, the package, the limits of its style."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

from lark import Lark

ROOT = Path(__file__).parent.parent
MODULES = [path for folder in ("schedlang", "runtime") for path in sorted((ROOT / folder).glob("**/*.py"))]


def test_the_grammar_has_no_conflict_and_no_colliding_terminals() -> None:
    grammar = (ROOT / "grammars" / "sched.lark").read_text()
    Lark(grammar, parser="lalr", lexer="basic", start="schedule", strict=True)


def test_files_and_functions_are_short() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 40, f"{path}: {node.name}"


def test_the_compiler_and_the_runtime_meet_only_in_the_plan() -> None:
    """No torch in the compiler; no parser in the runtime."""
    for path in MODULES:
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        if "runtime" in path.relative_to(ROOT).parts:
            assert not {"lark", "schedlang.parser", "schedlang.expand", "schedlang.syntax"} & imported, path
        else:
            assert not any(name.split(".")[0] == "torch" or "runtime" in name for name in imported), path


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"schedlang"}
    for path in [*MODULES, *ROOT.glob("grammars/*.lark"), *ROOT.glob("programs/*.sched"), *ROOT.glob("docs/**/*.md")]:
        inside = path.relative_to(ROOT).as_posix()
        assert (inside if inside.startswith("schedlang/") else f"schedlang/{inside}") in names
    assert "schedlang/py.typed" in names
