"""Program text → syntax tree."""

from functools import cache
from typing import Any

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.tree import Meta

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.files.cache import folder
from schedlang.files.package import GRAMMAR
from schedlang.language import expressions, syntax

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
_SHOWN = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a text in quotes",
    "$END": "the end of the file",
}
_MOST_EXPECTED = 5
#: By the keyword that begins it, how an item with several parts is written.
FORMS = {
    "BLOCK": "block m every 3 { … }",
    "COST": "cost B(s) = 2 + s",
    "FN": "fn half(n) = n / 2",
    "FOR": "for m in 0 .. microbatches { … }",
    "LINK": "link r on r / 2",
    "MEMORY": "memory F = 2",
    "PIPELINE": "pipeline down runs microbatches stage s in 0 .. ranks on s",
    "SKIP": "skip s in 0 .. 3 from s to 7 - s",
    "WEIGHTS": "weights delay 1 on 0 .. ranks",
}
#: Keywords that can be names as well: where a name is expected, they are not worth telling.
_WORDS = frozenset(
    {
        "AT",
        "BLOCK",
        "DELAY",
        "EVERY",
        "FILL",
        "FROM",
        "I",
        "IMPORT",
        "LATEST",
        "LINK",
        "MEMORY",
        "OBJECTIVE",
        "PIPELINE",
        "RECOMPUTE",
    }
    | {"REORDER", "RUNS", "SKIP", "SQUEEZE", "STASH", "STEADY", "TO", "WARMUP", "WEIGHTS", "WITHIN"}
)


def parse(source: Source) -> syntax.Schedule:
    """The program's syntax tree; CompileError at the first place where the text is not a
    program.
    """
    return _parse(source, "schedule", 0)  # type: ignore[no-any-return]


def parse_items(source: Source, start: int) -> tuple[syntax.Node, ...]:
    """The items of the imported file whose text starts at a place of the source; CompileError as
    above.
    """
    return _parse(source, "items", start)  # type: ignore[no-any-return]


def _parse(source: Source, rule: str, start: int) -> Any:
    try:
        return _Builder(start).transform(_parser().parse(source.text[start:], start=rule))
    except UnexpectedInput as error:
        raise CompileError([_syntax_error(source, error, start)]) from None
    except RecursionError:
        label = Label(Span(start, start))
        raise CompileError(
            [Diagnostic("nesting", "the program is nested too deeply", (label,), source)]
        ) from None


@cache
def _parser() -> Lark:
    return Lark(
        GRAMMAR.read_text(encoding="utf-8"),
        parser="lalr",
        lexer="basic",
        start=["schedule", "items"],
        propagate_positions=True,
        maybe_placeholders=True,
        cache=_cache_file() or False,
    )


def _cache_file() -> str | None:
    """Where the built grammar is kept: it takes longer to build than most programs take to
    compile.
    """
    cache_folder = folder()
    return None if cache_folder is None else str(cache_folder / "grammar")


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


def _syntax_error(source: Source, error: UnexpectedInput, start: int) -> Diagnostic:
    at = len(source.text) if error.pos_in_stream is None else start + error.pos_in_stream
    if isinstance(error, UnexpectedCharacters):
        message = f"unexpected character `{source.text[at]}`"
        end = at + 1
    elif isinstance(error, UnexpectedToken) and error.token.type != "$END":
        message = f"unexpected `{error.token}`"
        end = at + len(error.token)
    else:
        at = end = len(source.text.rstrip())
        message = "unexpected end of the file" if at > start else "the program is empty"
    expected = _expected(error)
    return Diagnostic(
        "syntax",
        f"{message}{f', expected {expected}' if expected else ''}",
        (Label(Span(at, end)),),
        source,
        help=_form(error),
    )


def _form(error: UnexpectedInput) -> str | None:
    """How the item in which the text stops being a program is written, where that helps."""
    if not isinstance(error, UnexpectedToken) or error.interactive_parser is None:
        return None
    # The parser's stack has the tokens of what is not finished, the innermost last.
    for part in reversed(error.interactive_parser.parser_state.value_stack):
        if isinstance(part, Token) and part.type in FORMS:
            return f"write it as in `{FORMS[part.type]}`"
        if part in ("{", "("):
            break
    return None


def _expected(error: UnexpectedInput) -> str:
    """What could stand here, or nothing where that is too much to read."""
    accepts = getattr(error, "accepts", None) or set()
    if "NAME" in accepts:
        accepts = accepts - _WORDS
    shown = sorted(_SHOWN.get(name) or f"`{_literal(name)}`" for name in accepts)
    if len(shown) > _MOST_EXPECTED:
        # At the end of the file, the one thing that is surely missing.
        at_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        shown = ["`}`"] if at_end and "`}`" in shown else []
    return " or ".join(shown)


def _literal(terminal: str) -> str:
    return next(known.pattern.value for known in _parser().terminals if known.name == terminal)
