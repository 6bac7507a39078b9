"""Changes to a program that might end a deadlock, or run an op that is missing.

These are only candidates: what is shown to a user is proved first, see `schedlang.advice.advice`.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import TypeVar

from attrs import frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.repair import Edit, Repair
from schedlang.diagnostics.source import Source, Span
from schedlang.diagnostics.waiting_ranks import Wait
from schedlang.language import expressions, syntax

N = TypeVar("N", bound=syntax.Node)

#: Two spans of the program, the first of which comes first.
SpanPair = tuple[Span, Span]

#: The mistake that an op never runs.
MISSING = "missing-op"
#: The longest piece of a program that is quoted whole.
_WIDTH = 40
#: What ends the waits at first uses, by the transport that the program is then for.
_FIRST_USES = {
    "nccl-eager": "open the process group with `device_id`",
    "portable": "use every communicator once before the step, as this project's runtime does,",
    "nccl-edge": "make a communicator for each direction between two ranks before the step, as "
    "this project's runtime does for such a plan,",
}


def candidates(
    source: Source, tree: syntax.Schedule, diagnostic: Diagnostic
) -> Iterator[Repair]:
    """Repairs to try, in an order in which those that change least come first."""
    program = _Program(source, tree)
    if diagnostic.code == "deadlock":
        waits = _waits_of_ranks(diagnostic.waits)
        yield from program.exchanges(waits)
        yield from program.moves(waits)
        yield from program.mirrored()
    if diagnostic.code == MISSING:
        yield from program.completed(diagnostic)
        return
    if diagnostic.code == "first-use":
        for transport, what in _FIRST_USES.items():
            text = f"{what} and compile with `--transport {transport}`"
            yield Repair(text, transport=transport)
    yield from program.without_batches()
    yield from program.without_transfers()
    # A wrong warm-up often comes with communication that was written for it.
    for first, second in product(program.mirrored(), program.without_transfers()):
        yield Repair(f"{first.text}; and {second.text}", first.edits + second.edits)


def _waits_of_ranks(waits: tuple[Wait, ...]) -> list[SpanPair]:
    """For each rank that others wait for, where it waits, and to what it has to come for them."""
    pairs: list[SpanPair] = []
    for wait in waits:
        rank = wait.at.rank
        awaited = [
            other.until for other in waits if other.until and other.until.rank == rank
        ]
        if awaited and awaited[0].span and wait.at.span:
            pairs.append((wait.at.span, awaited[0].span))
    # Ranks that run the same lines wait at the same ones.
    return list(dict.fromkeys(pairs))


@frozen
class _Program:
    """A program, and the edits that can be made to it; none are made in imported files."""

    source: Source
    tree: syntax.Schedule

    def exchanges(self, waits: list[SpanPair]) -> Iterator[Repair]:
        """Issue transfers that cross as one batch: on all ranks, or on some."""
        pairs: list[SpanPair] = []
        for at, until in waits:
            transfers = [
                statement
                for statement in self.statements(at, until)
                if isinstance(statement, syntax.Op) and statement.is_transfer
            ]
            if len(transfers) < 2:
                continue
            first, second = sorted(
                (transfer.span for transfer in transfers), key=lambda span: span.start
            )
            # Only neighbours can stand in one `overlap`.
            if not self.source.text[first.end : second.start].strip():
                pairs.append((first, second))
        for chosen in [*_all_at_once(pairs), *([pair] for pair in pairs)]:
            edits = []
            words = []
            for first, second in chosen:
                edits.append(Edit(Span(first.start, first.start), "overlap { "))
                edits.append(Edit(Span(second.end, second.end), " }"))
                words.append(f"{self.quoted(first)} and {self.quoted(second)} as one")
            words[0] += " `overlap { … }`"
            yield Repair(f"issue {', and '.join(words)}", tuple(edits))

    def moves(self, waits: list[SpanPair]) -> Iterator[Repair]:
        """Put what another rank waits for before what this rank waits at."""
        pairs: list[SpanPair] = []
        for at, until in waits:
            statements = self.statements(at, until)
            if statements and statements[0].span.start < statements[1].span.start:
                pairs.append((statements[0].span, statements[1].span))
        for chosen in [*([pair] for pair in pairs), *_all_at_once(pairs)]:
            edits = []
            words = []
            for before, moved in chosen:
                text = self.source.text[moved.start : moved.end]
                edits.append(Edit(Span(before.start, before.start), f"{text}  "))
                edits.append(Edit(moved, ""))
                words.append(f"{self.quoted(moved)} before {self.quoted(before)}")
            yield Repair(f"put {', and '.join(words)}", tuple(edits))

    def mirrored(self) -> Iterator[Repair]:
        """Count a number that depends on the rank, such as its warm-up, from the other end of the
        pipeline.
        """
        for rank in self.nodes(syntax.Rank):
            name = rank.name.text
            other = f"ranks - 1 - {name}"
            for let in syntax.walk(rank.body):
                if not isinstance(let, syntax.Let):
                    continue
                edits = []
                for node in syntax.walk(let.value):
                    if isinstance(node, expressions.Reference) and node.name == name:
                        is_whole = node.span == let.value.span
                        edits.append(
                            Edit(node.span, other if is_whole else f"({other})")
                        )
                if edits:
                    text = (
                        f"count `{let.name.text}` (line {self.line(let.span)}) from the other "
                        f"end: `{other}` for `{name}`"
                    )
                    yield Repair(text, tuple(edits))

    def without_batches(self) -> Iterator[Repair]:
        """Issue all transfers alone."""
        edits = []
        for node in self.batches():
            # What goes is `overlap {` and `}`; the transfers between them stay.
            start = node.ops[0].span.start
            end = node.ops[-1].span.end
            edits.append(Edit(Span(node.span.start, start), ""))
            edits.append(Edit(Span(end, node.span.end), ""))
        if edits:
            yield Repair("issue all transfers alone, without `overlap`", tuple(edits))

    def batches(self) -> list[syntax.Overlap]:
        """The transfers that are issued as one."""
        return [
            node
            for node in self.nodes(syntax.Overlap)
            if any(op.is_transfer for op in node.ops)
        ]

    def without_transfers(self) -> Iterator[Repair]:
        """Leave the communication to the compiler."""
        batches = [node.span for node in self.batches()]
        edits = [Edit(span, "") for span in batches]
        for transfer in filter(lambda op: op.is_transfer, self.nodes(syntax.Op)):
            start = transfer.span.start
            # Edits must not overlap: a transfer in a batch goes with its batch.
            if not any(batch.start <= start < batch.end for batch in batches):
                edits.append(Edit(transfer.span, ""))
        if edits:
            text = "leave the communication to the compiler: write no `send` and `recv`"
            yield Repair(text, tuple(edits))

    def completed(self, diagnostic: Diagnostic) -> Iterator[Repair]:
        """Run an op that is missing for some microbatches: where it runs for others, or behind all
        that its rank does; or run whole backwards in place of halves.
        """
        places = [label.span for label in diagnostic.labels[:1]]
        for op in self.nodes(syntax.Op):
            if op.span in places:
                yield from self.in_longer_loops(op)
                yield from self.behind_all(op)
        halves = [op for op in self.nodes(syntax.Op) if op.kind == "I"]
        if halves:
            edits = [
                Edit(Span(op.span.start, op.span.start + 1), "BW") for op in halves
            ]
            yield Repair("write whole backwards, `BW` for `I`", tuple(edits))

    def in_longer_loops(self, op: syntax.Op) -> Iterator[Repair]:
        """Run an op for all microbatches in one of the loops that it stands in."""
        for loop in self.around(op, syntax.For) + self.around(op, syntax.Repeat):
            bounds = (
                {loop.range.start.span: "0", loop.range.stop.span: "microbatches"}
                if isinstance(loop, syntax.For)
                else {loop.count.span: "microbatches"}
            )
            for span, text in bounds.items():
                old = self.source.text[span.start : span.end]
                if old != text:
                    told = f"write `{text}` for `{old}` in line {self.line(span)}"
                    yield Repair(told, (Edit(span, text),))

    def behind_all(self, op: syntax.Op) -> Iterator[Repair]:
        """Run an op behind all other statements of its rank: as often as a value of the rank says,
        for the microbatches behind its loop, or once.
        """
        for rank in self.around(op, syntax.Rank):
            *_, last = [
                statement
                for statement in rank.body.statements
                if not isinstance(statement, syntax.Assert)
            ]
            text = self.source.text[op.span.start : op.span.end]
            lets = [node for node in syntax.walk(rank) if isinstance(node, syntax.Let)]
            statements = [f"repeat {let.name.text} {{ {text} }}" for let in lets]
            for loop in self.around(op, syntax.For):
                stop = loop.range.stop.span
                rest = f"{self.source.text[stop.start : stop.end]} .. microbatches"
                statements.append(f"for {loop.name.text} in {rest} {{ {text} }}")
            line = self.source.text[: last.span.start].rpartition("\n")[2]
            indent = line[: len(line) - len(line.lstrip())]
            place = Span(last.span.end, last.span.end)
            for statement in [*statements, text]:
                told = f"add `{statement}` behind {self.quoted(last.span)}"
                yield Repair(told, (Edit(place, f"\n{indent}{statement}"),))

    def around(self, node: syntax.Node, kind: type[N]) -> list[N]:
        """The nodes of a kind that a node stands in, the innermost first."""
        found = [
            outer
            for outer in self.nodes(kind)
            if outer.span.start <= node.span.start and node.span.end <= outer.span.end
        ]
        return found[::-1]

    def nodes(self, kind: type[N]) -> list[N]:
        """The nodes of a kind in the program's own file."""
        # The texts of imported files stand behind the program's.
        end = len(self.source.text)
        return [
            node
            for node in syntax.walk(self.tree)
            if isinstance(node, kind) and node.span.end <= end
        ]

    def statements(self, first: Span, second: Span) -> list[syntax.Node]:
        """The two statements of one block that two spans are in; nothing if both are in the same
        one.

        Blocks are looked at from the outside in, so of several the innermost is taken.
        """
        found: list[syntax.Node] = []
        for block in self.nodes(syntax.Block):
            pair = [
                statement
                for span in (first, second)
                for statement in block.statements
                if statement.span.start <= span.start and span.end <= statement.span.end
            ]
            if len(pair) == 2 and pair[0] is not pair[1]:
                found = pair
        return found

    def quoted(self, span: Span) -> str:
        """A piece of the program in a message, with its line."""
        text = self.source.text[span.start : span.end]
        if len(text) > _WIDTH or "\n" in text:
            head = text.partition("{")[0].partition("\n")[0].strip()
            text = f"{head} {{ … }}"
        return f"`{text}` (line {self.line(span)})"

    def line(self, span: Span) -> int:
        """The line that a span starts in."""
        return self.source.position(span.start)[0]


def _all_at_once(pairs: list[SpanPair]) -> list[list[SpanPair]]:
    """All pairs as one choice, if there are several and they do not overlap."""
    ordered = sorted(pairs, key=lambda pair: pair[0].start)
    are_apart = all(
        before[1].end <= after[0].start for before, after in pairwise(ordered)
    )
    return [pairs] if len(pairs) > 1 and are_apart else []
