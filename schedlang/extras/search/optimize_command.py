"""`schedc optimize`: the best order of a program's ops, and how good it is.

Functions import slow modules themselves, since `schedc --help` loads this file.
"""

import argparse
import sys
from collections.abc import Callable
from math import inf
from typing import Any

from schedlang.cli.option_values import natural, numbers
from schedlang.cli.options import (
    COSTS,
    PARAMS,
    Command,
    file,
    given,
    more,
    output,
    transport_for,
)
from schedlang.cli.printing import json_text
from schedlang.cli.usage import FINE, USAGE, WRONG, UsageError

COMMAND = Command(
    "What is the best order of a program's ops, and how good is it?",
    "extras.search.optimize_command.optimize",
    "programs/1f1b.sched --for 10s -o best.sched",
    {
        **file(),
        **PARAMS,
        **output("PROGRAM", "the program to write, NAME.sched"),
        "--peak N": given(
            "what a rank may hold at most, as `peak(r)` counts it: activations of a stage, unless "
            "the program has amounts; one number for all or one per rank (default: the highest "
            "peak of the program)",
            numbers,
        ),
        "--offload": "copy activations to the host and back where that gains, at `offload_times` "
        "and `reload_times`; a program that offloads may always do so",
        "--block": "look for a block that repeats instead: its program is for any number of "
        "microbatches",
        "--for TIME": given(
            "how long to look for a better order, or a better bound: 30s, 5m (default: 60s)",
            dest="seconds",
            default=60.0,
        ),
        **COSTS,
        **more(
            {
                "--place": "look for better ranks of the stages first: one, several or not as "
                "many on each",
                "--recompute": "run forwards again where that gains, at `recompute_times`; also "
                "beside --offload",
                **transport_for(
                    "what the order is judged on, once it is found", "portable"
                ),
                "--workers N": given(
                    "how many threads the solver has (default: 2)", default=2
                ),
                "--seed N": given("what the search draws from", natural, default=0),
            }
        ),
    },
)

#: What is said of evictions and gathers, by their key in the JSON.
_EVICTIONS = {
    "offloads": "activations that are copied to the host and back",
    "recomputes": "forwards that run again",
    "gathers": "gathers of weights",
}


def optimize(options: argparse.Namespace) -> int:
    """Search the best order, print how good it is, and write it as a program."""
    if options.output and not options.output.endswith(".sched"):
        raise UsageError(f"`{options.output}` is to be a program: -o NAME.sched")
    from attrs import evolve

    from schedlang.cli.inputs import load_with_costs
    from schedlang.cli.progress import progress
    from schedlang.diagnostics.diagnostic import CompileError
    from schedlang.extras.search.optimize.optimize import check_solver, judged, optimize
    from schedlang.extras.search.optimize.problem import WAYS, Answer, Problem
    from schedlang.extras.search.optimize.program_text import program_of

    # Before the program is compiled, since nothing works without the solver.
    try:
        check_solver()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    plan, _ = load_with_costs(options, transport=options.transport)
    limits = options.peak
    if limits is not None and len(limits) not in (1, len(plan.ranks)):
        raise UsageError(
            f"--peak has {len(limits)} numbers, there are {len(plan.ranks)} ranks"
        )
    try:
        ways = [way for name, way in WAYS.items() if getattr(options, name)]
        problem = Problem.of(plan, limits, ways)
    except ValueError as error:
        raise UsageError(f"`{options.file}` cannot be optimized: {error}") from None
    # The value of the program's own order, before stages move, is printed with the answer.
    given = problem.as_given.value
    if not problem.is_bare and (options.block or options.place):
        raise UsageError(
            "--block and --place are for programs whose activations stay in memory, as do their "
            "weights: leave --offload and --recompute out, or the copies and gathers of the program"
        )
    if options.block:
        return _block(options, plan, problem)
    if options.place:
        problem = _placed(options.file, problem)
    # Kept outside the loop, so that the best answer is left after Ctrl-C.
    answer: Answer | None = None
    try:
        with progress(f"optimizing {plan.name}"):
            for better in optimize(
                problem, options.seconds, options.workers, options.seed
            ):
                answer = better
    except KeyboardInterrupt:
        # Ctrl-C ends the search with the best answer, unless no order fits into memory yet.
        if answer is None or answer.value == inf:
            raise
        print("interrupted: this is the best so far", file=sys.stderr)
    assert answer is not None
    if answer.value == inf:
        print(_too_little(problem, "order"), file=sys.stderr)
        return WRONG
    # After a placement, the problem's own order is not the one that the user gave.
    if options.place and answer.source == "as given":
        answer = evolve(answer, source="the placement of its stages")
    # The program is written first, so that it is kept if its proof fails.
    _write(options.output, program_of(problem, answer))
    result = None
    wrong: CompileError | None = None
    try:
        with progress(f"proving {plan.name}"):
            result = judged(problem, answer, options.transport, options.output)
    except CompileError as error:
        wrong = error
    _tell(options, _document(problem, given, answer, result), _text, plan.title)
    if wrong:
        raise wrong
    return FINE


