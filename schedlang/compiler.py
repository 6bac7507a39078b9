"""The line from a program to its plan, and the verdicts on it for one size or many."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from signal import SIG_IGN, SIGINT, signal
from types import MappingProxyType

from attrs import asdict, evolve, frozen

from schedlang import passes
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.language import syntax
from schedlang.language.claims import check_claims
from schedlang.language.expand import expand
from schedlang.language.forms import old_forms
from schedlang.language.imports import load
from schedlang.language.variables import with_variables
from schedlang.lowering.choice import choose_lowering
from schedlang.plan.plan import Plan
from schedlang.proof.lints import lint
from schedlang.proof.prove import prove
from schedlang.proof.structure import check_structure
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.stream import unroll
from schedlang.schedule.transports import PORTABLE, transports

NO_PARAMS: Mapping[str, int] = MappingProxyType({})


def compile(
    source: Source,
    params: Mapping[str, int] = NO_PARAMS,
    costs: Costs = UNIT,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> Plan:
    """The plan of a program for some parameters, proved; CompileError with everything that is wrong
    with it.

    It is proved for a transport (`schedlang.schedule.transports`; ValueError for an unknown one),
    by default for all. Its passes choose the order that is best for its own costs, or where they
    are given, for `costs`, and so is its lowering chosen for its transport; ValueError if these are
    not for its number of stages. What it claims of time or memory, it claims at its own costs only.
    `forward_only` makes it the inference plan of a training program, without the claims, which
    speak of training.
    """
    return compile_tree(*load(source), params, costs, forward_only, transport)


def compile_tree(
    source: Source,
    tree: syntax.Schedule,
    params: Mapping[str, int],
    costs: Costs = UNIT,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> Plan:
    """`compile` of a program that is loaded already."""
    transports(transport)
    try:
        schedule = evolve(_ops(source, tree, params, costs, forward_only), transport=transport)
        choice = choose_lowering(schedule, costs)
        execution = prove(choice.schedule)
    except CompileError as error:
        raise CompileError(with_variables(error.diagnostics, tree, params)) from None
    check_claims(choice.schedule, execution, costs)
    parts = asdict(evolve(choice.schedule, claims=()), recurse=False)
    idle = execution.timeline.bubble_over_makespan
    return Plan(
        **parts, kernels=choice.kernels, idle=idle, lowering=choice.name, trials=choice.trials
    )


def _ops(
    source: Source,
    tree: syntax.Schedule,
    params: Mapping[str, int],
    costs: Costs,
    forward_only: bool,
) -> Schedule:
    """The schedule of a program as it is written: without communication, unless it has its own."""
    schedule = expand(source, tree, params, costs)
    if schedule.stream and forward_only:
        schedule = unroll(schedule, 1)
    check_structure(unroll(schedule, 2) if schedule.stream else schedule)
    return evolve(passes.forward_only(schedule), claims=()) if forward_only else schedule


def check_program(
    source: Source, params: Mapping[str, int], names: Iterable[str]
) -> dict[str, list[Diagnostic]]:
    """`check_schedule` of a program; CompileError for what is wrong on all transports."""
    loaded, tree = load(source)
    try:
        schedule = choose_lowering(_ops(loaded, tree, params, UNIT, False), UNIT).schedule
    except CompileError as error:
        raise CompileError(with_variables(error.diagnostics, tree, params)) from None
    old = old_forms(loaded, tree)
    return {
        name: with_variables(diagnostics, tree, params) + old
        for name, diagnostics in check_schedule(schedule, names).items()
    }


def check_schedule(schedule: Schedule, names: Iterable[str]) -> dict[str, list[Diagnostic]]:
    """For each of some transports, what is wrong with a schedule with communication there; if
    nothing, warnings.
    """
    found: dict[str, list[Diagnostic]] = {}
    for name in names:
        asked = evolve(schedule, transport=name)
        try:
            check_claims(asked, prove(asked))
            found[name] = lint(asked)
        except CompileError as error:
            found[name] = error.diagnostics
    return found


@frozen
class Instance:
    """A program at one size: what is wrong with it there, or nothing; and whether its own `require`
    refuses it.
    """

    params: dict[str, int]
    refused: bool
    diagnostics: list[Diagnostic]


def check_range(
    source: Source, params: Mapping[str, int], ranges: Mapping[str, range], transport: str
) -> Iterator[Instance]:
    """Every size in some ranges of parameters, the smallest first, worked on by all cores."""
    from concurrent.futures import ProcessPoolExecutor

    sizes = [
        {**params, **dict(zip(ranges, values, strict=True))} for values in product(*ranges.values())
    ]
    sizes.sort(key=lambda size: (prod(max(size[name], 1) for name in ranges), list(size.values())))
    # Ctrl-C is for this process, which ends the others.
    with ProcessPoolExecutor(initializer=signal, initargs=(SIGINT, SIG_IGN)) as pool:
        try:
            yield from pool.map(partial(_instance, source, transport), sizes, chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)


def _instance(source: Source, transport: str, params: dict[str, int]) -> Instance:
    try:
        compile(source, params, transport=transport)
    except CompileError as error:
        refused = all(each.code == "require" for each in error.diagnostics)
        return Instance(params, refused, [] if refused else error.diagnostics)
    return Instance(params, False, [])
