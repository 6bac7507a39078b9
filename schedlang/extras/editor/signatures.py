"""What the call around a place of a program takes: an op, a function, a sequence, a stage of a
pipeline, a figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attrs import frozen
from lark import Token

from schedlang.diagnostics.source import Source
from schedlang.extras.editor.analysis import names_of
from schedlang.extras.editor.colours import op_words
from schedlang.extras.editor.words import meanings
from schedlang.language.grammar import tokens_of
from schedlang.language.scopes import BUILTINS
from schedlang.language.symbols import Symbol

#: Behind these words, names in parentheses are declared.
_DECLARE = frozenset(
    ("fn", "seq", "pipeline", "model", "cost", "memory", "capacity", "block")
)


@frozen
class Signature:
    """A way to call something: how it is written, its arguments there, and what it does."""

    label: str
    arguments: tuple[str, ...]
    meaning: str | None = None


@frozen
class Call:
    """The call around a place: the ways to write it, and the number of the argument there."""

    signatures: tuple[Signature, ...]
    argument: int

    @property
    def chosen(self) -> int:
        """The number of the first signature that has so many arguments."""
        counts = [len(each.arguments) for each in self.signatures]
        fitting = (number for number, n in enumerate(counts) if n > self.argument)
        return next(fitting, len(counts) - 1)


def call_at(source: Source, offset: int) -> Call | None:
    """The call around a place of a text, which need not be a program; None where there is none."""
    tokens = [
        token for token in tokens_of(source.text) if (token.end_pos or 0) <= offset
    ]
    found = _opened(tokens)
    if found is None:
        return None
    opening, argument = found
    before = tokens[:opening]
    if not before or (before[-2:-1] and before[-2] in _DECLARE):
        return None
    name = str(before[-1])
    is_transfer = before[-2:-1] and before[-2] in ("send", "recv")
    word = f"{before[-2]} {name}" if is_transfer else name
    symbols = names_of(source).known_at(offset)
    symbol = next((each for each in symbols[::-1] if each.name == name), None)
    if symbol is not None and symbol.takes is not None:
        signatures = [_of_symbol(source, symbol)]
    else:
        signatures = list(_of_language(word))
    return Call(tuple(signatures), argument) if signatures else None


def _opened(tokens: Sequence[Token]) -> tuple[int, int] | None:
    """The number of the parenthesis that is open behind some tokens, and of commas behind it."""
    depth = commas = 0
    for number in range(len(tokens) - 1, -1, -1):
        match tokens[number].type:
            case "RPAR" | "RSQB":
                depth += 1
            case "LPAR" | "LSQB" if depth:
                depth -= 1
            case "LPAR":
                return number, commas
            case "COMMA" if not depth:
                commas += 1
            case "LBRACE" | "RBRACE" | "LSQB":
                return None
    return None


def _of_symbol(source: Source, symbol: Symbol) -> Signature:
    """How to call what a program declares."""
    if symbol.kind == "pipeline":
        arguments = ("i", "s")[-(symbol.takes or 1) :]
        meaning = f"stage s of `{symbol.name}`"
        return _signature(symbol.name, arguments, meaning)
    text = source.text[symbol.statement.start : symbol.statement.end]
    named = re.search(rf"\b{symbol.name}\s*\(([^)]*)\)", text)
    if named is None:
        # It stands in a file that is imported.
        return _signature(symbol.name, tuple("abcdefgh"[: symbol.takes or 0]))
    arguments = tuple(re.findall(r"\w+", named[1]))
    whole = f"`{' '.join(text.split())}`" if symbol.kind == "fn" else None
    return _signature(symbol.name, arguments, whole)


def _of_language(word: str) -> Iterator[Signature]:
    """How to call what every program has."""
    name = word.split()[-1]
    if name in BUILTINS:
        _, most = BUILTINS[name]
        yield _signature(name, ("a",) if most == 1 else ("a", "b", "…"))
        return
    if word == "stage":
        yield _signature(word, ("c",), "chunk number c of this rank")
        return
    # What is sent of an op is called as the op itself.
    told = meanings().get(word, meanings().get(name, ""))
    forms, _, op = told.partition(": ")
    meaning = op if word in meanings() else f"the message of the op: {op}"
    # A row of the table may have several words, with the same arguments.
    for arguments in dict.fromkeys(re.findall(r"`[\w ]+\(([^)]*)\)`", forms)):
        listed = tuple(re.findall(r"\w+", arguments))
        yield _signature(word, listed, meaning)
        # The table has ops of a rank with one stage.
        if name in op_words() and listed == ("m",):
            yield _signature(word, ("s", "m"), f"of stage s: {meaning}")


def _signature(
    name: str, arguments: tuple[str, ...], meaning: str | None = None
) -> Signature:
    return Signature(f"{name}({', '.join(arguments)})", arguments, meaning)
