"""The processes of a job, `torchrun -m schedlang.runtime`: they begin together, and end
together.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.runtime.watch.store import of_this_attempt
from schedlang.runtime.watch.watchdog import PipelineError, say

T = TypeVar("T")


def join(seconds: float) -> dist.ProcessGroup:
    """Join the other processes; the group for what they do together before the training, each wait
    with this limit.
    """
    if "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(rendezvous("env://"))
        dist.init_process_group("gloo", store=of_this_attempt(store), rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=seconds))
    return group


def together(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What some work gives that all processes do; where it fails on one, all end, and each node
    says so once.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    wrong = None
    try:
        made = work()
    except (CompileError, OSError, PipelineError) as error:
        wrong = str(error)
    # The launcher is not to end the slower ones first.
    default = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with linked("at the start"):
        dist.all_gather_object(found, wrong, group)
    first = next((each for each in found if each is not None), None)
    if first is not None:
        if os.environ.get("LOCAL_RANK", "0") == "0" or wrong not in (None, first):
            say(wrong or first)
        leave(1)
    signal.signal(signal.SIGTERM, default)
    return made


def share(told: T, group: dist.ProcessGroup) -> T:
    """What rank 0 tells all others."""
    found = [told]
    with linked("at the start"):
        dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


@contextmanager
def linked(when: str) -> Iterator[None]:
    """Messages outside of the training; where another process is gone, or too late, this one
    ends.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo begins with a place in its own source.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
        say(f"rank {dist.get_rank()} lost another rank {when}: {reason}")
        leave(1)


def leave(code: int) -> NoReturn:
    """End at once: a thread of gloo that outlives the interpreter aborts the process, once in a
    dozen runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
