"""The key-value store of the process group, which all processes of a training share."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore


def is_of_torchrun() -> bool:
    """Whether the store is in torchrun's own process, and not in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_this_attempt(store: Any) -> Any:
    """The store with separate keys for each attempt, since torchrun's store survives a restart,
    with the keys of earlier processes.

    Torch mixes up its own keys then (pytorch/pytorch#135712).
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_of_torchrun() else "0"
    return PrefixStore(f"schedlang/{attempt}", store)


@lru_cache(1)
def connection(store: Any) -> Any:
    """A second connection to the store besides the process group's, since one thread's wait blocks
    all other threads on the same connection.
    """
    return of_this_attempt(store.clone())


#: Seconds between two calls of `meanwhile`.
_PATIENCE = 0.2


class StoreIsSilentError(RuntimeError):
    """The store does not answer."""


class LimitedStore:
    """A store whose calls raise StoreIsSilentError after some seconds without an answer; torch's
    own calls wait forever when the network is cut.

    `meanwhile` is called several times a second until there is an answer.
    """

    def __init__(
        self, store: Any, seconds: float, meanwhile: Callable[[], object]
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._meanwhile = meanwhile
        #: The time at which the current calls end.
        self._end: float | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, name))

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        answers: SimpleQueue[tuple[Any, RuntimeError | None]] = SimpleQueue()
        # If the call never returns, its thread is abandoned.
        Thread(target=_answer, args=(answers, method, arguments), daemon=True).start()
        # Concurrent calls of other threads share the limit of the first one.
        end = self._end = self._end or monotonic() + self._seconds
        while monotonic() < end:
            with suppress(Empty):
                answer, error = answers.get(timeout=_PATIENCE)
                self._end = None
                if error is not None:
                    raise error
                return answer
            self._meanwhile()
        raise StoreIsSilentError(f"no answer for {self._seconds:g} s")


def _answer(
    answers: SimpleQueue[Any], method: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        answers.put((method(*arguments), None))
    except RuntimeError as error:
        answers.put((None, error))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, at most some seconds; return whether it does."""
    end = monotonic() + seconds
    while not condition():
        if monotonic() > end:
            return False
        sleep(0.01)
    return True
