"""What `schedc view` writes, in a real headless Chromium: `make test-browser`. It prints the times
to first paint.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from time import sleep
from typing import TYPE_CHECKING

import pytest

from schedlang.cli.main import main
from tests.support.paths import GALLERY, PROGRAMS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

pytestmark = pytest.mark.browser

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
#: Time in pixels: where a page 1280 wide has it (timeline.js).
LEFT = 62
RIGHT = 74
AXIS = 22
SECOND = 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Here, because the default run only looks at this file's names: it needs no playwright.
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    assert found, (
        f"no {', '.join(names[:-1])} or {names[-1]} on this machine: install one (Debian: apt install chromium)"
    )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=found, args=ARGUMENTS, timeout=60 * SECOND
        )
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which nothing may be reported: no error, no warning, no message, no request but for
    the file itself.
    """
    heard: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(30 * SECOND)

    def listen(message: ConsoleMessage) -> None:
        heard.append(message.text)

    opened.on("console", listen)
    opened.on("pageerror", lambda error: heard.append(str(error)))
    opened.on(
        "request",
        lambda request: None if request.url.startswith("file:") else heard.append(request.url),
    )
    yield opened
    opened.close()
    assert heard == []


def view(page: Page, directory: Path, *arguments: str) -> None:
    """Write a page with the command and open it."""
    path = directory / "view.html"
    assert main(["view", *arguments, "-o", str(path)]) == 0
    page.goto(path.as_uri())
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")


def program(name: str) -> str:
    return str(PROGRAMS / f"{name}.sched")


def point(page: Page, time: float, rank: int, panel: int = 0) -> tuple[float, float]:
    """Where the page has a time on a rank, by the range of time and the pitch of the rows that it
    shows.
    """
    box = page.locator("canvas").nth(panel).bounding_box()
    assert box
    start, end = shown_range(page)
    pitch = page.evaluate(f"timelines[{panel}].pitch")
    x = box["x"] + LEFT + (time - start) / (end - start) * (box["width"] - LEFT - RIGHT)
    return x, box["y"] + AXIS + rank * pitch + 8


def shown_range(page: Page) -> tuple[float, float]:
    start, end = page.locator("#range").inner_text().split(" to ")
    return float(start), float(end)


def hover(page: Page, time: float, rank: int, panel: int = 0) -> str:
    page.mouse.move(*point(page, time, rank, panel))
    tip = page.locator("#tip")
    return tip.inner_text() if tip.is_visible() else ""


def colour(page: Page, time: float, rank: int, panel: int = 0, below: int = 8) -> str:
    """The colour of a pixel so far below the top of a rank's row, as a screenshot has it."""
    x, y = point(page, time, rank, panel)
    y += below - 8
    script = """async ([png, x, y]) => {
        const image = new Image(); image.src = 'data:image/png;base64,' + png; await image.decode();
        const canvas = Object.assign(document.createElement('canvas'), {width: image.width, height: image.height});
        const paint = canvas.getContext('2d'); paint.drawImage(image, 0, 0);
        return [...paint.getImageData(x, y, 1, 1).data].slice(0, 3);
    }"""
    parts = page.evaluate(script, [b64encode(page.screenshot()).decode(), round(x), round(y)])
    return "#" + "".join(f"{part:02x}" for part in parts)


@pytest.mark.parametrize(("ranks", "microbatches", "limit"), [(4, 8, 2), (64, 512, 5)])
def test_first_paint(page: Page, tmp_path: Path, ranks: int, microbatches: int, limit: int) -> None:
    view(
        page,
        tmp_path,
        program("1f1b"),
        "-p",
        f"ranks={ranks}",
        "-p",
        f"microbatches={microbatches}",
    )
    times = page.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0], performance.getEntriesByName('drawn')[0]]"
        ".map((entry) => entry.startTime)"
    )
    size = (tmp_path / "view.html").stat().st_size / 1e6
    print(
        f"{ranks} x {microbatches}: first paint {times[0]:.0f} ms, all drawn {times[1]:.0f} ms, {size:.2f} MB"
    )
    assert max(times) < limit * SECOND
    assert page.evaluate("timelines[0].count") == 2 * ranks * microbatches
    assert shown_range(page) == (0, 3 * (microbatches + ranks - 1))
    frame = page.evaluate(
        "(() => { const start = performance.now(); drawAll(); return performance.now() - start; })()"
    )
    print(f"{ranks} x {microbatches}: {frame:.1f} ms to draw a frame")
    assert frame < 250


