"""Program text → syntax tree."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lark import Token, Transformer
from lark.exceptions import UnexpectedInput
from lark.tree import Meta

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.files.file_kinds import FileKind, kind_of
from schedlang.language import expressions, syntax
from schedlang.language.grammar import grammar
from schedlang.language.recovery import mended_tokens, syntax_errors

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


def parse_mended(source: Source, rule: str) -> Any:
    """The tree of a text with mistakes, as far as it can be read; None if nothing can. Nothing is
    compiled of it: editors show its names and its outline.
    """
    parser = grammar().parse_interactive("", start=rule)
    try:
        for token in mended_tokens(source, rule, 0):
            parser.feed_token(token)
        return _Builder(0).transform(parser.feed_eof())  # type: ignore[no-untyped-call]
    except (UnexpectedInput, RecursionError):
        return None


def _parse(source: Source, rule: str, start: int) -> Any:
    with wrong_as_diagnostics(source, rule, start):
        return _Builder(start).transform(
            grammar().parse(source.text[start:], start=rule)
        )


@contextmanager
def wrong_as_diagnostics(source: Source, rule: str, start: int = 0) -> Iterator[None]:
    """Whoever parses the text that starts at a place of the source by a rule of the grammar raises
    CompileError where it is not what the rule says.
    """
    try:
        yield
    except UnexpectedInput:
        raise CompileError(_wrong(source, rule, start)) from None
    except RecursionError:
        label = Label(Span(start, start))
        raise CompileError(
            [
                Diagnostic(
                    "nesting", "the program is nested too deeply", (label,), source
                )
            ]
        ) from None


def _wrong(source: Source, rule: str, start: int) -> list[Diagnostic]:
    """What is wrong with a text that is not what a rule says: that it is a file of another kind, or
    its mistakes.
    """
    text = source.text[start:]
    path = source.file(start)[0]
    kind = kind_of(text)
    if rule == "schedule" and kind not in (
        FileKind.PROGRAM,
        FileKind.EMPTY,
        FileKind.TEXT,
    ):
        message = f"`{path}` is {kind.called}, not a program"
        help = kind.help(path) or "a program is written as `schedule name { … }`"
        return [Diagnostic("syntax", message, help=help, file=path)]
    return syntax_errors(source, rule, start)


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
            "indices",
            "args",
            "elements",
            "ops",
            "rows",
            "placed_ops",
            "microbatches",
        ):
            return tuple(child for child in children if child is not None)
        if rule in ("kind", "timed", "held"):
            return " ".join(children)
        if rule in ("block", "body"):
            return syntax.Block(tuple(children), span=span)
        if rule in _BINARY:
            return expressions.Binary(_BINARY[rule], *children, span=span)
        if rule in _UNARY:
            return expressions.Unary(_UNARY[rule], *children, span=span)
        if rule in ("list", "param_list"):
            name, length, values = children
            is_param = rule == "param_list"
            return syntax.List(name, values or (), length, is_param, span=span)
        if rule == "run":
            name, args = children
            return syntax.Run(name, args or (), span=span)
        if rule == "op":
            kind, args = children
            return syntax.Op(kind, args or (), span=span)
        return _NODES[rule.replace("_", "")](*children, span=span)

    def __default_token__(self, token: Token) -> str:
        return str(token)

    def NUMBER(self, token: Token) -> int:
        # Longer numbers stay too large to pass `check_names`, and short enough for Python to read.
        return int(token.lstrip("0")[:20] or 0)

    def string(self, children: list[str]) -> str:
        return children[0][1:-1]
