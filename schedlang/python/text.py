"""The ops of ranks as the text of a program, which says the same in the language.

Where a script calls the same ops for one microbatch after the other, in a loop, so does the text:
it is as long as the script, whatever the size.
"""

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal

from attrs import define, field, frozen

from schedlang.python.places import Place
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import OPS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout

#: The most characters of a line.
_WIDTH = 100
#: A loop has so many items at most, and goes over so many microbatches at least.
_MOST_IN_LOOP = 8
_LEAST_TIMES = 3
#: The names that a program has besides those of its pipelines.
NAMES = ("r", "s", "m", "ranks", "microbatches", "slices")
#: The word of each kind of action in a program.
WORDS = {kind: op.word for kind, op in OPS.items()}
WORDS |= {kind: transfer.word for kind, transfer in TRANSFERS.items()}


@frozen
class Call:
    """An op of a rank, as a script calls it.

    Neighbours with the same `group` above 0 are issued as one. `part` is the `warmup` or `steady`
    of a schedule without a flush that it is in. `place` is where the script calls it.
    """

    kind: Kind
    stage: int
    microbatch: int | None
    slice: int | None
    group: int
    part: str
    place: Place

    def follows(self, other: "Call") -> bool:
        """Whether it is the same op of the next microbatch, called at the same place."""
        same = (
            self.kind == other.kind
            and self.stage == other.stage
            and self.slice == other.slice
            and self.place == other.place
        )
        if self.microbatch is None or other.microbatch is None:
            return same and self.microbatch is other.microbatch
        return same and self.microbatch == other.microbatch + 1


#: Calls that are issued as one, or one alone.
Item = tuple[Call, ...]


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
    """The text of a program; and where the script calls the ops that begin at its characters."""

    text: str
    places: dict[int, Place]


def program_text(head: Head, ranks: Sequence[Sequence[Call]]) -> Text:
    """The program in which the ranks make these calls."""
    kinds = {call.kind for calls in ranks for call in calls}
    words = dict(WORDS)
    if Kind.W in kinds and Kind.I not in kinds:
        # There `B` would be the input half.
        words[Kind.B] = "BW"
    writer = _Writer(head, words)
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
            writer.rank(depth, rank, _items_of(call for call in calls if call.part == part))
        if part:
            writer.line(2, "}")
    writer.line(1, "}")
    writer.line(0, "}")
    return Text("".join(writer.pieces), writer.places)


def _items_of(calls: Iterable[Call]) -> list[Item]:
    """The calls of a rank, those that are issued as one together."""
    items: list[Item] = []
    for call in calls:
        if call.group and items and items[-1][0].group == call.group:
            items[-1] += (call,)
        else:
            items.append((call,))
    return items


def _runs(items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], int]]:
    """The items in order: some of them, and for how many microbatches in turn they come."""
    start = 0
    while start < len(items):
        period, times = max(
            ((period, _times(items, start, period)) for period in range(1, _MOST_IN_LOOP + 1)),
            # Those that leave the least; of these the shortest.
            key=lambda run: (run[0] * run[1] if run[1] >= _LEAST_TIMES else 0, -run[0]),
        )
        if times < _LEAST_TIMES:
            period = times = 1
        yield items[start : start + period], times
        start += period * times


