"""The rows of a long benchmark: several at a time, each kept as soon as it is there, so that who
stops it goes on later from there.

Rows are kept in build/bench-search, one file for each benchmark, for the sources that they were
made with: after a change of these, or of a limit, all are made anew.
"""

import argparse
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import Pool, TimeoutError
from pathlib import Path
from time import monotonic

from attrs import asdict, frozen

from schedlang.cli.option_values import seconds

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "bench-search"
#: What rows depend on.
SOURCES = (
    "schedlang/**/*.py",
    "programs/**/*.sched",
    "benchmarks/*.py",
    "tests/cases/*.json",
)


@frozen
class Row:
    """A row as it is printed, and what it counts as at the end: `counts` has words such as
    "proved".
    """

    text: str
    counts: Sequence[str]


#: Makes a row by its number and how many seconds it may take.
Maker = Callable[[int, float], Row]


def print_rows(name: str, head: str, count: int, make: Maker, limit: float) -> None:
    """Print the rows of the benchmark of a name, and how many count as what; `make` is a function
    of a module. Options of the command line say which rows, and how long it may take.
    """
    options = _options(count, limit)
    numbers = range(count)[options.rows]
    file = KEPT / f"{name}.jsonl"
    rows = _kept(file, options.limit)
    print(head)
    for number in numbers:
        if number in rows:
            print(rows[number].text)
    left = [number for number in numbers if number not in rows]
    deadline = monotonic() + options.seconds
    with file.open("a") as kept, Pool(options.jobs, _leave_interrupts) as pool:
        # In any order: a row that takes long keeps nobody waiting, and each is kept as soon as it
        # is there.
        made = pool.imap_unordered(partial(_numbered, make, options.limit), left)
        for _ in left:
            try:
                number, row = made.next(timeout=max(deadline - monotonic(), 0.0))
            except (TimeoutError, KeyboardInterrupt):
                break
            rows[number] = row
            print(row.text, flush=True)
            print(json.dumps({"number": number, **asdict(row)}), file=kept, flush=True)
    mine = [rows[number] for number in numbers if number in rows]
    counts = Counter(word for row in mine for word in row.counts)
    for word, times in sorted(counts.items()):
        print(f"{word}: {times} of {len(mine)}")
    if len(mine) < len(numbers):
        print(
            f"{len(numbers) - len(mine)} rows are missing: the same command goes on with them"
        )


def _options(count: int, limit: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "rows",
        nargs="?",
        type=lambda text: slice(*map(int, text.split(":"))),
        default=slice(0, count),
        help="which rows, as 10:20 (default: all)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=limit,
        help="seconds for a row (default: %(default)g)",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=seconds,
        default=float(10**6),
        help="how long it may take, as 90s or 10m; what is missing then comes next time",
    )
    help = "how many rows at a time (default: one on each core)"
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help=help)
    return parser.parse_args()


def _kept(file: Path, limit: float) -> dict[int, Row]:
    """The rows that there are already, with these sources and this limit."""
    made_with = {"limit": limit, "sources": _fingerprint()}
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    # The first line says what the rows were made with; rows of other sources are thrown away.
    if not lines or json.loads(lines[0]) != made_with:
        file.write_text(json.dumps(made_with) + "\n")
        return {}
    rows = map(json.loads, lines[1:])
    return {row["number"]: Row(row["text"], row["counts"]) for row in rows}


def _fingerprint() -> str:
    """A name for all that rows depend on."""
    digest = sha256(version("ortools").encode())
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _numbered(make: Maker, limit: float, number: int) -> tuple[int, Row]:
    return number, make(number, limit)


def _leave_interrupts() -> None:
    """Ctrl-C is for the one who waits for the rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
