"""The launcher of `schedc run`: `python -m schedlang.examples.demo.launch RANKS ARGUMENTS` starts a
process of `schedlang.runtime` for each rank.

It does what torchrun does, with the same environment variables, but it imports torch once and
forks. Under torchrun each rank imports torch itself, which takes longer than a short training. It
prints no log and no traceback: ranks print themselves what went wrong, unless a signal ended them.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_HOST = "127.0.0.1"
#: Seconds that ranks have to end after SIGTERM, as under torchrun.
_PATIENCE = 30
_COMMAND = "schedlang.examples.demo.command"
#: What an optimizer imports with its first step.
_COMPILER = "torch._dynamo"
#: The signals that end a launch.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Launch what the arguments say. The exit code is 0, 1 if a rank fails, or 128 + the number of
    a signal.
    """
    # Before torch is imported, which takes seconds.
    for number in _SIGNALS:
        signal.signal(number, _stop)
    ranks, *arguments = sys.argv[1:]
    succeeded = launch(int(ranks), arguments)
    # Without the half second in which the interpreter takes torch's modules apart.
    sys.stderr.flush()
    os._exit(0 if succeeded else 1)


def launch(ranks: int, arguments: list[str]) -> bool:
    """Run the command with these arguments in a process for each rank; whether all succeed. As soon
    as one fails, the others are ended.
    """
    for module in (_COMMAND, _COMPILER):
        import_module(module)
    dist = import_module("torch.distributed")
    # macOS's own libraries do not work after a fork.
    context = (
        multiprocessing.get_context("fork")
        if sys.platform == "linux"
        else multiprocessing.get_context("spawn")
    )
    listener = socket.create_server((_HOST, 0))
    port: int = listener.getsockname()[1]
    processes = [
        context.Process(target=_run_rank, args=(rank, ranks, listener, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    # After the forks, since the store has threads; ranks can connect before.
    _store = dist.TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    succeeded = _wait(processes)
    _end(signal.SIGTERM)
    return succeeded


def _run_rank(
    rank: int, ranks: int, listener: socket.socket, arguments: list[str]
) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    port = listener.getsockname()[1]
    listener.close()
    os.environ |= environment_of(rank, ranks, port)
    sys.argv = ["schedlang.runtime", *arguments]
    import_module(_COMMAND).run()


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, where all ranks and the store are on one
    machine.
    """
    return {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(processes: Sequence[BaseProcess]) -> bool:
    """Wait until all processes have succeeded, or one has failed; whether all have succeeded."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()])
        ended = [rank for rank in running if running[rank].exitcode is not None]
        for rank in ended:
            code = running.pop(rank).exitcode or 0
            if code < 0:
                name = signal.Signals(-code).name
                print(
                    f"the process of rank {rank} was ended by {name}", file=sys.stderr
                )
            if code:
                return False
    return True


def _end(number: int) -> None:
    """End the processes that still run, by a signal."""
    processes = multiprocessing.active_children()
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, number)
    for process in processes:
        process.join(_PATIENCE)
        process.kill()
        process.join()


def _stop(number: int, _: object) -> None:
    """End the launch at a signal, which the ranks get too."""
    signal.signal(number, signal.SIG_IGN)
    _end(number)
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
