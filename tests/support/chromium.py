"""The Chromium of this machine, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: All that would make the browser look for hosts is off; the sandbox does not work for root, as in
#: containers.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Milliseconds that it may take to start.
_LIMIT = 60_000
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, until the end of the block."""
    # Here, because the default run only looks at the names of tests: it needs no playwright.
    from playwright.sync_api import sync_playwright

    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    assert found, (
        f"no {', '.join(_NAMES[:-1])} or {_NAMES[-1]} on this machine: install one"
        " (Debian: apt install chromium)"
    )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=found, args=ARGUMENTS, timeout=_LIMIT
        )
        yield started
        started.close()


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """What axe-core, which `make test-browser` has npm fetch, finds wrong for readers who do not see
    a page or do not use a pointer: each rule, and the elements that break it.
    """
    axe = ROOT / "build" / "node_modules" / "axe-core" / "axe.min.js"
    assert axe.exists(), "run `make test-browser`, which fetches axe-core"
    page.evaluate(axe.read_text())
    found = page.evaluate("axe.run().then((found) => found.violations)")
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
