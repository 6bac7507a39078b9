"""From a program to its plan; and verdicts on a program, for many transports or sizes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import prod
from os import kill
from pathlib import Path
from signal import (
    SIG_BLOCK,
    SIG_IGN,
    SIG_SETMASK,
    SIG_UNBLOCK,
    SIGINT,
    SIGUSR1,
    getsignal,
    pthread_sigmask,
    raise_signal,
    signal,
)
from threading import current_thread, main_thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import asdict, evolve, frozen

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.arguments import check_flag, check_params
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.files.reading import source_of
from schedlang.language import syntax
from schedlang.language.claims import check_claims
from schedlang.language.expand import expand
from schedlang.language.forms import old_forms
from schedlang.language.imports import load
from schedlang.language.variables import with_variables
from schedlang.lowering.choice import choose_lowering
from schedlang.plan.plan import Plan
from schedlang.proof.capacity import check_capacity
from schedlang.proof.graph import remembered_walks
from schedlang.proof.lints import lint
from schedlang.proof.prove import proofs
from schedlang.proof.repetition import prove_for_all_updates, prove_repeats
from schedlang.proof.structure import check_structure
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.forward_only import forward_only as without_backwards
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.stream import unroll
from schedlang.schedule.transports import PORTABLE, transports

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.process import BaseProcess

T = TypeVar("T")

NO_PARAMS: Mapping[str, int] = MappingProxyType({})


def compile(
    source: Source | str | Path,
    params: Mapping[str, int] = NO_PARAMS,
    costs: Costs = UNIT,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> Plan:
    """The plan of a program for some parameters, proved.

    `source` is the path of the program's file, its text, or a `Source`: a `str` with a `{` in it is
    text. Where there is no such file, it may be a program of the gallery, as "1f1b". `params` are
    whole numbers by name, as `{"ranks": 4}`; others have the program's defaults.

    It is proved for a transport (`schedlang.schedule.transports`), by default for all. Passes and
    the lowering choose what is best for `costs`, or where these leave something open, for the
    program's own costs. What the program claims of time or memory, it claims at its own costs only.
    `forward_only` makes the inference plan of a training program; claims are then left out, since
    they are about training.

    CompileError has everything that is wrong with the program, or with its file. TypeError or
    ValueError names a wrong argument: an unknown transport, costs of another number of stages, and
    as a ParameterError, which is also a CompileError, parameters that the program does not have.
    """
    check_params("params", params)
    check_costs(costs)
    check_flag("forward_only", forward_only)
    transports(transport)
    whole, tree = load(source_of(source))
    return compile_tree(whole, tree, params, costs, forward_only, transport)


@remembered_walks()
def compile_tree(
    source: Source,
    tree: syntax.Schedule,
    params: Mapping[str, int],
    costs: Costs = UNIT,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> Plan:
    """`compile` for a program that was loaded before, with its imports and its syntax tree."""
    # An unknown one is refused before any work is done.
    transports(transport)
    try:
        doing(f"{tree.name.text}: running the program for each rank")
        ops = _schedule_of_ops(source, tree, params, costs, forward_only, transport)
        doing(f"{tree.name.text}: placing sends and receives")
        choice = choose_lowering(ops, costs)
        # What is known of the ops takes room, which the proof needs.
        del ops
        doing(f"{tree.name.text}: proving {len(choice.schedule.columns):,} actions")
        execution = prove_for_all_updates(choice.schedule, choice.kernels)
    except CompileError as error:
        # Only now somebody wants to know the loop variables.
        raise type(error)(with_variables(error.diagnostics, tree, params)) from None
    check_claims(choice.schedule, execution, costs)
    check_capacity(execution)
    # Claims are functions of the program; a plan is data.
    fields = asdict(evolve(choice.schedule, claims=()), recurse=False)
    return Plan(
        **fields,
        kernels=choice.kernels,
        idle=execution.timeline.bubble_over_makespan,
        lowering=choice.name,
        trials=choice.trials,
    )


def _schedule_of_ops(
    source: Source,
    tree: syntax.Schedule,
    params: Mapping[str, int],
    costs: Costs,
    forward_only: bool,
    transport: str = PORTABLE,
) -> Schedule:
    """The schedule of a program for a transport after its passes, with no transfers but those that
    it writes.
    """
    schedule = expand(source, tree, params, costs)
    if schedule.stream and forward_only:
        # Without backwards there is nothing to overlap with the next update.
        schedule = unroll(schedule, 1)
    _check_ops(schedule)
    if forward_only:
        schedule = evolve(without_backwards(schedule), claims=())
    # Without need for another schedule, this one keeps what is known of it.
    return (
        schedule
        if schedule.transport == transport
        else evolve(schedule, transport=transport)
    )


def _check_ops(schedule: Schedule) -> None:
    """`check_structure` of a program's schedule of ops, also of one without a flush."""
    # Of a stream, two updates: the second one begins before the first is done.
    check_structure(unroll(schedule, 2) if schedule.stream else schedule)