def test_hover(page: Page, tmp_path: Path) -> None:
    """1F1B's B0 of rank 1 runs from 8 to 10 (README)."""
    view(page, tmp_path, program("1f1b"))
    text = hover(page, 9, 1)
    assert text.splitlines()[0] == "1B0 backward"
    assert "stage 1, chunk 0 of rank 1, microbatch 0" in text
    assert "8 to 10, takes 2; memory 3 held as it starts" in text
    assert f"{program('1f1b')}:9  for m in warmup .. microbatches" in text
    # It needs its own forward and the backward of the stage after, and the backward of the stage
    # before needs it.
    words = page.evaluate(
        "(() => { const t = timelines[0], [from, to] = t.schedule.arrows;"
        "return t.arrowsOf(t.hovered).map((arrow) => t.word(from[arrow]) + ' ' + t.word(to[arrow])); })()"
    )
    assert sorted(words) == ["1B0 0B0", "1F0 1B0", "2B0 1B0"]
    assert hover(page, 6, 1) == ""


def test_colours(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    assert colour(page, 0.2, 0) == "#97d0f1"
    assert colour(page, 10.2, 0) == "#317e42"
    assert colour(page, 6, 0) == "#ffffff"


def test_dark_mode(page: Page, tmp_path: Path) -> None:
    page.emulate_media(color_scheme="dark")
    view(page, tmp_path, program("1f1b"))
    assert colour(page, 6, 0) == "#1d232b"
    assert colour(page, 0.2, 0) == "#97d0f1"


def test_zoom_and_move(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    page.mouse.move(*point(page, 10, 2))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    page.wait_for_function("view.to - view.from < 20")
    start, end = shown_range(page)
    assert start < 10 < end
    assert hover(page, 8.5, 2).splitlines()[0] == "2F2 forward"
    page.mouse.down()
    page.mouse.move(point(page, 9.5, 2)[0] + 200, point(page, 9.5, 2)[1], steps=4)
    page.mouse.up()
    moved = shown_range(page)
    assert moved[0] < start
    assert moved[1] - moved[0] == pytest.approx(end - start, abs=1e-3)
    page.keyboard.press("0")
    page.wait_for_function("document.getElementById('range').textContent === '0 to 33'")
    page.keyboard.press("w")
    page.wait_for_function("document.getElementById('range').textContent !== '0 to 33'")
    page.get_by_role("button", name="fit").click()
    page.wait_for_function("document.getElementById('range').textContent === '0 to 33'")


def test_microbatch_in_flight(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    slider = page.locator("#microbatch")
    assert slider.get_attribute("max") == "8"
    slider.fill("3")
    assert page.locator("#flight").inner_text() == "2: 2 to 18, 3 in flight as it starts"
    bright = colour(page, 2.2, 0)
    dim = colour(page, 0.2, 0)
    assert bright == "#97d0f1"
    assert dim != bright
    page.mouse.click(*point(page, 9, 1))
    assert page.locator("#flight").inner_text().startswith("0: ")
    page.mouse.click(*point(page, 6, 1))
    assert page.locator("#flight").inner_text() == "all"


def test_side_by_side(page: Page, tmp_path: Path) -> None:
    """Two schedules on one axis of time: equal times are equally long."""
    view(page, tmp_path, program("1f1b"), program("zb_h1"))
    assert page.locator("canvas").count() == 2
    assert shown_range(page) == (0, 33)
    assert hover(page, 9, 1, panel=0).splitlines()[0] == "1B0 backward"
    assert hover(page, 6.5, 1, panel=1).splitlines()[0] == "1I0 input gradient"
    assert colour(page, 30, 1, panel=1) == "#ffffff"
    boxes = [page.locator("canvas").nth(panel).bounding_box() for panel in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.get_by_role("button", name="one above the other").click()
    page.wait_for_function("document.querySelectorAll('canvas')[1].getBoundingClientRect().x < 100")
    assert hover(page, 6.5, 1, panel=1).splitlines()[0] == "1I0 input gradient"
    page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 33")
    assert page.evaluate("timelines.map((each) => each.scale)[0] === timelines[1].scale")


def test_what_differs_is_marked(page: Page, tmp_path: Path) -> None:
    """A strip along the top of what is only in one, or moved; the tip says where it was."""
    view(page, tmp_path, program("gpipe"), program("1f1b"))
    # Rank 3 of 1F1B has F1 behind B0, which GPipe has behind F0: they are moved, F0 is not.
    assert colour(page, 3.2, 3, panel=1, below=1) == "#97d0f1"
    assert colour(page, 6.2, 3, panel=1, below=1) == "#e06c00"
    assert colour(page, 6.2, 3, panel=1) == "#97d0f1"
    assert "moved: in the other schedule behind 3F0" in hover(page, 6.5, 3, panel=1)
    assert "moved" not in hover(page, 3.5, 3, panel=1)
    page.get_by_label("what differs").uncheck()
    page.wait_for_function("!view.marks")
    assert colour(page, 6.2, 3, panel=1, below=1) == "#97d0f1"
    view(page, tmp_path, program("1f1b"), program("zb_h1"))
    assert colour(page, 10.2, 0, below=1) == "#d0006f"
    assert "only in this schedule" in hover(page, 10.5, 0)
    view(page, tmp_path, program("1f1b"))
    assert not page.get_by_label("what differs").is_visible()


def test_many_ranks_scroll_and_zoom(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"), "-p", "ranks=64", "-p", "microbatches=512")
    page.mouse.move(*point(page, 800, 5))
    page.mouse.wheel(0, 100_000)
    page.wait_for_function("timelines[0].scroll.scrollTop > 0")
    page.wait_for_function("timelines[0].at(600, timelines[0].height - 20) !== undefined")
    last = page.evaluate(
        "(() => { const t = timelines[0]; return t.rank[t.at(600, t.height - 20)]; })()"
    )
    assert last == 63
    page.evaluate("show(800, 812)")
    page.wait_for_function("document.getElementById('range').textContent === '800 to 812'")
    canvas = page.locator("canvas").bounding_box()
    assert canvas
    page.mouse.move(canvas["x"] + 600, canvas["y"] + canvas["height"] - 20)
    assert page.locator("#tip b").inner_text().startswith("63")
    page.locator("#arrows").check()
    page.locator("#memory").uncheck()
    page.wait_for_function("!view.memory && view.arrows")


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_program_is_drawn(page: Page, tmp_path: Path, path: Path) -> None:
    """With all that can be drawn: arrows, a microbatch, the tip of every box."""
    view(page, tmp_path, str(path))
    page.locator("#arrows").check()
    page.locator("#microbatch").fill("1")
    texts = page.evaluate("timelines[0].kind.map((_, box) => timelines[0].describe(box).join(' '))")
    assert texts
    assert not [text for text in texts if "undefined" in text or "NaN" in text]
    page.evaluate(
        "timelines[0].kind.forEach((_, box) => { timelines[0].hovered = box; timelines[0].draw(); })"
    )


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[str]:
    """The address of a Perfetto that shows a trace of ZB-V with slow transfers."""
    trace = tmp_path / "trace.json"
    assert main(["view", program("zb_v"), "--p2p-time", "0.2", "-o", str(trace)]) == 0
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "viztracer.viewer",
        "--server_only",
        "--port",
        str(port),
        str(trace),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def test_perfetto_reads_the_trace(browser: Browser, perfetto: str) -> None:
    """By Perfetto's own query language: all ops, and arrows that join a producer to what needs it
    later.
    """
    page = browser.new_page()
    page.route(
        "**/*",
        lambda route: route.continue_() if "//127.0.0.1" in route.request.url else route.abort(),
    )
    page.goto(perfetto)
    page.get_by_text("rank 3 (stages 3, 4)").wait_for(timeout=60 * SECOND)
    # In its search box, a colon begins a query; the box is then another.
    page.locator("input").first.fill(":")
    box = page.locator(".pf-omnibox--query-mode input")
    box.fill(
        "select (select count(*) from slice) || ' slices, ' || count(*) || ' arrows, '"
        " || sum(made.name || '>' || used.name in ('0F5>1F5', '2I5>1I5')) || ' of two, '"
        " || (select sum(value) from stats where severity = 'error') || ' errors' as found"
        " from flow join slice made on slice_out = made.id join slice used on slice_in = used.id"
        " where used.ts >= made.ts + made.dur and made.track_id != used.track_id"
    )
    box.press("Enter")
    page.get_by_text("192 slices, 96 arrows, 2 of two, 0 errors", exact=True).wait_for(
        timeout=30 * SECOND
    )
    page.close()
