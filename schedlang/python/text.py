"""The ops of ranks as the text of a program, which says the same in the language."""

from collections.abc import Iterator, Sequence

from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import OPS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout

#: The most characters of a line.
_WIDTH = 100
#: The word of each kind of action in a program.
WORDS = {kind: op.word for kind, op in OPS.items()}
WORDS |= {kind: transfer.word for kind, transfer in TRANSFERS.items()}


@frozen
class Call:
    """An op of a rank, as a script calls it.

    Neighbours with the same `group` above 0 are issued as one. `part` is the `warmup` or `steady`
    of a schedule without a flush that it is in.
    """

    kind: Kind
    stage: int
    microbatch: int | None
    slice: int | None = None
    group: int = 0
    part: str = ""


@frozen
class Head:
    """What a program says before its ops: `microbatches` are those of all pipelines, `weights` has
    the rule of each stage.
    """

    name: str
    ranks: int
    microbatches: int
    layout: Layout
    weights: Sequence[str]
    costs: Costs

    @property
    def one_stage_each(self) -> bool:
        """Whether stage r is on rank r, which a program need not say."""
        is_plain = len(self.layout.pipelines) == 1
        return is_plain and self.layout.placement == tuple(range(self.ranks))


@frozen
class Text:
    """The text of a program, and where in it the calls of each rank are."""

    text: str
    spans: tuple[tuple[Span, ...], ...]


def program_text(head: Head, ranks: Sequence[Sequence[Call]]) -> Text:
    """The program in which the ranks make these calls."""
    kinds = {call.kind for calls in ranks for call in calls}
    words = dict(WORDS)
    if Kind.W in kinds and Kind.I not in kinds:
        # There `B` would be the input half.
        words[Kind.B] = "BW"
    writer = _Writer(head, words, [[] for _ in ranks])
    writer.line(0, f"schedule {head.name} {{")
    for item in _items(head, words):
        writer.line(1, item)
    writer.line(1, "rank r {")
    parts = sorted({call.part for calls in ranks for call in calls}, reverse=True)
    for part in parts:
        depth = 2
        if part:
            writer.line(depth, f"{part} {{")
            depth += 1
        for rank, calls in enumerate(ranks):
            writer.rank(depth, rank, [call for call in calls if call.part == part])
        if part:
            writer.line(2, "}")
    writer.line(1, "}")
    writer.line(0, "}")
    return Text("".join(writer.pieces), tuple(map(tuple, writer.spans)))


@define
class _Writer:
    """Writes lines, and notes where calls are."""

    head: Head
    words: dict[int, str]
    spans: list[list[Span]]
    pieces: list[str] = field(factory=list)
    _length: int = 0
    _column: int = 0

    def add(self, text: str) -> None:
        """Append some text, without the end of a line."""
        self.pieces.append(text)
        self._length += len(text)
        self._column += len(text)

    def line(self, depth: int, text: str) -> None:
        """Append a line of its own."""
        self.add(f"{'    ' * depth}{text}\n")
        self._column = 0

    def rank(self, depth: int, rank: int, calls: Sequence[Call]) -> None:
        """Append what one rank does, with as many ops on a line as there is room for."""
        if not calls:
            return
        self.line(depth, f"if r == {rank} {{")
        for index, call in enumerate(calls):
            group = call.group
            if group and (index == 0 or calls[index - 1].group != group):
                self.word(depth + 1, "exchange {" if call.kind in TRANSFERS else "overlap {")
            start = self.word(depth + 1, self.call(call))
            self.spans[rank].append(Span(start, self._length))
            if group and (index + 1 == len(calls) or calls[index + 1].group != group):
                self.word(depth + 1, "}")
        self.line(0, "")
        self.line(depth, "}")

    def word(self, depth: int, text: str) -> int:
        """Append an op to the line, or to a new one; gives where it begins."""
        if self._column and self._column + len(text) + 2 > _WIDTH:
            self.line(0, "")
        self.add("  " if self._column else "    " * depth)
        start = self._length
        self.add(text)
        return start

    def call(self, call: Call) -> str:
        """An op as a program writes it."""
        arguments = []
        if not self.head.one_stage_each:
            arguments.append(_stage(self.head.layout, call.stage))
        arguments += [str(number) for number in (call.microbatch, call.slice) if number is not None]
        word = self.words[call.kind]
        return f"{word}({', '.join(arguments)})" if arguments else word


