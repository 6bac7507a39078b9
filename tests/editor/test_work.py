"""Work in processes of its own, which ends when nobody asks for it any more."""

import asyncio
import os
import time

import pytest

from schedlang.extras.editor.worker_processes import Work
from tests.support.working import broken, endless, numbers, product

LIMIT = 120


def has_ended(process: int) -> bool:
    """Whether a process is gone, in a while."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_results_come_piece_by_piece() -> None:
    async def run() -> None:
        work = Work()
        assert [each async for each in work.results(numbers, 3, limit=LIMIT)] == [
            0,
            1,
            2,
        ]
        assert await work.result(product, 6, 7, limit=LIMIT) == 42
        # What was there before a mistake of ours is not lost; the mistake itself is on stderr.
        assert [each async for each in work.results(broken, limit=LIMIT)] == [1]

    asyncio.run(run())


@pytest.mark.slow
def test_what_takes_long_is_ended() -> None:
    async def run() -> None:
        work = Work()
        await work.result(product, 1, 1, limit=LIMIT)
        results = work.results(endless, limit=3)
        process = await anext(results)
        with pytest.raises(TimeoutError):
            await anext(results)
        assert has_ended(process)

    asyncio.run(run())


def test_what_nobody_asks_for_is_ended() -> None:
    async def run() -> None:
        work = Work()
        process: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            async for number in work.results(endless, limit=LIMIT):
                process.set_result(number)

        task = asyncio.create_task(ask())
        number = await asyncio.wait_for(process, LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_ended(number)

    asyncio.run(run())
