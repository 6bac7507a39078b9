"""When one rank fails, all of them say why and end, at once.

A rank that fails writes the cause under one key of the process group's store. Every rank has a
thread that looks there; it prints the cause and ends the process, since nothing can wake a main
thread that waits inside gloo. The same thread tells the others where its rank stands; it sees when
its main thread makes no progress, and whose fault that is. The rank that finds out also reports
where all others stood.
"""

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NoReturn

import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.runtime.transport.ranks import Ranks
from schedlang.runtime.watch.signals import SignalBell
from schedlang.runtime.watch.standings import Standing, Standings
from schedlang.runtime.watch.store import (
    LimitedStore,
    StoreIsSilentError,
    connection,
    is_of_torchrun,
    wait_until,
)

#: Seconds between two looks at the store.
POLL = 0.2
#: Seconds that the other ranks get to do their part when one fails.
GRACE = 2.0

#: Held by the thread that ends this process, whichever of its pipelines fails. Never given back.
_ending = threading.Lock()

#: Where a rank is that has made a step.
BETWEEN = "between two steps"

_CAUSE = "cause"
_OUT = "out"


class PipelineError(Exception):
    """What stopped the pipeline: the rank, the action with its program line, the reason; and where
    all ranks stood.
    """


class LostRank(PipelineError):
    """The connection to another rank broke, or to one of several."""

    def __init__(self, ranks: set[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = ranks


def say(line: str) -> None:
    """Print a line to stderr, in one write, or the lines of several ranks would run into one
    another.
    """
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class Watchdog:
    """Watches one process. Its main thread keeps `step`, `action` and `waits_for` up to date.

    `action` is an index into the rank's actions, None outside of a step, where `between` says what
    it does; `waits_for` are the processes that the main thread waits for, none while it computes.
    `number` tells apart the pipelines that all processes have built one after another. Here and in
    all messages, the rank of a process is that in the default process group.
    """

    def __init__(self, plan: Plan, ranks: Ranks, number: int, timeout: float) -> None:
        self.step = self._gathered = 0
        self.action: int | None = None
        self.between = "at the start"
        self.waits_for: tuple[int, ...] = ()
        self._plan = plan
        self._ranks = ranks
        self._number = number
        self._timeout = timeout
        self._rank = dist.get_rank()
        self._processes = dist.get_world_size()
        self._name = ranks.name(self._rank)
        shared = connection(dist.distributed_c10d._get_default_store())
        self.store = LimitedStore(shared, timeout + GRACE, self._standing)
        self._standings = Standings(self._processes, ranks.name, self.store)
        self._stands: tuple[int, int | None, tuple[int, ...]] = (0, None, ())
        self._since = monotonic()
        #: Whether it does not watch any more, has found the cause, and has lost the store.
        self._closed = self._found = self._is_alone = False
        self._bell = SignalBell()
        self._post()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="schedlang watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        self._stop_thread()
        self._bell.take_down()

    def _stop_thread(self) -> None:
        self._closed = True
        self._bell.interrupt()
        self._thread.join()

    def gather(self, value: str, otherwise: str) -> dict[int, str]:
        """What all ranks give here, of all replicas; PipelineError if some do not in time: they
        have `otherwise`.
        """
        group = f"gathered/{self._number}/{self._gathered}"
        keys = {rank: f"{group}/{rank}" for rank in self._ranks.all}
        self._gathered += 1
        self.store.set(keys[self._rank], value)
        if not wait_until(partial(self.store.check, [*keys.values()]), self._timeout):
            missing = [
                self._ranks.name(rank) for rank, key in keys.items() if not self.store.check([key])
            ]
            raise PipelineError(
                f"{' and '.join(missing)} has {otherwise} within {self._timeout:g} s"
            )
        found = self.store.multi_get([*keys.values()])
        return {rank: value.decode() for rank, value in zip(keys, found, strict=True)}

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks of an error that the main thread has met, and raise it as PipelineError.

        Where another rank has failed before, that is the cause: it is printed, and the process
        ends.
        """
        # If the thread has begun to end the process, the main thread stays here.
        _ending.acquire()
        if isinstance(error, LostRank):
            if len(error.ranks) > 1:
                error.ranks = {*self._ask(partial(self._silent, error.ranks), ())} or error.ranks
            self.waits_for = tuple(sorted(error.ranks))
        cause = self._publish(self._explain(self._deeper(error)))
        if not self._found:
            self._leave(cause)
        self._stop_thread()
        self._bell.let_finish(GRACE)
        if isinstance(error, LostRank):
            self._count_out()
        report = self._report(cause)
        self._count_out()
        raise PipelineError(report) from (
            error.__cause__ if isinstance(error, PipelineError) else error
        )

    def _at_exit(self) -> None:
        """Where this process ends by an error of its script, between two steps, tell all ranks of
        it.
        """
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception) and not self._closed and _ending.acquire(blocking=False):
            self._bell.ignore()
            cause = self._publish(self._explain(error))
            say(f"{self._name}: stopped: {self._report(cause) if self._found else cause}")
            self._count_out()
        self.close()

    def _deeper(self, error: Exception) -> Exception:
        """What is behind a lost connection: the loss of the store, for which the other rank may
        have ended itself.
        """
        if isinstance(error, LostRank) and 0 not in error.ranks:
            try:
                self.store.check([_CAUSE])
            except RuntimeError as lost:
                self._is_alone = True
                return lost
        return error

    def _explain(self, error: Exception) -> str:
        place = "" if self.action is None else self._place()
        # gloo begins with a place in its own source, and ends with advice and a greeting.
        reason = re.sub(r"^\[[^]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
        if isinstance(error, LostRank):
            gone = " or ".join(map(self._ranks.name, sorted(error.ranks)))
            return f"{gone} is gone: {self._name} lost its connection{place}: {reason}"
        if isinstance(error, StoreIsSilentError):
            return (
                f"the store of the process group does not answer: {self._name} lost it{place}: "
                f"{reason}"
            )
        if isinstance(error, dist.DistNetworkError):
            holder = "torchrun" if is_of_torchrun() else self._ranks.name(0)
            return (
                f"{holder} is gone: {self._name} lost the store of the process group{place}: "
                f"{reason}"
            )
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        return f"{self._name} failed{place}: {kind}{reason}"

    def _post(self, ended: bool = False) -> Standing:
        """Tell the other ranks where the main thread stands."""
        standing = self._standing(ended)
        self._standings.post(self._rank, standing)
        return standing

    def _standing(self, ended: bool = False) -> Standing:
        stands = self.step, self.action, self.waits_for
        if stands != self._stands:
            self._stands = stands
            self._since = monotonic()
        return Standing(*stands, monotonic() - self._since, self._place(), ended)

    def _place(self) -> str:
        action = self.action
        own = self._ranks.own
        if action is None:
            return f" {self.between}"
        return f" at {self._plan.ranks[own].word(action)} ({self._plan.where(own, action)})"

    def _publish(self, message: str) -> str:
        """Make this the cause, if there is none yet; the cause."""
        cause: str = self._ask(
            lambda: bytes(self.store.compare_set(_CAUSE, "", message)).decode(), message
        )
        self._found = cause == message
        return cause

    def _ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Do something with the store; not once it is gone: every time torch would print a page
        about it.
        """
        if not self._is_alone:
            try:
                return call()
            except RuntimeError:
                self._is_alone = True
        return otherwise

    def _leave(self, cause: str) -> NoReturn:
        said = self._report(cause) if self._found else cause
        self._ask(partial(self._post, ended=True))
        say(f"{self._name}: stopped: {said}")
        self._count_out()
        if self._rank == 0:
            # The store may be in this process, so the others go first.
            self._until_out(self._processes)
        os._exit(1)

    def _report(self, cause: str) -> str:
        """The cause, and where all ranks stood when they ended.

        That is known when all others have ended. They go first also because a launcher kills the
        others as soon as it sees that one has ended.
        """
        standing = self._standing(ended=True)
        self._ask(partial(self._standings.post, self._rank, standing))
        self._until_out(self._processes - 1)
        lines = self._ask(self._standings.lines, [self._standings.line(self._rank, standing)])
        return "\n  ".join([cause, *(lines if self.step else ())])

    def _count_out(self) -> None:
        self._ask(lambda: self.store.add(_OUT, 1))

    def _until_out(self, ranks: int) -> None:
        """Wait until so many ranks have said their last word, or are known to be gone."""
        self._ask(lambda: wait_until(lambda: self.store.add(_OUT, 0) >= ranks, GRACE))

    def _watch(self) -> None:
        """The thread: look, wait, look again, until there is a cause to end for."""
        cause = None
        while cause is None and not self._closed:
            try:
                cause = self._look()
            except RuntimeError as error:
                # The store is gone with the process that held it; outside of a step, that only
                # means the end of a job.
                if self.action is None and not isinstance(error, StoreIsSilentError):
                    return
                self._is_alone = True
                cause = self._publish(self._explain(error))
        if cause is not None and _ending.acquire(blocking=False):
            self._leave(cause)

    def _look(self) -> str | None:
        """Wait `POLL` seconds, then look whether there is a cause to end for."""
        signals = self._bell.wait(POLL)
        if signal.SIGINT in signals and self._stays():
            return self._publish(f"{self._name} was interrupted{self._place()}")
        if signal.SIGTERM in signals:
            # A launcher sends SIGTERM when another rank has died; those who knew that rank may yet
            # say so.
            wait_until(lambda: self.store.check([_CAUSE]), GRACE / 2)
        if self.store.check([_CAUSE]):
            return str(self.store.get(_CAUSE).decode())
        if signal.SIGTERM in signals:
            return self._publish(f"{self._name} was terminated{self._place()}")
        standing = self._post()
        is_busy = standing.action is not None or standing.waits_for
        if is_busy and standing.seconds > self._timeout:
            return self._publish(self._find_fault())
        return None

    def _stays(self) -> bool:
        """Whether the main thread stays where it is in a step, and so does not come to its
        KeyboardInterrupt.
        """
        stands = self._standing()
        gone = wait_until(
            lambda: self.action is None or self._standing().seconds < stands.seconds, GRACE / 2
        )
        return stands.action is not None and not gone

    def _find_fault(self) -> str:
        """Follow the waits from rank to rank, to one that waits for nobody; what is to be said
        about it.
        """
        waited = f"{self._name} has waited {self._timeout:g} s{self._place()}"
        rank = self._rank
        seen = {self._rank}
        standing = self._standing()
        while others := [each for each in standing.waits_for if each not in seen]:
            if silent := self._silent(others):
                return f"{self._ranks.name(silent[0])} does not answer: {waited}"
            # Several are replicas, which do the same: all wait for the last one.
            now = {each: self._standings.of(each) or standing for each in others}
            rank = min(now, key=lambda each: now[each].progress)
            standing = now[rank]
            seen.add(rank)
        stands = (
            f"{self._ranks.name(rank)} has made no progress for {standing.seconds:.1f} "
            f"s{standing.place}"
        )
        return stands if rank == self._rank else f"{stands}: {waited}"

    def _silent(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks that do not tell any more where they stand; this one does, for others
        may wait for it.
        """
        before = {each: self._standings.of(each) for each in ranks}

        def is_new(rank: int) -> bool:
            self._post()
            return self._standings.of(rank) != before[rank] or bool(self.store.check([_CAUSE]))

        return [each for each in before if not wait_until(partial(is_new, each), GRACE)]
