"""The syntax trees of programs and of the files that they import; a text is parsed once."""

from functools import lru_cache

from schedlang.diagnostics.source import Source
from schedlang.files.cache import TREE, cached
from schedlang.language import syntax


# Whoever looks for a size or a parameter compiles one program many times.
@lru_cache(8)
def tree_of(source: Source) -> syntax.Schedule:
    """The syntax tree of a program, its imports as they are written; CompileError at the first
    place where the text is not a program.
    """

    def make() -> syntax.Schedule:
        # It loads lark and the tables of the grammar, which takes longer than most programs take
        # to compile.
        from schedlang.language.parser import parse

        return parse(source)

    return cached(TREE, source.text, make)


@lru_cache(32)
def items_of(source: Source, start: int) -> tuple[syntax.Node, ...]:
    """The items of the imported file whose text starts at a place of the source; CompileError as
    above.
    """

    def make() -> tuple[syntax.Node, ...]:
        from schedlang.language.parser import parse_items

        return parse_items(source, start)

    return cached(TREE, (source.text[start:], start), make)
