"""The ops of ranks as the text of a program, which says the same in the language.

Where a script calls the same ops for one microbatch after the other, in a loop, so does the text:
it is as long as the script, whatever the size.
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field, frozen

from schedlang.language.head import Head, head_lines, shifted, stage_text, words_for
from schedlang.python.places import Place
from schedlang.schedule.kinds import Kind

#: The most characters of a line.
_WIDTH = 100
#: A loop has so many items at most, and goes over so many microbatches at least.
_MOST_IN_LOOP = 8
_LEAST_TIMES = 3
#: The names that a program has besides those of its pipelines.
NAMES = ("r", "s", "m", "ranks", "microbatches", "slices")


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
class Text:
    """The text of a program; and where the script calls the ops that begin at its characters."""

    text: str
    places: dict[int, Place]


def program_text(head: Head, ranks: Sequence[Sequence[Call]]) -> Text:
    """The program in which the ranks make these calls."""
    kinds = {call.kind for calls in ranks for call in calls}
    words = words_for(kinds)
    writer = _Writer(head, words)
    writer.line(0, f"schedule {head.name} {{")
    for item in head_lines(head, words):
        writer.line(1, item)
    writer.line(1, "rank r {")
    parts = sorted({call.part for calls in ranks for call in calls}, reverse=True)
    for part in parts:
        depth = 2
        if part:
            writer.line(depth, f"{part} {{")
            depth += 1
        for rank, calls in enumerate(ranks):
            writer.rank(
                depth, rank, _items_of(call for call in calls if call.part == part)
            )
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
        # Which neighbours make a loop, from here on: the period whose rounds cover most.
        #
        #     F0 B0 F1 B1 F2 B2 F3      period 1: none      period 2: 3 rounds, 6 ops
        period, times = max(
            (
                (period, _times(items, start, period))
                for period in range(1, _MOST_IN_LOOP + 1)
            ),
            # Those that leave the least; of these the shortest.
            key=lambda run: (run[0] * run[1] if run[1] >= _LEAST_TIMES else 0, -run[0]),
        )
        if times < _LEAST_TIMES:
            period = times = 1
        yield items[start : start + period], times
        start += period * times


def _times(items: Sequence[Item], start: int, period: int) -> int:
    """For how many microbatches in turn some items come, one or more."""
    if all(
        call.microbatch is None
        for item in items[start : start + period]
        for call in item
    ):
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
            self.word(depth, "overlap {")
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
            arguments.append(stage_text(self.head.layout, call.stage))
        if call.microbatch is not None:
            number = call.microbatch
            arguments.append(
                str(number) if first is None else shifted("m", number - first)
            )
        if call.slice is not None:
            arguments.append(str(call.slice))
        word = self.words[call.kind]
        return f"{word}({', '.join(arguments)})" if arguments else word
