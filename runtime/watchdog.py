"""When one rank fails, all of them say why and end, at once.

A rank that fails writes the cause under one key of the process group's store. Every rank has a thread that looks
there; it prints the cause and ends the process, since nothing can wake a main thread that waits inside gloo. The same
thread sees when its main thread makes no progress, and asks the others which rank that is the fault of.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from time import monotonic, sleep
from typing import Any, NoReturn

import torch.distributed as dist

from schedlang.plan import Plan
from schedlang.runtime.sigterm import SigtermBell

#: Seconds between two looks at the store.
POLL = 0.2
#: Seconds that the other ranks get to do their part when one fails.
GRACE = 2.0

#: Held by the thread that ends this process, whichever of its pipelines fails. Never given back.
_ending = threading.Lock()

_CAUSE, _OUT, _ASKED, _STANDS = (f"schedlang/{name}" for name in ("cause", "out", "asked", "stands"))


class PipelineError(Exception):
    """What stopped the pipeline, in one line: the rank, the action with its program line, the reason."""


class LostRank(PipelineError):
    """The connection to another rank broke, or to one of several."""

    def __init__(self, ranks: set[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = " or ".join(map(str, sorted(ranks)))


def say(line: str) -> None:
    """Print a line to stderr, in one write, or the lines of several ranks would run into one another."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for something that other ranks do, at most some seconds; whether it came."""
    end = monotonic() + seconds
    while not condition():
        if monotonic() > end:
            return False
        sleep(0.01)
    return True


@lru_cache(1)
def _connection(store: Any) -> Any:
    """A connection to the store of its own: on the group's, the thread would wait while the main thread waits."""
    return store.clone()


class Watchdog:
    """Watches one rank. Its main thread keeps `step`, `action` and `waits_for` up to date.

    `action` is an index into the rank's actions, None outside of a step; `waits_for` is the rank at the other end of
    the message that the main thread waits for, None while it computes.
    """

    def __init__(self, plan: Plan, timeout: float) -> None:
        self.step = 0
        self.action: int | None = None
        self.waits_for: int | None = None
        self._plan, self._timeout = plan, timeout
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.store = _connection(dist.distributed_c10d._get_default_store())
        self._stands: tuple[int, int | None, int | None] = (0, None, None)
        self._since = monotonic()
        self._closed = False
        self._bell = SigtermBell()
        self._thread = threading.Thread(target=self._watch, name="schedlang watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop_thread()
        self._bell.take_down()

    def _stop_thread(self) -> None:
        self._closed = True
        self._bell.interrupt()
        self._thread.join()

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks of an error that the main thread has met, and raise it as PipelineError.

        Where another rank has failed before, that is the cause: it is printed, and the process ends.
        """
        # If the thread has begun to end the process, the main thread stays here.
        _ending.acquire()
        message = self._explain(error)
        cause = self._publish(message)
        if cause != message:
            self._leave(cause)
        self._stop_thread()
        self._bell.let_finish(GRACE)
        if isinstance(error, LostRank):
            self._count_out()
        # The others go first: a launcher kills them as soon as it sees that one has ended.
        self._until_out(self._ranks - 1)
        self._count_out()
        raise PipelineError(message) from (error.__cause__ if isinstance(error, PipelineError) else error)

    def _explain(self, error: Exception) -> str:
        place = "" if self.action is None else self._place()
        # gloo begins with a place in its own source, and ends with advice and a greeting.
        reason = re.sub(r"^\[[^]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
        if isinstance(error, LostRank):
            return f"rank {error.ranks} is gone: rank {self._rank} lost its connection{place}: {reason}"
        if isinstance(error, dist.DistNetworkError):
            return f"rank {self._rank} lost the store of the process group{place}: {reason}"
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        return f"rank {self._rank} failed{place}: {kind}{reason}"

    def _place(self) -> str:
        """Where the main thread stands: ` at 1F0 (1f1b.sched:9)`."""
        if self.action is None:
            return " between two steps" if self.step else " at the start"
        return f" at {self._plan.ranks[self._rank].word(self.action)} ({self._plan.where(self._rank, self.action)})"

    def _publish(self, message: str) -> str:
        """Make this the cause, if there is none yet; the cause."""
        with suppress(RuntimeError):
            return bytes(self.store.compare_set(_CAUSE, "", message)).decode()
        return message

    def _leave(self, cause: str) -> NoReturn:
        say(f"rank {self._rank}: stopped: {cause}")
        self._count_out()
        if self._rank == 0:
            # The store may be in this process, so the others go first.
            self._until_out(self._ranks)
        os._exit(1)

    def _count_out(self) -> None:
        with suppress(RuntimeError):
            self.store.add(_OUT, 1)

    def _until_out(self, ranks: int) -> None:
        """Wait until so many ranks have said their last word, or are known to be gone."""
        with suppress(RuntimeError):
            wait_until(lambda: self.store.add(_OUT, 0) >= ranks, GRACE)

    def _watch(self) -> None:
        """The thread: look, wait, look again, until there is a cause to end for."""
        cause = None
        while cause is None and not self._closed:
            try:
                cause = self._look()
            except RuntimeError as error:
                # The store is gone with the process that held it; outside of a step, that only means the end of a job.
                if self.action is None:
                    return
                cause = self._explain(error)
        if cause is not None and _ending.acquire(blocking=False):
            self._leave(cause)

    def _look(self) -> str | None:
        """Wait `POLL` seconds, then look whether there is a cause to end for."""
        terminated = self._bell.wait(POLL)
        if terminated:
            # A launcher sends SIGTERM when another rank has died; those who knew that rank may yet say so.
            wait_until(lambda: self.store.check([_CAUSE]), GRACE / 2)
        if self.store.check([_CAUSE]):
            return str(self.store.get(_CAUSE).decode())
        if terminated:
            return self._publish(f"rank {self._rank} was terminated{self._place()}")
        if self.store.check([_ASKED]):
            self._answer()
        stands = self.step, self.action, self.waits_for
        if stands != self._stands:
            self._stands, self._since = stands, monotonic()
        elif self.action is not None and monotonic() - self._since > self._timeout:
            return self._publish(self._find_fault())
        return None

    def _answer(self) -> None:
        """Write down where this rank stands, how long, and for whom it waits."""
        answer = [self._place(), monotonic() - self._since, self.waits_for]
        self.store.set(f"{_STANDS}/{self._rank}", json.dumps(answer))

    def _find_fault(self) -> str:
        """Follow the waits from rank to rank, to one that waits for nobody; what is to be said about it."""
        self.store.set(_ASKED, "")
        self._answer()
        waited = f"rank {self._rank} has waited {self._timeout:g} s{self._place()}"
        rank, seen = self._rank, {self._rank}
        while True:
            key = f"{_STANDS}/{rank}"
            if not wait_until(partial(self.store.check, [key]), GRACE):
                return f"rank {rank} does not answer: {waited}"
            place, since, waits_for = json.loads(self.store.get(key))
            if waits_for is None or waits_for in seen:
                break
            rank = waits_for
            seen.add(rank)
        stands = f"rank {rank} has made no progress for {since:.1f} s{place}"
        return stands if rank == self._rank else f"{stands}: {waited}"
