"""`schedc check --for`: at which sizes a program is proved, at which it is wrong, and why."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, product
from math import prod
from string import ascii_lowercase
from typing import Any

from attrs import define, frozen

from schedlang.cli.diagnosed import print_diagnostics
from schedlang.cli.inputs import read_cost_options, with_costs_file
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, WRONG, UsageError
from schedlang.cli.workers import processes
from schedlang.compiler import compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted
from schedlang.diagnostics.rendering import to_json
from schedlang.diagnostics.source import Source
from schedlang.language.expand import check_text
from schedlang.language.loading import load
from schedlang.schedule.costs import Costs

#: The most sizes that one `schedc check --for` looks at.
MOST_SIZES = 1_000_000

_PROVED = "."
_REFUSED = "-"
#: The most columns of text, and lines, that a grid takes.
_WIDEST = 100
_MOST_LINES = 60
#: Of a larger one, how many marks stand in a line; and how many equal ones are told one by one.
_MARKS = 50
_FEW_RUNS = 4

Params = dict[str, int]


@define
class Reason:
    """Why some sizes are not proved: what is said of the smallest of them, and how many they are.

    `mark` is what stands in the grid for them.
    """

    mark: str
    smallest: Params
    diagnostics: list[Diagnostic]
    sizes: int = 0

    @property
    def is_refusal(self) -> bool:
        """Whether the program's own `require` refuses the sizes."""
        return self.mark == _REFUSED


@frozen
class Verdicts:
    """For every size the index of the reason why it is not proved, or None; and the reasons."""

    ranges: Mapping[str, range]
    sizes: Mapping[tuple[int, ...], int | None]
    reasons: tuple[Reason, ...]

    def mark(self, size: tuple[int, ...]) -> str:
        """What stands in the grid for a size."""
        reason = self.sizes[size]
        return _PROVED if reason is None else self.reasons[reason].mark

    def count(self, is_refusal: bool) -> int:
        """How many sizes are refused, or wrong."""
        return sum(
            reason.sizes for reason in self.reasons if reason.is_refusal == is_refusal
        )


def check_sizes(options: argparse.Namespace, source: Any) -> int:
    """Prove a program at every size that `--for` names, and print at which it holds."""
    ranges: Mapping[str, range] = options.ranges
    costs = read_cost_options(options)
    if options.transport == "all":
        raise UsageError("--for checks many sizes for one transport, not for all")
    in_both = ranges.keys() & options.params.keys()
    if in_both:
        raise UsageError(f"`{min(in_both)}` has a -p and a --for: give one of them")
    number = prod(map(len, ranges.values()))
    if number > MOST_SIZES:
        raise UsageError(
            f"--for asks for {number:,} sizes, at most {MOST_SIZES:,} are looked at"
        )
    # What is wrong at every size is said once, before any is compiled.
    whole, tree = load(source)
    check_text(
        whole,
        tree,
        options.params | {name: chosen[0] for name, chosen in ranges.items()},
    )
    with progress(f"proving {counted(number, 'size')}"):
        # The smallest size comes first, where a mistake is easiest to see.
        instances = check_range(
            source, options.params, ranges, options.transport, costs
        )
        try:
            verdicts = judge(instances, ranges)
        except ValueError as error:
            what = with_costs_file(options, error)
            message = (
                f"{what}: give one number for all stages, since sizes differ in these"
            )
            raise UsageError(message) from None
    wrong = [reason for reason in verdicts.reasons if not reason.is_refusal]
    if options.format == "json":
        print(
            json.dumps(
                verdicts_json(verdicts, options.file, options.transport), indent=1
            )
        )
        return WRONG if wrong else FINE
    print(verdicts_text(verdicts))
    if wrong:
        diagnostics = [
            diagnostic for reason in wrong for diagnostic in reason.diagnostics
        ]
        print_diagnostics(diagnostics, options)
    return WRONG if wrong else FINE


@frozen
class Instance:
    """A program at one size: what is wrong there, and whether that is only that its own `require`
    refuses the size.
    """

    params: Params
    refused: bool
    diagnostics: list[Diagnostic]


