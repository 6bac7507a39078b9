"""What the server says of a program that was analysed: texts for people, at places of the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.repair import Edit, Repair
from schedlang.diagnostics.source import Span
from schedlang.extras.editor.analysis import Analysis
from schedlang.extras.editor.words import examples, meanings
from schedlang.language.scopes import BUILTINS
from schedlang.language.symbols import Symbol
from schedlang.report.lines import Cost, LineCosts

#: The most ranks whose values are shown, and the most characters of a declaration.
_MOST_RANKS = 8
_MOST_TEXT = 200
#: What stands for the value of a name that a rank does not come to.
_NONE = "-"


def hover(analysis: Analysis, offset: int, word: str) -> str | None:
    """What the word at a place is, and what its statement costs, in Markdown."""
    parts = []
    symbol = analysis.symbols.at(offset) if analysis.symbols else None
    if symbol is not None:
        parts.append(_symbol_text(analysis, symbol))
    elif word in meanings():
        parts.append(meanings()[word])
    elif word in examples():
        parts.append(f"as in `{examples()[word]}`")
    elif word in BUILTINS:
        parts.append(f"`{word}`: a function that every program has")
    cost = _cost_at(analysis, offset)
    if cost:
        parts.append(cost)
    return "\n\n".join(parts) or None


def _symbol_text(analysis: Analysis, symbol: Symbol) -> str:
    """What a declared name is: its declaration, and its values."""
    text = analysis.source.text[symbol.statement.start : symbol.statement.end]
    # Of what has a block, such as a pipeline, the line before it is enough.
    head = (
        text
        if symbol.kind in ("let", "list", "fn", "param")
        else text.partition("{")[0]
    )
    head = " ".join(head[:_MOST_TEXT].split())
    lines = [f"```sched\n{head}\n```"]
    path = analysis.source.file(symbol.place.start)[0]
    if path != analysis.source.path:
        lines.append(f"declared in `{path}`")
    value = value_of(analysis, symbol)
    if value:
        lines.append(f"`{symbol.name}` is {value}")
    return "\n".join(lines)


def value_of(analysis: Analysis, symbol: Symbol) -> str | None:
    """What a name is at the parameters: one value, or those of the ranks."""
    if symbol.kind == "param" and analysis.figures:
        value = analysis.figures.params.get(symbol.name)
        return None if value is None else str(value)
    if symbol.kind != "let" or analysis.lets is None:
        return None
    items, ranks = analysis.lets
    place = symbol.place.start
    if place in items:
        return _range_text(items[place])
    values = [_range_text(lets[place]) if place in lets else _NONE for lets in ranks]
    if not values or set(values) == {_NONE}:
        return None
    if len(set(values)) == 1:
        return values[0]
    if len(values) > _MOST_RANKS:
        # The first ones show how it goes on, and the last one where it ends.
        values = [*values[: _MOST_RANKS - 2], "…", values[-1]]
    return ", ".join(values)


def value_in(proved: Analysis, symbol: Symbol) -> str | None:
    """What a name of a text is in the text that was last proved, if only one there is called so."""
    if proved.symbols is None:
        return None
    alike = [
        each
        for each in proved.symbols.declared
        if (each.name, each.kind) == (symbol.name, symbol.kind)
    ]
    return value_of(proved, alike[0]) if len(alike) == 1 else None


def _range_text(values: tuple[float, float]) -> str:
    """The values that a name has: one, or the least and the greatest."""
    least, greatest = (f"{float(value):.10g}" for value in values)
    return least if least == greatest else f"{least}…{greatest}"


def hints(analysis: Analysis) -> Iterator[tuple[int, str]]:
    """Behind which places of the program's own text values are shown, and which."""
    if analysis.symbols is None:
        return
    for symbol in analysis.symbols.declared:
        if symbol.kind != "let":
            continue
        value = value_of(analysis, symbol)
        text = analysis.source.text[symbol.place.end : symbol.statement.end]
        # What stands there anyhow needs no hint.
        if value is not None and text.lstrip(" =") != value:
            yield symbol.statement.end, f" = {value}"


def _cost_at(analysis: Analysis, offset: int) -> str | None:
    """What the statement at a place costs; None where there is none, or it has no ops."""
    costs = analysis.costs
    around = [span for span in analysis.statements if span.start <= offset <= span.end]
    if costs is None or not around:
        return None
    # Statements stand in each other, so the shortest around a place is the one that it belongs to.
    innermost = min(around, key=lambda span: span.end - span.start)
    has_ops = any(
        innermost.start <= place.start and place.end <= innermost.end
        for place in costs.places
    )
    return _cost_text(analysis, innermost, costs) if has_ops else None


def _cost_text(analysis: Analysis, span: Span, costs: LineCosts) -> str:
    """What a piece of a program costs, as shares of the whole."""
    cost: Cost = costs.within(span)
    assert analysis.figures is not None
    params = ", ".join(
        f"{name} = {value}" for name, value in analysis.figures.params.items()
    )
    lines = [f"At {params}:"]
    runs = _share(cost.runs, costs.makespan)
    lines.append(f"- {runs} of the critical path")
    if cost.waits:
        lines.append(
            f"- {_share(cost.waits, costs.makespan)} of it waiting for this to begin"
        )
    if costs.idle:
        lines.append(
            f"- {_share(cost.idle, costs.idle)} of the idle time comes before it"
        )
    if costs.peak:
        held = _share(cost.held, costs.peak)
        lines.append(f"- {held} of the peak memory, on rank {costs.peak_rank}")
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    """A part of something, as a share and as numbers."""
    return f"{part / whole:.0%} ({part:.6g} of {whole:.6g})"


def message(diagnostic: Diagnostic) -> str:
    """A diagnostic in the words of the command line: its message, notes, and the way out."""
    lines = [diagnostic.message, *(f"note: {note}" for note in diagnostic.notes)]
    if diagnostic.repair:
        lines.append(f"repair: {diagnostic.repair.text}: proved at this size")
    elif diagnostic.help:
        lines.append(f"help: {diagnostic.help}")
    return "\n".join(lines)


def fix(analysis: Analysis, diagnostic: Diagnostic) -> Repair | None:
    """What can be done about a diagnostic by edits of the program's own text: its repair, or else
    what its help says.
    """
    repair = diagnostic.repair
    if repair is None and diagnostic.edits:
        repair = Repair(_edits_text(analysis, diagnostic.edits), diagnostic.edits)
    if repair is None or not repair.edits:
        return None
    end = len(analysis.text)
    return repair if all(edit.span.end <= end for edit in repair.edits) else None


def _edits_text(analysis: Analysis, edits: Sequence[Edit]) -> str:
    """What edits do that do the same at each of their places."""
    first = edits[0]
    new = " ".join(first.text.split())
    old = analysis.source.text[first.span.start : first.span.end]
    text = f"write `{new}`" if new else f"leave out `{old}`"
    return text if len(edits) == 1 else f"{text}, and so on in {len(edits)} places"


def own_place(analysis: Analysis, diagnostic: Diagnostic) -> Span:
    """The place of the program's own text that a diagnostic is shown at: its first one there; or
    the import of the file that it is in.
    """
    for label in diagnostic.labels:
        if label.span.end <= len(analysis.text):
            return label.span
        path = analysis.source.file(label.span.start)[0]
        for span, imported in analysis.imports:
            if imported == path:
                return span
    return Span(0, 0)
