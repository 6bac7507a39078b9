"""What the compiler says of a program, for an editor: as data, which comes piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from attrs import evolve, frozen

from schedlang.advice.advice import ADVISED, advise
from schedlang.compiler import compile_tree
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source, Span
from schedlang.extras.editor.outline import Entry, outline_of
from schedlang.language import syntax
from schedlang.language.formatting import formatted, rule_of
from schedlang.language.grammar import tokens_of
from schedlang.language.imports import file_of, with_imports
from schedlang.language.loading import load
from schedlang.language.parser import parse_items, parse_mended
from schedlang.language.symbols import Symbols, symbols_of
from schedlang.language.variables import Lets, values_of_lets
from schedlang.plan.plan import Plan
from schedlang.proof.lints import lint
from schedlang.proof.prove import simulate
from schedlang.report.lines import LineCosts, line_costs

#: Statements that stand in others without a block around them.
_WITHIN = (syntax.Row, syntax.Placed, syntax.Op, syntax.If)
#: The most ranks whose values are looked up.
_MOST_RANKS = 64


@frozen
class Figures:
    """The figures of a schedule at some parameters."""

    params: dict[str, int]
    makespan: float
    bubble: float
    peak: tuple[float, ...]

    def __str__(self) -> str:
        """In one line, as it stands above a program."""
        params = ", ".join(f"{name} = {value}" for name, value in self.params.items())
        return (
            f"makespan {self.makespan:.10g}, bubble {self.bubble:.1%} of it, "
            f"peak {max(self.peak):.10g} on rank {self.peak.index(max(self.peak))} ({params})"
        )


@frozen
class Analysis:
    """What is known of a text by now; None for what is not known, or not yet.

    `source` has the texts of imported files. `statements` are the places of all items and
    statements of its own text, the outer ones first. `imports` are the places of imports, and the
    files that they name. A text with mistakes has those names that can be read.
    """

    source: Source
    diagnostics: Sequence[Diagnostic] = ()
    symbols: Symbols | None = None
    statements: Sequence[Span] = ()
    outline: Sequence[Entry] = ()
    imports: Sequence[tuple[Span, str]] = ()
    figures: Figures | None = None
    costs: LineCosts | None = None
    lets: tuple[Lets, list[Lets]] | None = None

    @property
    def text(self) -> str:
        """The program's own text, without those of imported files behind it."""
        return self.source.alone.text


def analyse(source: Source, params: Mapping[str, int]) -> Iterator[Analysis]:
    """What is known of a program after each step: its names, what is wrong with it, what it costs,
    and repairs. Of the parameters, those count that it has.
    """
    imports = imports_of(source)
    wrong: Sequence[Diagnostic] = ()
    try:
        whole, tree = read(source)
    except CompileError as error:
        wrong = error.diagnostics
        whole, tree = read_mended(source)
    end = len(source.text)
    analysis = Analysis(
        whole,
        wrong,
        symbols_of(whole, tree, end),
        [span for span in _statements(tree.items) if span.end <= end],
        outline_of(tree, source.text),
        imports,
    )
    yield analysis
    # A file to import has names and places, and nothing to compile.
    if wrong or not tree.span.end:
        return
    for diagnostics, plan in compiled(source, whole, tree, params):
        known = evolve(analysis, diagnostics=diagnostics)
        yield _with_figures(known, tree, plan) if plan else known


def compiled(
    source: Source, whole: Source, tree: syntax.Schedule, params: Mapping[str, int]
) -> Iterator[tuple[Sequence[Diagnostic], Plan | None]]:
    """What is wrong with a program that was loaded, and then the same with repairs; or its warnings
    and its plan. Of the parameters, those count that it has.
    """
    chosen = chosen_of(tree, params)
    try:
        plan = compile_tree(whole, tree, chosen)
    except CompileError as error:
        # The mistake first, at once; a repair is looked for by compiling changed programs, which
        # takes longer.
        yield error.diagnostics, None
        if any(diagnostic.code in ADVISED for diagnostic in error.diagnostics):
            yield advise(error, source, chosen).diagnostics, None
        return
    yield [*plan.warnings, *lint(plan)], plan


def read(source: Source) -> tuple[Source, syntax.Schedule]:
    """A program with its imports, and its tree; CompileError where it cannot be read.

    Of a file to import, which by itself is no program, the tree is that of an empty place.
    """
    if rule_of(source.text) == "schedule":
        return load(source)
    # The names of its items are all that is wanted.
    return source, _list_of(parse_items(source, 0))


def read_mended(source: Source) -> tuple[Source, syntax.Schedule]:
    """A program with mistakes and its tree, as far as it can be read; with its imports, if all of
    them can be read.
    """
    rule = rule_of(source.text)
    read = parse_mended(source, rule)
    tree = read if isinstance(read, syntax.Schedule) else _list_of(read or ())
    with suppress(CompileError):
        return with_imports(source, tree)
    return source, tree


def _list_of(items: tuple[syntax.Node, ...]) -> syntax.Schedule:
    """Items in an empty schedule that is nowhere in the text."""
    nowhere = Span(0, 0)
    return syntax.Schedule(syntax.Name("items", span=nowhere), items, span=nowhere)


def names_of(source: Source) -> Symbols:
    """The names of a text, as far as it can be read."""
    try:
        whole, tree = read(source)
    except CompileError:
        whole, tree = read_mended(source)
    return symbols_of(whole, tree, len(source.text))


def read_with_names(source: Source) -> tuple[Source, syntax.Schedule, Symbols]:
    """A program with its imports, its tree and its names; CompileError where it cannot be read."""
    whole, tree = read(source)
    return whole, tree, symbols_of(whole, tree, len(source.text))


def in_style(source: Source) -> str | None:
    """A text as `schedc fmt` writes it; None if it is no program."""
    try:
        return formatted(source)
    except CompileError:
        return None


def _with_figures(analysis: Analysis, tree: syntax.Schedule, plan: Plan) -> Analysis:
    """What is known of a program that is proved."""
    execution = simulate(plan)
    timeline = execution.timeline
    is_small = len(plan.ranks) <= _MOST_RANKS
    return evolve(
        analysis,
        figures=Figures(
            plan.params,
            timeline.makespan,
            timeline.bubble_over_makespan,
            execution.peak_memory,
        ),
        costs=line_costs(plan, execution),
        lets=values_of_lets(tree, plan.params) if is_small else None,
    )


def chosen_of(tree: syntax.Schedule, params: Mapping[str, int]) -> dict[str, int]:
    """Of some parameters those that a program has."""
    names = [item.name.text for item in tree.items if isinstance(item, syntax.Param)]
    return {name: params[name] for name in names if name in params}


def _statements(nodes: Sequence[syntax.Node]) -> Iterator[Span]:
    """The places of items or statements, and of those within them."""
    for node in nodes:
        yield node.span
        for part in node.parts:
            for child in part if isinstance(part, tuple) else (part,):
                if isinstance(child, syntax.Block):
                    yield from _statements(child.statements)
                elif isinstance(child, _WITHIN):
                    yield from _statements((child,))


def imports_of(source: Source) -> list[tuple[Span, str]]:
    """The places of imports in a text, and the files that they name, as far as there are."""
    tokens = tokens_of(source.text)
    imports = []
    for word, text in pairwise(tokens):
        if (word.type, text.type) != ("IMPORT", "STRING"):
            continue
        path = file_of(text[1:-1], Path(source.path).parent)
        if path is not None:
            imports.append((Span(text.start_pos or 0, text.end_pos or 0), str(path)))
    return imports
