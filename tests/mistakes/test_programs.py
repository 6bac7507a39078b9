"""Programs and files with a mistake, each with the whole message that it gets, to be read.

`statements.txt` has statements of a rank, `items.txt` items of a schedule whose rank is right,
`programs.txt` whole programs, and `files.txt` commands about the files of a folder.
`pytest --update-golden` writes the messages.
"""

from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from time import process_time

import pytest

from tests.support import commands
from tests.support.paths import PROGRAMS as GALLERY
from tests.support.sections import cases, section

HERE = Path(__file__).parent
HEAD = "schedule wrong {\n    param ranks = 4\n    param microbatches = 8\n"
RANK = "    rank r {\n        for m in 0 .. microbatches { F(m)  B(m) }\n    }\n"
#: The program that is compiled, by the file that has a part of it, or all of it.
WHOLE: dict[str, Callable[[str], str]] = {
    "statements": lambda statement: (
        f"{HEAD}    rank r {{\n{indent(statement, '        ')}\n    }}\n}}\n"
    ),
    "items": lambda item: f"{HEAD}{indent(item, '    ')}\n{RANK}}}\n",
    "programs": lambda program: program and f"{program}\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name, as the current one."""
    monkeypatch.chdir(tmp_path)
    program = (GALLERY / "gpipe.sched").read_text()
    Path("gpipe.sched").write_text(program)
    assert (
        schedc("compile gpipe.sched -p ranks=2 -p microbatches=2 -o plan.json")[0] == 0
    )
    Path("gpipe.sched").rename("program.txt")
    texts = {
        "table.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "data.csv": "step,loss\n1,5.6\n2,5.5\n",
        "list.json": "[1, 2, 3]\n",
        "other.json": '{"name": {"first": "a"}}\n',
        "cut.json": Path("plan.json").read_text()[:200],
        "trace.json": '{"traceEvents": [{"ph": "X", "name": "step", "ts": 0, "dur": 5}]}\n',
        "costs.json": '{"forward_times": [1, 2]}\n',
        "costs.yaml": "forward_times: [1, 2]\np2p_time: 1\n",
        "script.py": "import schedlang\n\nprint(schedlang)\n",
        "items.sched": "let chunks = 2\nfn half(n) = n / 2\n",
        "empty": "",
        "imports_a_plan.sched": 'schedule a {\n    import "plan.json"\n}\n',
        "imports_a_program.sched": 'schedule a {\n    import "program.txt"\n}\n',
        "imports_itself_wrong.sched": 'schedule a {\n    import "wrong.sched"\n}\n',
        "wrong.sched": "let chunks == 2\nfn half(n) -> n / 2\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("binary").write_bytes(b"a\x00b")
    Path("utf16.sched").write_text(program, encoding="utf-16")
    Path("latin.sched").write_bytes("# Grüße\n".encode("latin-1"))
    Path("archive.pt").write_bytes(b"PK\x03\x04\xff\xff")
    Path("folder").mkdir()
    Path("folder", "mine.sched").write_text(program)
    return tmp_path


def schedc(command: str) -> tuple[int, str]:
    """The exit code of a command, and what it prints for the user."""
    done = commands.schedc(*command.split())
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_programs(name: str, folder: Path, golden: Callable[[str, Path], None]) -> None:
    sections = []
    for shown in cases(HERE / f"{name}.txt"):
        Path("wrong.sched").write_text(WHOLE[name](shown))
        before = process_time()
        code, message = schedc("compile wrong.sched")
        assert process_time() - before < 3
        assert code == 1, shown
        assert message.startswith("error["), shown
        sections.append(section(shown, message))
    golden("".join(sections), HERE / f"{name}.txt")


@pytest.mark.core
def test_a_forgotten_backward_is_warned_of(folder: Path) -> None:
    """A program without any backward is right, as an inference, for whoever says that it is meant."""
    forgotten = "schedule a { param ranks = 2 param microbatches = 4 rank r { repeat microbatches { F(next) } } }"
    Path("forgotten.sched").write_text(forgotten)
    code, message = schedc("compile forgotten.sched -o forgotten.json")
    assert code == 0
    assert message.startswith("warning[forward-only]: the program has no backward")
    assert "--forward-only" in message
    for command in (
        "compile forgotten.sched --forward-only",
        "simulate forgotten.json",
        "compile gpipe --forward-only",
        "compile gpipe",
    ):
        assert schedc(command) == (0, "")


def test_files(folder: Path, golden: Callable[[str, Path], None]) -> None:
    sections = []
    for shown in cases(HERE / "files.txt"):
        code, message = schedc(shown.removeprefix("$ schedc "))
        assert code in (1, 2), shown
        assert "error" in message, shown
        sections.append(section(shown, f"{message}exit code {code}"))
    golden("".join(sections), HERE / "files.txt")
