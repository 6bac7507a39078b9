"""The blocks of code on the pages of the documentation, and what it takes to run them.

A fence says what its block is: the language that it is coloured by, then words that no reader sees.

    ```sched first.sched      a program; by its name, the blocks that follow find it
    ```sched bad.sched wrong  a program that is refused: the page shows how
    ```python train.py        a file, and so are `yaml` and `json` with a name
    ```python train.py more   the next part of this file
    ```python                 a script
    ```python ranks=2         a part of a script, for so many processes; the rest of the script is in
                              `tests/support/page_scripts.py`, by the name that is `given=`
    ```sh                     commands, which all succeed
    ```console                commands after `$ `, each with all that it prints; `…` is any text, and
                              as a line of its own any lines
    ```text                   nothing to run
    ```sh elsewhere: REASON   what cannot be run here, and why

The blocks of a page are run in order, in a folder of their own that has the repository's programs.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from attrs import frozen

from schedlang import Source
from schedlang.cli.main import main
from tests.support.paths import ROOT
from tests.support.processes import ENVIRONMENT

#: Seconds that the commands of a block may take.
LIMIT = 300
#: What a fence begins with, what it says, and its lines.
_BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
_SHOWN = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)
#: Commands that start processes; and those of them that train the example.
_STARTS = re.compile(r"schedc run|torchrun")
_TRAINS = re.compile(r"schedc run|schedlang\.runtime")
#: A command of `schedc` in which nothing is for a shell, and which starts nothing.
_ALONE = re.compile(r"schedc (?!run )[^\n|<>;&$*?~`\\]+\n?")
#: The scripts that import for many seconds, or need four processes; what they show has tests of its
#: own.
_SLOW = ("sharded", "llama", "packed", "meshes", "exchanges", "teacher", "standby")
_TOOLS = {
    "python": "",
    "schedc": "-m schedlang",
    "torchrun": "-m torch.distributed.run",
}


@frozen
class Block:
    """A block of code: its language, the words behind it, its text, and where it stands."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    elsewhere: str
    text: str

    @property
    def where(self) -> str:
        """Its place, as an editor opens it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name under which the blocks that follow find it."""
        return next((word for word in self.words if "." in word), None)

    @property
    def ranks(self) -> int | None:
        """On how many processes it runs, if it is a part of a script."""
        of = [int(word[6:]) for word in self.words if word.startswith("ranks=")]
        return of[0] if of else None

    @property
    def given(self) -> str:
        """The script that it is a part of."""
        return next(
            (word[6:] for word in self.words if word.startswith("given=")), "script"
        )

    @property
    def is_slow(self) -> bool:
        """Whether that script takes long."""
        return self.given in _SLOW

    @property
    def starts_processes(self) -> bool:
        """Whether its commands start a training."""
        is_run = self.language in ("sh", "console") and not self.elsewhere
        return is_run and bool(_STARTS.search(self.text))

    @property
    def trains_the_example(self) -> bool:
        """Whether that is the example that comes with the runtime, which takes long."""
        return self.starts_processes and bool(_TRAINS.search(self.text))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        indent, fence, inside = match.groups()
        head, _, elsewhere = fence.partition(" elsewhere: ")
        language, *words = head.split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        inside = re.sub(f"^{indent}", "", inside, flags=re.M)
        yield Block(page, line, language, tuple(words), elsewhere, inside)


def program_of(page: Path, name: str) -> Source:
    """The program on a page that has this name."""
    (block,) = (block for block in blocks(page) if block.file == name)
    return Source(name, block.text)


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console, each with what the page shows of its output."""
    shown = _SHOWN.findall(block.text)
    # Nothing of the block may be left over that no command has printed.
    assert "".join(f"$ {command}\n{output}" for command, output in shown) == block.text
    return shown


def matches(output: str, shown: str) -> bool:
    """Whether an output is what a page shows."""
    lines = [
        "(?:.*\n)*" if line == "…\n" else line_pattern(line)
        for line in shown.splitlines(True)
    ]
    return re.fullmatch("".join(lines), output) is not None


def line_pattern(line: str) -> str:
    """A line of which some may vary, as a regular expression."""
    return ".*".join(map(re.escape, line.split("…")))


def _tools_of_tree(folder: Path) -> Path:
    """Write scripts to a folder that run the tree that is tested."""
    for name, arguments in _TOOLS.items():
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        tool.chmod(0o755)
    return folder


class Shell:
    """Runs the commands of a page as a reader does, in a folder.

    What is to be done in place of `torchrun` gets its words, and gives what `run` does. Where it
    `stays`, a command of `schedc` by itself runs in this process.

    `python`, `schedc` and `torchrun` are those of the folder `tools`; without one, they are scripts
    that run the tree that is tested.
    """

    def __init__(self, folder: Path, tools: Path | None = None) -> None:
        self.folder = folder
        self.torchrun: Callable[[list[str]], tuple[int, str]] | None = None
        self.stays = False
        home = folder.with_name(f"{folder.name}.home")
        home.mkdir()
        self.environment = ENVIRONMENT | {
            "PATH": f"{tools or _tools_of_tree(home)}:{os.environ['PATH']}",
            "HOME": str(home),
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        if tools:
            # What is imported is what is installed there.
            del self.environment["PYTHONPATH"]

    def run(self, command: str) -> tuple[int, str]:
        """The exit code of a command, and what it has printed."""
        if self.torchrun and command.startswith("torchrun "):
            return self.torchrun(shlex.split(command))
        if self.stays and _ALONE.fullmatch(command):
            return self._run_here(shlex.split(command)[1:])
        process = subprocess.Popen(
            ["bash", "-e", "-u", "-o", "pipefail", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            # With the processes that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(
                f"`{command}` takes longer than {LIMIT} s:\n{output}"
            ) from None
        return process.returncode, output

    def _run_here(self, arguments: list[str]) -> tuple[int, str]:
        """The same of a command of `schedc`."""
        printed = StringIO()
        with (
            chdir(self.folder),
            patch.dict(os.environ, self.environment),
            redirect_stdout(printed),
            redirect_stderr(printed),
        ):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
        # Lines end as they do where what a process prints is read as text.
        return code, printed.getvalue().replace("\r\n", "\n")
