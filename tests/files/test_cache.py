"""What is kept of plans and syntax trees: the same as if it was made again, whatever happens to the
files.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from schedlang import CompileError, Source, read_source
from schedlang.cli.main import main
from schedlang.files import cache
from schedlang.files.cache import Kind
from schedlang.language import parser, syntax
from schedlang.language.trees import items_of, tree_of
from tests.support.paths import PROGRAMS

#: A kind of which everything is worth keeping.
KIND = Kind("kind", worth=0, most=16)
PROGRAM = "schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) F(1) B(0) B(1) } }"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "schedlang"


def made(values: list[int]) -> Callable[[], list[int]]:
    """Makes something, and notes that it did."""

    def make() -> list[int]:
        values.append(len(values))
        return values[:]

    return make


def test_what_is_kept_is_not_made_again() -> None:
    values: list[int] = []
    assert (
        cache.cached(KIND, "key", made(values))
        == cache.cached(KIND, "key", made(values))
        == [0]
    )
    assert cache.cached(KIND, "another key", made(values)) == [0, 1]
    assert cache.cached(Kind("other", worth=0, most=1), "key", made(values)) == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04."])
def test_a_damaged_file_is_made_again(folder: Path, content: bytes) -> None:
    values: list[int] = []
    cache.cached(KIND, "key", made(values))
    (path,) = folder.glob("kind-*")
    path.write_bytes(content)
    assert (
        cache.cached(KIND, "key", made(values))
        == cache.cached(KIND, "key", made(values))
        == [0, 1]
    )


def test_another_version_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[int] = []
    cache.cached(KIND, "key", made(values))
    monkeypatch.setattr(cache, "_version", lambda: "another")
    assert cache.cached(KIND, "key", made(values)) == [0, 1]


def test_the_oldest_go(folder: Path) -> None:
    for key in range(KIND.most + 4):
        cache.cached(KIND, key, made([]))
    assert len(list(folder.glob("kind-*"))) == KIND.most


def test_what_is_made_quickly_is_not_kept(folder: Path) -> None:
    cache.cached(Kind("kind", worth=1000, most=16), "key", made([]))
    assert not list(folder.glob("kind-*"))


def test_what_cannot_be_kept_is_made_all_the_same(folder: Path) -> None:
    def make() -> object:
        return lambda: "no function without a name can be written"

    assert callable(cache.cached(KIND, "key", make))
    assert not list(folder.glob("kind-*"))


def text(key: int) -> str:
    return str(key) * 100_000


def ask(round: int) -> bool:
    """Ask for what others ask for too."""
    return all(
        cache.cached(KIND, key, partial(text, key)) == text(key)
        for key in range(round, round + 4)
    )


def test_processes_at_once() -> None:
    with ProcessPoolExecutor(4) as pool:
        assert all(pool.map(ask, [each for each in range(10) for _ in range(4)]))


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is said of a plan that was kept, and another text is another program."""
    monkeypatch.setattr(
        "schedlang.advice.compiling.PLAN", Kind("plan", worth=0, most=16)
    )
    path = tmp_path / "s.sched"
    said = []
    for program in (
        PROGRAM,
        PROGRAM,
        PROGRAM.replace("F(0) F(1) B(0)", "F(0) B(0) F(1)"),
    ):
        path.write_text(program)
        assert (
            main(
                [
                    "compile",
                    str(path),
                    "-v",
                    "--transport",
                    "nccl",
                    "-o",
                    str(tmp_path / "plan.json"),
                ]
            )
            == 0
        )
        said.append((capsys.readouterr().out, (tmp_path / "plan.json").read_bytes()))
    assert said[0] == said[1]
    assert said[1][0] != said[2][0]
    assert len(list((tmp_path / "schedlang").glob("plan-*"))) == 2


def places(nodes: Iterable[syntax.Node]) -> list[object]:
    """Every node of some trees, with its place in the text."""
    return [(type(node), node.span) for tree in nodes for node in syntax.walk(tree)]


def test_trees_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the parser, which is not asked again; a file that is imported at another
    place has its own.
    """
    monkeypatch.setattr(
        "schedlang.language.trees.TREE", Kind("tree", worth=0, most=1000)
    )
    sources = [read_source(path) for path in sorted(PROGRAMS.glob("*.sched"))]
    text = (PROGRAMS / "lib" / "v.sched").read_text()
    imported = [Source("s", f"{before}{text}") for before in ("", "schedule s { }\n")]
    starts = [len(source.text) - len(text) for source in imported]
    trees = list(map(parser.parse, sources))
    items = list(map(parser.parse_items, imported, starts))
    assert places(items[0]) != places(items[1])

    def forget() -> None:
        tree_of.cache_clear()
        items_of.cache_clear()

    for _ in range(2):
        forget()
        kept = list(map(tree_of, sources))
        assert kept == trees
        assert places(kept) == places(trees)
        kept_items = list(map(items_of, imported, starts))
        assert kept_items == items
        assert list(map(places, kept_items)) == list(map(places, items))
        monkeypatch.setattr(parser, "parse", None)
        monkeypatch.setattr(parser, "parse_items", None)
    forget()


def test_a_text_that_is_no_program_is_not_kept(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="unexpected"):
            tree_of(Source("s", "schedule {"))
    assert not list(folder.glob("tree-*"))
