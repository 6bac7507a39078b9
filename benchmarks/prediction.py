"""Predicted against measured step time, with real processes on the demo model: `make
bench WHAT=prediction`.

Each case is a run of 11 steps, `schedc run --trace`, of which the last 10 are recorded, and `schedc
compare` of it. The figures are for a machine without other work, and with a core for each rank; the
load of the machine and its cores stand beside them, since ranks that share cores take longer
whenever they work at once.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent.parent / "programs"
LIMIT = 280
STEPS = 11


def measure(program: str, ranks: int, folder: Path) -> dict[str, Any]:
    """The comparison of a run, as `schedc compare --json` has it."""
    file = str(PROGRAMS / f"{program}.sched")
    trace = folder / "run.json"
    sizes = ["-p", f"ranks={ranks}"]
    schedc("run", file, *sizes, "--steps", str(STEPS), "--trace", str(trace))
    found: dict[str, Any] = json.loads(
        schedc("compare", file, str(trace), *sizes, "--json")
    )
    return found


def schedc(*arguments: str) -> str:
    """What a command prints; exit code 1 if it fails."""
    command = [sys.executable, "-m", "schedlang", *arguments]
    done = subprocess.run(command, timeout=LIMIT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"schedc {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    """Print the table."""
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    print(
        f"medians of {STEPS - 1} steps, on {cores} cores; load: of the last minute, when the run "
        "has ended"
    )
    print("program           ranks | predicted, ms  measured, ms   error |  load")
    for ranks in (2, 4):
        for program in ("1f1b", "interleaved_1f1b", "zb_h1"):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(program, ranks, Path(folder))
            predicted, measured = (
                found[which]["makespan"] / 1000 for which in ("predicted", "measured")
            )
            shares = (
                f"  {ranks} ranks share {cores} cores" if ranks > (cores or 1) else ""
            )
            print(
                f"{program:<17} {ranks:>5} | {predicted:>13.1f} {measured:>13.1f} "
                f"{found['error']:>+7.1%} | "
                f"{os.getloadavg()[0]:>5.1f}{shares}",
                flush=True,
            )


if __name__ == "__main__":
    main()
