"""How a process ends after it or another rank has failed.

One rank is the first to write the cause into the store: its own error, the signal that ends it, or
the fault that it finds after it has waited for too long. To find that, it follows the waits from
heartbeat to heartbeat, to the rank for which all others wait in the end:

    rank 0 waits for rank 1 waits for rank 2, which computes       they wait for as long as it takes
    rank 0 waits for rank 1 waits for rank 2, which stands still   rank 2 is at fault

All other ranks write their tracebacks to a file and end. The rank that wrote the cause ends last,
and prints the report (`failure_report.py`).
"""

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from signal import SIGINT, SIGTERM
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.on_demand import on_demand
from schedlang.runtime.errors import LostRank, PipelineError, way_out
from schedlang.runtime.failure_report import (
    Cause,
    keep_traceback,
    lines_of_script,
    stderr_of_process,
)
from schedlang.runtime.heartbeats import Heartbeat
from schedlang.runtime.store import StoreIsSilentError, is_of_torchrun, wait_until
from schedlang.runtime.watchdog import (
    AT_END,
    CAUSE,
    ENDING,
    GRACE,
    OPEN,
    Watchdog,
    after_another,
    say,
)

if TYPE_CHECKING:
    from schedlang.runtime.mistakes import report_mistake
else:
    report_mistake = on_demand("schedlang.runtime.mistakes.report_mistake")

E = TypeVar("E", bound=BaseException)

#: Keys of the store: the number of ranks that have finished; where the cause was printed; whether
#: the report was.
_OUT = "out"
_SAID = "said"
_REPORTED = "reported"

#: Set when the main thread has told the other ranks of an error. The script may still continue.
_has_told = threading.Event()
#: An attribute of this error: the `Failure` that has told them.
_TOLD = "_told_all_ranks"


