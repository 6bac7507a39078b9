"""What gradients cost that are late by one update, and what error feedback gives back:
`make bench WHAT=late`.

A small GPT trains on the source of Python's standard library: under 1F1B, whose gradients are in
time, and under PipeDream-2BW without and with error feedback, with the same learning rates and on
the same batches. The losses are means over the last LAST steps.
"""

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

PROGRAMS = Path(__file__).parent.parent / "programs"
STEPS = 300
LAST = 50
SIZE = ("-p", "ranks=2", "-p", "microbatches=2")
#: Learning rates of AdamW; the first one is that of `schedc run`.
RATES = (0.003, 0.001)
LATE = "pipedream_2bw"
RUNS = {
    "in time": ("1f1b",),
    "late": (LATE,),
    "late, error feedback": (LATE, "--error-feedback"),
}


def loss(program: str, *options: str) -> float:
    """The mean loss of the last steps of a training."""
    command = [sys.executable, "-m", "schedlang", "run", f"{PROGRAMS / program}.sched"]
    command += [*SIZE, "--steps", str(STEPS), *options]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=1800
    )
    losses = re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.M)
    assert len(losses) == STEPS
    return mean(map(float, losses[-LAST:]))


def main() -> None:
    """Print the table."""
    print(f"{'AdamW':8}" + "".join(f"{name:>22}" for name in RUNS))
    for rate in RATES:
        chosen = ("--optimizer", "adamw", "--lr", str(rate))
        losses = (loss(*run, *chosen) for run in RUNS.values())
        cells = "".join(f"{each:22.3f}" for each in losses)
        print(f"{rate:<8}{cells}", flush=True)


if __name__ == "__main__":
    main()
