"""`schedc fmt` as a command: what it reads, writes and says."""

import io
import json
import sys
from pathlib import Path

import pytest

from schedlang.cli.main import main
from schedlang.files import reading

UGLY = "schedule s{param ranks=2 param microbatches=2 rank r{F(0)}}\n"
NEAT = """\
schedule s {
    param ranks = 2
    param microbatches = 2
    rank r { F(0) }
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ugly.sched").write_text(UGLY)
    (tmp_path / "neat.sched").write_text(NEAT)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lib.sched").write_bytes(b"let a = 1\r\n")
    (tmp_path / "other.txt").write_text(UGLY)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["fmt", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_files_and_folders_are_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(folder), str(folder / "ugly.sched"))
    lib = folder / "in" / "lib.sched"
    ugly = folder / "ugly.sched"
    assert (code, out) == (0, f"wrote: {lib}\nwrote: {ugly}\n1 file in style\n")
    assert ugly.read_text() == (folder / "neat.sched").read_text() == NEAT
    assert lib.read_bytes() == b"let a = 1\n"
    assert (folder / "other.txt").read_text() == UGLY
    assert run(capsys, str(folder), "--check") == (0, "3 files in style\n", "")


@pytest.mark.parametrize("option", ["--check", "--diff"])
def test_what_only_looks_writes_nothing(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ugly = folder / "ugly.sched"
    code, out, _ = run(capsys, option, str(ugly), str(folder / "neat.sched"))
    assert code == 1
    assert ugly.read_text() == UGLY
    if option == "--check":
        assert out == f"not in style: {ugly}\n1 file in style\n"
    else:
        new = "".join(f"+{line}\n" for line in NEAT.splitlines())
        assert out == f"--- {ugly}\n+++ {ugly}\n@@ -1 +1,5 @@\n-{UGLY}{new}"


def test_a_file_that_is_no_program_is_told_and_the_others_are_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = folder / "bad.sched"
    bad.write_text("let = 3\n")
    code, out, err = run(capsys, str(bad), str(folder / "ugly.sched"))
    assert (code, bad.read_text()) == (1, "let = 3\n")
    assert out == f"wrote: {folder / 'ugly.sched'}\n"
    assert err.startswith("error[syntax]: ")
    code, _, err = run(capsys, str(folder / "none.sched"))
    assert code == 2
    assert "cannot read" in err


def test_standard_input_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, wanted in [
        (["-"], (0, NEAT)),
        (["-", "--check"], (1, "not in style: <stdin>\n")),
    ]:
        reading._standard_input.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(UGLY.encode())))
        assert run(capsys, *arguments)[:2] == wanted
    reading._standard_input.cache_clear()


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json", "--check", str(folder / "ugly.sched"))
    document = {"files": [{"file": str(folder / "ugly.sched"), "changed": True}]}
    assert (code, json.loads(out)) == (1, document)


def test_a_folder_without_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fmt", str(tmp_path)])
    assert (
        f"there is no file NAME.sched in the folder `{tmp_path}`"
        in capsys.readouterr().err
    )