def report_uncaught(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Python's `sys.excepthook` in a process that has imported `Pipeline`.

    It prints a report in place of a traceback: of the error that ends a run, whose report names the
    file with the tracebacks; and of a wrong plan or program, also before there is a pipeline.
    """
    if hasattr(error, _TOLD):
        # The report of KeyboardInterrupt was printed already; that of a PipelineError is its text.
        if isinstance(error, PipelineError):
            say(str(error))
            getattr(error, _TOLD).note_report()
        is_reported = True
    elif OPEN:
        is_reported = OPEN[-1].failure.end_with(error)
    else:
        is_reported = isinstance(error, CompileError) and report_mistake(error)
    if is_reported:
        # Call the earlier hook without its output, since some hooks send the error to a service.
        with redirect_stderr(StringIO()):
            before(kind, error, traceback)
    else:
        before(kind, error, traceback)


def read_cause(store: Any) -> Cause:
    """The cause that a rank has written into the store."""
    return Cause.read(store.get(CAUSE))


class Failure:
    """Ends a process after its `watchdog` has noticed a failure."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._store = watchdog.store
        self._heartbeats = watchdog.heartbeats
        self._signals = watchdog.signals
        self._timeout = watchdog.timeout
        self._name_of = watchdog.processes.name
        self._rank = watchdog.rank
        self._name = watchdog.name
        self._count = dist.get_world_size()
        #: Whether this rank was the first to write a cause; and whether the store is gone.
        self._is_first_cause = False
        self._has_lost_store = False
        #: For silent ranks, the last heartbeat, and since when there was no other.
        self._heard: dict[int, tuple[Heartbeat | None, float]] = {}

    def tell_all(self, error: Exception) -> PipelineError:
        """Tell all ranks of an error in the main thread; return the error to raise.

        If another rank has failed before, that is the cause: it is printed, and the process ends.
        """
        if self._watchdog.is_closed:
            raise after_another() from error
        # If the watchdog's thread is ending the process, the main thread waits here until it has.
        if not ENDING.acquire(timeout=10 * GRACE):
            raise after_another() from error
        if isinstance(error, LostRank):
            # If a message to several ranks broke, ranks that write heartbeats are not the cause.
            if len(error.ranks) > 1:
                error.ranks = {
                    *self._ask(partial(self._silent, error.ranks), ())
                } or error.ranks
            self._watchdog.waits_for = tuple(sorted(error.ranks))
        cause = self.cause_of_error(self._deeper(error))
        # If another rank was first, this error is a consequence of its cause.
        if not self._is_first_cause:
            self.leave(cause, error)
        self._watchdog.stop_thread()
        # From here on only the main thread ends the process; the script may catch the error.
        self._signals.let_finish(GRACE)
        if isinstance(error, LostRank):
            self._count_out()
        report = self._report(cause, error)
        self._count_out()
        told = self._told(PipelineError(report))
        told.__cause__ = error.__cause__ if isinstance(error, PipelineError) else error
        return told

    def abandon(self, error: BaseException) -> None:
        """Tell all ranks that the main thread leaves a step by an exception that is not the
        pipeline's.
        """
        if self._watchdog.is_closed or not ENDING.acquire(blocking=False):
            return
        # The script may catch the exception and clean up before the process ends.
        self._watchdog.stop_thread()
        self._signals.let_finish(GRACE)
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Make an error the cause, if there is none yet, and print the cause."""
        cause = self.cause_of_error(self._told(error))
        self._say(cause, error)

    def _told(self, error: E) -> E:
        """Mark an error of which the other ranks were told."""
        _has_told.set()
        setattr(error, _TOLD, self)
        return error

    def end_with(self, error: BaseException) -> bool:
        """Report an uncaught error of the script, unless an earlier error has ended the run; return
        whether this one has.
        """
        if _has_told.is_set():
            return False
        # If the watchdog's thread is ending the process, the main thread waits here until it has.
        if self._watchdog.is_closed or not ENDING.acquire(timeout=10 * GRACE):
            return False
        self._watchdog.stop_thread()
        self._signals.let_finish(GRACE)
        self.tell(error)
        return True

    def _deeper(self, error: Exception) -> Exception:
        """The error behind a lost connection: the peer may have ended because it lost the store,
        and then this rank has lost the store, too.
        """
        if isinstance(error, LostRank) and 0 not in error.ranks:
            try:
                self._store.check([CAUSE])
            except RuntimeError as lost:
                self._has_lost_store = True
                return lost
        return error

    def _explain(self, error: BaseException) -> str:
        """The cause in words: which rank failed, where, and why."""
        if isinstance(error, KeyboardInterrupt):
            return f"{self._name} was interrupted{self._watchdog.place()}"
        place = "" if self._watchdog.action is None else self._watchdog.place()
        # gloo's messages begin with a place in its source, and end with advice.
        reason = re.sub(
            r"^\[[^]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0]
        )
        if isinstance(error, LostRank):
            gone = " or ".join(map(self._name_of, sorted(error.ranks)))
            hint = self._uneven(error.ranks)
            return f"{gone} is gone: {self._name} lost its connection{place}: {reason}{hint}"
        if isinstance(error, StoreIsSilentError):
            return (
                f"the store of the process group does not answer: {self._name} lost it{place}: "
                f"{reason}"
            )
        if isinstance(error, dist.DistNetworkError):
            holder = "torchrun" if is_of_torchrun() else self._name_of(0)
            return (
                f"{holder} is gone: {self._name} lost the store of the process group{place}: "
                f"{reason}"
            )
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        way = way_out(error, in_script=self._watchdog.action is None)
        return f"{self._name} failed{place}: {kind}{reason}" + (
            f" ({way})" if way else ""
        )

    def _uneven(self, ranks: Iterable[int]) -> str:
        """A hint for the cause if the script of a lost rank has ended, and this one makes another
        step.
        """
        for rank in ranks:
            last = self._ask(partial(self._heartbeats.of, rank))
            if last is not None and last.place == f" {AT_END}":
                return (
                    f" (its script ended after step {last.step}, and this is step "
                    f"{self._watchdog.step}: all ranks must make as many steps)"
                )
        return ""

    def cause_of_error(self, error: BaseException) -> Cause:
        """Make an error the cause, if there is none yet; return the cause."""
        return self._publish(self._explain(error))

    def without_store(self, error: RuntimeError) -> Cause:
        """The cause if the watchdog's thread has lost the store."""
        self._has_lost_store = True
        return self.cause_of_error(error)

    def cause_of_signal(self, signals: bytes) -> Cause | None:
        """The cause if a signal ends this process, and no other rank has written one."""
        if SIGINT in signals and self._is_stuck():
            return self._publish(
                f"{self._name} was interrupted{self._watchdog.place()}"
            )
        if SIGTERM in signals:
            # A launcher sends SIGTERM when another rank has died; the peers of that rank may still
            # write it as the cause.
            wait_until(self._has_cause, GRACE / 2)
            if not self._has_cause():
                return self._publish(
                    f"{self._name} was terminated{self._watchdog.place()}"
                )
        return None

    def cause_of_wait(self) -> Cause | None:
        """The cause if this rank has waited for too long, and some rank is at fault."""
        fault = self._find_fault()
        return self._publish(fault) if fault else None

    def _has_cause(self) -> bool:
        return bool(self._store.check([CAUSE]))

    def _publish(self, message: str) -> Cause:
        """Make this message the cause, if there is none yet; return the cause."""
        own = Cause.new(message).text()
        cause = Cause.read(
            self._ask(partial(self._store.compare_set, CAUSE, "", own), own)
        )
        # Two threads of this process may have found the same cause.
        self._is_first_cause = cause.message == message
        return cause

    def _ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Call the store, unless it is gone: torch prints a page for every failed call."""
        if not self._has_lost_store:
            try:
                return call()
            except RuntimeError:
                self._has_lost_store = True
        return otherwise

    def leave(self, cause: Cause, error: BaseException | None = None) -> NoReturn:
        """Print the cause, and end the process."""
        self._say(cause, error)
        if self._rank == 0:
            # The store may be in this process, so the others end first.
            self._until_out(self._count)
        os._exit(1)

    def _say(self, cause: Cause, error: BaseException | None) -> None:
        """Print the report if this rank has found the cause. Otherwise print the cause, once for
        each terminal or file to which the report does not go. Then count this rank out.
        """
        if self._is_first_cause:
            say(self._report(cause, error))
            self.note_report()
            self._count_out()
            return
        keep_traceback(cause, self._name, error)
        self._ask(partial(self._watchdog.post, ended=True))
        here = stderr_of_process()
        if here != cause.stderr and self._ask(
            lambda: self._store.add(f"{_SAID}/{here}", 1) == 1, True
        ):
            say(f"{self._name}: stopped: {cause.message}")
        self._count_out()
        if is_of_torchrun():
            # torchrun prints as soon as a process ends, and its store outlives this wait.
            self._ask(lambda: wait_until(self._is_reported, GRACE))

    def note_report(self) -> None:
        """Tell the other ranks, which wait for it, that the report is printed."""
        self._ask(partial(self._store.set, _REPORTED, ""))

    def _is_reported(self) -> bool:
        return bool(self._store.check([_REPORTED]))

    def _report(self, cause: Cause, error: BaseException | None) -> str:
        """The cause, the lines of the script that led to it, and what all ranks were doing when
        they ended.

        So all other ranks must end first; also, a launcher kills the rest as soon as one process
        has ended.
        """
        heartbeat = self._watchdog.heartbeat(ended=True)
        keep_traceback(cause, self._name, error)
        self._ask(partial(self._heartbeats.post, self._rank, heartbeat))
        self._until_out(self._count - 1)
        lines = [cause.message, *lines_of_script(error)]
        if self._watchdog.step:
            own = self._line(self._rank, heartbeat)
            lines += self._ask(self._lines, [own])
        return "\n  ".join([*lines, f"tracebacks of all ranks: {cause.tracebacks}"])

    def _lines(self) -> list[str]:
        """A line for each rank: what it was doing when it ended, and for which ranks it waited."""
        ranks = range(self._count)
        return [self._line(rank, self._heartbeats.of(rank)) for rank in ranks]

    def _line(self, rank: int, heartbeat: Heartbeat | None) -> str:
        """A line about what a rank was doing by its last heartbeat."""
        name = self._name_of(rank)
        if heartbeat is None:
            return f"{name} has built no pipeline"
        if not heartbeat.ended:
            return f"{name} was last seen{heartbeat.place}"
        if not heartbeat.waits_for:
            return f"{name} has been{heartbeat.place} for {heartbeat.seconds:.1f} s"
        others = " or ".join(map(self._name_of, heartbeat.waits_for))
        return (
            f"{name} has waited {heartbeat.seconds:.1f} s for {others}{heartbeat.place}"
        )

    def _count_out(self) -> None:
        """Count this rank among those that have finished."""
        self._ask(lambda: self._store.add(_OUT, 1))

    def _until_out(self, ranks: int) -> None:
        """Wait until this many ranks have finished, for a limited time."""
        self._ask(lambda: wait_until(lambda: self._store.add(_OUT, 0) >= ranks, GRACE))

    def _is_stuck(self) -> bool:
        """Whether the main thread is stuck in one action of a step: then its KeyboardInterrupt,
        which needs the call to return, does not come.
        """
        before = self._watchdog.heartbeat()
        goes_on = wait_until(
            lambda: (
                self._watchdog.action is None
                or self._watchdog.heartbeat().seconds < before.seconds
            ),
            GRACE / 2,
        )
        return before.action is not None and not goes_on

    def _find_fault(self) -> str | None:
        """Follow the waits from rank to rank, to a rank that waits for none; return the cause in
        words if that rank stands still.
        """
        waited = f"{self._name} has waited {self._timeout:g} s{self._watchdog.place()}"
        rank = self._rank
        seen = {self._rank}
        heartbeat = self._watchdog.heartbeat()
        while others := [other for other in heartbeat.waits_for if other not in seen]:
            if silent := self._silent(others):
                told = f"{self._name_of(silent[0])} does not answer: {waited}"
                return told if any(map(self._is_silent_for_long, silent)) else None
            # Several ranks are replicas with the same actions, which all wait for the slowest one.
            now = {other: self._heartbeats.of(other) or heartbeat for other in others}
            rank = min(now, key=lambda other: now[other].progress)
            heartbeat = now[rank]
            seen.add(rank)
        if not self._watchdog.stands_still(heartbeat):
            return None
        stuck = (
            f"{self._name_of(rank)} has made no progress for {heartbeat.idle:.1f} "
            f"s{heartbeat.place}"
        )
        return stuck if rank == self._rank else f"{stuck}: {waited}"

    def _is_silent_for_long(self, rank: int) -> bool:
        """Whether a rank is silent for too long. In an op, it may be silent for as long as the
        time-out, since a call may block Python's other threads.
        """
        last = self._heartbeats.of(rank)
        before, since = self._heard.get(rank, (None, 0.0))
        if before != last:
            since = monotonic() - GRACE
            self._heard[rank] = last, since
        return not (last and last.is_in_op) or monotonic() - since > self._timeout

    def _silent(self, ranks: Iterable[int]) -> list[int]:
        """The ranks among these whose heartbeats have stopped. Meanwhile this rank posts its own,
        since others may check it.
        """
        before = {each: self._heartbeats.of(each) for each in ranks}

        def is_new(rank: int) -> bool:
            self._watchdog.post()
            return self._heartbeats.of(rank) != before[rank] or self._has_cause()

        return [each for each in before if not wait_until(partial(is_new, each), GRACE)]
