"""Processes that work for this one, one on each core, until Ctrl-C stops them."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from os import kill
from signal import (
    SIG_BLOCK,
    SIG_IGN,
    SIG_SETMASK,
    SIG_UNBLOCK,
    SIGINT,
    SIGUSR1,
    getsignal,
    pthread_sigmask,
    raise_signal,
    signal,
)
from threading import current_thread, main_thread
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """Processes that work for this one, until Ctrl-C stops them."""

    # Ctrl-C raises nothing here by itself: an exception that comes out of the blue may leave a lock
    # of the pool's queues locked, for which the pool would wait without end. Nor does it kill the
    # others: one may be writing its result, for whose end the pool would wait. So they are asked to
    # end by SIGUSR1, raise KeyboardInterrupt within their work, and that is then its result.

    def __init__(
        self, pool: ProcessPoolExecutor, children: Callable[[], list[BaseProcess]]
    ) -> None:
        self._pool = pool
        self._children = children
        self._others = children()
        self.is_interrupted = False

    def map(self, function: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """What a function gives for each of some arguments, in their order. KeyboardInterrupt
        after Ctrl-C.
        """
        # The processes begin with the first work, and cannot be asked before `_begin`.
        before = pthread_sigmask(SIG_BLOCK, {SIGUSR1})
        try:
            futures = [
                self._pool.submit(_work, function, *each)
                for each in zip(*arguments, strict=True)
            ]
        finally:
            pthread_sigmask(SIG_SETMASK, before)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return (future.result() for future in futures)

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C does: ask the processes to end what they do, and to do no more."""
        self.is_interrupted = True
        for process in self._children():
            if process not in self._others:
                assert process.pid is not None
                kill(process.pid, SIGUSR1)


#: Of a process that works for another: whether it is at work now, and whether it is to do no more.
_worker = {"works": False, "is over": False}


def _begin() -> None:
    # Ctrl-C is for the other process, which then asks this one.
    signal(SIGINT, SIG_IGN)
    signal(SIGUSR1, _end)
    pthread_sigmask(SIG_UNBLOCK, {SIGUSR1})


def _end(*_: object) -> None:
    _worker["is over"] = True
    if _worker["works"]:
        raise KeyboardInterrupt


def _work(function: Callable[..., T], *arguments: Any) -> T:
    _worker["works"] = True
    try:
        if _worker["is over"]:
            raise KeyboardInterrupt
        return function(*arguments)
    finally:
        _worker["works"] = False


@contextmanager
def processes() -> Iterator[Workers]:
    """A process on each core, for those who compile much; what they have not begun by the end is
    dropped.
    """
    with ProcessPoolExecutor(initializer=_begin) as pool:
        workers = Workers(pool, active_children)
        before = getsignal(SIGINT)
        listens = callable(before) and current_thread() is main_thread()
        if listens:
            signal(SIGINT, workers.interrupt)
        try:
            yield workers
        finally:
            if workers.is_interrupted:
                # Some may not have been there yet.
                workers.interrupt()
            pool.shutdown(cancel_futures=True)
            if listens:
                signal(SIGINT, before)
            if workers.is_interrupted:
                raise_signal(SIGINT)
