"""What gradients cost that are late by one update, and what error feedback gives back:
`make bench WHAT=late`.

A small GPT trains on the source of Python's standard library: under 1F1B, whose gradients are in
time, and under PipeDream-2BW without and with error feedback, with the same learning rates and on
the same batches. The losses are means over the last LAST steps. `schedc run` gives SGD a momentum
under 1F1B, and none where gradients are late, so SGD has no loss in time to compare with.
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
#: Optimizers and learning rates.
RATES = (("adamw", 0.003), ("adamw", 0.001), ("sgd", 0.1), ("sgd", 0.3))
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
    print(f"{'':16}" + "".join(f"{name:>22}" for name in RUNS))
    for optimizer, rate in RATES:
        print(f"{optimizer:6} {rate:<9}", end="")
        for name, (program, *options) in RUNS.items():
            if optimizer == "sgd" and name == "in time":
                print(f"{'-':>22}", end="")
                continue
            chosen = ("--optimizer", optimizer, "--lr", str(rate))
            print(f"{loss(program, *options, *chosen):22.3f}", end="", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
