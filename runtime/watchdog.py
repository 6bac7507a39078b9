"""The watchdog: when one rank fails, all ranks report the cause and end at once.

Every process has a main thread, which runs the plan, and a thread of the watchdog:

    main thread       F  B  F ── waits inside gloo, and nothing can wake it ──
    watchdog          heartbeat … heartbeat … is there a cause? ─► print it, end the process
                         │                        ▲
    store             heartbeats of all ranks,  cause  (of the process group; all ranks share it)

A rank that fails writes the cause into the store. The watchdogs of all others find it there, write
their tracebacks to a file and end their processes. `schedlang.runtime.failure` has the code for
that, and is loaded only then.
"""

import atexit
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from signal import SIGINT, SIGTERM
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import LostRank, PipelineError
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

# For failures only.
_failure_of = on_demand("schedlang.runtime.failure.Failure")
_report_uncaught = on_demand("schedlang.runtime.failure.report_uncaught")
_read_cause = on_demand("schedlang.runtime.failure.read_cause")

#: The interval at which the store is polled, in seconds.
POLL = 0.2
#: Seconds that the other ranks have to report and end when one fails.
GRACE = 2.0

#: An op of a stage may be idle for this many times the time-out, since it may read a file or sleep;
#: a wait for another rank may not.
_PATIENCE = 4
#: How many plans of earlier steps are kept, for the place of a GPU that is behind.
_PLANS = 16
#: The longest interval between two searches for the rank at fault, in seconds.
_PAUSE = 5.0

#: Held by the thread that ends this process, whichever of its pipelines fails. Never released.
ENDING = threading.Lock()

#: In messages: what a rank does after a step.
BETWEEN = "between two steps"

#: In messages: what a rank does whose script has ended.
AT_END = "at the end of its script"

#: The key of the cause in the store.
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
    """Install the hook that reports uncaught errors, once."""
    hook = sys.excepthook
    if getattr(hook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, hook)


# A script may end before it has a pipeline, such as by a plan file that is not there.
_install_hook()


def after_another() -> PipelineError:
    """The error of a pipeline in a process in which another pipeline has failed."""
    return PipelineError(
        "an earlier pipeline of this process has failed, and its other ranks have ended: start the "
        "processes again"
    )


