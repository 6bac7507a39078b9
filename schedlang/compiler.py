"""From a program to its plan; and verdicts on a program, for many transports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import evolve

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import Params, check_flag, check_params
from schedlang.files.sources import source_of
from schedlang.language import syntax
from schedlang.language.expand import expand
from schedlang.language.loading import load
from schedlang.lowering.choice import choose_lowering
from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.proof.graph import Graph
from schedlang.proof.prove import prove
from schedlang.proof.structure import check_structure
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.transports import PORTABLE, transports

if TYPE_CHECKING:
    from schedlang.language.claims import check_claims
    from schedlang.language.variables import with_variables
    from schedlang.passes import run_passes
    from schedlang.proof.capacity import check_capacity
    from schedlang.proof.claim_figures import Figures
    from schedlang.proof.lints import lint
    from schedlang.proof.repetition import proofs, prove_for_all_updates
    from schedlang.schedule.forward_only import forward_only as without_backwards
    from schedlang.schedule.stream import unroll
else:
    # For programs that declare such things: claims, passes, capacities, or no flush.
    check_claims = on_demand("schedlang.language.claims.check_claims")
    Figures = on_demand("schedlang.proof.claim_figures.Figures")
    run_passes = on_demand("schedlang.passes.run_passes")
    check_capacity = on_demand("schedlang.proof.capacity.check_capacity")
    prove_for_all_updates = on_demand(
        "schedlang.proof.repetition.prove_for_all_updates"
    )
    unroll = on_demand("schedlang.schedule.stream.unroll")
    # For users that ask for an inference plan, or for verdicts on many transports.
    without_backwards = on_demand("schedlang.schedule.forward_only.forward_only")
    proofs = on_demand("schedlang.proof.repetition.proofs")
    lint = on_demand("schedlang.proof.lints.lint")
    # For programs that are wrong: looking up the values of their names is slow.
    with_variables = on_demand("schedlang.language.variables.with_variables")


class ClaimError(CompileError):
    """Claims of a program that do not hold, or ranks without room for what they hold: all else is
    proved. `plan` is the program's plan, which can be drawn and measured all the same; its `wrong`
    are the error's diagnostics.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(list(plan.wrong))
        self.plan = plan


NO_PARAMS: Mapping[str, int] = MappingProxyType({})


