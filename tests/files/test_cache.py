"""What is kept of compiled plans: the same as if it was made again, whatever happens to the files."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from schedlang.cli.main import main
from schedlang.files import cache

PROGRAM = "schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) F(1) B(0) B(1) } }"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which everything is worth keeping."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "WORTH", 0)
    return tmp_path / "schedlang"


def made(values: list[int]) -> Callable[[], list[int]]:
    """Makes something, and notes that it did."""

    def make() -> list[int]:
        values.append(len(values))
        return values[:]

    return make


def test_what_is_kept_is_not_made_again() -> None:
    values: list[int] = []
    assert cache.cached("key", made(values)) == cache.cached("key", made(values)) == [0]
    assert cache.cached("another key", made(values)) == [0, 1]


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04."])
def test_a_damaged_file_is_made_again(folder: Path, content: bytes) -> None:
    values: list[int] = []
    cache.cached("key", made(values))
    (path,) = folder.glob("plan-*")
    path.write_bytes(content)
    assert cache.cached("key", made(values)) == cache.cached("key", made(values)) == [0, 1]


def test_another_version_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[int] = []
    cache.cached("key", made(values))
    monkeypatch.setattr(cache, "_version", lambda: [("machine.py", 1)])
    assert cache.cached("key", made(values)) == [0, 1]


def test_the_oldest_go(folder: Path) -> None:
    for key in range(cache.MOST + 4):
        cache.cached(key, made([]))
    assert len(list(folder.glob("plan-*"))) == cache.MOST


def test_what_is_made_quickly_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH", 1000)
    cache.cached("key", made([]))
    assert not list(folder.glob("plan-*"))


def text(key: int) -> str:
    return str(key) * 100_000


def ask(round: int) -> bool:
    """Ask for what others ask for too."""
    cache.WORTH = 0
    return all(
        cache.cached(key, partial(text, key)) == text(key) for key in range(round, round + 4)
    )


def test_processes_at_once() -> None:
    with ProcessPoolExecutor(4) as pool:
        assert all(pool.map(ask, [each for each in range(10) for _ in range(4)]))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same is said of a plan that was kept, and another text is another program."""
    path = tmp_path / "s.sched"
    said = []
    for program in (PROGRAM, PROGRAM, PROGRAM.replace("F(0) F(1) B(0)", "F(0) B(0) F(1)")):
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
