"""A program as it is compiled: its syntax tree, with the items of the files that it imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.language import syntax
from schedlang.language.trees import tree_of
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.language.imports import with_imports
    from schedlang.language.recovery import with_forms_of_today
else:
    with_imports = on_demand("schedlang.language.imports.with_imports")
    with_forms_of_today = on_demand("schedlang.language.recovery.with_forms_of_today")


def load(source: Source) -> tuple[Source, syntax.Schedule]:
    """The program's tree with the items of imported files in place, and the source that has the
    texts of all. CompileError for a file that is not there, or not a list of items.
    """
    source = of_today(source)
    tree = tree_of(source)
    if any(isinstance(item, syntax.Import) for item in tree.items):
        return with_imports(source, tree)
    return source, tree


def of_today(source: Source) -> Source:
    """The program with today's forms in place of those that the language had before; as it is, if
    that makes no program of it.
    """
    try:
        tree_of(source)
    except CompileError:
        return with_forms_of_today(source, "schedule")
    return source