def compile(
    source: Source | str | Path,
    params: Params = NO_PARAMS,
    costs: Costs = UNIT,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> Plan:
    """The plan of a program for some parameters, proved.

    `source` is the path of the program's file, its text, or a `Source`: a `str` with a `{` in it is
    text. Where there is no such file, it may be a program of the gallery, as "1f1b". `params` are
    whole numbers by name, as `{"ranks": 4}`, or lists of them; others have the program's defaults.

    It is proved for a transport (`schedlang.schedule.transports`), by default for all. Passes and
    the lowering choose what is best for `costs`, or where these leave something open, for the
    program's own costs. What the program claims of time or memory, it claims at its own costs only.
    `forward_only` makes the inference plan of a program; the claims of a training program are then
    left out, since they are about training.

    CompileError has everything that is wrong with the program, or with its file; where only claims
    do not hold, it is a `ClaimError`, which has the plan. Its text has a repair that is proved, if
    one is found. TypeError or
    ValueError names a wrong argument: an unknown transport, costs of another number of stages, and
    as a ParameterError, which is also a CompileError, parameters that the program does not have.
    """
    check_params("params", params)
    check_costs(costs)
    check_flag("forward_only", forward_only)
    transports(transport)
    given = source_of(source)
    whole, tree = load(given)
    try:
        return compile_tree(whole, tree, params, costs, forward_only, transport)
    except CompileError as error:
        # Advice is for the costs of the program itself, and not for claims.
        if costs == UNIT and not isinstance(error, ClaimError):
            error.compiled = (given, params, forward_only, transport)
        raise


def compile_tree(
    source: Source,
    tree: syntax.Schedule,
    params: Params,
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
        execution = _proved(choice.schedule, choice.kernels, choice.walked)
    except CompileError as error:
        raise type(error)(with_variables(error.diagnostics, tree, params)) from None
    wrong = _wrong_figures(choice.schedule, execution, costs)
    # Claims are functions of the program; a plan is data.
    plan = Plan.of(
        choice.schedule,
        claims=(),
        kernels=choice.kernels,
        idle=execution.timeline.bubble_over_makespan,
        lowering=choice.name,
        trials=choice.trials,
        wrong=tuple(wrong),
    )
    if wrong:
        raise ClaimError(plan)
    return plan


def _proved(
    schedule: Schedule, kernels: tuple[Kernel, ...], walked: Iterable[Graph]
) -> Execution:
    """The execution of a schedule that is right, however often its kernels are repeated."""
    if kernels:
        return prove_for_all_updates(schedule, kernels, walked)
    return prove(schedule, walked)


def _wrong_figures(
    schedule: Schedule, execution: Execution, given: Costs
) -> list[Diagnostic]:
    """The claims that do not hold in an execution, and the ranks without room for what they hold.
    Of the costs, some may be `given` by a user: see `check_claims`.
    """
    wrong: list[Diagnostic] = []
    try:
        if schedule.claims:
            check_claims(schedule, Figures(execution), given)
    except CompileError as error:
        wrong += error.diagnostics
    try:
        if execution.costs.capacity_bytes is not None:
            check_capacity(execution)
    except CompileError as error:
        wrong += error.diagnostics
    return wrong


def ops_of(
    source: Source,
    tree: syntax.Schedule,
    params: Params,
    costs: Costs = UNIT,
) -> Schedule:
    """The schedule of a program after its passes, with no transfers but those that it writes;
    CompileError with what is wrong until there.
    """
    schedule = expand(source, tree, params, costs)
    return run_passes(schedule) if schedule.passes else schedule


def _schedule_of_ops(
    source: Source,
    tree: syntax.Schedule,
    params: Params,
    costs: Costs,
    forward_only: bool,
    transport: str = PORTABLE,
) -> Schedule:
    """`ops_of` a program, checked and for a transport."""
    schedule = ops_of(source, tree, params, costs)
    if schedule.stream and forward_only:
        # Without backwards there is nothing to overlap with the next update.
        schedule = unroll(schedule, 1)
    _check_ops(schedule)
    if forward_only:
        claims = schedule.claims if schedule.is_forward_only else ()
        schedule = evolve(without_backwards(schedule), claims=claims)
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


def check_program(
    source: Source, params: Params, names: Iterable[str], costs: Costs = UNIT
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
    verdicts = check_schedule(
        choice.schedule, names, choice.kernels, costs, choice.walked
    )
    for name, diagnostics in verdicts.items():
        verdicts[name] = with_variables(diagnostics, tree, params)
    return verdicts


def check_schedule(
    schedule: Schedule,
    names: Iterable[str],
    kernels: tuple[Kernel, ...] = (),
    given: Costs = UNIT,
    walked: Iterable[Graph] = (),
) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a schedule and its communication,
    however often its kernels are repeated; if nothing is, the warnings. Of its costs, some may be
    `given` by a user: see `check_claims`. `walked` are graphs as of `prove`.
    """
    verdicts = wrong_on(schedule, names, kernels, given, walked)
    for name, wrong in verdicts.items():
        if not wrong:
            on_transport = evolve(schedule, transport=name)
            verdicts[name] = [*on_transport.warnings, *lint(on_transport)]
    return verdicts


def wrong_ops(ops: Schedule, names: Iterable[str]) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a program that was expanded before, as
    `check_program` says it, but without the values of the program's names; CompileError for what is
    wrong whatever the transport.
    """
    _check_ops(ops)
    choice = choose_lowering(ops, UNIT)
    return wrong_on(choice.schedule, names, choice.kernels, walked=choice.walked)


def wrong_on(
    schedule: Schedule,
    names: Iterable[str],
    kernels: tuple[Kernel, ...] = (),
    given: Costs = UNIT,
    walked: Iterable[Graph] = (),
) -> dict[str, list[Diagnostic]]:
    """For each of some transports what is wrong there with a schedule and its communication, as
    `check_schedule` says it, without warnings.
    """
    wrong: dict[str, list[Diagnostic]] = {}
    for name, proof in proofs(schedule, names, kernels, walked).items():
        if isinstance(proof, CompileError):
            wrong[name] = proof.diagnostics
        else:
            wrong[name] = _wrong_figures(schedule, proof, given)
    return wrong
