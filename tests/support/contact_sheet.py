"""`make sheet`: how the pages look, on one picture, docs/pictures/contact-sheet.jpg: the site that
`make site` has built, in windows of three sizes, light and dark, and as it is printed.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

from tests.support.chromium import chromium
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SITE = ROOT / "build" / "site"
SHEET = ROOT / "docs" / "pictures" / "contact-sheet.jpg"
PAGES = {
    "front page": "index.html",
    "gallery": "programs/index.html",
    "a program": "programs/zb_v.html",
    "a guide": "docs/tutorial.html",
    "playground": "playground/index.html#program=zb_v",
    "two programs": "playground/compare.html#1f1b,zb_v",
}
#: Windows, and how wide each is on the sheet.
SIZES = {(1440, 900): 336, (390, 844): 98, (3840, 2160): 300}
_SCHEMES = ("light", "dark")
#: Milliseconds that it takes a page to lay itself out, and at most to fetch and draw its pictures.
_LAYOUT = 1000
_LOADING = 60_000
#: Whether all pictures are drawn that stand in frames of a page, or in frames of these.
_DRAWN = """() => {
    const isDrawn = (page) => [...page.querySelectorAll('iframe')].every(({ contentDocument: inner }) =>
        inner?.querySelector('canvas') || (inner?.querySelector('iframe') && isDrawn(inner)));
    return isDrawn(document);
}"""
_STYLE = """
body { margin: 16px; width: 1690px; background: #8b95a1; color: #10151c; font: 13px sans-serif }
section { margin-bottom: 10px } h2 { margin: 0 0 4px; font-size: 14px }
img { margin-right: 6px; vertical-align: top; border: 1px solid #5b6672 }
"""


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


def write_sheet() -> None:
    """Take all pictures, and write the sheet."""
    handler = partial(_Handler, directory=str(SITE))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium() as browser,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        sections = [
            f"<section><h2>{name}</h2>{''.join(_shots(browser, address + path))}</section>"
            for name, path in PAGES.items()
        ]
        page = browser.new_page(viewport={"width": 1722, "height": 900})
        page.set_content(f"<style>{_STYLE}</style>{''.join(sections)}")
        page.screenshot(path=SHEET, type="jpeg", quality=40, full_page=True)
        server.shutdown()
    print(f"wrote {SHEET.relative_to(ROOT)}, {SHEET.stat().st_size // 1000} kB")


def _shots(browser: Browser, address: str) -> list[str]:
    """A page in all sizes, light and dark, and as it is printed."""
    found = []
    for (width, height), shown in SIZES.items():
        for scheme in _SCHEMES:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            page.goto(address)
            page.wait_for_timeout(_LAYOUT)
            page.wait_for_function(_DRAWN, timeout=_LOADING)
            page.wait_for_timeout(_LAYOUT)
            found.append(_image(page.screenshot(type="jpeg", quality=70), shown))
            if (width, height) == (1440, 900) and scheme == "dark":
                # Browsers print in the light scheme, whatever the screen has.
                page.emulate_media(media="print", color_scheme="light")
                page.set_viewport_size({"width": 760, "height": 1075})
                page.wait_for_timeout(_LAYOUT)
                found.append(_image(page.screenshot(type="jpeg", quality=70), 150))
            page.close()
    return found


def _image(picture: bytes, width: int) -> str:
    data = b64encode(picture).decode()
    return f'<img width="{width}" src="data:image/jpeg;base64,{data}">'


if __name__ == "__main__":
    sys.exit(write_sheet())