def _stage(layout: Layout, stage: int) -> str:
    """A stage as a program names it: `3`, or `up(1)`."""
    pipeline = layout.pipeline_of[stage]
    return f"{pipeline.name}({stage - pipeline.start})" if pipeline.name else str(stage)


def _items(head: Head, words: dict[int, str]) -> Iterator[str]:
    """The lines before the ops."""
    layout = head.layout
    sizes = {"ranks": head.ranks, "microbatches": head.microbatches}
    if layout.slices > 1:
        sizes["slices"] = layout.slices
    for name, size in sizes.items():
        yield f"param {name} = {size}"
    condition = " and ".join(f"{name} == {size}" for name, size in sizes.items())
    yield f'require {condition}, "the ops below are those of this size"'
    for pipeline in layout.pipelines:
        stages = pipeline.stop - pipeline.start
        on = _by_number("s", layout.placement[pipeline.start : pipeline.stop])
        line = f"stage s in 0 .. {stages} on {on}"
        if pipeline.name:
            yield f"pipeline {pipeline.name} runs {pipeline.microbatches} {line}"
        elif not head.one_stage_each:
            yield line
    for earlier, later in layout.skips:
        yield f"skip s in 0 .. 1 from {earlier} to {later}"
    if layout.links:
        yield f"link r on {_by_number('r', layout.links)}"
    yield from _weights(head.weights)
    yield from _costs(head.costs, words)


def _weights(rules: Sequence[str]) -> Iterator[str]:
    """The rule of all stages, or of each that does not read the latest weights."""
    if len(set(rules)) == 1:
        if rules[0] != "latest":
            yield f"weights {rules[0]}"
        return
    for stage, rule in enumerate(rules):
        if rule != "latest":
            yield f"weights {rule} on {stage} .. {stage + 1}"


def _costs(costs: Costs, words: dict[int, str]) -> Iterator[str]:
    """The lines of costs, whose numbers are whole."""
    if costs.p2p_time is not None:
        yield f"cost send = {int(costs.p2p_time)}"
    names = {op.cost: words[kind] for kind, op in OPS.items()} | {"overlap": "overlap"}
    for name, word in names.items():
        for item, amount in (("cost", "times"), ("memory", "memory")):
            values = getattr(costs, f"{name}_{amount}", None)
            if values is None:
                continue
            if len(values) == 1:
                yield f"{item} {word} = {int(values[0])}"
            else:
                yield f"{item} {word}(s) = {_by_number('s', list(map(int, values)))}"


def _by_number(name: str, values: Sequence[int]) -> str:
    """An expression that has these values for the numbers from 0 on.

    The numbers are cut into runs in which values count up, count down, or stay the same.
    """
    runs: list[tuple[int, int]] = []
    start = 0
    while start < len(values):
        step = values[start + 1] - values[start] if start + 1 < len(values) else 0
        stop = start + 1
        if step in (-1, 0, 1):
            while stop < len(values) and values[stop] - values[stop - 1] == step:
                stop += 1
        runs.append((start, stop))
        start = stop

    def run(index: int) -> str:
        first, stop = runs[index]
        value = values[first]
        step = values[first + 1] - value if stop > first + 1 else 0
        if step == 0:
            return str(value)
        if step < 0:
            return f"{value + first} - {name}"
        shift = value - first
        return name if shift == 0 else f"{name} {'+' if shift > 0 else '-'} {abs(shift)}"

    # Halved again and again, since a program must not be nested deeply.
    def between(low: int, high: int) -> str:
        if high - low == 1:
            return run(low)
        middle = (low + high) // 2
        condition = f"{name} < {runs[middle][0]}"
        return f"(if {condition} then {between(low, middle)} else {between(middle, high)})"

    text = between(0, len(runs))
    return text[1:-1] if text.startswith("(") else text
