"""The process from which ranks are forked: it imports torch and each test module once.

`ranks.py` starts it with the number of a file descriptor, by which it is asked for runs: a function
with its arguments, a number of ranks, whether they join a process group, a folder for what comes of
them, and limits in seconds. A rank prints to `<rank>.log`, and what its function returns is in
`<rank>.result`.

The server itself never computes anything, nor does it open a connection, so that it has no threads
that a fork would lose.
"""

import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Torch imports these with the first optimizer, the first step and the first tensor that is read,
# which takes a second in each rank.
import torch._dynamo
import torch.distributed as dist
import torch.profiler
import torch.utils.serialization

from schedlang.language.grammar import grammar
from tests.support.forks import fork, print_to, read, write
from tests.support.plans import keep_plans


def rank_main(
    function: Callable[[], object], rank: int, ranks: int, joins: bool, folder: Path
) -> None:
    """One rank: joins the others, calls the function and leaves what it returned."""
    # So that it can be ended with all processes that it starts itself.
    os.setpgid(0, 0)
    print_to(folder / f"{rank}.log", 1, 2)
    # For the tracebacks of a run that fails.
    tempfile.tempdir = str(folder)
    if joins:
        store = join_store(rank, ranks, folder / "port")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.barrier()
    (folder / f"{rank}.started").touch()
    write(folder / f"{rank}.result", pickle.dumps(function()))
    if joins:
        # Nobody leaves while another one still needs it, or waits in vain for some other reason
        # than its own.
        dist.barrier()
        dist.destroy_process_group()


def join_store(rank: int, ranks: int, port: Path) -> dist.TCPStore:
    """The store of the process group, which rank 0 has."""
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False
        )
        write(port, str(store.port).encode())
        return store
    return dist.TCPStore("127.0.0.1", int(read(port).decode()), ranks, is_master=False)


def run(
    connection: Connection,
    function: Callable[[], object],
    ranks: int,
    joins: bool,
    folder: Path,
    limit: float,
    seconds: float | None,
) -> tuple[float, list[int | None]]:
    """How long the ranks took, and how each of them ended: None where it had to be ended."""
    begin = time.monotonic()
    end = begin + limit
    children = [
        fork(partial(rank_main, function, rank, ranks, joins, folder))
        for rank in range(ranks)
    ]
    codes: dict[int, int | None] = {}
    while len(codes) < ranks:
        # From now on the shorter limit counts: ranks that hang do so after they have found each
        # other.
        if seconds is not None and len(list(folder.glob("*.started"))) == ranks:
            end = time.monotonic() + seconds
            seconds = None
        # Whoever asked is gone, if there is something to read while no answer was given.
        if connection.poll(0.005) or time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    codes[child] = None
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
    return time.monotonic() - begin, [codes[child] for child in children]


def main() -> None:
    """Answer until nobody can ask any more."""
    torch.set_num_threads(1)
    # Ranks that compile a program would each load its tables, and each compile it.
    grammar()
    plans = Path(tempfile.mkdtemp())
    keep_plans(plans)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            shutil.rmtree(plans)
            return
        # It imports the test module.
        given = pickle.loads(request)
        # What is imported is not looked through when ranks count their tensors.
        gc.collect()
        gc.freeze()
        connection.send(run(connection, *given))


if __name__ == "__main__":
    main()
