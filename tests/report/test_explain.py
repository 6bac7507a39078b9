"""Every error code has a page, which shows what the compiler says of a program, and one that it
accepts.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedlang.cli.main import main
from schedlang.report.explain import PAGES, codes, page
from tests.support.paths import PROGRAMS, ROOT

SOURCES = sorted((ROOT / "schedlang").glob("**/*.py"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("code", codes())
def test_page(
    code: str,
    golden: Callable[[str, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("programs").symlink_to(PROGRAMS)
    meaning, wrong, right = re.split(r"^(?=## )", page(code), flags=re.M)
    assert meaning.startswith(f"# {code}\n\n")
    assert wrong.startswith("## Wrong\n")
    assert right.startswith("## Right\n")
    wrong, failed = executed(wrong, "wrong", capsys)
    # What is only a warning stands beside a verdict.
    severity = "error" if failed.pop() else "warning"
    assert not failed
    assert f"{severity}[{code}]: " in wrong
    right, passed = executed(right, "right", capsys)
    assert not any(passed or [main(["compile", "right.sched"])])
    golden(meaning + wrong + right, PAGES / f"{code}.md")


def executed(
    section: str, name: str, capsys: pytest.CaptureFixture[str]
) -> tuple[str, list[int]]:
    """A section with what its commands print, on files with what its other blocks hold; and their
    exit codes.
    """
    for kind, text in BLOCK.findall(section):
        if kind != "console":
            Path(f"{name}.{kind or 'sched'}").write_text(text)
    exits = []

    def printed(block: re.Match[str]) -> str:
        if block[1] != "console":
            return block[0]
        lines = []
        for command in re.findall(r"^\$ schedc (.*)$", block[2], re.M):
            exits.append(main(command.split()))
            captured = capsys.readouterr()
            # The last line leads to the page that it would stand on.
            diagnostics = re.sub(r"\n.*see: .*\n$", "", captured.err)
            lines.append(f"$ schedc {command}\n{captured.out}{diagnostics}")
        return f"```console\n{''.join(lines)}```"

    return BLOCK.sub(printed, section), exits


def test_explain_prints_pages_or_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "order", "deadlock"]) == 0
    assert capsys.readouterr().out == f"{page('order')}\n{page('deadlock')}"
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == codes()
    assert "order                An op stands before something that it needs" in lines


def test_the_last_line_names_the_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.sched"
    bad.write_text(
        "schedule bad { param ranks = 1 param microbatches = 1 rank r { B(0) F(0) } }"
    )
    assert main(["compile", str(bad)]) == 1
    assert capsys.readouterr().err.endswith(" |\n\nsee: schedc explain order\n")
    bad.write_text("schedule bad { param ranks = 1 rank r { F(m) F(k) } }")
    assert main(["compile", str(bad)]) == 1
    assert capsys.readouterr().err.endswith(
        "\n\n3 errors; see: schedc explain missing-part unknown-name\n"
    )


@pytest.mark.slow
def test_every_code_has_a_page_and_every_page_a_code() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    takers = {
        name: place for tree in trees.values() for name, place in takers_of_codes(tree)
    }
    assert {"Diagnostic", "Finding", "Fault", "report"} <= takers.keys()
    found = {
        code
        for path, tree in trees.items()
        for code in written_codes(tree, takers, set(), path)
    }
    assert sorted(found) == codes()


def takers_of_codes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What has a parameter or a field `code`: its name, and which argument that is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign)
            ]
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    fields = parameters(each)
            if "code" in fields:
                yield node.name, fields.index("code")
        if (
            isinstance(node, ast.FunctionDef)
            and node.name != "__init__"
            and "code" in parameters(node)
        ):
            yield node.name, parameters(node).index("code")


def parameters(function: ast.FunctionDef) -> list[str]:
    named = [*function.args.args, *function.args.kwonlyargs]
    return [each.arg for each in named if each.arg != "self"]


def defaults(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    args = function.args
    pairs = [
        *zip(args.args[::-1], args.defaults[::-1], strict=False),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    return [(arg.arg, default) for arg, default in pairs if default is not None]


def written_codes(
    node: ast.AST, takers: dict[str, int], known: set[str], path: Path
) -> Iterator[str]:
    """The codes given in some code, where `known` are the parameters of the functions around it."""
    if isinstance(node, ast.FunctionDef):
        known = known | set(parameters(node))
        for name, default in defaults(node):
            if name == "code":
                yield from literals(default, known, path)
    if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "code":
        assert node.value is None, (
            f"{path}:{node.lineno}: every diagnostic says its code"
        )
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        yield from (
            code
            for each in node.keywords
            if each.arg == "code"
            for code in literals(each.value, known, path)
        )
        if name in takers and takers[name] < len(node.args):
            yield from literals(node.args[takers[name]], known, path)
    for child in ast.iter_child_nodes(node):
        yield from written_codes(child, takers, known, path)


def literals(node: ast.expr, known: set[str], path: Path) -> Iterator[str]:
    """The words that an argument can be; a code that was given on the way here is collected where
    it is written.
    """
    if isinstance(node, ast.IfExp):
        yield from literals(node.body, known, path)
        yield from literals(node.orelse, known, path)
    elif isinstance(node, ast.Constant):
        yield node.value
    else:
        handed_on = isinstance(node, ast.Attribute) and node.attr == "code"
        assert handed_on or (
            isinstance(node, ast.Name) and node.id == "code" and "code" in known
        ), (
            f"{path}:{node.lineno}: write the code out as a word, so that it is seen to have a page"
        )
