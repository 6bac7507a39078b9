"""Write an answer as the text of a program, with claims about its value and memory."""

from collections.abc import Container, Iterator, Sequence
from textwrap import TextWrapper
from typing import Any

from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.language.head import (
    Head,
    by_number,
    head_lines,
    stage_text,
    words_for,
)
from schedlang.passes.op_graph import Op
from schedlang.schedule.exact_text import exact_text
from schedlang.schedule.fixed_point import FixedPoint
from schedlang.schedule.schedule import Schedule

#: The most characters of a line.
_WIDTH = 100
#: The limit of ops in the body of a `repeat`.
_MOST_IN_REPEAT = 24
#: The tolerance of claims about sums that are rounded, since the costs have too many digits.
_ROUNDING = 1e-8


def program_of(problem: Problem, answer: Answer) -> str:
    """The program whose ranks run the orders of an answer, with the problem's costs and with claims
    about its value and the ranks' memory.

    A program cannot write latencies and bandwidths. With such costs, it has no claim about time,
    and the costs must be given again when it is compiled.
    """
    graph = problem.graph
    schedule = graph.schedule
    ranks = problem.ops_of(answer)
    head, words = head_of(
        schedule, {op[0] for order in ranks for ops in order for op in ops}
    )
    lines = [*_comment(problem, answer), f"schedule {schedule.name} {{"]
    lines += [f"    {line}" for line in head_lines(head, words)]
    if schedule.objective != "makespan":
        lines.append(f"    objective {schedule.objective}")
    lines.append("    rank r {")
    for rank, order in enumerate(ranks):
        lines.append(f"        if r == {rank} {{")
        lines += _wrapped(_text(_calls(order, head, words)))
        lines.append("        }")
    peaks = problem.peaks(answer)
    most = by_number("r", [at_most(graph.fixed_memory, peak) for peak in peaks])
    lines.append(
        f"        assert peak(r) <= {f'({most})' if most.startswith('if') else most}"
    )
    lines.append("    }")
    if can_write_times(problem):
        value = exact_text(at_most(graph.fixed, answer.value))
        lines.append(f"    assert {schedule.objective} <= {value}")
    return "\n".join([*lines, "}", ""])


def head_of(schedule: Schedule, kinds: Container[int]) -> tuple[Head, dict[int, str]]:
    """The head of a program with the layout and the costs of a schedule, and the words for ops in a
    program that has these kinds.
    """
    rules = [
        str(schedule.weights_of(stage)) for stage in range(len(schedule.placement))
    ]
    head = Head(
        schedule.name,
        len(schedule.ranks),
        schedule.microbatches,
        schedule.layout,
        rules,
        schedule.costs,
        schedule.message_type,
    )
    return head, words_for(kinds)


def at_most(fixed: FixedPoint, value: float) -> Any:
    """An upper bound that a program may claim: the value, or a little more if it is rounded."""
    return fixed.exact(value) if fixed.is_exact(value) else value * (1 + _ROUNDING)


def can_write_times(problem: Problem) -> bool:
    """Whether a program can state the costs of a problem, which have no latencies or bandwidths."""
    costs = problem.graph.schedule.costs
    has_times = costs.p2p_time is not None or costs.link_times is not None
    return has_times or not any(delay for of in problem.graph.needs for _, delay in of)


def _comment(problem: Problem, answer: Answer) -> Iterator[str]:
    """Comment lines that say which search found the program, and how good it is."""
    schedule = problem.graph.schedule
    value = _said(problem.graph.fixed, answer.value)
    objective = schedule.objective
    yield f"# An order for {schedule.title}, found by `schedc optimize` ({answer.source})."
    if answer.is_best:
        yield f"# No order has a {objective} below {value} within this memory, which is proved."
    else:
        bound = _said(problem.graph.fixed, answer.bound)
        yield (
            f"# Its {objective} is {value}; within this memory none is below {bound}, "
            f"{answer.gap:.1%} less, which is proved."
        )
    if not can_write_times(problem):
        yield "# Its latencies and bandwidths are not written here: give them with --costs."


def _said(fixed: FixedPoint, value: float) -> str:
    """The text of a time in a comment."""
    return exact_text(fixed.exact(value) if fixed.is_exact(value) else value)


def _calls(
    order: Sequence[Sequence[Op]], head: Head, words: dict[int, str]
) -> list[str]:
    """The ops of a rank as calls; `next` stands for microbatches that come in ascending order."""
    layout = head.layout
    following: dict[tuple[int, int], int] = {}
    turns: dict[tuple[int, int], bool] = {}
    for together in order:
        for kind, stage, microbatch in together:
            name = kind, stage
            in_turn = microbatch == following.get(name, 0) and layout.slices == 1
            turns[name] = turns.get(name, True) and in_turn
            following[name] = microbatch + 1

    def call(kind: int, stage: int, microbatch: int) -> str:
        arguments = [] if head.one_stage_each else [stage_text(layout, stage)]
        if microbatch >= 0:
            number, slice = divmod(microbatch, layout.slices)
            arguments.append("next" if turns[kind, stage] else str(number))
            if layout.slices > 1:
                arguments.append(str(slice))
        return f"{words[kind]}({', '.join(arguments)})" if arguments else words[kind]

    calls = []
    for together in order:
        ops = [call(*op) for op in together]
        calls.append(ops[0] if len(ops) == 1 else f"overlap {{ {'  '.join(ops)} }}")
    return calls


def _text(calls: Sequence[str]) -> Iterator[str]:
    """Lines with the calls; groups that follow each other several times become a `repeat`."""
    # Dynamic programming from the last call to the first. least[i] is the shortest text from call i
    # on: its cost, the size of its first group, and how often that repeats.
    #
    #     F F B F B F B B      least[1]:  repeat 3 { F B }, then B: a cost of 4
    least: list[tuple[int, int, int]] = [(0, 0, 0)] * (len(calls) + 1)
    for start in reversed(range(len(calls))):
        choices = [(1 + least[start + 1][0], 1, 1)]
        for size in range(1, min(_MOST_IN_REPEAT, (len(calls) - start) // 2) + 1):
            stop = start + size
            while stop < len(calls) and calls[stop] == calls[stop - size]:
                stop += 1
            times = (stop - start) // size
            if times > 1:
                choices.append((size + 1 + least[start + times * size][0], size, times))
        least[start] = min(choices)
    start = 0
    single: list[str] = []
    while start < len(calls):
        _, size, times = least[start]
        body = "  ".join(calls[start : start + size])
        if times == 1:
            single.append(body)
        else:
            if single:
                yield "  ".join(single)
                single = []
            yield f"repeat {times} {{ {body} }}"
        start += size * times
    if single:
        yield "  ".join(single)


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    """Wrap the lines of a rank."""
    indent = " " * 12
    wrapper = TextWrapper(
        _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    for line in lines:
        # No-break spaces keep a call on one line.
        joined = line.replace(", ", ",\N{NO-BREAK SPACE}")
        for part in wrapper.wrap(joined):
            yield part.replace("\N{NO-BREAK SPACE}", " ")
