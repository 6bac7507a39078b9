"""Program text → syntax tree."""

from typing import Any

from lark import Token, Transformer
from lark.exceptions import UnexpectedInput
from lark.tree import Meta

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.language import expressions, syntax
from schedlang.language.grammar import grammar
from schedlang.language.recovery import syntax_errors

_NODES = {
    name.lower(): node
    for name, node in (vars(syntax) | vars(expressions)).items()
    if isinstance(node, type)
}
# The operators, by the name of their grammar rule.
_BINARY = {
    "or": "or",
    "and": "and",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "mod": "%",
}
_UNARY = {"not": "not", "neg": "-"}


def parse(source: Source) -> syntax.Schedule:
    """The program's syntax tree; CompileError at all places where the text is not a program."""
    return _parse(source, "schedule", 0)  # type: ignore[no-any-return]


def parse_items(source: Source, start: int) -> tuple[syntax.Node, ...]:
    """The items of the imported file whose text starts at a place of the source; CompileError as
    above.
    """
    return _parse(source, "items", start)  # type: ignore[no-any-return]


def _parse(source: Source, rule: str, start: int) -> Any:
    try:
        return _Builder(start).transform(grammar().parse(source.text[start:], start=rule))
    except UnexpectedInput:
        raise CompileError(syntax_errors(source, rule, start)) from None
    except RecursionError:
        label = Label(Span(start, start))
        raise CompileError(
            [Diagnostic("nesting", "the program is nested too deeply", (label,), source)]
        ) from None


class _Builder(Transformer[Token, Any]):
    """A rule makes the node class of its name; a plural rule makes a tuple; a one-token rule makes
    its text.
    """

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def __default__(self, rule: Token, children: list[Any], meta: Meta) -> Any:
        start, end = (0, 0) if meta.empty else (meta.start_pos, meta.end_pos)
        span = Span(self._start + start, self._start + end)
        if rule in (
            "items",
            "names",
            "args",
            "ops",
            "transfers",
            "rows",
            "placed_ops",
            "microbatches",
        ):
            return tuple(child for child in children if child is not None)
        if rule in ("kind", "passed", "direction", "timed", "held"):
            return children[0]
        if rule in ("block", "body"):
            return syntax.Block(tuple(children), span=span)
        if rule in _BINARY:
            return expressions.Binary(_BINARY[rule], *children, span=span)
        if rule in _UNARY:
            return expressions.Unary(_UNARY[rule], *children, span=span)
        if rule == "own_stage":
            return expressions.OwnStage(*children, span=span)
        if rule == "op":
            kind, args = children
            return syntax.Op(kind, args or (), span=span)
        return _NODES[rule](*children, span=span)

    def __default_token__(self, token: Token) -> str:
        return str(token)

    def NUMBER(self, token: Token) -> int:
        # Longer numbers stay too large to pass `check_names`, and short enough for Python to read.
        return int(token.lstrip("0")[:20] or 0)

    def string(self, children: list[str]) -> str:
        return children[0][1:-1]
