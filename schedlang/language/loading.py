"""A program as it is compiled: its syntax tree, with the items of the files that it imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.diagnostics.source import Source
from schedlang.language import syntax
from schedlang.language.trees import tree_of
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.language.imports import with_imports
else:
    with_imports = on_demand("schedlang.language.imports.with_imports")


def load(source: Source) -> tuple[Source, syntax.Schedule]:
    """The program's tree with the items of imported files in place, and the source that has the
    texts of all. CompileError for a file that is not there, or not a list of items.
    """
    tree = tree_of(source)
    if any(isinstance(item, syntax.Import) for item in tree.items):
        return with_imports(source, tree)
    return source, tree
