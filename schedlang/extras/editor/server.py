"""The language server, `schedc lsp`: what the compiler knows of a program, asked by an editor.

It speaks the Language Server Protocol over standard input and output. Nothing is worked out here:
texts go to processes of their own (`schedlang.extras.editor.work`), answers become those of the
protocol.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen
from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.extras.editor import answers
from schedlang.extras.editor.analysis import Analysis, analyse, in_style
from schedlang.extras.editor.completion import Candidates, candidates
from schedlang.extras.editor.positions import lines_of
from schedlang.extras.editor.renaming import renamed
from schedlang.extras.editor.work import Work
from schedlang.files.package import DOCS
from schedlang.language.scopes import BUILTINS, FIGURES
from schedlang.language.symbols import Symbol

#: Seconds without a key before a text is looked at; and what that, or an answer, may take, unless
#: an editor says otherwise.
PAUSE = 0.15
LIMIT = 10.0
#: What stands above a program in place of its figures until they are known.
CHECKING = "checking …"

_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
}
_KINDS = {
    "param": types.CompletionItemKind.Constant,
    "fn": types.CompletionItemKind.Function,
    "pipeline": types.CompletionItemKind.Function,
}


@frozen
class Progress:
    """What is known of a text by now: set as soon as it is known whether it is a program, and as
    soon as no more is to come.
    """

    is_read: asyncio.Event = field(factory=asyncio.Event)
    is_done: asyncio.Event = field(factory=asyncio.Event)

    def end(self) -> None:
        """No more is to come."""
        self.is_read.set()
        self.is_done.set()


@define
class Document:
    """An open text, and what is known of it: by now, and where it was last a program."""

    uri: str
    text: str
    task: asyncio.Task[None] | None = None
    analysis: Analysis | None = None
    known: Analysis | None = None
    progress: Progress = field(factory=Progress)

    @property
    def path(self) -> str:
        """The path of its file, which need not be there yet."""
        return to_fs_path(self.uri) or self.uri

    @property
    def source(self) -> Source:
        """The text as the compiler takes it."""
        return Source(self.path, self.text)

    def know(self, analysis: Analysis) -> None:
        """Keep what is known of the text by now."""
        self.analysis = analysis
        if analysis.symbols is not None:
            self.known = analysis

    def stop(self) -> None:
        """End what is being done with the text; who waits for it looks again."""
        if self.task is not None:
            self.task.cancel()
        self.progress.end()

    async def read(self) -> None:
        """Wait until it is known whether the newest text is a program."""
        # A key that comes meanwhile puts new progress here, and sets the old one to wake us up.
        while not self.progress.is_read.is_set():
            await self.progress.is_read.wait()

    async def done(self) -> None:
        """Wait until all is known of the newest text."""
        while not self.progress.is_done.is_set():
            await self.progress.is_done.wait()


class Server(LanguageServer):
    """The server, its open documents, and the parameters that programs are compiled with."""

    def __init__(self) -> None:
        super().__init__("schedlang", version("schedlang"))
        self.work = Work()
        self.documents: dict[str, Document] = {}
        self.params: dict[str, int] = {}
        self.limit = LIMIT
        self.view_command = ""

    def set_options(self, options: Any) -> None:
        """Take the settings of the editor: `params`; the `limit` of a compilation, in seconds; and
        the command that draws a program.
        """
        if not isinstance(options, Mapping):
            return
        params = options.get("params")
        if isinstance(params, Mapping):
            self.params = {
                str(name): value for name, value in params.items() if type(value) is int
            }
        limit = options.get("limit")
        if isinstance(limit, int | float) and limit > 0:
            self.limit = float(limit)
        self.view_command = str(options.get("viewCommand", self.view_command))

    def change(self, document: Document, pause: float = PAUSE) -> None:
        """Look at a text that has changed; what was being done with the old one ends."""
        document.stop()
        document.analysis = None
        document.progress = Progress()
        # What the editor shows of the old text is not true of the new one.
        self.refresh()
        document.task = asyncio.create_task(
            self.look_at(document, document.progress, pause)
        )

    async def look_at(
        self, document: Document, progress: Progress, pause: float
    ) -> None:
        """Find out all about a text, and tell it piece by piece."""
        # What a key starts, and the next key ends, wherever it is by then:
        #
        #     key ─ pause ─► syntax, names ─► expansion ─► proof ─► figures, costs of lines
        #                    │ is_read                              │ is_done
        #                    └─► definition, rename, completion     └─► hover, lens, hints
        await asyncio.sleep(pause)
        analysis = Analysis(document.source)
        told: Analysis | None = None
        steps = self.work.results(
            analyse, document.source, self.params, limit=self.limit
        )
        try:
            async with aclosing(steps):
                async for analysis in steps:
                    document.know(analysis)
                    progress.is_read.set()
                    # Until all is known that may be wrong, what was told of the text before stays.
                    if analysis.diagnostics:
                        self.tell(document, analysis)
                        told = analysis
        except TimeoutError:
            slow = _too_slow(analysis, self.limit)
            analysis = evolve(analysis, diagnostics=[*analysis.diagnostics, slow])
        finally:
            progress.end()
        if told is not analysis:
            self.tell(document, analysis)
        else:
            self.refresh()

    def tell(self, document: Document, analysis: Analysis) -> None:
        """Publish the diagnostics of a text, and have the editor ask for the rest."""
        found = [_diagnostic(analysis, each) for each in analysis.diagnostics]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, found)
        )
        self.refresh()

    def refresh(self) -> None:
        """Have the editor ask again for the hints and the figures of all texts."""
        workspace = self.client_capabilities.workspace
        if workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        if self.refreshes_lenses:
            self.workspace_code_lens_refresh(None)

    @property
    def refreshes_lenses(self) -> bool:
        """Whether the editor asks for the figures again when it is told to."""
        workspace = self.client_capabilities.workspace
        lens = workspace.code_lens if workspace else None
        return bool(lens and lens.refresh_support)

    async def known(self, uri: str, all_of_it: bool = False) -> Analysis | None:
        """What is known of the newest text of a document, as soon as its names are, or all is; None
        where it is no program.
        """
        document = self.documents.get(uri)
        if document is None:
            return None
        try:
            ready = document.done() if all_of_it else document.read()
            await asyncio.wait_for(ready, self.limit)
        except TimeoutError:
            return None
        analysis = document.analysis
        # A key may have come while this waited: places in the older text would be wrong in the
        # newer one.
        if (
            analysis is None
            or analysis.symbols is None
            or analysis.text != document.text
        ):
            return None
        return analysis

    def place(self, uri: str, position: types.Position) -> int:
        """The place of a position in the text of a document."""
        return lines_of(self.documents[uri].text).offset(position)


def serve() -> None:
    """Serve an editor over standard input and output, until it says that this is the end."""
    # Whatever else is printed, by any process, must not get between the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    server().start_io(sys.stdin.buffer, output)


def server() -> Server:
    """A server with all that it can do."""
    server = Server()

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.set_options(params.initialization_options)

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def configure(params: types.DidChangeConfigurationParams) -> None:
        settings = params.settings
        server.set_options(
            settings.get("schedlang") if isinstance(settings, Mapping) else None
        )
        for document in server.documents.values():
            server.change(document, 0)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        document = Document(params.text_document.uri, params.text_document.text)
        server.documents[document.uri] = document
        server.change(document, 0)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        document = server.documents.get(params.text_document.uri)
        if document is not None:
            document.text = server.workspace.get_text_document(document.uri).source
            server.change(document)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: types.DidSaveTextDocumentParams) -> None:
        # Others may import it.
        for document in server.documents.values():
            if document.uri != params.text_document.uri:
                server.change(document, 0)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: types.DidCloseTextDocumentParams) -> None:
        document = server.documents.pop(params.text_document.uri, None)
        if document is not None:
            document.stop()
            server.text_document_publish_diagnostics(
                types.PublishDiagnosticsParams(document.uri, [])
            )

    _add_names(server)
    _add_texts(server)
    return server


def _add_names(server: Server) -> None:
    """What the server says of names."""

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: types.DefinitionParams) -> types.Location | None:
        analysis = await server.known(params.text_document.uri)
        if analysis is None or analysis.symbols is None:
            return None
        offset = server.place(params.text_document.uri, params.position)
        for span, path in analysis.imports:
            if span.start <= offset <= span.end:
                beginning = types.Position(0, 0)
                return types.Location(_uri(path), types.Range(beginning, beginning))
        symbol = analysis.symbols.at(offset)
        return _location(analysis, symbol.place) if symbol else None

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    async def references(params: types.ReferenceParams) -> list[types.Location]:
        analysis, symbol = await symbol_at(params.text_document.uri, params.position)
        if analysis is None or analysis.symbols is None or symbol is None:
            return []
        places = analysis.symbols.places_of(symbol)
        if not params.context.include_declaration:
            places = places[1:]
        return [_location(analysis, place) for place in places]

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    async def prepare(params: types.PrepareRenameParams) -> types.Range | None:
        analysis, symbol = await symbol_at(params.text_document.uri, params.position)
        if analysis is None or analysis.symbols is None or symbol is None:
            return None
        offset = server.place(params.text_document.uri, params.position)
        places = analysis.symbols.places_of(symbol)
        place = next(each for each in places if each.start <= offset <= each.end)
        return lines_of(server.documents[params.text_document.uri].text).range(place)

    @server.feature(
        types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True)
    )
    async def rename(params: types.RenameParams) -> types.WorkspaceEdit:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            raise JsonRpcInvalidParams("the document is not open")
        lines = lines_of(document.text)
        offset = lines.offset(params.position)
        new = params.new_name
        places = await server.work.result(
            renamed, document.source, offset, new, limit=server.limit
        )
        if not isinstance(places, list):
            raise JsonRpcInvalidParams(places or "it takes too long")
        edits = [types.TextEdit(lines.range(place), new) for place in places]
        return types.WorkspaceEdit(changes={document.uri: edits})

    @server.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=["(", '"']),
    )
    async def completion(params: types.CompletionParams) -> list[types.CompletionItem]:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return []
        offset = lines_of(document.text).offset(params.position)
        arguments = document.text, offset, document.path
        possible = await server.work.result(candidates, *arguments, limit=server.limit)
        return _completions(document, offset, possible) if possible else []

    async def symbol_at(
        uri: str, position: types.Position
    ) -> tuple[Analysis | None, Symbol | None]:
        analysis = await server.known(uri)
        if analysis is None or analysis.symbols is None:
            return None, None
        return analysis, analysis.symbols.at(server.place(uri, position))


def _add_texts(server: Server) -> None:
    """What the server says of places, and of the text as a whole."""

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hover(params: types.HoverParams) -> types.Hover | None:
        # What a line costs comes when it is known; nobody waits for it with a hand on the mouse.
        analysis = await server.known(params.text_document.uri)
        if analysis is None:
            return None
        text = server.documents[params.text_document.uri].text
        offset = server.place(params.text_document.uri, params.position)
        text = answers.hover(analysis, offset, _word_at(text, offset)) or ""
        content = types.MarkupContent(types.MarkupKind.Markdown, text)
        return types.Hover(content) if text else None

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hints(params: types.InlayHintParams) -> list[types.InlayHint]:
        analysis = await server.known(params.text_document.uri, all_of_it=True)
        if analysis is None:
            return []
        document = server.documents[params.text_document.uri]
        lines = lines_of(document.text)
        shown = params.range.start.line, params.range.end.line
        return [
            types.InlayHint(lines.position(place), text)
            for place, text in answers.hints(analysis)
            if place <= len(document.text)
            and shown[0] <= lines.line_of(place) <= shown[1]
        ]

    @server.feature(types.TEXT_DOCUMENT_CODE_LENS)
    async def lenses(params: types.CodeLensParams) -> list[types.CodeLens]:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return []
        if server.refreshes_lenses and not document.progress.is_done.is_set():
            # The editor shows an answer until the next one, and asks again when all is known.
            title = CHECKING
        else:
            analysis = await server.known(document.uri, all_of_it=True)
            if analysis is None or analysis.figures is None:
                return []
            title = str(analysis.figures)
        # The figures stand above the line where the schedule begins.
        first = re.search(r"^\s*schedule\b", document.text, re.M)
        place = first.end() if first else 0
        line = lines_of(document.text).range(Span(place, place))
        arguments = [document.uri] if server.view_command else None
        command = types.Command(title, server.view_command, None, arguments)
        return [types.CodeLens(line, command)]

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    async def format(
        params: types.DocumentFormattingParams,
    ) -> list[types.TextEdit] | None:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return None
        text = await server.work.result(in_style, document.source, limit=server.limit)
        if text is None or text == document.text:
            return None
        whole = lines_of(document.text).range(Span(0, len(document.text)))
        return [types.TextEdit(whole, text)]

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix]),
    )
    async def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        document = server.documents.get(params.text_document.uri)
        analysis = document.analysis if document else None
        if document is None or analysis is None:
            return []
        if analysis.text != document.text:
            return []
        asked = range(params.range.start.line, params.range.end.line + 1)
        return [
            action
            for diagnostic in analysis.diagnostics
            if (action := _action(document, analysis, diagnostic)) is not None
            and _is_in(action, asked)
        ]


def _is_in(action: types.CodeAction, lines: range) -> bool:
    """Whether what an action mends is in some lines."""
    return any(
        each.range.start.line < lines.stop and each.range.end.line >= lines.start
        for each in action.diagnostics or ()
    )


def _word_at(text: str, offset: int) -> str:
    """The word at a place of a text."""
    before = re.search(r"\w*$", text[:offset])
    behind = re.match(r"\w*", text[offset:])
    return (before.group() if before else "") + (behind.group() if behind else "")


def _uri(path: str) -> str:
    """The address of a file."""
    return from_fs_path(str(Path(path).absolute())) or path


def _location(analysis: Analysis, span: Span) -> types.Location:
    """A place of a program or of a file that it imports."""
    path, start = analysis.source.file(span.start)
    ends = [begin - 1 for _, begin in analysis.source.imports if begin > span.start]
    text = analysis.source.text[start : ends[0] if ends else None]
    place = Span(span.start - start, span.end - start)
    return types.Location(_uri(path), lines_of(text).range(place))


def _diagnostic(analysis: Analysis, diagnostic: Diagnostic) -> types.Diagnostic:
    """A diagnostic as the protocol has it."""
    source = analysis.source if diagnostic.source is None else diagnostic.source
    analysis = evolve(analysis, source=source)
    page = DOCS / "errors" / f"{diagnostic.code}.md"
    related = [
        types.DiagnosticRelatedInformation(
            _location(analysis, label.span), label.text or "here"
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


def _too_slow(analysis: Analysis, limit: float) -> Diagnostic:
    """What is said of a program that takes too long to compile."""
    name = re.search(r"\bschedule\s+(\w+)", analysis.source.text)
    place = Span(name.start(1), name.end(1)) if name else Span(0, 0)
    message = f"it takes longer than {limit:g} s to compile: stopped"
    help = "set smaller `params`, or a larger `limit`, in the editor; `schedc compile` has no limit"
    label = (Label(place),)
    return Diagnostic(
        "too-many-ops", message, label, analysis.source, help=help, severity="warning"
    )


def _action(
    document: Document, analysis: Analysis, diagnostic: Diagnostic
) -> types.CodeAction | None:
    """What can be done about a diagnostic as a quick fix, if that changes the text."""
    repair = answers.fix(analysis, diagnostic)
    if repair is None:
        return None
    lines = lines_of(document.text)
    edits = [types.TextEdit(lines.range(edit.span), edit.text) for edit in repair.edits]
    return types.CodeAction(
        f"{repair.text[0].upper()}{repair.text[1:]}",
        types.CodeActionKind.QuickFix,
        [_diagnostic(analysis, diagnostic)],
        is_preferred=True,
        edit=types.WorkspaceEdit(changes={document.uri: edits}),
    )


def _completions(
    document: Document, offset: int, possible: Candidates
) -> list[types.CompletionItem]:
    """What can stand at a place, as the protocol has it: names first."""
    items = []
    kinds = types.CompletionItemKind
    if possible.takes_names:
        for symbol in _names_at(document, offset):
            detail = (
                answers.value_of(document.known, symbol) if document.known else None
            )
            items.append(
                types.CompletionItem(
                    symbol.name,
                    kind=_KINDS.get(symbol.kind, kinds.Variable),
                    detail=detail,
                )
            )
        items += [types.CompletionItem(name, kind=kinds.Function) for name in BUILTINS]
    if possible.takes_figures:
        items += [types.CompletionItem(name, kind=kinds.Property) for name in FIGURES]
    items += [types.CompletionItem(word, kind=kinds.Keyword) for word in possible.words]
    items += [types.CompletionItem(text, kind=kinds.Value) for text in possible.others]
    ranges = lines_of(document.text).range(Span(possible.start, offset))
    for number, item in enumerate(items):
        item.sort_text = f"{number:04}"
        item.text_edit = types.TextEdit(ranges, item.label)
    return items


def _names_at(document: Document, offset: int) -> list[Symbol]:
    """The names that are known at a place, as they were when the text was last a program."""
    known = document.known
    if known is None or known.symbols is None:
        return []
    # What stands before the place where the texts begin to differ has not moved.
    old = known.source.text
    same = next(
        (
            number
            for number in range(offset)
            if old[number : number + 1] != document.text[number]
        ),
        offset,
    )
    return known.symbols.known_at(same)