@remembered_walks()
def check_program(
    source: Source, params: Mapping[str, int], names: Iterable[str], costs: Costs = UNIT
) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong with a program there, compiled for some costs, as
    `check_schedule`; CompileError for what is wrong whatever the transport, ValueError for costs of
    another number of stages.
    """
    whole, tree = load(source)
    try:
        ops = _schedule_of_ops(whole, tree, params, costs, False)
        choice = choose_lowering(ops, costs)
    except CompileError as error:
        raise CompileError(with_variables(error.diagnostics, tree, params)) from None
    old = old_forms(whole, tree)
    verdicts = check_schedule(choice.schedule, names, choice.kernels, costs)
    for name, diagnostics in verdicts.items():
        verdicts[name] = with_variables(diagnostics, tree, params) + old
    return verdicts


def check_schedule(
    schedule: Schedule,
    names: Iterable[str],
    kernels: tuple[Kernel, ...] = (),
    given: Costs = UNIT,
) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a schedule and its communication,
    however often its kernels are repeated; if nothing is, the warnings. Of its costs, some may be
    `given` by a user: see `check_claims`.
    """
    verdicts = wrong_on(schedule, names, kernels, given)
    for name, wrong in verdicts.items():
        if not wrong:
            on_transport = evolve(schedule, transport=name)
            verdicts[name] = [*on_transport.warnings, *lint(on_transport)]
    return verdicts


@remembered_walks()
def wrong_ops(ops: Schedule, names: Iterable[str]) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a program that was expanded before, as
    `check_program` says it, but without the values of the program's names; CompileError for what is
    wrong whatever the transport.
    """
    _check_ops(ops)
    choice = choose_lowering(ops, UNIT)
    return wrong_on(choice.schedule, names, choice.kernels)


@remembered_walks()
def wrong_on(
    schedule: Schedule,
    names: Iterable[str],
    kernels: tuple[Kernel, ...] = (),
    given: Costs = UNIT,
) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a schedule and its communication, as
    `check_schedule` says it, without warnings.
    """
    wrong: dict[str, list[Diagnostic]] = {}
    for name, proof in proofs(schedule, names).items():
        on_transport = evolve(schedule, transport=name)
        wrong[name] = []
        try:
            if isinstance(proof, CompileError):
                raise proof
            prove_repeats(on_transport, kernels)
            check_claims(on_transport, proof, given)
            check_capacity(proof)
        except CompileError as error:
            wrong[name] = error.diagnostics
    return wrong


@frozen
class Instance:
    """A program at one size: what is wrong there, and whether that is only that its own `require`
    refuses the size.
    """

    params: dict[str, int]
    refused: bool
    diagnostics: list[Diagnostic]


