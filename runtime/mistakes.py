"""A mistake in a plan or a program that ends a script before it has a pipeline, such as a plan file
that is not there.

All ranks read the same file and find the same mistake. One of them reports it:

    error[unreadable]: cannot read `plan.json`: No such file or directory     the mistake
      train.py:114, in train: plan = read_plan(options.plan)                  lines of the script
"""

import os
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.runtime.failure_report import (
    lines_of_script,
    stderr_of_process,
    tell_torchrun,
)
from schedlang.runtime.store import connection, is_of_torchrun, of_this_attempt
from schedlang.runtime.watchdog import say

#: Seconds that a process takes to connect to torchrun's store, at most.
_CONNECTING = 10


def report_mistake(error: CompileError) -> bool:
    """Report a mistake, unless a process that prints to the same terminal or file has reported the
    same one; whether that was done. A script without a launcher has its traceback.
    """
    if "RANK" not in os.environ:
        return False
    lines = [str(error), *(f"  {line}" for line in lines_of_script(error))]
    text = "\n".join(lines)
    if _is_first_with(f"{stderr_of_process()}\n{text}"):
        say(text)
    tell_torchrun(lines[0].split("\n", 1)[0])
    return True


def _is_first_with(text: str) -> bool:
    """Whether no other process of this training has asked about the same text before. True where
    the processes have no store.
    """
    key = f"mistake/{sha256(text.encode()).hexdigest()}"
    try:
        store = _store_of_training()
        return store is None or bool(store.add(key, 1) == 1)
    except (RuntimeError, ValueError):
        return True


def _store_of_training() -> Any:
    """The store of the process group; without a group, that of torchrun; None without torchrun."""
    if dist.group.WORLD is not None:
        return connection(dist.group.WORLD.get_group_store())
    if not is_of_torchrun():
        return None
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=_CONNECTING)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    return of_this_attempt(store)
