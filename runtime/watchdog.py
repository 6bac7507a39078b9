"""When one rank fails, all of them print why and end, at once.

Every process has a main thread, which walks over the plan, and a thread of the watchdog:

    main thread       F  B  F ── waits inside gloo, and nothing can wake it ──
    watchdog          heartbeat … heartbeat … is there a cause? ─► print it, end the process
                         │                        ▲
    store             heartbeats of all ranks,  cause  (of the process group; all ranks share it)

A rank that fails writes the cause into the store. The watchdogs of all others find it there, keep
their tracebacks in a file and end their processes. What a rank does from the moment at which
something is wrong stands in `schedlang.runtime.failure`, which is loaded then.
"""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from signal import SIGINT, SIGTERM
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
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
    from schedlang.runtime.failure_report import Cause
    from schedlang.runtime.gpu_progress import GpuProgress

# When something is wrong.
_failure_of = on_demand("schedlang.runtime.failure.Failure")
_report_uncaught = on_demand("schedlang.runtime.failure.report_uncaught")
_read_cause = on_demand("schedlang.runtime.failure.read_cause")

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
ENDING = threading.Lock()

#: What a rank does that has made a step.
BETWEEN = "between two steps"

#: And one whose script has ended.
AT_END = "at the end of its script"

#: The key of the store under which the cause is.
CAUSE = "cause"

#: The watchdogs of this process that are not closed, the newest last.
OPEN: list["Watchdog"] = []


