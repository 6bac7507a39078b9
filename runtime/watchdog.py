"""When one rank fails, all of them print why and end, at once.

Every process has a main thread, which walks over the plan, and a thread of the watchdog:

    main thread       F  B  F ── waits inside gloo, and nothing can wake it ──
    watchdog          heartbeat … heartbeat … is there a cause? ─► print it, end the process
                         │                        ▲
    store             heartbeats of all ranks,  cause  (of the process group; all ranks share it)

A rank that fails writes the cause into the store. The watchdogs of all others find it there, keep
their tracebacks in a file and end their processes. A watchdog also sees when its main thread makes
no progress; from the heartbeats it finds the rank for which all others wait in the end. That one is
at fault if it stands still, but it may compute for as long as it takes, and so long the others
wait. The rank that writes the cause prints the report (`failure_report.py`).
"""

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from io import StringIO
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.runtime.errors import LostRank, PipelineError, way_out
from schedlang.runtime.failure_report import (
    Cause,
    keep_traceback,
    lines_of_script,
    stderr_of_process,
)
from schedlang.runtime.heartbeats import Doing, Heartbeat, Heartbeats
from schedlang.runtime.processes import Processes
from schedlang.runtime.signals import SignalListener
from schedlang.runtime.store import (
    LimitedStore,
    StoreIsSilentError,
    connection,
    is_of_torchrun,
    wait_until,
)
from schedlang.runtime.work import Work

if TYPE_CHECKING:
    from schedlang.runtime.gpu_progress import GpuProgress

E = TypeVar("E", bound=BaseException)

#: Seconds between two looks at the store.
POLL = 0.2
#: Seconds that the other ranks have to say their part and end when one fails.
GRACE = 2.0

#: How many times the time-out an op of a stage may stand still, which may read a file or sleep:
#: only waits for other ranks are known to be no work.
_PATIENCE = 4
#: Seconds between two looks, at most, at what ranks do for which this one has waited for too long.
_PAUSE = 5.0

#: Held by the thread that ends this process, whichever of its pipelines fails. Never released.
_ending = threading.Lock()

#: What a rank does that has made a step.
BETWEEN = "between two steps"

#: And one whose script has ended.
_AT_END = "at the end of its script"

_CAUSE = "cause"
_OUT = "out"
_SAID = "said"

#: The watchdogs of this process that are not closed, the newest last.
_open: list["Watchdog"] = []
#: Set when the main thread has told the other ranks of an error. The script may still go on.
_has_told = threading.Event()
#: The attribute by which this error is known.
_TOLD = "_told_all_ranks"


def say(line: str) -> None:
    """Print a line to stderr, in one write, so that it does not mix with those of other ranks."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _report_uncaught(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Python's `sys.excepthook` in a process with a pipeline: it reports the error that ends a run
    in place of the traceback, which stands in the file that the report names.
    """
    if hasattr(error, _TOLD):
        # The report of KeyboardInterrupt has been printed, that of a PipelineError is its text.
        if isinstance(error, PipelineError):
            say(str(error))
        is_reported = True
    else:
        is_reported = bool(_open) and _open[-1].end_with(error)
    if is_reported:
        # It may do more than print: some send the error to a service.
        with redirect_stderr(StringIO()):
            before(kind, error, traceback)
    else:
        before(kind, error, traceback)


def _install_hook() -> None:
    """Let uncaught errors be reported, if they are not yet."""
    hook = sys.excepthook
    if getattr(hook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, hook)


def _told(error: E) -> E:
    """An error of which the other ranks are told."""
    _has_told.set()
    setattr(error, _TOLD, True)
    return error


def _after_another() -> PipelineError:
    return PipelineError(
        "an earlier pipeline of this process has failed, and its other ranks have ended: start the "
        "processes again"
    )