def check_range(
    source: Source,
    params: Mapping[str, int],
    ranges: Mapping[str, range],
    transport: str,
    costs: Costs,
) -> Iterator[Instance]:
    """A program at every size in some ranges of parameters, the smallest size first, compiled for
    some costs; all cores work on it.
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


def _instances(
    source: Source, transport: str, costs: Costs, sizes: list[Params]
) -> list[Instance]:
    return [_instance(source, transport, costs, params) for params in sizes]


def _instance(source: Source, transport: str, costs: Costs, params: Params) -> Instance:
    try:
        compile(source, params, costs, transport=transport)
    except CompileError as error:
        refused = all(diagnostic.code == "require" for diagnostic in error.diagnostics)
        return Instance(params, refused, error.diagnostics)
    return Instance(params, refused=False, diagnostics=[])


def judge(instances: Iterable[Instance], ranges: Mapping[str, range]) -> Verdicts:
    """The verdicts on all sizes; those that fail in the same place with the same code have one
    reason.
    """
    number = prod(map(len, ranges.values()))
    reasons: list[Reason] = []
    #: The index of each reason, by what makes it one.
    known: dict[object, int] = {}
    sizes: dict[tuple[int, ...], int | None] = {}
    letters = iter(ascii_lowercase)
    for done, instance in enumerate(instances, 1):
        size = {name: instance.params[name] for name in ranges}
        index = None
        if instance.diagnostics:
            first, *others = instance.diagnostics
            # The place and not the message, which has the numbers of one size.
            key = (first.code, first.labels[:1] and first.labels[0].span)
            if key not in known:
                first = first.with_note(
                    f"the smallest size where this is so: {_size(size)}"
                )
                # More kinds of mistakes than letters would be a mistake of their own.
                new = _REFUSED if instance.refused else next(letters, "?")
                known[key] = len(reasons)
                reasons.append(Reason(new, size, [first, *others]))
            index = known[key]
            reasons[index].sizes += 1
        sizes[tuple(size.values())] = index
        doing("proving sizes", done, number)
    return Verdicts(ranges, sizes, tuple(reasons))


def verdicts_json(verdicts: Verdicts, file: str, transport: str) -> dict[str, Any]:
    """The verdicts for programs: `reason` is an index into `reasons`."""
    sizes = []
    for values in product(*verdicts.ranges.values()):
        size = dict(zip(verdicts.ranges, values, strict=True))
        reason = verdicts.sizes[values]
        sizes.append({"params": size, "mark": verdicts.mark(values), "reason": reason})
    reasons = [
        {
            "mark": reason.mark,
            "verdict": "refused" if reason.is_refusal else "wrong",
            "sizes": reason.sizes,
            "smallest": reason.smallest,
            "diagnostics": list(map(to_json, reason.diagnostics)),
        }
        for reason in verdicts.reasons
    ]
    return {
        "file": file,
        "transport": transport,
        "proved": sum(reason is None for reason in verdicts.sizes.values()),
        "refused": verdicts.count(is_refusal=True),
        "wrong": verdicts.count(is_refusal=False),
        "reasons": reasons,
        "sizes": sizes,
    }


def verdicts_text(verdicts: Verdicts) -> str:
    """How many sizes are proved; and if not all are, which, and why the others are not."""
    refused = verdicts.count(is_refusal=True)
    wrong = verdicts.count(is_refusal=False)
    proved = counted(len(verdicts.sizes) - refused - wrong, "size")
    line = f"{proved} proved, {refused} refused by the program's own `require`"
    if wrong:
        line += f", {wrong} wrong"
    if not verdicts.reasons:
        return line
    reasons = [f"{_PROVED}  proved"]
    for reason in verdicts.reasons:
        first = reason.diagnostics[0]
        what = "refused" if reason.is_refusal else f"error[{first.code}]"
        sizes = (
            f"{counted(reason.sizes, 'size')}, the smallest {_size(reason.smallest)}"
        )
        reasons.append(f"{reason.mark}  {what}: {sizes}: {first.message}")
    return "\n".join([line, "", *_grid(verdicts), "", *reasons])


def _grid(verdicts: Verdicts) -> Iterator[str]:
    """A line for each value of the first ranges, with a mark for each value of the last one."""
    *names, last = verdicts.ranges
    columns = verdicts.ranges[last]
    rows: dict[tuple[int, ...], str] = {}
    for row in product(*(verdicts.ranges[name] for name in names)):
        rows[row] = "".join(verdicts.mark((*row, value)) for value in columns)
    heads = [_size(dict(zip(names, row, strict=True))) for row in rows]
    margin = max(map(len, [last, *heads]))
    width = max(len(str(value)) for value in columns) + 1
    if margin + 1 + width * len(columns) > _WIDEST or len(rows) > _MOST_LINES:
        lines = list(_compact_grid(rows, names, last, columns))
        yield from lines[:_MOST_LINES]
        if len(lines) > _MOST_LINES:
            yield f"… and {len(lines) - _MOST_LINES:,} more lines: --json has all sizes"
        return
    yield f"{last:>{margin}} " + "".join(f"{value:>{width}}" for value in columns)
    for head, marks in zip(heads, rows.values(), strict=True):
        yield f"{head:>{margin}} " + "".join(f"{mark:>{width}}" for mark in marks)


def _compact_grid(
    rows: dict[tuple[int, ...], str], names: list[str], last: str, columns: range
) -> Iterator[str]:
    """The same for grids that are too large: equal rows are one, and marks stand side by side."""
    # Rows are put together along the innermost of their names.
    groups = [
        list(group) for _, group in groupby(rows, key=lambda row: (row[:-1], rows[row]))
    ]
    for group in groups:
        outer = _size(dict(zip(names[:-1], group[0], strict=False)))
        inner = f"{names[-1]} = {_span(group[0][-1], group[-1][-1])}" if names else ""
        yield ", ".join(
            filter(None, [outer, inner, f"{last} = {_span(columns[0], columns[-1])}"])
        )
        marks = rows[group[0]]
        runs = [(mark, len(list(run))) for mark, run in groupby(marks)]
        if len(runs) <= _FEW_RUNS:
            start = 0
            for mark, length in runs:
                yield f"  {mark} {_span(columns[start], columns[start + length - 1])}"
                start += length
            continue
        # In tens, so that one can count.
        for start in range(0, len(marks), _MARKS):
            tens = [marks[at : at + 10] for at in range(start, start + _MARKS, 10)]
            yield f"{columns[start]:>8,} {' '.join(tens)}".rstrip()


def _size(params: Params) -> str:
    """A size as messages show it."""
    return ", ".join(f"{name} = {value}" for name, value in params.items())


def _span(first: int, end: int) -> str:
    return str(first) if first == end else f"{first}..{end}"