def _times(items: Sequence[Item], start: int, period: int) -> int:
    """For how many microbatches in turn some items come, one or more."""
    if all(call.microbatch is None for item in items[start : start + period] for call in item):
        return 1
    stop = start + period
    while stop < len(items) and _follows(items[stop - period], items[stop]):
        stop += 1
    return max((stop - start) // period, 1)


def _follows(before: Item, item: Item) -> bool:
    return len(before) == len(item) and all(map(Call.follows, item, before))


@define
class _Writer:
    """Writes lines, and notes where calls are."""

    head: Head
    words: dict[int, str]
    places: dict[int, Place] = field(factory=dict)
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

    def rank(self, depth: int, rank: int, items: Sequence[Item]) -> None:
        """Append what one rank does, with as many ops on a line as there is room for."""
        if not items:
            return
        self.line(depth, f"if r == {rank} {{")
        for run, times in _runs(items):
            first = 0
            if times > 1:
                numbers = [call.microbatch for item in run for call in item]
                first = next(number for number in numbers if number is not None)
                self.word(depth + 1, f"for m in {first} .. {first + times} {{")
            for item in run:
                self.item(depth + 1, item, first if times > 1 else None)
            if times > 1:
                self.word(depth + 1, "}")
        self.line(0, "")
        self.line(depth, "}")

    def item(self, depth: int, item: Item, first: int | None) -> None:
        """Append calls that are issued as one, or one; in a loop from microbatch `first` on."""
        if len(item) > 1:
            self.word(depth, "exchange {" if item[0].kind in TRANSFERS else "overlap {")
        for call in item:
            start = self.word(depth, self.call(call, first))
            self.places[start] = call.place
        if len(item) > 1:
            self.word(depth, "}")

    def word(self, depth: int, text: str) -> int:
        """Append an op to the line, or to a new one; gives where it begins."""
        if self._column and self._column + len(text) + 2 > _WIDTH:
            self.line(0, "")
        if not self._column:
            self.add("    " * depth)
        elif text == "}" or self.pieces[-1].endswith("{"):
            self.add(" ")
        else:
            self.add("  ")
        start = self._length
        self.add(text)
        return start

    def call(self, call: Call, first: int | None) -> str:
        """An op as a program writes it."""
        arguments = []
        if not self.head.one_stage_each:
            arguments.append(_stage(self.head.layout, call.stage))
        if call.microbatch is not None:
            number = call.microbatch
            arguments.append(str(number) if first is None else _shifted("m", number - first))
        if call.slice is not None:
            arguments.append(str(call.slice))
        word = self.words[call.kind]
        return f"{word}({', '.join(arguments)})" if arguments else word


def _shifted(name: str, shift: int) -> str:
    """A name plus a number."""
    return name if shift == 0 else f"{name} {'+' if shift > 0 else '-'} {abs(shift)}"


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
    """The lines of costs."""
    if costs.p2p_time is not None:
        yield f"cost send = {number_text(costs.p2p_time)}"
    if costs.capacity_bytes is not None:
        yield from _values("capacity", "r", costs.capacity_bytes)
    names = {op.cost: words[kind] for kind, op in OPS.items()} | {"overlap": "overlap"}
    names |= {"sum": "sum", "gather": "gather"}
    for name, word in names.items():
        for item, amount in (("cost", "times"), ("memory", "memory")):
            values = getattr(costs, f"{name}_{amount}", None)
            if values is not None:
                yield from _values(f"{item} {word}", "s", values)


def _values(item: str, name: str, values: Sequence[float]) -> Iterator[str]:
    """The line that gives one value, or one for each number."""
    if len(values) == 1:
        yield f"{item} = {number_text(values[0])}"
    else:
        yield f"{item}({name}) = {_by_number(name, values)}"


def number_text(value: float) -> str:
    """A number as a program has it: without an exponent, and whole if it is."""
    return format(Decimal(repr(value)).normalize(), "f")


def _by_number(name: str, values: Sequence[float]) -> str:
    """An expression that has these values for the numbers from 0 on.

    The numbers are cut into runs in which values count up, count down, or stay the same.
    """
    runs: list[tuple[int, int]] = []
    start = 0
    while start < len(values):
        step = values[start + 1] - values[start] if start + 1 < len(values) else 0
        stop = start + 1
        # Decimals, whose sums are rounded, are only counted where they stay the same.
        if step == 0 or (step in (-1, 1) and float(values[start]).is_integer()):
            while stop < len(values) and values[stop] - values[stop - 1] == step:
                stop += 1
        runs.append((start, stop))
        start = stop

    def run(index: int) -> str:
        first, stop = runs[index]
        value = values[first]
        step = values[first + 1] - value if stop > first + 1 else 0
        if step == 0:
            return number_text(value)
        if step < 0:
            return f"{number_text(value + first)} - {name}"
        return _shifted(name, int(value - first))

    # Halved again and again, since a program must not be nested deeply.
    def between(low: int, high: int) -> str:
        if high - low == 1:
            return run(low)
        middle = (low + high) // 2
        condition = f"{name} < {runs[middle][0]}"
        return f"(if {condition} then {between(low, middle)} else {between(middle, high)})"

    text = between(0, len(runs))
    return text[1:-1] if text.startswith("(") else text