class Watchdog:
    """Watches one process. Its main thread keeps `step`, `action` and `waits_for` up to date.

    `action` is an index into the rank's actions, None outside of a step, where `between` says what
    the main thread does; `waits_for` are the processes that it waits for, none while it computes.
    `number` tells apart the pipelines that all processes have built one after another. Here and in
    all messages, the rank of a process is that in the default process group.
    """

    def __init__(
        self, plan: Plan, processes: Processes, number: int, timeout: float
    ) -> None:
        if _ending.locked():
            raise _after_another()
        self.step = 0
        self.action: int | None = None
        self.between = "at the start"
        self.waits_for: tuple[int, ...] = ()
        #: Where the stages are on a GPU, how far that is.
        self.gpu: GpuProgress | None = None
        #: What a thread has met that makes copies beside the main one.
        self.met_beside: Exception | None = None
        self._gathered = 0
        self._plan = plan
        self._processes = processes
        self._number = number
        self._timeout = timeout
        self._pid = os.getpid()
        self._rank = dist.get_rank()
        self._count = dist.get_world_size()
        self._name = processes.name(self._rank)
        world = dist.group.WORLD
        assert world is not None
        # While the store does not answer, the main thread goes on, and a heartbeat must tell so.
        self.store = LimitedStore(
            connection(world.get_group_store()), timeout + GRACE, self._heartbeat
        )
        self._heartbeats = Heartbeats(self._count, processes.name, self.store)
        #: What this rank did at the last look, and since when.
        self._last: Doing = (0, None, ())
        self._since = monotonic()
        #: What the process works, when it did so last, and the next look at what others do.
        self._work = Work()
        self._worked = monotonic()
        self._next_look = monotonic()
        #: Of ranks that were silent, the last heartbeats, and since when there was none.
        self._heard: dict[int, tuple[Heartbeat | None, float]] = {}
        self._is_closed = False
        self._is_first_cause = False
        self._has_lost_store = False
        self._signals = SignalListener()
        self._post()
        atexit.register(self._at_exit)
        _install_hook()
        _open.append(self)
        self._thread = threading.Thread(
            target=self._watch, name="schedlang watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        if self in _open:
            _open.remove(self)
        if threading.current_thread() is self._thread:
            # Python has collected the pipeline here, and a thread cannot wait for its own end.
            threading.Thread(target=self.close, daemon=True).start()
            return
        self._stop_thread()
        self._signals.close()

    def _stop_thread(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._signals.interrupt()
        self._thread.join()

    @contextmanager
    def guard(self, what: str | None = None) -> Iterator[None]:
        """Fail together with all ranks if what runs inside raises an error; meanwhile this rank is
        `what` others are told, as in `in clip_grad_norm_`.
        """
        before = self.between
        if what is not None:
            self.between = what
        try:
            yield
        except Exception as error:
            self.fail(error)
        except BaseException as error:
            self.abandon(error)
            raise
        self.between = before

    def mark(self) -> None:
        """Mark for a GPU that what it was given last belongs to what the main thread does now."""
        if self.gpu is not None:
            self.gpu.mark((self.step, self.action, self.waits_for))

    def gather(self, value: str, otherwise: str) -> dict[int, str]:
        """The values that all ranks of all replicas give here; PipelineError if some do not in
        time, which says that they have `otherwise`.
        """
        group = f"gathered/{self._number}/{self._gathered}"
        keys = {rank: f"{group}/{rank}" for rank in self._processes.all}
        self._gathered += 1
        self.store.set(keys[self._rank], value)
        if not wait_until(partial(self.store.check, [*keys.values()]), self._timeout):
            missing = [
                rank for rank, key in keys.items() if not self.store.check([key])
            ]
            names = " and ".join(map(self._processes.name, missing))
            raise PipelineError(f"{names} has {otherwise} within {self._timeout:g} s")
        found = self.store.multi_get([*keys.values()])
        return {rank: value.decode() for rank, value in zip(keys, found, strict=True)}

    def agree(self, number: int) -> None:
        """Count this rank among those that have made a call with this number."""
        self.store.add(f"agreed/{self._number}/{number}", 1)

    def agreed(self, number: int, step: int) -> int | None:
        """The step after which all ranks make the call with this number: the first that any of them
        names, once all have made it.
        """
        key = f"agreed/{self._number}/{number}"
        if self.store.add(key, 0) < len(self._processes.all):
            return None
        return int(self.store.compare_set(f"{key}/step", "", str(step)))

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks of an error that the main thread has met, and raise it as PipelineError.

        Where another rank has failed before, that is the cause: it is printed, and the process
        ends.
        """
        if self._is_closed:
            raise _after_another() from error
        # If the thread has begun to end the process, the main thread stays here until it does.
        if not _ending.acquire(timeout=10 * GRACE):
            raise _after_another() from error
        if isinstance(error, LostRank):
            # A message to several ranks broke: those that still write heartbeats are not the cause.
            if len(error.ranks) > 1:
                error.ranks = {
                    *self._ask(partial(self._silent, error.ranks), ())
                } or error.ranks
            self.waits_for = tuple(sorted(error.ranks))
        cause = self._publish(self._explain(self._deeper(error)))
        # Another rank was first with its cause, of which this error is a consequence.
        if not self._is_first_cause:
            self._leave(cause, error)
        self._stop_thread()
        # From here on the main thread ends by itself: the script may catch the error and tidy up.
        self._signals.let_finish(GRACE)
        if isinstance(error, LostRank):
            self._count_out()
        report = self._report(cause, error)
        self._count_out()
        raise _told(PipelineError(report)) from (
            error.__cause__ if isinstance(error, PipelineError) else error
        )

    def abandon(self, error: BaseException) -> None:
        """Tell all ranks that the main thread leaves a step for what is no error of the pipeline,
        such as KeyboardInterrupt: the script's own affair, but nobody can go on from here.
        """
        if self._is_closed or not _ending.acquire(blocking=False):
            return
        # Not yet the end of the process, which may catch it and tidy up.
        self._stop_thread()
        self._signals.let_finish(GRACE)
        self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Make an error the cause, if there is none yet, and print the cause."""
        cause = self._publish(self._explain(_told(error)))
        self._say(cause, error)
        self._count_out()

    def end_with(self, error: BaseException) -> bool:
        """Report an error of the script that nobody has caught, unless an error before it has ended
        the run; whether this one has.
        """
        if _has_told.is_set():
            return False
        # If the thread has begun to end the process, the main thread stays here until it does.
        if self._is_closed or not _ending.acquire(timeout=10 * GRACE):
            return False
        self._stop_thread()
        self._signals.let_finish(GRACE)
        self._tell(error)
        return True

    def _at_exit(self) -> None:
        """Tell all ranks that this process ends between two steps, and the error if that is why."""
        # The end of a process that the script has forked is none of this one's.
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        if (
            isinstance(error, BaseException)
            and not self._is_closed
            and _ending.acquire(blocking=False)
        ):
            self._signals.ignore()
            self._tell(error)
        elif error is None and not self._is_closed and is_of_torchrun():
            # Others may go on. Where rank 0 has the store, that may be gone already.
            self._stop_thread()
            self.between = _AT_END
            self._ask(self._post)
        self.close()

    def _deeper(self, error: Exception) -> Exception:
        """The reason behind a lost connection: the other rank may have ended because it lost the
        store, and then this one has lost it as well.
        """
        if isinstance(error, LostRank) and 0 not in error.ranks:
            try:
                self.store.check([_CAUSE])
            except RuntimeError as lost:
                self._has_lost_store = True
                return lost
        return error

    def _explain(self, error: BaseException) -> str:
        """The cause in words: which rank failed, where, and why."""
        if isinstance(error, KeyboardInterrupt):
            return f"{self._name} was interrupted{self._place()}"
        place = "" if self.action is None else self._place()
        # gloo's messages begin with a line of its own source, and end with advice.
        reason = re.sub(
            r"^\[[^]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0]
        )
        if isinstance(error, LostRank):
            gone = " or ".join(map(self._processes.name, sorted(error.ranks)))
            hint = self._uneven(error.ranks)
            return f"{gone} is gone: {self._name} lost its connection{place}: {reason}{hint}"
        if isinstance(error, StoreIsSilentError):
            return (
                f"the store of the process group does not answer: {self._name} lost it{place}: "
                f"{reason}"
            )
        if isinstance(error, dist.DistNetworkError):
            holder = "torchrun" if is_of_torchrun() else self._processes.name(0)
            return (
                f"{holder} is gone: {self._name} lost the store of the process group{place}: "
                f"{reason}"
            )
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        way = way_out(error, in_script=self.action is None)
        return f"{self._name} failed{place}: {kind}{reason}" + (
            f" ({way})" if way else ""
        )

    def _uneven(self, ranks: Iterable[int]) -> str:
        """What is to be said of ranks whose script has ended where this one makes another step."""
        for rank in ranks:
            last = self._ask(partial(self._heartbeats.of, rank))
            if last is not None and last.place == f" {_AT_END}":
                return (
                    f" (its script ended after step {last.step}, and this is step {self.step}: all "
                    "ranks must make as many steps)"
                )
        return ""

    def _post(self, ended: bool = False) -> Heartbeat:
        """Write the heartbeat of this rank, for the others."""
        heartbeat = self._heartbeat(ended)
        self._heartbeats.post(self._rank, heartbeat)
        return heartbeat

    def _heartbeat(self, ended: bool = False) -> Heartbeat:
        """What this rank does now, and for how long."""
        now = self._doing()
        if now != self._last:
            self._last = now
            self._since = monotonic()
        seconds = monotonic() - self._since
        idle = min(seconds, monotonic() - self._worked)
        _, action, _ = now
        return Heartbeat(*now, seconds, idle, self._place_of(action), ended)

    def _doing(self) -> Doing:
        """What the GPU does, which is behind the main thread, or if it has nothing to do, what the
        main thread does.
        """
        of_gpu = None if self.gpu is None else self.gpu.doing()
        return of_gpu or (self.step, self.action, self.waits_for)

    def _gpu_waits(self) -> bool:
        """Whether the GPU waits for another rank, and not only for the end of what is under way."""
        return not wait_until(lambda: not self._doing()[2], GRACE)

    def _note_work(self) -> None:
        """Note if this rank, which waits for no other, has worked since the last look."""
        _, _, waits_for = self._doing()
        if waits_for:
            # Threads of its connections may work.
            self._work.goes_on()
        elif self._work.goes_on() or (
            monotonic() - self._worked > self._timeout / 2
            and self._work.of_started_goes_on()
        ):
            self._worked = monotonic()

    def _stands_still(self, heartbeat: Heartbeat) -> bool:
        """Whether a rank has made no progress for too long."""
        limit = self._timeout * (_PATIENCE if heartbeat.is_in_op else 1)
        return heartbeat.idle > limit

    def _place(self) -> str:
        """Where in the plan the main thread is, in words."""
        return self._place_of(self.action)

    def _place_of(self, action: int | None) -> str:
        own = self._processes.own
        if action is None:
            return f" {self.between}"
        return (
            f" at {self._plan.name_of(own, action)} ({self._plan.where(own, action)})"
        )

    def _publish(self, message: str) -> Cause:
        """Make this the cause, if there is none yet; the cause."""
        own = Cause.new(message).text()
        cause = Cause.read(
            self._ask(partial(self.store.compare_set, _CAUSE, "", own), own)
        )
        # Two threads of this process may have found the same.
        self._is_first_cause = cause.message == message
        return cause

    def _ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Do something with the store, but not once it is gone: each time torch would print a page
        about it.
        """
        if not self._has_lost_store:
            try:
                return call()
            except RuntimeError:
                self._has_lost_store = True
        return otherwise

    def _leave(self, cause: Cause, error: BaseException | None = None) -> NoReturn:
        """Print the cause, and end the process."""
        self._say(cause, error)
        self._count_out()
        if self._rank == 0:
            # The store may be in this process, so the others go first.
            self._until_out(self._count)
        os._exit(1)

    def _say(self, cause: Cause, error: BaseException | None) -> None:
        """Print the report, if this rank has found the cause; otherwise the cause, once for each
        place where the report is not read.
        """
        if self._is_first_cause:
            say(self._report(cause, error))
            return
        keep_traceback(cause, self._name, error)
        self._ask(partial(self._post, ended=True))
        here = stderr_of_process()
        if here != cause.stderr and self._ask(
            lambda: self.store.add(f"{_SAID}/{here}", 1) == 1, True
        ):
            say(f"{self._name}: stopped: {cause.message}")

    def _report(self, cause: Cause, error: BaseException | None) -> str:
        """The cause, the lines of the script that met it, and what all ranks were doing when they
        ended.

        That is known when all others have ended. They end first also because a launcher kills the
        rest as soon as it sees that one process has ended.
        """
        heartbeat = self._heartbeat(ended=True)
        keep_traceback(cause, self._name, error)
        self._ask(partial(self._heartbeats.post, self._rank, heartbeat))
        self._until_out(self._count - 1)
        lines = [cause.message, *lines_of_script(error)]
        if self.step:
            own = self._heartbeats.line(self._rank, heartbeat)
            lines += self._ask(self._heartbeats.lines, [own])
        return "\n  ".join([*lines, f"tracebacks of all ranks: {cause.tracebacks}"])

    def _count_out(self) -> None:
        """Count this rank among those that have said their last word."""
        self._ask(lambda: self.store.add(_OUT, 1))

    def _until_out(self, ranks: int) -> None:
        """Wait until so many ranks have said their last word, or are known to be gone."""
        self._ask(lambda: wait_until(lambda: self.store.add(_OUT, 0) >= ranks, GRACE))

    def _watch(self) -> None:
        """The watchdog's thread: it looks again and again, until there is a cause to end for."""
        cause = None
        while cause is None and not self._is_closed:
            try:
                cause = self._look()
            except RuntimeError as error:
                # The store is gone with the process that held it; outside of a step and a wait,
                # that only means the end of a job.
                is_busy = self.action is not None or self.waits_for or self._gpu_waits()
                if not is_busy and not isinstance(error, StoreIsSilentError):
                    self._signals.stop()
                    return
                self._has_lost_store = True
                cause = self._publish(self._explain(error))
        if cause is not None and _ending.acquire(blocking=False):
            self._leave(cause, self.met_beside)

    def _look(self) -> Cause | None:
        """Wait `POLL` seconds, then look whether there is a cause to end for."""
        signals = self._signals.wait(POLL)
        # What ends this process, the surest first:
        #
        #     SIGINT, and the main thread hangs     the user waits for an answer
        #     another rank has told a cause         whatever else is seen may follow from it
        #     SIGTERM                               and nobody has told one
        #     a thread beside the main one failed   which may never wait for it
        #     the main thread waits for too long    then the waits lead to the rank at fault
        if signal.SIGINT in signals and self._is_stuck():
            return self._publish(f"{self._name} was interrupted{self._place()}")
        if signal.SIGTERM in signals:
            # A launcher sends SIGTERM when another rank has died; those who knew that rank may yet
            # say so.
            wait_until(lambda: self.store.check([_CAUSE]), GRACE / 2)
        if self.store.check([_CAUSE]):
            return Cause.read(self.store.get(_CAUSE))
        if signal.SIGTERM in signals:
            return self._publish(f"{self._name} was terminated{self._place()}")
        if self.met_beside is not None:
            return self._publish(self._explain(self.met_beside))
        self._note_work()
        heartbeat = self._post()
        is_busy = heartbeat.action is not None or heartbeat.waits_for
        if is_busy and self._stands_still(heartbeat) and monotonic() > self._next_look:
            self._next_look = monotonic() + min(_PAUSE, self._timeout)
            if fault := self._find_fault():
                return self._publish(fault)
        return None

    def _is_stuck(self) -> bool:
        """Whether the main thread stays at one action of a step: then its KeyboardInterrupt, which
        waits for the end of a call, does not come.
        """
        before = self._heartbeat()
        goes_on = wait_until(
            lambda: self.action is None or self._heartbeat().seconds < before.seconds,
            GRACE / 2,
        )
        return before.action is not None and not goes_on

    def _find_fault(self) -> str | None:
        """Follow the waits from rank to rank, to one that waits for none; the cause in words, if
        that rank stands still.
        """
        waited = f"{self._name} has waited {self._timeout:g} s{self._place()}"
        rank = self._rank
        seen = {self._rank}
        heartbeat = self._heartbeat()
        while others := [other for other in heartbeat.waits_for if other not in seen]:
            if silent := self._silent(others):
                told = f"{self._processes.name(silent[0])} does not answer: {waited}"
                return told if any(map(self._is_silent_for_long, silent)) else None
            # If there are several, they are replicas, which do the same: all wait for the slowest.
            now = {other: self._heartbeats.of(other) or heartbeat for other in others}
            rank = min(now, key=lambda other: now[other].progress)
            heartbeat = now[rank]
            seen.add(rank)
        if not self._stands_still(heartbeat):
            return None
        stuck = (
            f"{self._processes.name(rank)} has made no progress for {heartbeat.idle:.1f} "
            f"s{heartbeat.place}"
        )
        return stuck if rank == self._rank else f"{stuck}: {waited}"

    def _is_silent_for_long(self, rank: int) -> bool:
        """Whether a rank is silent for longer than a call may take that lets no other thread of
        Python run, if it is in an op.
        """
        last = self._heartbeats.of(rank)
        before, since = self._heard.get(rank, (None, 0.0))
        if before != last:
            since = monotonic() - GRACE
            self._heard[rank] = last, since
        return not (last and last.is_in_op) or monotonic() - since > self._timeout

    def _silent(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks whose heartbeat has stopped. This rank goes on with its own, since
        others may look for it.
        """
        before = {each: self._heartbeats.of(each) for each in ranks}

        def is_new(rank: int) -> bool:
            self._post()
            return self._heartbeats.of(rank) != before[rank] or bool(
                self.store.check([_CAUSE])
            )

        return [each for each in before if not wait_until(partial(is_new, each), GRACE)]
