"""The items of a program before its ops, written from a layout and costs: sizes, stages, weights,
costs.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import Any

from attrs import frozen

from schedlang.schedule.costs import Costs
from schedlang.schedule.exact_text import exact_text
from schedlang.schedule.kinds import INPUT_HALVES, OPS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.naming import Names

#: The word of each kind of action in a program.
WORDS = {kind: op.word for kind, op in OPS.items()}
WORDS |= {kind: transfer.word for kind, transfer in TRANSFERS.items()}


@frozen
class Head:
    """What stands before the ops of a program. `microbatches` are those of all pipelines; `weights`
    has the rule of each stage.
    """

    name: str
    ranks: int
    microbatches: int
    layout: Layout
    weights: Sequence[str]
    costs: Costs
    message_type: str = ""

    @property
    def one_stage_each(self) -> bool:
        """Whether stage r is on rank r, which a program need not say."""
        is_plain = len(self.layout.pipelines) == 1
        return is_plain and self.layout.placement == tuple(range(self.ranks))


def words_for(kinds: Container[int]) -> dict[int, str]:
    """The words of ops in a program that has ops of these kinds."""
    words = dict(WORDS)
    if Kind.W in kinds and not any(kind in kinds for kind in INPUT_HALVES):
        # There `B` would be the input half.
        words[Kind.B] = "BW"
    return words


def shifted(name: str, shift: int) -> str:
    """A name plus a number."""
    return name if shift == 0 else f"{name} {'+' if shift > 0 else '-'} {abs(shift)}"


def stage_text(layout: Layout, stage: int) -> str:
    """A stage as a program names it: `3`, `up(1)`, `lane(0, 1)`."""
    return Names(layout).stage(stage).replace(",", ", ")


def head_lines(head: Head, words: dict[int, str]) -> Iterator[str]:
    """The lines before the ops."""
    layout = head.layout
    sizes = {"ranks": head.ranks, "microbatches": head.microbatches}
    if layout.slices > 1:
        sizes["slices"] = layout.slices
    for name, size in sizes.items():
        yield f"param {name} = {size}"
    condition = " and ".join(f"{name} == {size}" for name, size in sizes.items())
    yield f'require {condition}, "the ops below are those of this size"'
    if not head.one_stage_each:
        yield from _pipelines(layout)
    for earlier, later in layout.edges:
        yield f"edge s in 0 .. 1 from {earlier} to {later}"
    for earlier, later in layout.skips:
        yield f"skip s in 0 .. 1 from {earlier} to {later}"
    for stage in layout.frozen:
        yield f"frozen {stage} .. {stage + 1}"
    if layout.links:
        yield f"link(r) = {by_number('r', layout.links)}"
    if layout.keepers:
        yield f"keeper(r) = {by_number('r', layout.keepers)}"
    yield from _weights(head.weights)
    if head.message_type:
        yield f"send {head.message_type}"
    yield from _costs(head.costs, words)


def _pipelines(layout: Layout) -> Iterator[str]:
    """The lines of pipelines; those that differ by a number, as `lane(0)` and `lane(1)`, have one
    line.
    """
    word = "model" if layout.models else "pipeline"
    for name, group in groupby(layout.pipelines, lambda pipeline: pipeline.family):
        pipelines = list(group)
        ranks = [layout.placement[each.start : each.stop] for each in pipelines]
        microbatches = [each.microbatches for each in pipelines]
        is_numbered = pipelines[0].name.endswith(")")
        on = by_numbers("is", ranks) if is_numbered else by_number("s", ranks[0])
        line = f"stage s in 0 .. {len(ranks[0])} on {on}"
        if is_numbered:
            runs = by_number("i", microbatches)
            yield f"{word} {name}(i) in 0 .. {len(pipelines)} runs {runs} {line}"
        elif name:
            yield f"{word} {name} runs {microbatches[0]} {line}"
        else:
            yield line


def _weights(rules: Sequence[str]) -> Iterator[str]:
    """The lines of weights: one for all stages, or one for each that does not read the latest
    weights.
    """
    if len(set(rules)) == 1:
        if rules[0] != "latest":
            yield f"weights {rules[0]}"
        return
    for stage, rule in enumerate(rules):
        if rule != "latest":
            yield f"weights {rule} on {stage} .. {stage + 1}"


def _costs(costs: Costs, words: dict[int, str]) -> Iterator[str]:
    """The lines of costs."""
    if costs.p2p_time is not None:
        yield f"cost send = {exact_text(costs.p2p_time)}"
    if costs.link_times is not None:
        yield f"cost send(r, q) = {by_numbers('rq', costs.link_times)}"
    if costs.capacity_bytes is not None:
        yield from _values("capacity", "r", costs.capacity_bytes)
    names = {op.cost: words[kind] for kind, op in OPS.items()} | {"overlap": "overlap"}
    names |= {"sum": "sum", "gather": "gather", "message": "send"}
    for name, word in names.items():
        for item, amount in (("cost", "times"), ("memory", "memory")):
            values = getattr(costs, f"{name}_{amount}", None)
            if values is not None:
                yield from _values(f"{item} {word}", "smk", values)


#: Values by a number, or by several: then some are lists of values by the next number.
Nested = Sequence[Any]


def _values(item: str, names: str, values: Nested) -> Iterator[str]:
    """The line of a cost: one value, or an expression of the indices in `names`, each of which is a
    letter.
    """
    depth = _depth(values)
    if depth == 1 and len(values) == 1:
        yield f"{item} = {exact_text(values[0])}"
    else:
        yield f"{item}({', '.join(names[:depth])}) = {by_numbers(names, values)}"


def _depth(values: Nested) -> int:
    """By how many indices values are nested."""
    return 1 + max(
        (_depth(value) for value in values if isinstance(value, Sequence)), default=0
    )


def by_number(name: str, values: Sequence[float]) -> str:
    """An expression of one name, which has these values for the numbers from 0 on.

    The numbers are cut into runs in which values count up, count down, or stay the same.
    """
    runs: list[tuple[int, str]] = []
    start = 0
    while start < len(values):
        step = values[start + 1] - values[start] if start + 1 < len(values) else 0
        stop = start + 1
        # Decimals, whose sums are rounded, are only counted where they stay the same.
        if step == 0 or (step in (-1, 1) and float(values[start]).is_integer()):
            while stop < len(values) and values[stop] - values[stop - 1] == step:
                stop += 1
        runs.append(
            (start, _run(name, start, values[start], step if stop > start + 1 else 0))
        )
        start = stop
    return _chosen(name, runs)


def by_numbers(names: str, values: Nested) -> str:
    """An expression of several names, each a letter, for nested values: by the first name, some of
    them by the next.
    """
    if _depth(values) == 1:
        return by_number(names[0], values)
    rows = [value if isinstance(value, Sequence) else [value] for value in values]
    texts = [by_numbers(names[1:], row) for row in rows]
    firsts = [
        index
        for index, text in enumerate(texts)
        if index == 0 or text != texts[index - 1]
    ]
    return _chosen(names[0], [(first, texts[first]) for first in firsts])


def _run(name: str, first: int, value: float, step: float) -> str:
    """The value of a run that counts by a step from its first number on."""
    if step == 0:
        return exact_text(value)
    if step < 0:
        return f"{exact_text(value + first)} - {name}"
    return shifted(name, int(value - first))


def _chosen(name: str, runs: Sequence[tuple[int, str]]) -> str:
    """The expression that chooses the run of a number. Each run is given with its first number."""

    # Halved again and again, since a program must not be nested deeply.
    def between(low: int, high: int) -> str:
        if high - low == 1:
            text = runs[low][1]
            return f"({text})" if text.startswith("if") and len(runs) > 1 else text
        middle = (low + high) // 2
        condition = f"{name} < {runs[middle][0]}"
        return (
            f"(if {condition} then {between(low, middle)} else {between(middle, high)})"
        )

    text = between(0, len(runs))
    return text[1:-1] if text.startswith("(") else text
