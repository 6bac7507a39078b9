"""The language server, `schedc lsp`: what the compiler knows of a program, asked by an editor.

It speaks the Language Server Protocol over standard input and output. Nothing is worked out here:
texts go to processes of their own (`schedlang.extras.editor.worker_processes`), answers become
those of the protocol.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from attrs import define, evolve, field, frozen
from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.extras.editor import answers
from schedlang.extras.editor.analysis import Analysis, analyse, in_style
from schedlang.extras.editor.completion import candidates
from schedlang.extras.editor.outline import folds
from schedlang.extras.editor.positions import lines_of
from schedlang.extras.editor.protocol import (
    completions_of,
    diagnostic_of,
    document_symbols_of,
    is_in,
    location_of,
    quick_fix,
    semantic_tokens_of,
    signatures_of,
    uri_of,
)
from schedlang.extras.editor.renaming import renamed
from schedlang.extras.editor.semantics import KINDS, PROPERTIES, pieces
from schedlang.extras.editor.signatures import call_at
from schedlang.extras.editor.worker_processes import Work
from schedlang.language.symbols import Symbol

#: Seconds without a key before a text is looked at; and what that, or an answer, may take, unless
#: an editor says otherwise.
PAUSE = 0.15
LIMIT = 10.0
#: What stands above a program in place of its figures until they are known.
CHECKING = "checking …"


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
    """An open text, what is known of it by now, and of the text that was last proved."""

    uri: str
    text: str
    task: asyncio.Task[None] | None = None
    analysis: Analysis | None = None
    proved: Analysis | None = None
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
        if analysis.figures is not None:
            self.proved = analysis

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
        found = [diagnostic_of(analysis, each) for each in analysis.diagnostics]
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
    def takes_snippets(self) -> bool:
        """Whether the editor fills in texts that have places for that."""
        document = self.client_capabilities.text_document
        item = (
            document.completion and document.completion.completion_item
            if document
            else None
        )
        return bool(item and item.snippet_support)

    @property
    def refreshes_lenses(self) -> bool:
        """Whether the editor asks for the figures again when it is told to."""
        workspace = self.client_capabilities.workspace
        lens = workspace.code_lens if workspace else None
        return bool(lens and lens.refresh_support)

    async def known(self, uri: str, all_of_it: bool = False) -> Analysis | None:
        """What is known of the newest text of a document, as soon as its names are, or all is; None
        where it takes too long.
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
    _add_parts(server)
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
                return types.Location(uri_of(path), types.Range(beginning, beginning))
        symbol = analysis.symbols.at(offset)
        return location_of(analysis, symbol.place) if symbol else None

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    async def references(params: types.ReferenceParams) -> list[types.Location]:
        analysis, symbol = await symbol_at(params.text_document.uri, params.position)
        if analysis is None or analysis.symbols is None or symbol is None:
            return []
        places = analysis.symbols.places_of(symbol)
        if not params.context.include_declaration:
            places = places[1:]
        return [location_of(analysis, place) for place in places]

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
        if possible is None:
            return []
        # The text may be another one by now.
        span = Span(possible.start, offset)
        return completions_of(
            possible, span, arguments[0], document.proved, server.takes_snippets
        )

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    async def highlights(
        params: types.DocumentHighlightParams,
    ) -> list[types.DocumentHighlight]:
        uri = params.text_document.uri
        analysis, symbol = await symbol_at(uri, params.position)
        if analysis is None or analysis.symbols is None or symbol is None:
            return []
        lines = lines_of(analysis.text)
        kinds = types.DocumentHighlightKind
        return [
            types.DocumentHighlight(
                lines.range(place),
                kinds.Write if place == symbol.place else kinds.Read,
            )
            for place in analysis.symbols.places_of(symbol)
            if place.end <= len(analysis.text)
        ]

    @server.feature(
        types.TEXT_DOCUMENT_SIGNATURE_HELP,
        types.SignatureHelpOptions(trigger_characters=["(", ","]),
    )
    async def signature(
        params: types.SignatureHelpParams,
    ) -> types.SignatureHelp | None:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return None
        offset = lines_of(document.text).offset(params.position)
        call = await server.work.result(
            call_at, document.source, offset, limit=server.limit
        )
        return signatures_of(call) if call else None

    async def symbol_at(
        uri: str, position: types.Position
    ) -> tuple[Analysis | None, Symbol | None]:
        analysis = await server.known(uri)
        if analysis is None or analysis.symbols is None:
            return None, None
        return analysis, analysis.symbols.at(server.place(uri, position))


def _add_parts(server: Server) -> None:
    """What the server says of the parts of a text: outline, folding, colours."""

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def outline(
        params: types.DocumentSymbolParams,
    ) -> list[types.DocumentSymbol]:
        analysis = await server.known(params.text_document.uri)
        if analysis is None:
            return []
        return document_symbols_of(analysis.outline, lines_of(analysis.text))

    @server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
    async def folding(params: types.FoldingRangeParams) -> list[types.FoldingRange]:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return []
        found = await server.work.result(folds, document.text, limit=server.limit)
        kinds = types.FoldingRangeKind
        return [
            types.FoldingRange(
                first, last, kind=kinds.Comment if is_comment else kinds.Region
            )
            for first, last, is_comment in found or ()
        ]

    @server.feature(
        types.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL,
        types.SemanticTokensLegend(list(KINDS), list(PROPERTIES)),
    )
    async def colours(params: types.SemanticTokensParams) -> types.SemanticTokens:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return types.SemanticTokens([])
        source = document.source
        found = await server.work.result(pieces, source, limit=server.limit)
        numbers = semantic_tokens_of(found or (), lines_of(source.text))
        return types.SemanticTokens(numbers)


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
            if (action := quick_fix(document.uri, analysis, diagnostic)) is not None
            and is_in(action, asked)
        ]


def _word_at(text: str, offset: int) -> str:
    """The word at a place of a text."""
    before = re.search(r"\w*$", text[:offset])
    behind = re.match(r"\w*", text[offset:])
    return (before.group() if before else "") + (behind.group() if behind else "")


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