def check_range(
    source: Source,
    params: Mapping[str, int],
    ranges: Mapping[str, range],
    transport: str,
    costs: Costs = UNIT,
) -> Iterator[Instance]:
    """A program at every size in some ranges of parameters, the smallest size first, compiled for
    some costs; all cores work on it. ValueError for costs of another number of stages.
    """
    sizes = []
    for values in product(*ranges.values()):
        sizes.append({**params, **dict(zip(ranges, values, strict=True))})

    def order(size: dict[str, int]) -> tuple[int, list[int]]:
        # A parameter may be 0 or less, which would make all products alike.
        product_of_ranges = prod(max(size[name], 1) for name in ranges)
        return product_of_ranges, list(size.values())

    sizes.sort(key=order)
    several = [sizes[first : first + 4] for first in range(0, len(sizes), 4)]
    with processes() as workers:
        for instances in workers.map(
            partial(_instances, source, transport, costs), several
        ):
            yield from instances


class Workers:
    """Processes that work for this one, until Ctrl-C stops them."""

    # Ctrl-C raises nothing here by itself: an exception that comes out of the blue may leave a lock
    # of the pool's queues locked, for which the pool would wait without end. Nor does it kill the
    # others: one may be writing its result, for whose end the pool would wait. So they are asked to
    # end by SIGUSR1, raise KeyboardInterrupt within their work, and that is then its result.

    def __init__(
        self, pool: "ProcessPoolExecutor", children: Callable[[], list["BaseProcess"]]
    ) -> None:
        self._pool = pool
        self._children = children
        self._others = children()
        self.is_interrupted = False

    def map(self, function: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """What a function gives for each of some arguments, in their order. KeyboardInterrupt
        after Ctrl-C.
        """
        # The processes begin with the first work, and cannot be asked before `_begin`.
        before = pthread_sigmask(SIG_BLOCK, {SIGUSR1})
        try:
            futures = [
                self._pool.submit(_work, function, *each)
                for each in zip(*arguments, strict=True)
            ]
        finally:
            pthread_sigmask(SIG_SETMASK, before)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return (future.result() for future in futures)

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C does: ask the processes to end what they do, and to do no more."""
        self.is_interrupted = True
        for process in self._children():
            if process not in self._others:
                assert process.pid is not None
                kill(process.pid, SIGUSR1)


#: Of a process that works for another: whether it is at work now, and whether it is to do no more.
_worker = {"works": False, "is over": False}


def _begin() -> None:
    # Ctrl-C is for the other process, which then asks this one.
    signal(SIGINT, SIG_IGN)
    signal(SIGUSR1, _end)
    pthread_sigmask(SIG_UNBLOCK, {SIGUSR1})


def _end(*_: object) -> None:
    _worker["is over"] = True
    if _worker["works"]:
        raise KeyboardInterrupt


def _work(function: Callable[..., T], *arguments: Any) -> T:
    _worker["works"] = True
    try:
        if _worker["is over"]:
            raise KeyboardInterrupt
        return function(*arguments)
    finally:
        _worker["works"] = False


@contextmanager
def processes() -> Iterator[Workers]:
    """A process on each core, for those who compile much; what they have not begun by the end is
    dropped.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children

    with ProcessPoolExecutor(initializer=_begin) as pool:
        workers = Workers(pool, active_children)
        before = getsignal(SIGINT)
        listens = callable(before) and current_thread() is main_thread()
        if listens:
            signal(SIGINT, workers.interrupt)
        try:
            yield workers
        finally:
            if workers.is_interrupted:
                # Some may not have been there yet.
                workers.interrupt()
            pool.shutdown(cancel_futures=True)
            if listens:
                signal(SIGINT, before)
            if workers.is_interrupted:
                raise_signal(SIGINT)


def _instances(
    source: Source, transport: str, costs: Costs, sizes: list[dict[str, int]]
) -> list[Instance]:
    return [_instance(source, transport, costs, params) for params in sizes]


def _instance(
    source: Source, transport: str, costs: Costs, params: dict[str, int]
) -> Instance:
    try:
        compile(source, params, costs, transport=transport)
    except CompileError as error:
        refused = all(diagnostic.code == "require" for diagnostic in error.diagnostics)
        return Instance(params, refused, error.diagnostics)
    return Instance(params, refused=False, diagnostics=[])
