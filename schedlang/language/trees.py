"""The syntax trees of programs and of the files that they import; a text is parsed once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import evolve

from schedlang.diagnostics.source import Source
from schedlang.files.cache import TREE, cached
from schedlang.language import syntax
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.language.parser import parse, parse_items
else:
    # The parser loads lark and the tables of the grammar, which takes longer than most programs
    # take to compile.
    parse = on_demand("schedlang.language.parser.parse")
    parse_items = on_demand("schedlang.language.parser.parse_items")

T = TypeVar("T")


class Itself(Generic[T]):
    """A key for caches that compares by identity.

    Trees that are equal may have different spans, and the Python made for a tree refers to its
    spans.
    """

    def __init__(self, it: T) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.it is self.it


# Whoever looks for a size or a parameter compiles one program many times.
@lru_cache(8)
def tree_of(source: Source) -> syntax.Schedule:
    """The syntax tree of a program, with its imports as they are written. CompileError at the first
    place where the text is not a program.
    """
    return cached(TREE, source.text, lambda: parse(source))


@lru_cache(32)
def items_of(source: Source, start: int) -> tuple[syntax.Node, ...]:
    """The items of the imported file whose text starts at a place of the source; CompileError as
    above.
    """
    key = source.text[start:], start
    return cached(TREE, key, lambda: parse_items(source, start))


def with_items(tree: syntax.Schedule, items: Iterable[syntax.Node]) -> syntax.Schedule:
    """A program's tree with other items. The same items give the same tree, since caches have trees
    as keys.
    """
    return _with_items(Itself(tree), tuple(map(Itself, items)))


@lru_cache(8)
def _with_items(
    tree: Itself[syntax.Schedule], items: tuple[Itself[syntax.Node], ...]
) -> syntax.Schedule:
    return evolve(tree.it, items=tuple(item.it for item in items))
