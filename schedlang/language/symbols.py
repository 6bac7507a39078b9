"""The names of a program: where each is declared, what it is, where it is used and known."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field, frozen

from schedlang.diagnostics.source import Source, Span
from schedlang.language import syntax
from schedlang.language.names import Checker
from schedlang.language.scopes import FIGURES, Declared

#: The statements and items that bring a name into scope behind them, in the block they stand in.
_BEHIND = (
    syntax.Param,
    syntax.Let,
    syntax.List,
    syntax.Fn,
    syntax.Seq,
    syntax.Pipeline,
)


@frozen
class Symbol:
    """A declared name: its place, the kind of its declaration, and the range of the text where it
    is known.

    `statement` is the span of the declaration. `takes` is the number of arguments of a function.
    """

    name: str
    place: Span
    statement: Span
    kind: str
    known: Span
    takes: int | None = None


@frozen
class Use:
    """A place where a name is used, and the place where it is declared. A figure is declared
    nowhere.
    """

    place: Span
    declared: Span | None


@frozen
class Symbols:
    """All names of a program, those of imported files included, in the order of the text."""

    declared: tuple[Symbol, ...]
    uses: tuple[Use, ...]

    def at(self, offset: int) -> Symbol | None:
        """The symbol whose name stands at a place, where it is declared or used."""
        places = {use.place: use.declared for use in self.uses}
        places |= {symbol.place: symbol.place for symbol in self.declared}
        for place, declared in places.items():
            if place.start <= offset <= place.end:
                return self.declared_at(declared)
        return None

    def declared_at(self, place: Span | None) -> Symbol | None:
        """The symbol that is declared at a place."""
        return next((symbol for symbol in self.declared if symbol.place == place), None)

    def places_of(self, symbol: Symbol) -> list[Span]:
        """Where a symbol is declared, and all places where it is used."""
        uses = [use.place for use in self.uses if use.declared == symbol.place]
        return [symbol.place, *uses]

    def known_at(self, offset: int) -> list[Symbol]:
        """The symbols that an expression at a place can speak of."""
        return [
            symbol
            for symbol in self.declared
            if symbol.known.start <= offset <= symbol.known.end
        ]


def symbols_of(source: Source, tree: syntax.Schedule, end: int) -> Symbols:
    """The names of a program, right or wrong. `end` is the end of its own file; the texts of
    imported files follow it.
    """
    recorder = _Recorder(source)
    recorder.block(tree.items, {})
    declared = sorted(_in_block(tree.items, end), key=lambda symbol: symbol.place.start)
    return Symbols(tuple(declared), tuple(recorder.uses))


@define
class _Recorder(Checker):
    """Records what each name refers to, while the names are checked."""

    uses: list[Use] = field(factory=list)

    def reference(
        self, node: syntax.Node, name: str, scope: dict[str, Declared]
    ) -> None:
        """Keep what a name is, if it is known."""
        super().reference(node, name, scope)
        self.use(node.span, name, scope)

    def call(
        self,
        node: syntax.Node,
        name: syntax.Name,
        count: int,
        scope: dict[str, Declared],
    ) -> None:
        """Keep what a function is, if it is known."""
        super().call(node, name, count, scope)
        self.use(name.span, name.text, scope)

    def run(self, node: syntax.Run, scope: dict[str, Declared]) -> None:
        """Keep what a sequence is, if it is known."""
        super().run(node, scope)
        self.use(node.name.span, node.name.text, scope)

    def element(
        self, node: syntax.Node, name: syntax.Name, scope: dict[str, Declared]
    ) -> None:
        """Keep what a list is, if it is known."""
        super().element(node, name, scope)
        self.use(name.span, name.text, scope)

    def use(self, place: Span, name: str, scope: dict[str, Declared]) -> None:
        """Keep where a name is declared."""
        if name not in scope:
            return
        declared = scope[name].span
        # Figures are in scope by the claim that speaks of them.
        is_figure = name in FIGURES and declared.start <= place.start < declared.end
        self.uses.append(Use(place, None if is_figure else declared))


def _in_block(statements: tuple[syntax.Node, ...], end: int) -> Iterator[Symbol]:
    """The names of statements that share a scope, up to its `end`."""
    for statement in statements:
        if isinstance(statement, _BEHIND):
            place = statement.name.span
            # What an imported file declares stands behind the program's own text.
            known = Span(place.end, end) if place.start < end else Span(0, end)
            takes = _arguments(statement)
            kind = type(statement).__name__.lower()
            yield Symbol(statement.name.text, place, statement.span, kind, known, takes)
        yield from _within(statement)


def _within(node: syntax.Node) -> Iterator[Symbol]:
    """The names that are known only in a node, and those of blocks in it."""
    for name in _own_names(node):
        kind = type(node).__name__.lower()
        yield Symbol(name.text, name.span, node.span, f"{kind} variable", node.span)
    for part in node.parts:
        for child in part if isinstance(part, tuple) else (part,):
            if isinstance(child, syntax.Block):
                yield from _in_block(child.statements, child.span.end)
            elif isinstance(child, syntax.Node):
                yield from _within(child)


def _own_names(node: syntax.Node) -> tuple[syntax.Name, ...]:
    """The names that a node declares for what is in it."""
    match node:
        case syntax.Fn(_, params, _) | syntax.Seq(_, params, _):
            return params
        case syntax.Pipeline(_, _, number):
            return (number,) if number else ()
        case syntax.Repeated(microbatches):
            return microbatches
        case syntax.Cost(_, indices):
            return indices or ()
        case (
            syntax.Rank(name)
            | syntax.Stage(name)
            | syntax.For(name)
            | syntax.Row(name)
            | syntax.Edge(_, name)
        ):
            return (name,)
    return ()


def _arguments(node: syntax.Node) -> int | None:
    """The number of arguments of what a statement declares; None for a value."""
    match node:
        case syntax.Fn(_, params, _) | syntax.Seq(_, params, _):
            return len(params)
        case syntax.Pipeline(_, _, number):
            return 2 if number else 1
    return None