class Watchdog:
    """Watches one process. Its main thread keeps `step`, `action` and `waits_for` up to date.

    `action` is an index into the rank's actions. It is None outside a step, where `between` says in
    words what the main thread does. `waits_for` are the processes for which it waits, none while it
    computes. `number` identifies the pipeline among those that all processes build in turn. Here
    and in all messages, the rank of a process is that in the default process group.
    """

    def __init__(
        self,
        plan: Plan,
        processes: Processes,
        number: int,
        timeout: float,
        survives_loss: bool = False,
    ) -> None:
        if ENDING.locked():
            raise after_another()
        self.step = 0
        self.action: int | None = None
        self.between = "at the start"
        self.waits_for: tuple[int, ...] = ()
        #: If the stages are on a GPU, its progress.
        self.gpu: GpuProgress | None = None
        #: An error in a thread that makes copies.
        self.met_beside: Exception | None = None
        self.processes = processes
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.name = processes.name(self.rank)
        self.is_closed = False
        self._gathered = 0
        #: The plans that steps have followed of late, each with its first step.
        self._plans: tuple[tuple[int, Plan], ...] = ((0, plan),)
        self._number = number
        self._survives_loss = survives_loss
        self._pid = os.getpid()
        world = dist.group.WORLD
        assert world is not None
        # While the store does not answer, heartbeats must still note the main thread's progress.
        self.store = LimitedStore(
            connection(world.get_group_store()), timeout + GRACE, self.heartbeat
        )
        self.heartbeats = Heartbeats(self.store)
        #: What this rank was doing at the last look, and since when.
        self._last: Doing = (0, None, ())
        self._since = monotonic()
        #: The work of this process, the last time it worked, and the next search for a fault.
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

    def follow(self, plan: Plan) -> None:
        """From this step on, actions are those of another plan."""
        # A GPU may be some steps behind, and the thread of the watchdog a moment.
        self._plans = (*self._plans[1 - _PLANS :], (self.step, plan))

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        if self in OPEN:
            OPEN.remove(self)
        if threading.current_thread() is self._thread:
            # The garbage collector closes the pipeline in this thread, which cannot join itself.
            threading.Thread(target=self.close, daemon=True).start()
            return
        self.stop_thread()
        self.signals.close()

    def stop_thread(self) -> None:
        """Stop the watchdog's thread: from here on only the main thread ends this process."""
        if self.is_closed:
            return
        self.is_closed = True
        self.signals.interrupt()
        self._thread.join()

    @cached_property
    def failure(self) -> Any:
        """The object that ends this process when it or another rank fails."""
        return _failure_of(self)

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks of an error in the main thread, and raise it as PipelineError.

        If another rank has failed before, that is the cause: it is printed, and the process ends.
        The loss of another rank is raised as it is, and told to nobody, where this one survives it.
        """
        if self._survives_loss and isinstance(error, LostRank):
            self.waits_for = ()
            raise error
        told: PipelineError = self.failure.tell_all(error)
        raise told

    def abandon(self, error: BaseException) -> None:
        """Tell all ranks that the main thread leaves a step by an exception that is not the
        pipeline's, such as KeyboardInterrupt: no rank can continue from here.
        """
        self.failure.abandon(error)

    @contextmanager
    def guard(self, what: str | None = None) -> Iterator[None]:
        """A context in which an error ends all ranks. `what` says in messages where this rank is,
        such as `in clip_grad_norm_`.
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
        """Mark that the GPU's last work belongs to the main thread's current action."""
        if self.gpu is not None:
            doing = self.step, self.action, self.waits_for
            self.gpu.mark(doing, self.gpu.stream())

    def gather(
        self, value: str, otherwise: str, among: Iterable[int] | None = None
    ) -> dict[int, str]:
        """Gather the values of all ranks of all replicas, or of the ranks `among` which this one
        is. PipelineError if some do not come in time; `otherwise` says what these have not done.
        """
        group = f"gathered/{self._number}/{self._gathered}"
        ranks = self.processes.all if among is None else sorted(among)
        keys = {rank: f"{group}/{rank}" for rank in ranks}
        self._gathered += 1
        self.store.set(keys[self.rank], value)
        if not wait_until(partial(self.store.check, [*keys.values()]), self.timeout):
            missing = [
                rank for rank, key in keys.items() if not self.store.check([key])
            ]
            names = " and ".join(map(self.processes.name, missing))
            raise PipelineError(f"{names} has {otherwise} within {self.timeout:g} s")
        found = self.store.multi_get([*keys.values()])
        if not is_of_torchrun():
            # The store is in the process of rank 0, which may end behind this call. Pipelines of
            # other ranks, as on the rows of a mesh, have readers of their own.
            readers = f"{group}/readers/{min(ranks)}"
            self.store.add(readers, 1)
            if self.rank == 0:
                wait_until(
                    lambda: self.store.add(readers, 0) == len(keys), self.timeout
                )
        return {rank: value.decode() for rank, value in zip(keys, found, strict=True)}

    def leave(self, name: str, value: str) -> None:
        """Leave a value for other ranks, without a wait."""
        self.store.set(f"left/{self._number}/{name}/{self.rank}", value)

    def left(self, name: str) -> dict[int, str] | None:
        """The values that all ranks have left under a name; None if some have not yet."""
        keys = [f"left/{self._number}/{name}/{rank}" for rank in self.processes.all]
        if not self.store.check(keys):
            return None
        found = self.store.multi_get(keys)
        return {
            rank: value.decode()
            for rank, value in zip(self.processes.all, found, strict=True)
        }

    def agree(self, number: int) -> None:
        """Count this rank among those that have noted the call with this number."""
        self.store.add(f"agreed/{self._number}/{number}", 1)

    def agreed(self, number: int, step: int) -> int | None:
        """The step after which all ranks make the call with this number: the first that any of them
        proposes, once all have noted the call; None before that.
        """
        key = f"agreed/{self._number}/{number}"
        if self.store.add(key, 0) < len(self.processes.all):
            return None
        return int(self.store.compare_set(f"{key}/step", "", str(step)))

    def _at_exit(self) -> None:
        """Tell all ranks that this process ends between two steps, and its error if it has one."""
        # A process that the script has forked does not report its end.
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
            # Others may continue. If rank 0 has the store, that may be gone already.
            self.stop_thread()
            self.between = AT_END
            with suppress(RuntimeError):
                self.post()
        self.close()

    def post(self, ended: bool = False) -> Heartbeat:
        """Write the heartbeat of this rank to the store."""
        heartbeat = self.heartbeat(ended)
        self.heartbeats.post(self.rank, heartbeat)
        return heartbeat

    def heartbeat(self, ended: bool = False) -> Heartbeat:
        """The heartbeat: what this rank does now, and for how long."""
        now = self._doing()
        if now != self._last:
            self._last = now
            self._since = monotonic()
        seconds = monotonic() - self._since
        idle = min(seconds, monotonic() - self._worked)
        step, action, _ = now
        return Heartbeat(*now, seconds, idle, self._place_of(step, action), ended)

    def _doing(self) -> Doing:
        """What the GPU does, which is behind the main thread; if it has nothing to do, what the
        main thread does.
        """
        of_gpu = None if self.gpu is None else self.gpu.doing()
        return of_gpu or (self.step, self.action, self.waits_for)

    def _gpu_waits(self) -> bool:
        """Whether the GPU keeps waiting for another rank."""
        return not wait_until(lambda: not self._doing()[2], GRACE)

    def _note_work(self) -> None:
        """Note if this rank has worked since the last look and waits for no other one."""
        _, _, waits_for = self._doing()
        if waits_for:
            # Threads of connections may have worked, which does not count.
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
        """The main thread's place in the plan, in words."""
        return self._place_of(self.step, self.action)

    def _place_of(self, step: int, action: int | None) -> str:
        own = self.processes.own
        if action is None:
            return f" {self.between}"
        plan = next(
            (plan for begin, plan in reversed(self._plans) if begin <= step),
            self._plans[0][1],
        )
        # A thread may see the action of the next step already, whose plan may be a longer one.
        action = min(action, len(plan.ranks[own]) - 1)
        return f" at {plan.name_of(own, action)} ({plan.where(own, action)})"

    def _watch(self) -> None:
        """The loop of the watchdog's thread, until there is a cause to end the process."""
        cause = None
        while cause is None and not self.is_closed:
            try:
                cause = self._look()
            except RuntimeError as error:
                # The store is gone with the process that held it. Outside steps and waits, that
                # only means the end of the job.
                is_busy = self.action is not None or self.waits_for or self._gpu_waits()
                if not is_busy and not isinstance(error, StoreIsSilentError):
                    self.signals.stop()
                    return
                cause = self.failure.without_store(error)
        if cause is not None and ENDING.acquire(blocking=False):
            self.failure.leave(cause, self.met_beside)

    def _look(self) -> "Cause | None":
        """Wait `POLL` seconds, then check whether there is a cause to end the process."""
        signals = self.signals.wait(POLL)
        # Causes to end this process, the surest first:
        #
        #     SIGINT, and the main thread hangs     the user waits for an answer
        #     another rank has written a cause      anything else may be a consequence of it
        #     SIGTERM                               if no rank has written a cause
        #     a thread for copies has failed        the main thread may never wait for it
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
