"""`schedc view --serve`: the page of a program at an address of this machine, drawn again when the
program is saved or one of its parameters is moved.
"""

from __future__ import annotations

import argparse
import json
import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from attrs import define, field

from schedlang.cli.executions import pictures_of
from schedlang.cli.usage import FINE, UsageError
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.rendering import render
from schedlang.files.reading import read_source
from schedlang.report.compare import parameters_of
from schedlang.report.views.html import page, page_data

if TYPE_CHECKING:
    from schedlang.report.views import Picture

#: Nobody but this machine is answered.
_HOST = "127.0.0.1"
#: How often the files are looked at, in seconds; and after how many looks without news a browser is
#: written to, which shows whether it is still there.
_LOOK = 0.2
_LOOKS = 50
#: A slider goes up to so many times its value, but at least so far.
_REACH = 4
_LEAST_REACH = 16


def serve(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if options.others or options.output:
        raise UsageError("--serve shows one program, at an address in place of a file")
    with PageServer(options) as server:
        print(f"serving {server.address} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.ended.set()
    return FINE


@define
class _Drawn:
    """The pictures of a program with some parameters, or what is wrong with it."""

    pictures: list[Picture] = field(factory=list)
    wrong: str | None = None

    @property
    def params(self) -> dict[str, int]:
        """The program's parameters."""
        return {
            name: value
            for picture in self.pictures
            for name, value in picture.params.items()
        }

    @property
    def files(self) -> set[str]:
        """The files that it was read from."""
        sources = [picture.execution.schedule.source for picture in self.pictures]
        return {path for source in sources for path, _ in source.imports}


class PageServer(ThreadingHTTPServer):
    """A server of one program's page, on a free port; `ended` ends what it still waits for."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.options = options
        self.ended = Event()
        self.files = {options.file}
        self._drawing = Lock()

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{_HOST}:{self.server_port}/"

    def draw(self, params: dict[str, int]) -> _Drawn:
        """The program as it is now, with some parameters in place of those in the options."""
        # A copy: requests come in threads, and each has parameters of its own.
        options = argparse.Namespace(**vars(self.options))
        options.wrong = []
        # One at a time: the compiler's caches and its line of progress are made for one thread.
        with self._drawing:
            try:
                # A program that was saved may have fewer parameters than the page has sliders.
                known = parameters_of(read_source(options.file))
                moved = {name: value for name, value in params.items() if name in known}
                options.params = self.options.params | moved
                drawn = _Drawn(pictures_of(options, [options.file]))
            except CompileError as error:
                return _Drawn(wrong=render(error.diagnostics, self.options.format))
            except UsageError as error:
                return _Drawn(wrong=f"error: {error}")
        # Also where it is wrong by now: the page is drawn again as soon as one of them is saved.
        self.files = {options.file} | drawn.files
        return drawn

    def page(self) -> str:
        """The page with what is there now."""
        drawn = self.draw({})
        parameters = [
            {"name": name, "value": value, "most": max(_REACH * value, _LEAST_REACH)}
            for name, value in drawn.params.items()
        ]
        return page(drawn.pictures, {"parameters": parameters, "wrong": drawn.wrong})

    def data(self, query: str) -> dict[str, Any]:
        """The schedules with the parameters in a query, or what is wrong."""
        try:
            params = {name: int(value) for name, value in parse_qsl(query)}
        except ValueError:
            return {"wrong": "error: a parameter is a whole number"}
        drawn = self.draw(params)
        if drawn.wrong is not None:
            return {"wrong": drawn.wrong}
        return {"schedules": page_data(drawn.pictures), "parameters": drawn.params}

    def stamps(self) -> dict[str, int]:
        """When each file was saved last."""
        return {
            path: os.stat(path).st_mtime_ns
            for path in self.files
            if os.path.exists(path)
        }


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer

    def do_GET(self) -> None:
        # A page of another site may have a name that leads here, and must not read what is here.
        names = {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}
        if self.headers.get("Host") not in names:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._answer(self.server.page(), "text/html; charset=utf-8")
        elif url.path == "/data":
            self._answer(json.dumps(self.server.data(url.query)), "application/json")
        elif url.path == "/saved":
            self._tell_of_saves()
        elif url.path == "/favicon.ico":
            # Browsers ask for it, and would note an error.
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def _tell_of_saves(self) -> None:
        """Send an event each time that a file is saved (server-sent events), as long as the browser
        listens.
        """
        before = self.server.stamps()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        looks = 0
        try:
            while not self.server.ended.wait(_LOOK):
                now = self.server.stamps()
                looks += 1
                if now != before:
                    self.wfile.write(b"data: saved\n\n")
                elif looks % _LOOKS == 0:
                    self.wfile.write(b": still here\n\n")
                before = now
        except OSError:
            # The page was closed.
            self.close_connection = True