def say(line: str) -> None:
    """Print a line to stderr, in one write, so that it does not mix with those of other ranks."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _install_hook() -> None:
    """Let uncaught errors be reported, if they are not yet."""
    hook = sys.excepthook
    if getattr(hook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, hook)


# A script may end before it has a pipeline, such as by a plan file that is not there.
_install_hook()


def after_another() -> PipelineError:
    """The error of a pipeline in a process in which another one has failed."""
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
        if ENDING.locked():
            raise after_another()
        self.step = 0
        self.action: int | None = None
        self.between = "at the start"
        self.waits_for: tuple[int, ...] = ()
        #: Where the stages are on a GPU, how far that is.
        self.gpu: GpuProgress | None = None
        #: What a thread has met that makes copies beside the main one.
        self.met_beside: Exception | None = None
        self.processes = processes
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.name = processes.name(self.rank)
        self.is_closed = False
        self._gathered = 0
        self._plan = plan
        self._number = number
        self._pid = os.getpid()
        world = dist.group.WORLD
        assert world is not None
        # While the store does not answer, the main thread goes on, and a heartbeat must tell so.
        self.store = LimitedStore(
            connection(world.get_group_store()), timeout + GRACE, self.heartbeat
        )
        self.heartbeats = Heartbeats(dist.get_world_size(), processes.name, self.store)
        #: What this rank did at the last look, and since when.
        self._last: Doing = (0, None, ())
        self._since = monotonic()
        #: What the process works, when it did so last, and the next look at what others do.
        self._work = Work()
        self._worked = monotonic()
        self._next_look = monotonic()
        self.signals = SignalListener()
        self.post()
        atexit.register(self._at_exit)
        _install_hook()
        OPEN.append(self)
        self._thread = threading.Thread(
            target=self._watch, name="schedlang watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        if self in OPEN:
            OPEN.remove(self)
        if threading.current_thread() is self._thread:
            # Python has collected the pipeline here, and a thread cannot wait for its own end.
            threading.Thread(target=self.close, daemon=True).start()
            return
        self.stop_thread()
        self.signals.close()

    def stop_thread(self) -> None:
        """Stop looking: from here on the main thread alone says how this process ends."""
        if self.is_closed:
            return
        self.is_closed = True
        self.signals.interrupt()
        self._thread.join()

    @cached_property
    def failure(self) -> Any:
        """What this process does when it or another rank fails."""
        return _failure_of(self)

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks of an error that the main thread has met, and raise it as PipelineError.

        Where another rank has failed before, that is the cause: it is printed, and the process
        ends.
        """
        told: PipelineError = self.failure.tell_all(error)
        raise told

    def abandon(self, error: BaseException) -> None:
        """Tell all ranks that the main thread leaves a step for what is no error of the pipeline,
        such as KeyboardInterrupt: the script's own affair, but nobody can go on from here.
        """
        self.failure.abandon(error)

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
        keys = {rank: f"{group}/{rank}" for rank in self.processes.all}
        self._gathered += 1
        self.store.set(keys[self.rank], value)
        if not wait_until(partial(self.store.check, [*keys.values()]), self.timeout):
            missing = [
                rank for rank, key in keys.items() if not self.store.check([key])
            ]
            names = " and ".join(map(self.processes.name, missing))
            raise PipelineError(f"{names} has {otherwise} within {self.timeout:g} s")
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
        if self.store.add(key, 0) < len(self.processes.all):
            return None
        return int(self.store.compare_set(f"{key}/step", "", str(step)))

    def _at_exit(self) -> None:
        """Tell all ranks that this process ends between two steps, and the error if that is why."""
        # The end of a process that the script has forked is none of this one's.
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        if (
            isinstance(error, BaseException)
            and not self.is_closed
            and ENDING.acquire(blocking=False)
        ):
            self.signals.ignore()
            self.failure.tell(error)
        elif error is None and not self.is_closed and is_of_torchrun():
            # Others may go on. Where rank 0 has the store, that may be gone already.
            self.stop_thread()
            self.between = AT_END
            with suppress(RuntimeError):
                self.post()
        self.close()

    def post(self, ended: bool = False) -> Heartbeat:
        """Write the heartbeat of this rank, for the others."""
        heartbeat = self.heartbeat(ended)
        self.heartbeats.post(self.rank, heartbeat)
        return heartbeat

    def heartbeat(self, ended: bool = False) -> Heartbeat:
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
            monotonic() - self._worked > self.timeout / 2
            and self._work.of_started_goes_on()
        ):
            self._worked = monotonic()

    def stands_still(self, heartbeat: Heartbeat) -> bool:
        """Whether a rank has made no progress for too long."""
        limit = self.timeout * (_PATIENCE if heartbeat.is_in_op else 1)
        return heartbeat.idle > limit

    def place(self) -> str:
        """Where in the plan the main thread is, in words."""
        return self._place_of(self.action)

    def _place_of(self, action: int | None) -> str:
        own = self.processes.own
        if action is None:
            return f" {self.between}"
        return (
            f" at {self._plan.name_of(own, action)} ({self._plan.where(own, action)})"
        )

    def _watch(self) -> None:
        """The watchdog's thread: it looks again and again, until there is a cause to end for."""
        cause = None
        while cause is None and not self.is_closed:
            try:
                cause = self._look()
            except RuntimeError as error:
                # The store is gone with the process that held it; outside of a step and a wait,
                # that only means the end of a job.
                is_busy = self.action is not None or self.waits_for or self._gpu_waits()
                if not is_busy and not isinstance(error, StoreIsSilentError):
                    self.signals.stop()
                    return
                cause = self.failure.without_store(error)
        if cause is not None and ENDING.acquire(blocking=False):
            self.failure.leave(cause, self.met_beside)

    def _look(self) -> "Cause | None":
        """Wait `POLL` seconds, then look whether there is a cause to end for."""
        signals = self.signals.wait(POLL)
        # What ends this process, the surest first:
        #
        #     SIGINT, and the main thread hangs     the user waits for an answer
        #     another rank has told a cause         whatever else is seen may follow from it
        #     SIGTERM                               and nobody has told one
        #     a thread beside the main one failed   which may never wait for it
        #     the main thread waits for too long    then the waits lead to the rank at fault
        cause: Cause | None = None
        if SIGINT in signals or SIGTERM in signals:
            cause = self.failure.cause_of_signal(signals)
        if cause is None and self.store.check([CAUSE]):
            cause = _read_cause(self.store)
        if cause is None and self.met_beside is not None:
            cause = self.failure.cause_of_error(self.met_beside)
        if cause is not None:
            return cause
        self._note_work()
        heartbeat = self.post()
        is_busy = heartbeat.action is not None or heartbeat.waits_for
        if is_busy and self.stands_still(heartbeat) and monotonic() > self._next_look:
            self._next_look = monotonic() + min(_PAUSE, self.timeout)
            cause = self.failure.cause_of_wait()
        return cause
