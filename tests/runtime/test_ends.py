"""What a pipeline leaves behind, on two processes."""

import asyncio
import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing import get_context
from time import sleep
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang.runtime import Pipeline
from schedlang.runtime.watchdog import POLL
from tests.support.models import program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def pipeline() -> Pipeline:
    plan = program("1f1b", ranks=2, microbatches=2)
    stages = {dist.get_rank(): nn.Linear(4, 4)}
    return Pipeline(plan, stages, nn.functional.mse_loss)


def step() -> None:
    """One step of a pipeline that is garbage after it, in a cycle of objects, as it is with a
    trainer that its own parts refer to.
    """
    trained = pipeline()
    trained.step(*torch.rand(2, 4, 4))
    trainer: dict[str, object] = {"pipeline": trained}
    trainer["self"] = trainer


def told() -> list[str]:
    """What Python tells of files and sockets that a pipeline leaves open."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        gc.collect()
    return [str(each.message) for each in caught if each.category is ResourceWarning]


def told_by_the_watchdog() -> list[str]:
    """The same, and what Python cannot raise, where the pipeline's own watchdog meets the garbage
    first: the main thread makes none meanwhile.
    """
    unraisable = list[str]()
    sys.unraisablehook = lambda each: unraisable.append(str(each.exc_value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.disable()
        step()
        before = gc.get_threshold()
        gc.set_threshold(1)
        gc.enable()
        sleep(1)
        gc.set_threshold(*before)
    sys.unraisablehook = sys.__unraisablehook__
    return unraisable + [
        str(each.message) for each in caught if each.category is ResourceWarning
    ]


class Slow:
    """A store that answers late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        sleep(0.5)
        return getattr(self._store, name)  # type: ignore[no-any-return]


def leaves_after_a_gather() -> None:
    """Rank 0, which has the store, ends right after all have told something; rank 1 is slow."""
    watchdog = pipeline()._watchdog
    if dist.get_rank() == 1:
        watchdog.store = Slow(watchdog.store)  # type: ignore[assignment]
    told = watchdog.gather(str(dist.get_rank()), "told nothing")
    os._exit(0 if told == {0: "0", 1: "1"} else 1)


def test_the_rank_with_the_store_stays_until_all_have_read_it(run_ranks: Run) -> None:
    outcome = run_ranks(leaves_after_a_gather, 2)
    assert outcome.codes == [0, 0], outcome.logs


def children() -> tuple[list[int | None], list[float]]:
    """How some processes end that the script forks and terminates, at once and after a while, and
    the losses of a step after that.
    """
    ours = pipeline()
    forked = get_context("fork")
    codes = list[int | None]()
    for pause in (*[0.0] * 20, 0.2):
        child = forked.Process(target=sleep, args=(30,))
        child.start()
        sleep(pause)
        child.terminate()
        child.join(10)
        codes.append(child.exitcode)
    # Its end terminates the processes.
    with forked.Pool(2) as pool:
        pool.map(abs, range(4))
    sleep(2 * POLL)
    losses = ours.step(*torch.rand(2, 4, 4))
    return codes, [] if losses is None else losses.tolist()


def ends_a_child() -> int:
    """How many losses a step has after the end of a child that the script has forked, by an error
    of its own.
    """
    ours = pipeline()
    if (child := os.fork()) == 0:
        # What Python does where nobody catches an error.
        sys.last_value = ValueError("the child's")
        atexit._run_exitfuncs()
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    sleep(2 * POLL)
    losses = ours.step(*torch.rand(2, 4, 4))
    return 0 if losses is None else len(losses)


def terminated_alone() -> None:
    """SIGTERM where the process that had the store has ended, between two steps."""
    ours = pipeline()
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(0)
    sleep(2)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(10)
    del ours


def heard_by_a_later_handler() -> list[str]:
    """What a handler of SIGTERM hears that the script has set after it built the pipeline: beside
    it, and when it is gone.
    """
    heard = list[str]()
    ours = pipeline()
    signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(2 * POLL)
    del ours
    os.kill(os.getpid(), signal.SIGTERM)
    return heard


async def told_by_the_loop() -> list[int]:
    """The signals that an event loop hears while there is a pipeline, and after it."""
    heard = list[int]()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, heard.append, 1)
    ours = pipeline()
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.2)
    del ours
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.2)
    return heard


async def terminated_in_a_loop() -> None:
    """SIGTERM while an event loop hears signals that began after the pipeline."""
    ours = pipeline()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(10)
    del ours


def run_loop(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(main())


def terminated_after(*, by_another: bool) -> None:
    """SIGTERM after a pipeline that its own watchdog has closed; if `by_another`, while there is
    another one.
    """
    told_by_the_watchdog()
    another = pipeline() if by_another else None
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(10)
    del another


def test_no_socket_is_left_open(run_ranks: Run) -> None:
    assert run_ranks(told, 2).results() == [[], []]


def test_the_watchdog_may_end_itself(run_ranks: Run) -> None:
    assert run_ranks(told_by_the_watchdog, 2).results() == [[], []]


def test_sigterm_ends_a_process_whose_watchdog_has_ended_itself(run_ranks: Run) -> None:
    outcome = run_ranks(partial(terminated_after, by_another=False), 2)
    assert outcome.codes == [-signal.SIGTERM] * 2, outcome.logs


def test_a_child_may_fail(run_ranks: Run) -> None:
    assert run_ranks(ends_a_child, 2).results() == [0, 2]


def test_sigterm_ends_a_process_that_has_lost_the_store(run_ranks: Run) -> None:
    outcome = run_ranks(terminated_alone, 2)
    assert outcome.codes == [0, -signal.SIGTERM], outcome.logs


def test_the_next_pipeline_says_that_it_was_terminated(run_ranks: Run) -> None:
    outcome = run_ranks(partial(terminated_after, by_another=True), 2)
    assert outcome.codes == [1] * 2, outcome.logs
    assert all("was terminated" in log for log in outcome.logs)


def test_children_may_be_terminated(run_ranks: Run) -> None:
    (first, _), (second, losses) = run_ranks(children, 2).results()
    assert first == second == [-signal.SIGTERM] * 21
    assert len(losses) == 2


def test_an_event_loop_goes_on_hearing_signals(run_ranks: Run) -> None:
    assert run_ranks(partial(run_loop, told_by_the_loop), 2).results() == [[1, 1]] * 2


def test_sigterm_is_heard_beside_an_event_loop(run_ranks: Run) -> None:
    outcome = run_ranks(partial(run_loop, terminated_in_a_loop), 2)
    assert outcome.codes == [1] * 2, outcome.logs
    assert all("was terminated" in log for log in outcome.logs)


def test_a_later_handler_stays(run_ranks: Run) -> None:
    heard = run_ranks(heard_by_a_later_handler, 2).results()
    assert heard == [["SIGTERM", "SIGTERM"]] * 2
