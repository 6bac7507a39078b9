"""A client of the language server: a real one, in a process of its own, over its standard input and
output.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.client import BaseLanguageClient

from schedlang.extras.editor.positions import Lines
from tests.support.paths import ROOT

#: Seconds that an answer may take, whatever else the machine does.
LIMIT = 600


class Client(BaseLanguageClient):
    """An editor with one window."""

    def __init__(self) -> None:
        super().__init__("tests", "1")
        #: What was published of each document, and how often.
        self.published: dict[str, list[types.Diagnostic]] = {}
        self.times: dict[str, int] = {}
        self.news = asyncio.Condition()
        self.versions: dict[str, int] = {}
        #: How often it was told to ask again for the figures above programs.
        self.refreshes = 0

        @self.feature(types.WORKSPACE_CODE_LENS_REFRESH)
        async def refresh(_: None) -> None:
            async with self.news:
                self.refreshes += 1
                self.news.notify_all()

        @self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        async def published(params: types.PublishDiagnosticsParams) -> None:
            async with self.news:
                self.published[params.uri] = list(params.diagnostics)
                self.times[params.uri] = self.times.get(params.uri, 0) + 1
                self.news.notify_all()

    async def begin(
        self, asks_again: bool = False, **options: Any
    ) -> types.InitializeResult:
        """Start the server; an editor may ask again for figures when it is told to."""
        lens = types.CodeLensWorkspaceClientCapabilities(asks_again)
        await self.start_io(sys.executable, "-m", "schedlang", "lsp", cwd=str(ROOT))
        params = types.InitializeParams(
            types.ClientCapabilities(
                workspace=types.WorkspaceClientCapabilities(code_lens=lens)
            ),
            initialization_options=options or None,
        )
        result = await asyncio.wait_for(self.initialize_async(params), LIMIT)
        self.initialized(types.InitializedParams())
        return result

    async def end(self) -> int:
        """End the server as an editor does; its exit code."""
        await asyncio.wait_for(self.shutdown_async(None), LIMIT)
        self.exit(None)
        assert self._server is not None
        return await asyncio.wait_for(self._server.wait(), LIMIT)

    def open(self, path: Path, text: str | None = None) -> str:
        """Open a file, or a text that is to be one; its address."""
        uri = path.as_uri()
        self.versions[uri] = 1
        text = path.read_text() if text is None else text
        item = types.TextDocumentItem(uri, "sched", 1, text)
        self.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return uri

    def write(self, uri: str, text: str) -> None:
        """Make another text of a document."""
        self.versions[uri] += 1
        document = types.VersionedTextDocumentIdentifier(self.versions[uri], uri)
        changes = [types.TextDocumentContentChangeWholeDocument(text)]
        self.text_document_did_change(
            types.DidChangeTextDocumentParams(document, changes)
        )

    def close(self, uri: str) -> None:
        """Close a document."""
        del self.versions[uri]
        document = types.TextDocumentIdentifier(uri)
        self.text_document_did_close(types.DidCloseTextDocumentParams(document))

    async def diagnostics(
        self,
        uri: str,
        wanted: Callable[[list[types.Diagnostic]], bool] = lambda _: True,
    ) -> list[types.Diagnostic]:
        """What is published of a document from now on, as soon as it is what is wanted."""
        # What was published before does not count, or a test could pass with an older answer.
        before = self.times.get(uri, 0)

        def is_there() -> bool:
            return self.times.get(uri, 0) > before and wanted(self.published[uri])

        async with self.news:
            await asyncio.wait_for(self.news.wait_for(is_there), LIMIT)
        return self.published[uri]

    async def refreshed(self, before: int) -> None:
        """Wait until it is told more often than before to ask for figures again."""
        async with self.news:
            told = self.news.wait_for(lambda: self.refreshes > before)
            await asyncio.wait_for(told, LIMIT)


def at(uri: str, text: str, piece: str, shift: int = 0) -> dict[str, Any]:
    """The parameters of a question about the first place of a piece of a text."""
    position = Lines(text).position(text.index(piece) + shift)
    return {"text_document": types.TextDocumentIdentifier(uri), "position": position}


def edited(text: str, edits: list[types.TextEdit]) -> str:
    """A text with edits made, as editors make them."""
    lines = Lines(text)
    places = [
        (lines.offset(edit.range.start), lines.offset(edit.range.end)) for edit in edits
    ]
    # From the end backwards, so that the places of those before stay right.
    for (start, end), edit in sorted(
        zip(places, edits, strict=True), key=lambda pair: pair[0], reverse=True
    ):
        text = text[:start] + edit.new_text + text[end:]
    return text


class Session:
    """A server that several tests talk with, each in a stretch of its own."""

    def __init__(self, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.client = Client()
        self._runner.run(self.client.begin(**options))

    def __call__(self, talk: Callable[[Client], Awaitable[None]]) -> None:
        """Talk with the server; nobody who wants to know more than `LIMIT` allows is waited for."""

        async def run() -> None:
            await talk(self.client)
            for uri in list(self.client.versions):
                self.client.close(uri)

        self._runner.run(run())

    def end(self) -> int:
        """End the server; its exit code."""
        try:
            return self._runner.run(self.client.end())
        finally:
            self._runner.close()
