"""The progress of a training: on a terminal one line that changes, elsewhere a line per step."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from schedlang.cli.run import STARTED

_WIDTH = 24


class Progress:
    """Prints the progress on one rank, which has losses.

    The line on a terminal also has the measured share of the step in which that rank was idle: all
    the time that its ops do not take.
    """

    def __init__(self, rank: int, steps: int) -> None:
        self._rank = rank
        self._steps = steps
        tells = dist.get_rank() == self._rank
        #: Whether there is a line that changes, which needs the ops of every step.
        self.is_bar = tells and sys.stdout.isatty()
        self._is_log = tells and not self.is_bar

    def show(self, step: int, loss: float, speed: float, idle: float) -> None:
        """A step is done: its number from 1, its mean loss, tokens per second, and the idle share
        of this rank.
        """
        if STARTED in os.environ:
            # Whoever has started this shows until now that it takes a while.
            Path(os.environ.pop(STARTED)).touch()
        if self._is_log:
            print(
                f"step {step:>3}  loss {loss:.4f}  {speed:>9,.0f} tokens/s", flush=True
            )
        elif self.is_bar:
            bar = ("█" * (_WIDTH * step // self._steps)).ljust(_WIDTH, "░")[:_WIDTH]
            line = f"step {step}/{self._steps} {bar} loss {loss:.4f}  {speed:,.0f} tokens/s"
            line += f"  rank {self._rank} idle {idle:.0%}"
            # What is printed next, such as the cause of a failure, takes its place.
            print(
                f"\x1b[K{line}", end="\n" if step >= self._steps else "\r", flush=True
            )
