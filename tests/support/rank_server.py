"""The process from which ranks are forked: it imports torch and each test module once.

`ranks.py` starts it with the number of a file descriptor, by which it is asked for runs: a function
with its arguments, a number of ranks, a folder for what comes of them, and limits in seconds. A rank
prints to `<rank>.log`, and what its function returns is in `<rank>.result`.

The server itself never computes anything, nor does it open a connection, so that it has no threads
that a fork would lose.
"""

import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Torch imports it with the first optimizer, which takes a second in each rank.
import torch._dynamo
import torch.distributed as dist


def rank_main(function: Callable[[], object], rank: int, ranks: int, folder: Path) -> None:
    """One rank: joins the others, calls the function and leaves what it returned."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    dist.init_process_group(
        "gloo", store=join_store(rank, ranks, folder / "port"), rank=rank, world_size=ranks
    )
    dist.barrier()
    (folder / f"{rank}.started").touch()
    result = pickle.dumps(function())
    write(folder / f"{rank}.result", result)
    # Nobody leaves while another one still needs it, or waits in vain for some other reason than
    # its own.
    dist.barrier()
    dist.destroy_process_group()


def join_store(rank: int, ranks: int, port: Path) -> dist.TCPStore:
    """The store of the process group, which rank 0 has, as under torchrun."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        write(port, str(store.port).encode())
        return store
    while not port.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), ranks, is_master=False)


def write(path: Path, content: bytes) -> None:
    """At once: the file is there with all of its content, or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.rename(path)


def fork(function: Callable[[], object], rank: int, ranks: int, folder: Path) -> int:
    """The process of a rank."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        rank_main(function, rank, ranks, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(
    connection: Connection,
    function: Callable[[], object],
    ranks: int,
    folder: Path,
    limit: float,
    seconds: float | None,
) -> tuple[float, list[int | None]]:
    """How long the ranks took, and how each of them ended: None where it had to be ended."""
    begin = time.monotonic()
    end = begin + limit
    children = [fork(function, rank, ranks, folder) for rank in range(ranks)]
    codes: dict[int, int | None] = {}
    while len(codes) < ranks:
        if seconds is not None and len(list(folder.glob("*.started"))) == ranks:
            end = time.monotonic() + seconds
            seconds = None
        # Whoever asked is gone, if there is something to read while no answer was given.
        if connection.poll(0.005) or time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
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
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        # It imports the test module.
        given = pickle.loads(request)
        # What is imported is not looked through when ranks count their tensors.
        gc.collect()
        gc.freeze()
        connection.send(run(connection, *given))


if __name__ == "__main__":
    main()
