"""What all processes of the command do together: they join, agree on what to do, and end."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from schedlang.cli.usage import UsageError
from schedlang.diagnostics.diagnostic import CompileError, counted
from schedlang.runtime.errors import PipelineError, is_of_connection
from schedlang.runtime.store import of_this_attempt
from schedlang.runtime.watchdog import say

T = TypeVar("T")


def device_for(name: str | None) -> torch.device:
    """The device of this process, by the name of an option; by default a GPU, where each process of
    this machine can have one.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < processes:
        say(
            f"this machine has {counted(gpus, 'GPU')}, and `--device cuda` takes one for each of "
            f"its processes, here {processes}: leave it out to train on CPUs"
        )
        leave(1)
    if name == "cpu" or gpus < processes:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(seconds: float, device: torch.device) -> dist.ProcessGroup:
    """Join the other processes, which send each other tensors of CPUs and of the device. Gives the
    process group for all that they do together before the training, in which no wait is longer than
    so many seconds.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(rendezvous("env://"))
        dist.init_process_group(
            backend, store=of_this_attempt(store), rank=rank, world_size=ranks
        )
    else:
        dist.init_process_group(
            backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1
        )
    group: dist.ProcessGroup = dist.new_group(
        timeout=timedelta(seconds=seconds), backend="gloo"
    )
    return group


def together(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do some work, as all processes do, and give what it gives. If it fails in one process, all
    end, and each node prints the reason once.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    wrong = None
    try:
        made = work()
    except (CompileError, OSError, PipelineError, UsageError) as error:
        wrong = str(error)
    # As soon as one process has ended, the launcher ends the others, which have not printed yet.
    default = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with linked("at the start"):
        dist.all_gather_object(found, wrong, group)
    first = next((each for each in found if each is not None), None)
    if first is not None:
        # The first process of a node prints the first reason, and any process one of its own.
        if os.environ.get("LOCAL_RANK", "0") == "0" or wrong not in (None, first):
            say(wrong or first)
        leave(1)
    signal.signal(signal.SIGTERM, default)
    return made


def share(told: T, group: dist.ProcessGroup) -> T:
    """Give what rank 0 has to all processes."""
    found = [told]
    with linked("at the start"):
        dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


@contextmanager
def linked(when: str) -> Iterator[None]:
    """For messages outside of the training: if another process is gone, or too late, this one
    ends.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_connection(error):
            raise
        # gloo's messages begin with a line of its own source.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
        say(f"rank {dist.get_rank()} lost another rank {when}: {reason}")
        leave(1)


def leave(code: int) -> NoReturn:
    """End at once. A thread of gloo that outlives the interpreter would abort the process, once in
    a dozen runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
