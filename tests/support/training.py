"""`torchrun`, of `schedlang.runtime` or of a script, without the time that it takes: its processes are
forked from one that has imported torch already, and have the environment that torchrun gives them.

Tests of what torchrun itself does about them start a real one, see `processes.py`.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch.distributed as dist
from attrs import frozen

from schedlang.examples.demo.command import run
from schedlang.examples.demo.launch import environment_of
from tests.support.forks import fork, print_to, read, write
from tests.support.ranks import Run


@frozen
class Training:
    """What became of a training: the exit code of each process, and what all have printed."""

    codes: list[int]
    stdout: str
    stderr: str


Train = Callable[..., Training]

_SCRIPT = b"import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"


def train(run_ranks: Run, tmp_path: Path, ranks: int, *arguments: object) -> Training:
    """Run `schedlang.runtime` with these arguments on so many ranks; on 0, without a launcher."""
    return launched(
        run_ranks, tmp_path, ranks, partial(module_main, list(map(str, arguments)))
    )


def printed_figures(out: str) -> dict[str, Any]:
    """The figures in the last lines of a training, by their names in the JSON of `--json`."""
    (end,) = re.findall(r"^(\d+) steps?, a loss of (\S+), (\S+) tokens/s$", out, re.M)
    figures: dict[str, Any] = {
        "steps": int(end[0]),
        "loss": float(end[1]),
        "tokens_per_second": float(end[2].replace(",", "")),
    }
    for of in ("predicted", "measured"):
        shares = re.findall(rf"^rank \d+ {of} .* (\d+)% idle$", out, re.M)
        figures[f"{of}_idle"] = [int(share) / 100 for share in shares]
    if differences := re.search(r"^largest difference .*; up to", out, re.M):
        assert re.search(r"^(right|wrong): this is (not )?the same ", out, re.M)
        for what in ("loss", "gradient"):
            if found := re.search(rf" {what}s? (\d\S+e[+-]\d+)", differences[0]):
                figures[f"{what}_error"] = float(found[1])
    return figures


def run_script(
    run_ranks: Run, tmp_path: Path, ranks: int, *command: object
) -> Training:
    """Run a script with arguments on so many ranks."""
    return launched(
        run_ranks, tmp_path, ranks, partial(script_main, list(map(str, command)))
    )


def run_torchrun(
    run_ranks: Run, tmp_path: Path, folder: Path, command: list[str]
) -> tuple[int, str]:
    """Run `torchrun --standalone --nproc-per-node N SCRIPT …` in a folder: its exit code, and what all
    have printed.
    """
    ranks, *script = command[3:]
    assert command[:3] == ["torchrun", "--standalone", "--nproc-per-node"]
    done = launched(run_ranks, tmp_path, int(ranks), partial(script_in, folder, script))
    return int(any(done.codes)), done.stdout + done.stderr


def launched(
    run_ranks: Run, tmp_path: Path, ranks: int, main: Callable[[], None]
) -> Training:
    """What becomes of processes that do this."""
    folder = Path(mkdtemp(dir=tmp_path))
    given = partial(launch, ranks, main, folder)
    (codes,) = run_ranks(given, 1, joins=False).results()
    return Training(
        codes, (folder / "stdout").read_text(), (folder / "stderr").read_text()
    )


def launch(ranks: int, main: Callable[[], None], folder: Path) -> list[int]:
    """As torchrun does: has the store of the processes, waits for them to end, and asks all others
    to end where one has failed.
    """
    print_to(folder / "stdout", 1)
    print_to(folder / "stderr", 2)
    port = folder / "port"
    mains = [partial(rank_main, rank, ranks, port, main) for rank in range(ranks)]
    children = [fork(each) for each in mains or [main]]
    # Only now, for it has threads.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    write(port, str(store.port).encode())
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child] != 0:
            for other in set(children) - codes.keys():
                os.kill(other, signal.SIGTERM)
    return [codes[child] for child in children]


def rank_main(rank: int, ranks: int, port: Path, main: Callable[[], None]) -> None:
    """A process as torchrun starts it."""
    os.environ |= environment_of(rank, ranks, int(read(port)))
    main()


def module_main(arguments: list[str]) -> None:
    """`python -m schedlang.runtime`."""
    sys.argv = ["schedlang.runtime", *arguments]
    run()


def script_in(folder: Path, command: list[str]) -> None:
    """`python SCRIPT` in a folder."""
    os.chdir(folder)
    script_main(command)


def script_main(command: list[str]) -> None:
    """`python SCRIPT`, from its first line to the end of its interpreter: what it fails with is told,
    and what is to be done at the end is done.
    """
    sys.argv = command
    failed = ctypes.pythonapi.PyRun_SimpleString(_SCRIPT)
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
