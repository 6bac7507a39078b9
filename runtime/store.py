"""The store of the process group, as the processes of one attempt to train share it."""

import os
from collections.abc import Callable
from functools import lru_cache
from time import monotonic, sleep
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore


def is_of_torchrun() -> bool:
    """Whether it is in torchrun's own process, and not in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_this_attempt(store: Any) -> Any:
    """A store where nothing is seen of the processes before a restart, which torchrun's own outlives.

    Torch's own keys are mixed up there (pytorch/pytorch#135712).
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_of_torchrun() else "0"
    return PrefixStore(f"schedlang/{attempt}", store)


@lru_cache(1)
def connection(store: Any) -> Any:
    """A connection of its own: on the group's, one thread would wait while another one waits."""
    return of_this_attempt(store.clone())


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for something that other ranks do, at most some seconds; whether it came."""
    end = monotonic() + seconds
    while not condition():
        if monotonic() > end:
            return False
        sleep(0.01)
    return True
