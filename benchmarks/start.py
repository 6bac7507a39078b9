"""What it costs to start a command: `make bench WHAT=start`.

Processor time of whole processes on 1F1B with 4 ranks and 8 microbatches, beside that of Python by
itself and of numpy, which all commands that compile need. They run in turn, so that all meet the
machine in the same mood; the least of ROUNDS counts. A text that was compiled before is parsed from
the cache; a new one takes lark and the tables of the grammar as well.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

PROGRAM = str(Path(__file__).parent.parent / "programs" / "1f1b.sched")
ROUNDS = 15

SCHEDC = ("-m", "schedlang")
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import numpy": ("-c", "import numpy"),
    "import schedlang": ("-c", "import schedlang"),
    "schedc --help": (*SCHEDC, "--help"),
    "schedc compile": (*SCHEDC, "compile", PROGRAM),
    "schedc simulate": (*SCHEDC, "simulate", PROGRAM),
    "schedc view": (*SCHEDC, "view", PROGRAM),
}
NEW = "schedc compile, a new text"


def spent(arguments: tuple[str, ...]) -> float:
    """The processor time of a Python process, of user and system, in seconds."""
    # Python writes the bytecode of a module beside it once, unless this variable forbids it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=60
    )
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the least time of each."""
    times: dict[str, list[float]] = {name: [] for name in (*COMMANDS, NEW)}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "new.sched"
        for round in range(ROUNDS):
            for name, arguments in COMMANDS.items():
                times[name].append(spent(arguments))
            # A comment of its own makes the text a new one, which is in no cache.
            program.write_text(f"# {folder} {round}\n{Path(PROGRAM).read_text()}")
            times[NEW].append(spent((*SCHEDC, "compile", str(program))))
    for name, seconds in times.items():
        print(f"{name:28} {min(seconds) * 1e3:4.0f} ms")


if __name__ == "__main__":
    main()
