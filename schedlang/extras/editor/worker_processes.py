"""Work of the compiler in processes of its own, which can be ended: whatever a text makes the
compiler do, the server goes on answering.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

#: Each piece of work is a copy of a process that has these loaded, so that it begins at once.
_LOADED = ["schedlang.extras.editor.warm"]


class Work:
    """Starts the processes."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_LOADED)

    async def results(
        self, function: Callable[..., Iterator[T]], *arguments: Any, limit: float
    ) -> AsyncGenerator[T, None]:
        """What a function gives, piece by piece; TimeoutError when it is not done after so many
        seconds. Who stops asking ends it. Its module must be one that is loaded already.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        # A process can be killed wherever it is; a thread could not, and the compiler looks at no
        # clock.
        process = self._context.Process(
            target=_send, args=(sender, function, arguments), daemon=True
        )
        waiting: asyncio.Future[Any] | None = None
        loop = asyncio.get_running_loop()
        try:
            # The first time, it waits until all is loaded.
            await asyncio.to_thread(process.start)
            sender.close()
            end = loop.time() + limit
            while True:
                waiting = asyncio.ensure_future(asyncio.to_thread(receiver.recv))
                done, _ = await asyncio.wait([waiting], timeout=end - loop.time())
                if not done:
                    raise TimeoutError
                try:
                    result = waiting.result()
                except EOFError:
                    return
                yield result
        finally:
            if process.pid is not None:
                process.kill()
            # Only now is nothing more to come for who waits.
            if waiting is not None:
                with suppress(EOFError, OSError):
                    await asyncio.shield(waiting)
            receiver.close()

    async def result(
        self, function: Callable[..., T], *arguments: Any, limit: float
    ) -> T | None:
        """What a function gives; None where it takes longer than so many seconds."""
        results = self.results(_once, function, arguments, limit=limit)
        async with aclosing(results):
            with suppress(TimeoutError):
                async for result in results:
                    return result  # type: ignore[no-any-return]
        return None


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    yield function(*arguments)


def _send(
    sender: Connection, function: Callable[..., Iterator[Any]], arguments: Any
) -> None:
    """The work of a process: what a function gives, sent piece by piece."""
    # Ctrl-C is for the server, which ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody listens any more.
    with suppress(BrokenPipeError):
        for result in function(*arguments):
            sender.send(result)