def _too_little(problem: Any, what: str) -> str:
    """The error if no order or block stays within the memory."""
    graph = problem.graph
    most = max(problem.limits)
    least = max(
        (graph.rise[node] for order in graph.order for node in order), default=0
    )
    message = f"error: no {what} was found that holds at most {most:g}, as `peak(r)` counts it"
    return (
        f"{message}: --peak is {least:g} at least, for one op"
        if least > most
        else message
    )


def _block(options: argparse.Namespace, plan: Any, problem: Any) -> int:
    """Search the best repeating block, print its figures, and write it as a program."""
    from schedlang.cli.progress import progress
    from schedlang.diagnostics.diagnostic import CompileError
    from schedlang.extras.search.optimize.blocks import best_block

    if options.place:
        raise UsageError(
            "--block keeps stages where they are: leave --place out, or place first"
        )
    try:
        with progress(f"looking for blocks of {plan.name}"):
            block = best_block(problem, options.seconds, options.workers)
    except ValueError as error:
        raise UsageError(f"`{options.file}` has no block: {error}") from None
    if block is None:
        print(_too_little(problem, "block"), file=sys.stderr)
        return WRONG
    _write(options.output, block.text)
    compiled = None
    wrong: CompileError | None = None
    try:
        with progress(f"proving {plan.name}"):
            compiled = _compiled(options.output, block.text, plan)
    except CompileError as error:
        wrong = error
    document = {
        "schedule": plan.name,
        "params": plan.params,
        "microbatches": block.microbatches,
        "interval": block.interval,
        "length": block.length,
        "work": block.work,
        "memory": list(problem.limits),
        "peak_memory": list(compiled.peak_memory) if compiled else None,
        "makespan": compiled.timeline.makespan if compiled else None,
    }
    _tell(options, document, _text_of_block, plan.title)
    if wrong:
        raise wrong
    return FINE


def _tell(
    options: argparse.Namespace,
    document: dict[str, Any],
    text_of: Callable[[dict[str, Any], str], str],
    title: str,
) -> None:
    """Print the result as text or JSON, and the file that was written."""
    if options.format == "json":
        print(json_text(document | {"output": options.output}))
        return
    print(text_of(document, title))
    if options.output:
        print(f"wrote {options.output}")


def _compiled(output: str | None, text: str, plan: Any) -> Any:
    """The execution of a block's program, without communication, at the plan's microbatches."""
    from schedlang.compiler import compile
    from schedlang.diagnostics.source import Source
    from schedlang.proof.prove import simulate

    microbatches = {"microbatches": plan.microbatches}
    source = Source(output or f"{plan.name}, as found", text)
    proved = compile(source, microbatches, plan.costs)
    return simulate(proved, plan.costs, ideal=True)


