"""Answers as the Language Server Protocol has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import evolve
from lsprotocol import types
from pygls.uris import from_fs_path

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Label, Span
from schedlang.extras.editor import answers, semantics
from schedlang.extras.editor.analysis import Analysis
from schedlang.extras.editor.completion import Candidates
from schedlang.extras.editor.outline import Entry
from schedlang.extras.editor.positions import Lines, lines_of
from schedlang.extras.editor.signatures import Call
from schedlang.files.package import DOCS
from schedlang.language.scopes import BUILTINS, FIGURES

_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
}
#: How names are shown in completions, by the kinds of their declarations.
_KINDS = {
    "param": types.CompletionItemKind.Constant,
    "fn": types.CompletionItemKind.Function,
    "seq": types.CompletionItemKind.Function,
    "pipeline": types.CompletionItemKind.Function,
}
#: How parts of a program are shown in its outline, by the classes of their nodes.
_PARTS = {
    "schedule": types.SymbolKind.Module,
    "param": types.SymbolKind.Constant,
    "let": types.SymbolKind.Variable,
    "list": types.SymbolKind.Array,
    "fn": types.SymbolKind.Function,
    "seq": types.SymbolKind.Function,
    "pipeline": types.SymbolKind.Class,
    "stage": types.SymbolKind.Struct,
    "rank": types.SymbolKind.Method,
    "repeated": types.SymbolKind.Method,
    "part": types.SymbolKind.Namespace,
    "for": types.SymbolKind.Event,
    "repeat": types.SymbolKind.Event,
    "if": types.SymbolKind.Event,
    "row": types.SymbolKind.Event,
    "import": types.SymbolKind.File,
    "require": types.SymbolKind.Boolean,
    "assert": types.SymbolKind.Boolean,
}


def uri_of(path: str) -> str:
    """The address of a file."""
    return from_fs_path(str(Path(path).absolute())) or path


def location_of(analysis: Analysis, span: Span) -> types.Location:
    """A place of a program or of a file that it imports."""
    path, start = analysis.source.file(span.start)
    ends = [begin - 1 for _, begin in analysis.source.imports if begin > span.start]
    text = analysis.source.text[start : ends[0] if ends else None]
    place = Span(span.start - start, span.end - start)
    return types.Location(uri_of(path), lines_of(text).range(place))


def diagnostic_of(analysis: Analysis, diagnostic: Diagnostic) -> types.Diagnostic:
    """A diagnostic as the protocol has it."""
    source = analysis.source if diagnostic.source is None else diagnostic.source
    analysis = evolve(analysis, source=source)
    page = DOCS / "errors" / f"{diagnostic.code}.md"
    related = [
        types.DiagnosticRelatedInformation(
            location_of(analysis, label.span), label.text or "here"
        )
        for label in _others(analysis, diagnostic)
    ]
    return types.Diagnostic(
        range=lines_of(source.text).range(answers.own_place(analysis, diagnostic)),
        message=answers.message(diagnostic),
        severity=_SEVERITIES[diagnostic.severity],
        code=diagnostic.code,
        code_description=types.CodeDescription(page.as_uri())
        if page.exists()
        else None,
        source="schedlang",
        related_information=related or None,
    )


def _others(analysis: Analysis, diagnostic: Diagnostic) -> list[Label]:
    """The places that a diagnostic tells beside the one that it is shown at."""
    place = answers.own_place(analysis, diagnostic)
    return [label for label in diagnostic.labels if label.text or label.span != place]


def quick_fix(
    uri: str, analysis: Analysis, diagnostic: Diagnostic
) -> types.CodeAction | None:
    """What can be done about a diagnostic as a quick fix, if that changes the text."""
    repair = answers.fix(analysis, diagnostic)
    if repair is None:
        return None
    lines = lines_of(analysis.text)
    edits = [types.TextEdit(lines.range(edit.span), edit.text) for edit in repair.edits]
    return types.CodeAction(
        f"{repair.text[0].upper()}{repair.text[1:]}",
        types.CodeActionKind.QuickFix,
        [diagnostic_of(analysis, diagnostic)],
        # Who has made a claim may have to mend the schedule, and not the claim.
        is_preferred=diagnostic.code != "assert",
        edit=types.WorkspaceEdit(changes={uri: edits}),
    )


def is_in(action: types.CodeAction, lines: range) -> bool:
    """Whether what an action mends is in some lines."""
    return any(
        each.range.start.line < lines.stop and each.range.end.line >= lines.start
        for each in action.diagnostics or ()
    )


def completions_of(
    possible: Candidates,
    span: Span,
    text: str,
    proved: Analysis | None,
    takes_snippets: bool,
) -> list[types.CompletionItem]:
    """What can stand in place of a span of a text: names first, with their values in the text that
    was last proved.
    """
    kinds = types.CompletionItemKind
    items = []
    if possible.takes_names:
        for symbol in possible.names:
            detail = answers.value_in(proved, symbol) if proved else None
            kind = _KINDS.get(symbol.kind, kinds.Variable)
            items.append(types.CompletionItem(symbol.name, kind=kind, detail=detail))
        items += [types.CompletionItem(name, kind=kinds.Function) for name in BUILTINS]
    if possible.takes_figures:
        items += [types.CompletionItem(name, kind=kinds.Property) for name in FIGURES]
    items += [types.CompletionItem(word, kind=kinds.Keyword) for word in possible.words]
    items += [types.CompletionItem(text, kind=kinds.Value) for text in possible.others]
    place = lines_of(text).range(span)
    for item in items:
        item.text_edit = types.TextEdit(place, item.label)
    if takes_snippets:
        items += [
            types.CompletionItem(
                shown,
                kind=kinds.Snippet,
                filter_text=word,
                insert_text_format=types.InsertTextFormat.Snippet,
                text_edit=types.TextEdit(place, snippet),
            )
            for word, shown, snippet in possible.forms
        ]
    for number, item in enumerate(items):
        item.sort_text = f"{number:04}"
    return items


def document_symbols_of(
    entries: Sequence[Entry], lines: Lines
) -> list[types.DocumentSymbol]:
    """The parts of a program as an outline."""
    return [
        types.DocumentSymbol(
            # An editor refuses an empty name.
            entry.name or entry.kind,
            _PARTS.get(entry.kind, types.SymbolKind.Property),
            lines.range(entry.span),
            lines.range(entry.place),
            entry.detail or None,
            children=document_symbols_of(entry.children, lines),
        )
        for entry in entries
    ]


def semantic_tokens_of(
    pieces: Iterable[tuple[int, int, str, tuple[str, ...]]], lines: Lines
) -> list[int]:
    """The pieces of a text as five numbers each: lines and units from the piece before, its length,
    its kind, and a bit for each of its properties.
    """
    numbers: list[int] = []
    before = types.Position(0, 0)
    for start, end, kind, properties in pieces:
        place = lines.position(start)
        same_line = place.line == before.line
        bits = sum(1 << semantics.PROPERTIES.index(each) for each in properties)
        numbers += (
            place.line - before.line,
            place.character - (before.character if same_line else 0),
            lines.position(end).character - place.character,
            semantics.KINDS.index(kind),
            bits,
        )
        before = place
    return numbers


def signatures_of(call: Call) -> types.SignatureHelp:
    """The ways to write a call, with the argument that one is at."""
    signatures = [
        types.SignatureInformation(
            each.label,
            types.MarkupContent(types.MarkupKind.Markdown, each.meaning)
            if each.meaning
            else None,
            [types.ParameterInformation(name) for name in each.arguments],
        )
        for each in call.signatures
    ]
    return types.SignatureHelp(signatures, call.chosen, call.argument)
