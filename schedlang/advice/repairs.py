"""Changes to a program that might end a standstill. What is shown to a user is proved first, see
`schedlang.advice.advice`.
"""

from collections.abc import Iterator
from itertools import chain, pairwise, product
from typing import TypeVar

from attrs import frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.repair import Edit, Repair
from schedlang.diagnostics.source import Source, Span
from schedlang.diagnostics.waits import Wait
from schedlang.language import expressions, syntax

N = TypeVar("N", bound=syntax.Node)

#: The longest piece of a program that is quoted whole.
_WIDTH = 40
#: What ends the waits at first uses, by the transport that the program is then for.
_FIRST_USES = {
    "nccl-eager": "open the process group with `device_id`",
    "portable": "use every communicator once before the step, as this project's runtime does,",
}


def candidates(source: Source, tree: syntax.Schedule, diagnostic: Diagnostic) -> Iterator[Repair]:
    """Repairs to try, those first that change least."""
    program = _Program(source, tree)
    if diagnostic.code == "deadlock":
        stands = _stands(diagnostic.waits)
        yield from program.exchanges(stands)
        yield from program.moves(stands)
        yield from program.mirrored()
    if diagnostic.code == "first-use":
        for transport, what in _FIRST_USES.items():
            yield Repair(f"{what} and compile with `--transport {transport}`", transport=transport)
    yield from program.without_batches()
    yield from program.without_transfers()
    for first, second in product(program.mirrored(), program.without_transfers()):
        yield Repair(f"{first.text}; and {second.text}", first.edits + second.edits)


def _stands(waits: tuple[Wait, ...]) -> list[tuple[Span, Span]]:
    """Of each rank that others wait for, the place where it waits, and the one that they
    wait for.
    """
    found = []
    for wait in waits:
        until = next(
            (each.until for each in waits if each.until and each.until.rank == wait.at.rank), None
        )
        if until and until.span and wait.at.span:
            found.append((wait.at.span, until.span))
    return list(dict.fromkeys(found))


@frozen
class _Program:
    """A program and the edits that can be made to it; in imported files, none."""

    source: Source
    tree: syntax.Schedule

    def exchanges(self, stands: list[tuple[Span, Span]]) -> Iterator[Repair]:
        """Issue transfers that cross as one batch, on all ranks or on some."""
        pairs = []
        for stand in stands:
            nodes = [node for node in self.apart(*stand) if isinstance(node, syntax.Transfer)]
            places = sorted((node.span for node in nodes), key=lambda span: span.start)
            if len(places) == 2 and not self.source.text[places[0].end : places[1].start].strip():
                pairs.append((places[0], places[1]))
        for chosen in [*_all(pairs), *([pair] for pair in pairs)]:
            edits = [
                (Edit(Span(a.start, a.start), "exchange { "), Edit(Span(b.end, b.end), " }"))
                for a, b in chosen
            ]
            first, *others = [f"{self.quoted(a)} and {self.quoted(b)} as one" for a, b in chosen]
            words = ", and ".join([f"{first} `exchange {{ … }}`", *others])
            yield Repair(f"issue {words}", tuple(chain(*edits)))

    def moves(self, stands: list[tuple[Span, Span]]) -> Iterator[Repair]:
        """Put what another rank waits for before what this rank waits at."""
        pairs = []
        for stand in stands:
            places = [node.span for node in self.apart(*stand)]
            if places and places[0].start < places[1].start:
                pairs.append((places[0], places[1]))
        for chosen in [*([pair] for pair in pairs), *_all(pairs)]:
            edits = []
            for at, until in chosen:
                moved = self.source.text[until.start : until.end]
                edits += [Edit(Span(at.start, at.start), f"{moved}  "), Edit(until, "")]
            words = ", and ".join(
                f"{self.quoted(until)} before {self.quoted(at)}" for at, until in chosen
            )
            yield Repair(f"put {words}", tuple(edits))

    def mirrored(self) -> Iterator[Repair]:
        """Count a rank's own figure, such as its warm-up, from the other end of the pipeline."""
        for rank in self.own(syntax.Rank):
            for let in (node for node in syntax.walk(rank.body) if isinstance(node, syntax.Let)):
                uses = [
                    node.span
                    for node in syntax.walk(let.value)
                    if isinstance(node, expressions.Reference) and node.name == rank.name.text
                ]
                other = f"ranks - 1 - {rank.name.text}"
                edits = tuple(
                    Edit(span, other if span == let.value.span else f"({other})") for span in uses
                )
                if edits:
                    text = (
                        f"count `{let.name.text}` (line {self.line(let.span)}) from the other "
                        f"end: `{other}`"
                    )
                    yield Repair(f"{text} for `{rank.name.text}`", edits)

    def without_batches(self) -> Iterator[Repair]:
        """Issue all transfers alone."""
        edits = []
        for node in filter(lambda node: node.transfers, self.own(syntax.Exchange)):
            first = node.transfers[0].span
            last = node.transfers[-1].span
            edits += [
                Edit(Span(node.span.start, first.start), ""),
                Edit(Span(last.end, node.span.end), ""),
            ]
        if edits:
            yield Repair("issue all transfers alone, without `exchange`", tuple(edits))

    def without_transfers(self) -> Iterator[Repair]:
        """Leave the communication to the compiler."""
        batches = [node.span for node in self.own(syntax.Exchange)]
        alone = [node.span for node in self.own(syntax.Transfer)]
        alone = [each for each in alone if not any(a.start <= each.start < a.end for a in batches)]
        edits = tuple(Edit(span, "") for span in batches + alone)
        if edits:
            yield Repair(
                "leave the communication to the compiler: write no `send` and `recv`", edits
            )

    def own(self, kind: type[N]) -> list[N]:
        """The nodes of a kind in the program's own file."""
        own = len(self.source.text)
        return [
            node
            for node in syntax.walk(self.tree)
            if isinstance(node, kind) and node.span.end <= own
        ]

    def apart(self, first: Span, second: Span) -> list[syntax.Node]:
        """Of two places, the statements of one block that they are in; nothing if these are the
        same.
        """
        found: list[syntax.Node] = []
        for block in self.own(syntax.Block):
            pair = [
                node
                for place in (first, second)
                for node in block.statements
                if node.span.start <= place.start and place.end <= node.span.end
            ]
            if len(pair) == 2 and pair[0] is not pair[1]:
                found = pair
        return found

    def quoted(self, span: Span) -> str:
        """A piece of the program in a message."""
        text = self.source.text[span.start : span.end]
        if len(text) > _WIDTH or "\n" in text:
            text = f"{text.partition('{')[0].partition(chr(10))[0].strip()} {{ … }}"
        return f"`{text}` (line {self.line(span)})"

    def line(self, span: Span) -> int:
        """The line of a place."""
        return self.source.position(span.start)[0]


def _all(pairs: list[tuple[Span, Span]]) -> list[list[tuple[Span, Span]]]:
    """The list of all pairs, if there are several and they do not overlap."""
    ordered = sorted(pairs, key=lambda pair: pair[0].start)
    disjoint = all(a[1].end <= b[0].start for a, b in pairwise(ordered))
    return [pairs] if len(pairs) > 1 and disjoint else []