def _text_of_block(document: dict[str, Any], title: str) -> str:
    """The figures of a block as text."""
    from schedlang.report.text_table import explained

    together = document["microbatches"]
    of = "a microbatch" if together == 1 else f"{together} microbatches"
    is_least = document["interval"] <= document["work"]
    verdict = "as long as the busiest rank works, so none is shorter"
    if not is_least:
        verdict = f"the busiest rank works {document['work']:.10g} of it"
    rows = [
        (
            "interval",
            f"{document['interval']:.10g}",
            f"after which {of} may start again; {verdict}",
        ),
        (
            "length",
            f"{document['length']:.10g}",
            f"from the first op of {of} to the last one",
        ),
    ]
    if document["makespan"] is not None:
        peaks = " ".join(f"{peak:.10g}" for peak in document["peak_memory"])
        rows.append(("peak memory", peaks, "per rank"))
        makespan = f"{document['makespan']:.10g}"
        rows.append(("makespan", makespan, "without communication"))
    return "\n".join([title, *explained(rows)])


def _write(output: str | None, text: str) -> None:
    """Write a program to the output file, if the user wants one."""
    if output:
        from schedlang.files.writing import write_text

        write_text(text, output)


def _placed(file: str, problem: Any) -> Any:
    """The problem with its stages on the best ranks that are found."""
    from schedlang.cli.progress import progress
    from schedlang.extras.search.partition.place import place

    try:
        with progress(f"placing the stages of {problem.graph.schedule.name}"):
            return place(problem)
    except ValueError as error:
        raise UsageError(f"`{file}` cannot be placed anew: {error}") from None


def _document(problem: Any, given: float, answer: Any, result: Any) -> dict[str, Any]:
    """The result as JSON."""
    from schedlang.schedule.kinds import GATHER

    schedule = problem.graph.schedule
    kinds = {f"{name}s": way.back for name, way in problem.named_ways.items()}
    if problem.gathered:
        kinds["gathers"] = GATHER
    evictions = {
        name: [
            sum(op[0] == kind for ops in order for op in ops)
            for order in problem.ops_of(answer)
        ]
        for name, kind in kinds.items()
    }
    return evictions | {
        "schedule": schedule.name,
        "params": schedule.params,
        "objective": schedule.objective,
        "value": answer.value,
        "bound": answer.bound,
        "gap": answer.gap,
        "proved": answer.is_best,
        "source": answer.source,
        "placement": list(schedule.layout.placement),
        "given": given if given < inf else None,
        "peak_memory": problem.peaks(answer),
        "memory": list(problem.limits),
        "transport": result.transport if result else None,
        "makespan": result.makespan if result else None,
    }


def _text(document: dict[str, Any], title: str) -> str:
    """The result as text."""
    from schedlang.report.text_table import explained

    objective = document["objective"]
    if document["proved"]:
        verdict = "no order has less, which is proved"
    else:
        verdict = f"none is below {document['bound']:.10g}, which is proved: a gap of "
        verdict += f"{document['gap']:.2%}"
    rows = [
        (objective, f"{document['value']:.10g}", f"{verdict}"),
        ("found by", "", document["source"]),
        (
            "stages on ranks",
            " ".join(map(str, document["placement"])),
            "in the order of the model",
        ),
        (
            "peak memory",
            " ".join(f"{peak:.10g}" for peak in document["peak_memory"]),
            "per rank",
        ),
    ]
    rows += [
        (name, " ".join(map(str, document[name])), f"per rank, {what}")
        for name, what in _EVICTIONS.items()
        if name in document
    ]
    if document["given"] is None:
        rows.insert(
            1, (f"{objective} before", "-", "the order as given holds more than it may")
        )
    else:
        rows.insert(1, (f"{objective} before", f"{document['given']:.10g}", "as given"))
    if document["makespan"] is not None:
        on = f"makespan on {document['transport']}"
        rows.append((on, f"{document['makespan']:.10g}", "with its transfers"))
    return "\n".join([title, *explained(rows)])
