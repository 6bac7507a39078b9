"""What `schedc view` writes, in a real headless Chromium: `make test-browser`. It prints the times
to first paint, for a frame when the pointer moves, for a key, and of frames while a wheel zooms
and moves.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from socket import socket
from statistics import median
from time import sleep
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree

import pytest

import schedlang
from schedlang import Costs
from schedlang.cli.main import main
from tests.support.chromium import chromium, violations
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.recorded import recorded_as

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        CDPSession,
        ConsoleMessage,
        Locator,
        Page,
        Route,
    )

pytestmark = pytest.mark.browser

#: Time in pixels: where a page 1280 wide has it (timeline.js).
LEFT = 62
RIGHT = 74
AXIS = 22
SECOND = 1000
SVG = "{http://www.w3.org/2000/svg}"
#: The components of layers of experts.
EXPERTS = {
    "F": [
        "attention 1 compute",
        "dispatch 1 all_to_all",
        "mlp 1 compute",
        "combine 1 all_to_all",
    ],
    "B": [
        "combine 1 all_to_all",
        "mlp 2 compute",
        "dispatch 1 all_to_all",
        "attention 2 compute",
    ],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


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
        lambda request: (
            None
            if request.url.startswith(("file:", "about:"))
            else heard.append(request.url)
        ),
    )
    yield opened
    opened.close()
    assert heard == []


def view(page: Page, directory: Path, *arguments: str) -> None:
    """Write a page with the command and open it."""
    path = directory / "view.html"
    assert main(["view", *arguments, "-o", str(path)]) == 0
    page.goto(path.as_uri())
    page.wait_for_function(
        "performance.getEntriesByName('first-contentful-paint').length"
        " && performance.getEntriesByName('drawn').length"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_cell_of_a_notebook(
    page: Page, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    """The page of a plan in its frame: it draws, light or dark, and answers keys, though it has no
    address of its own.
    """
    from schedlang import load

    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><body>{load('chimera')._repr_html_()}</body>")
    page.emulate_media(color_scheme=scheme)
    page.goto(cell.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("canvas").first.wait_for()
    # In a small frame they are folded away.
    frame.get_by_role("button", name="controls and legend").click()
    frame.get_by_text("d is down, u is up").wait_for()
    colour = frame.locator("body").evaluate(
        "(body) => getComputedStyle(body).backgroundColor"
    )
    red = int(re.findall(r"\d+", colour)[0])
    assert (red < 80) == (scheme == "dark")
    before = frame.locator("#range").text_content()
    frame.locator("#in").click()
    page.wait_for_timeout(200)
    assert frame.locator("#range").text_content() != before


def program(name: str) -> str:
    return str(PROGRAMS / f"{name}.sched")


def canvas_of(page: Page, panel: int = 0) -> Locator:
    """The canvas that listens to the pointer; below it lies that of the rows."""
    return page.get_by_role("application").nth(panel)


def point(page: Page, time: float, rank: int, panel: int = 0) -> tuple[float, float]:
    """Where the page has a time on a rank, by the range of time and the pitch of the rows that it
    shows.
    """
    box = canvas_of(page, panel).bounding_box()
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
    parts = page.evaluate(
        script, [b64encode(page.screenshot()).decode(), round(x), round(y)]
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def test_components_have_a_lane_for_each_resource(page: Page, tmp_path: Path) -> None:
    """Below the row of each rank, each in the colour of its op, which the pointer finds."""
    (tmp_path / "costs.json").write_text(json.dumps({"components": EXPERTS}))
    costs = tmp_path / "costs.json"
    view(page, tmp_path, program("dualpipe"), "-p", "ranks=4", "--costs", str(costs))
    assert page.evaluate("timelines[0].schedule.resources") == ["compute", "all_to_all"]
    # Rank 0 begins with a forward: attention, dispatch, experts, combine, each a quarter of 1.
    top, below = page.evaluate("[timelines[0].laneTop(0), timelines[0].laneTop(1)]")
    blue = colour(page, 0.1, 0)
    assert colour(page, 0.1, 0, below=top + 3) == blue
    assert colour(page, 0.35, 0, below=below + 3) == blue
    assert colour(page, 0.35, 0, below=top + 3) != blue
    x, y = point(page, 0.35, 0)
    page.mouse.move(x, y - 8 + below + 3)
    tip = page.locator("#tip").inner_text()
    assert "forward\non all_to_all: 0.25 to 0.5, takes 0.25\n" in tip
    page.mouse.move(x, y - 8 + top + 3)
    assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [
        ("1f1b", {"ranks": 4, "microbatches": 8}, 64),
        ("interleaved_1f1b", {"ranks": 64, "microbatches": 512, "chunks": 4}, 262_144),
    ],
)
def test_times(
    page: Page, tmp_path: Path, name: str, sizes: dict[str, int], count: int
) -> None:
    """Of a small page, and of one with a quarter of a million ops, in wall-clock and in processor
    time of the page: what it may take is judged on a machine without other work.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    view(
        page,
        tmp_path,
        program(name),
        *(f"-p{key}={value}" for key, value in sizes.items()),
    )
    size = (tmp_path / "view.html").stat().st_size / 1e6
    assert size < 4
    assert page.evaluate("timelines[0].schedule.count") == count
    first, drawn = page.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0],"
        " performance.getEntriesByName('drawn')[0]].map((entry) => entry.startTime)"
    )
    title = " x ".join(map(str, sizes.values()))
    print(
        f"{title}: first paint {first:.0f} ms, all drawn {drawn:.0f} ms, of which"
        f" {processor_time(session):.0f} ms of processor time; {size:.2f} MB"
    )
    hovers = page.evaluate(TIMED, ["hover", 60])
    keys = page.evaluate(TIMED, ["key", 20])
    print(
        f"{title}: {hovers[0]:.1f} ms for a hover (the slowest of 60: {hovers[1]:.1f} ms)"
    )
    print(f"{title}: {keys[0]:.1f} ms for a key (the slowest of 20: {keys[1]:.1f} ms)")
    for gesture, part in (("zoom", 1), ("move", 1), ("move", 16), ("move", 64)):
        begun = processor_time(session)
        frames = page.evaluate(FRAMES, [gesture, part, 120])
        spent = (processor_time(session) - begun) / 120
        print(
            f"{title}: {gesture} in 1/{part} of all time: a frame each {median(frames):.1f} ms,"
            f" {sum(frame < 20 for frame in frames)} of {len(frames)} within 20 ms;"
            f" {spent:.1f} ms of processor time each"
        )


def processor_time(session: CDPSession) -> float:
    """The milliseconds that the page's thread has worked."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    (busy,) = (each["value"] for each in metrics if each["name"] == "TaskDuration")
    return float(busy) * SECOND


#: The times between frames while a wheel zooms in and out, or moves to the right and back in a part
#: of the schedule's time: once for each frame.
FRAMES = """async ([gesture, part, count]) => {
    const [{ over }] = timelines, { left, top, width, height } = over.getBoundingClientRect();
    const next = () => new Promise(requestAnimationFrame), stamps = [];
    show(all.from + (all.to - all.from) * (1 - 1 / part) / 2, all.to - (all.to - all.from) * (1 - 1 / part) / 2);
    for (let turn = 0; turn <= count; turn++) {
        stamps.push(await next());
        const way = turn < count / 2 ? 1 : -1, at = { clientX: left + width / 2, clientY: top + height / 2, cancelable: true };
        const turned = gesture === 'zoom' ? { ctrlKey: true, deltaY: -50 * way } : { deltaX: 40 * way };
        over.dispatchEvent(new WheelEvent('wheel', { ...at, ...turned }));
    }
    return stamps.slice(1).map((stamp, at) => stamp - stamps[at]);
}"""


#: The median and the most of the times in milliseconds that the page takes to draw, when the
#: pointer moves, or when a key zooms.
TIMED = """([what, count]) => {
    const [timeline] = timelines, times = [];
    timeline.schedule.usersOf(0);
    for (let turn = 0; turn < count; turn++) {
        const begun = performance.now();
        if (what === 'hover') {
            const x = 70 + turn * 18, y = 30 + turn * 37 % (timeline.height - 40);
            point(timeline, timeline.at(x, y), x, y);
            timeline.drawOver();
        } else {
            zoom(turn < count / 2 ? 0.7 : 1 / 0.7);
            drawAll();
        }
        times.push(performance.now() - begun);
    }
    times.sort((a, b) => a - b);
    return [times[count >> 1], times.at(-1)];
}"""


def test_a_hover_leaves_the_rows_as_they_are(page: Page, tmp_path: Path) -> None:
    """Only the canvas above them is drawn, so that it costs as much for a large schedule."""
    view(page, tmp_path, program("1f1b"))
    page.evaluate(
        "(() => { timelines[0].drawn = 0; const draw = Timeline.prototype.draw;"
        "Timeline.prototype.draw = function () { this.drawn++; draw.call(this); }; })()"
    )
    hover(page, 9, 1)
    hover(page, 6, 1)
    page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    assert page.evaluate("timelines[0].drawn") == 0


def test_hover(page: Page, tmp_path: Path) -> None:
    """1F1B's B0 of rank 1 runs from 8 to 10 (README)."""
    view(page, tmp_path, program("1f1b"))
    text = hover(page, 9, 1)
    assert text.splitlines()[0] == "1B0 backward"
    assert "stage 1, chunk 0 of rank 1, microbatch 0" in text
    assert "8 to 10, takes 2; memory 3 held as it starts" in text
    assert "1f1b.sched:9  for m in warmup .. microbatches" in text
    # It needs its own forward and the backward of the stage after, and the backward of the stage
    # before needs it.
    words = page.evaluate(
        "(() => { const { schedule, pointed: { box } } = timelines[0];"
        "const words = (boxes) => Array.from(boxes, (each) => schedule.word(each));"
        "return [words(schedule.makersOf(box)).sort(), words(schedule.usersOf(box))]; })()"
    )
    assert words == [["1F0", "2B0"], ["0B0"]]


def test_ops_that_run_as_one_share_a_box(page: Page, tmp_path: Path) -> None:
    """The forward above, the backward below it, each as long as both, and each with its own tip."""
    view(page, tmp_path, program("dualpipe"), "-p", "ranks=4")
    height = page.evaluate("timelines[0].barHeight")
    assert colour(page, 7.2, 0, below=4) == "#97d0f1"
    assert colour(page, 9.8, 0, below=4) == "#97d0f1"
    assert colour(page, 7.2, 0, below=height - 4) == "#07492c"
    assert colour(page, 9.8, 0, below=height - 4) == "#07492c"
    tips = []
    for below in (4, height - 4):
        x, y = point(page, 8.6, 0)
        page.mouse.move(x, y - 8 + below)
        tips.append(page.locator("#tip").inner_text())
    assert tips[0].startswith("down(0)F3 forward\n")
    assert tips[1].startswith("up(3)B1 backward\n")
    for tip, other in zip(tips, ("up(3)B1", "down(0)F3"), strict=True):
        assert "7 to 10, takes 3; " in tip
        assert f"runs as one with {other}" in tip


def test_idle_time_says_its_cause(page: Page, tmp_path: Path) -> None:
    """Rank 0 waits from 4 to 10 for B0, which comes from rank to rank: at 5, rank 3 runs it."""
    view(page, tmp_path, program("1f1b"))
    *lines, held = hover(page, 5, 0).splitlines()
    assert lines == [
        "idle: memory",
        "a later op could run here, but the rank would hold more than its peak",
        "rank 0, 4 to 6, takes 2",
        "rank 0 waits for 0B0, which needs 1B0 of rank 1",
        "rank 1 waits for 1B0, which needs 2B0 of rank 2",
        "rank 2 waits for 2B0, which needs 3B0 of rank 3",
        "rank 3 runs 3B0 until 6",
    ]
    assert held.startswith("rank 0 holds 4 activations at 5")
    view(page, tmp_path, program("1f1b"), "--p2p-time", "1")
    text = hover(page, 1.5, 1)
    assert "idle: transfer, rank 0 to rank 1" in text
    assert "0F0 ended at 1: its result is on its way, or held back" in text


@pytest.mark.parametrize(
    "name", ["1f1b", "zb_v", "dualpipe", "pipe_offload", "chimera"]
)
def test_chains_end_where_the_compiler_says(
    page: Page, tmp_path: Path, name: str
) -> None:
    """The page follows waits from op to op; the last one runs, or has run, and is that which the
    compiler has found behind the idle time.
    """
    view(page, tmp_path, program(name), "--p2p-time", "0.3", "--forward-times", "1.25")
    wrong = page.evaluate("""(() => {
        const { schedule } = timelines[0], wrong = [];
        schedule.idleRows.forEach(({ first, stop }, rank) => {
            for (let part = first; part < stop; part++) {
                const time = (schedule.idleStart[part] + schedule.idleEnd[part]) / 2;
                const { maker } = schedule.chain(rank, time).at(-1);
                const running = maker < 0 ? undefined : schedule.boxAt(schedule.ops[schedule.rank[maker]], time);
                const end = maker < 0 || schedule.boxEnd[maker] <= time || running === undefined ? maker : running;
                const heads = [end, schedule.behind[part]].map((box) => box < 0 ? box : box - schedule.part[box]);
                if (maker >= 0 && heads[0] !== heads[1]) wrong.push([rank, time, ...heads.map((box) => schedule.word(box))]);
            }
        });
        return wrong;
    })()""")
    assert wrong == []


def test_colours(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    assert colour(page, 0.2, 0) == "#97d0f1"
    assert colour(page, 10.2, 0) == "#317e42"
    page.get_by_label("causes of idle time").uncheck()
    page.wait_for_function("!view.causes")
    assert colour(page, 6, 0) == "#ffffff"


def test_dark_mode(page: Page, tmp_path: Path) -> None:
    page.emulate_media(color_scheme="dark")
    view(page, tmp_path, program("1f1b"))
    page.get_by_label("causes of idle time").uncheck()
    page.wait_for_function("!view.causes")
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
    assert (
        page.locator("#flight").inner_text() == "2: 2 to 18, 3 in flight as it starts"
    )
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
    assert page.get_by_role("application").count() == 2
    assert shown_range(page) == (0, 33)
    assert hover(page, 9, 1, panel=0).splitlines()[0] == "1B0 backward"
    assert hover(page, 6.5, 1, panel=1).splitlines()[0] == "1I0 input gradient"
    boxes = [canvas_of(page, panel).bounding_box() for panel in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.get_by_role("button", name="one above the other").click()
    page.wait_for_function("timelines[1].over.getBoundingClientRect().x < 100")
    assert hover(page, 6.5, 1, panel=1).splitlines()[0] == "1I0 input gradient"
    page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 33")
    assert page.evaluate(
        "timelines.map((each) => each.scale)[0] === timelines[1].scale"
    )


def test_stages_take_their_share_of_the_model(page: Page, tmp_path: Path) -> None:
    """A stage of eight is half of one of four: on the common axis its ops take half as long, which the
    title and the axis say.
    """
    view(page, tmp_path, program("zb_h1"), program("zb_v"))
    assert shown_range(page) == (0, 27)
    assert page.evaluate("timelines[0].scale === timelines[1].scale")
    assert "0 to 0.5, takes 0.5" in hover(page, 0.2, 0, panel=1)
    titles = page.locator("h2").all_inner_texts()
    assert "makespan 27, 11.1% idle; a stage is 1/4 of the model" in titles[0]
    share = "a stage is 1/8 of the model and takes 1/2 of the time of 1/4"
    assert f"makespan 25.5, 5.9% idle; {share}" in titles[1]
    assert (
        page.evaluate("timelines.map((each) => each.schedule.unitText)")
        == ["of 1/4 model"] * 2
    )
    view(page, tmp_path, program("zb_h1"), program("zb_v"), "--unit", "stage")
    assert shown_range(page) == (0, 51)
    assert "of the model" not in page.locator("h2").last.inner_text()


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
    # All are in sight, until rows are made higher.
    assert page.evaluate("timelines[0].shown()") == {"first": 0, "stop": 64}
    assert page.evaluate(
        "timelines[0].scroll.scrollHeight <= timelines[0].scroll.clientHeight"
    )
    # Low rows are mixtures: of forwards alone in the warm-up, and then of two colours.
    assert colour(page, 20, 0, below=3) == "#97d0f1"
    mixed = colour(page, 800, 40, below=3)
    assert "#317e42" < mixed < "#97d0f1"
    # Where forwards and backwards alternate, faster than pixels do, no stripes are seen.
    greens = page.evaluate(
        "(() => { const { canvas } = timelines[0];"
        "const { data } = canvas.getContext('2d').getImageData(timelines[0].x(700), timelines[0].y(40) + 3, 100, 1);"
        "return [...data].filter((_, at) => at % 4 === 1); })()"
    )
    assert max(greens) - min(greens) < 20
    for _ in range(4):
        page.get_by_role("button", name="higher rows").click()
    page.wait_for_function("timelines[0].pitch > 30")
    page.mouse.move(*point(page, 800, 5))
    page.mouse.wheel(0, 100_000)
    page.wait_for_function("timelines[0].scroll.scrollTop > 0")
    page.wait_for_function(
        "timelines[0].at(600, timelines[0].height - 20) !== undefined"
    )
    last = page.evaluate("timelines[0].at(600, timelines[0].height - 20).rank")
    assert last == 63
    page.evaluate("show(800, 812)")
    page.wait_for_function(
        "document.getElementById('range').textContent === '800 to 812'"
    )
    canvas = canvas_of(page).bounding_box()
    assert canvas
    top = page.evaluate("timelines[0].y(63) + 5")
    page.mouse.move(canvas["x"] + 600, canvas["y"] + top)
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
    page.get_by_label("critical path").check()
    texts = page.evaluate("""(() => {
        const [timeline] = timelines, { schedule } = timeline, texts = [];
        for (let box = 0; box < schedule.count; box++) {
            texts.push(schedule.describe(box).join(' '));
            timeline.pointed = { box, rank: schedule.rank[box], time: schedule.start[box] };
            timeline.drawOver();
        }
        schedule.idleRows.forEach(({ first, stop }, rank) => {
            for (let idle = first; idle < stop; idle++) {
                const time = schedule.idleStart[idle];
                texts.push(schedule.describeIdle(idle, time).join(' '));
                timeline.pointed = { idle, rank, time };
                timeline.drawOver();
            }
        });
        return texts;
    })()""")
    assert texts
    assert not [text for text in texts if "undefined" in text or "NaN" in text]


def test_memory_is_steps_on_one_scale(page: Page, tmp_path: Path) -> None:
    """A curve that rises and falls at one time is drawn as steps, and as high in either panel."""
    view(page, tmp_path, program("1f1b_recompute"), program("1f1b"))
    points = page.evaluate("""(() => {
        const [timeline] = timelines, points = [];
        timeline.pen = new Proxy({}, { get: (_, name) => (...to) => { if (name.endsWith('To')) points.push(to); }, set: () => true });
        timeline.drawMemory(0, 0);
        return points;
    })()""")
    assert len(points) > 10
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))
    assert page.evaluate("timelines[0].mostMemory === timelines[1].mostMemory")
    x, y = point(page, 5, 0)
    page.mouse.move(x, y + page.evaluate("timelines[0].memoryTop"))
    assert "its peak is" in page.locator("#tip").inner_text()


def test_keys(page: Page, tmp_path: Path) -> None:
    """The arrows go from op to op, idle time included, and to other ranks; Escape lets go."""
    view(page, tmp_path, program("1f1b"))
    canvas_of(page).focus()

    def pressed(key: str) -> str:
        page.keyboard.press(key)
        return page.locator("#tip b").inner_text()

    assert pressed("ArrowRight") == "0F0 forward"
    assert pressed("ArrowRight") == "0F1 forward"
    assert page.locator("#said").inner_text().startswith("0F1 forward. stage 0")
    assert pressed("ArrowDown") == "1F0 forward"
    assert pressed("ArrowLeft") == "idle: fill"
    assert pressed("ArrowUp") == "0F0 forward"
    page.keyboard.press("Enter")
    assert page.locator("#flight").inner_text().startswith("0: ")
    # What is pointed at stays so when the view changes.
    page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 33")
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#flight").inner_text() == "all"


def test_the_tip_follows_a_zoom_by_keys(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    before = hover(page, 3.5, 3)
    page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 33")
    time = page.evaluate("timelines[0].pointed.time")
    assert page.locator("#tip").inner_text() != before
    assert time != pytest.approx(3.5, abs=0.5)


def test_the_address_has_what_is_seen(
    browser: Browser, page: Page, tmp_path: Path
) -> None:
    view(page, tmp_path, program("1f1b"))
    page.get_by_label("critical path").check()
    page.locator("#microbatch").fill("2")
    page.evaluate("show(4, 12)")
    page.wait_for_function("location.hash.includes('from=4')")
    address = page.evaluate("location.href")
    other = browser.new_page(viewport=page.viewport_size)
    other.goto(address)
    other.wait_for_function("performance.getEntriesByName('drawn').length")
    assert shown_range(other) == (4, 12)
    assert other.get_by_label("critical path").is_checked()
    assert other.locator("#flight").inner_text().startswith("1: ")
    other.close()


def test_what_is_seen_can_be_saved(page: Page, tmp_path: Path) -> None:
    """An SVG that is whole, with the titles, the numbers and the legend of the page; and a PNG."""
    view(page, tmp_path, program("1f1b"), program("zb_h1"))
    for name in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name, exact=True).click()
        download.value.save_as(tmp_path / f"saved.{name.lower()}")
    root = ElementTree.parse(tmp_path / "saved.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert (
        "one_f_one_b (ranks = 4, microbatches = 8): makespan 33, 27.3% idle; ops only here: 32, moved: 0"
        in texts
    )
    assert {"rank 0", "7", "forward", "weight gradient"} <= set(texts)
    sizes = [float(text.attrib["font-size"]) for text in root.iter(f"{SVG}text")]
    assert 8 <= min(sizes) <= max(sizes) <= 13
    assert (tmp_path / "saved.png").read_bytes().startswith(b"\x89PNG")


def test_more_than_two_stand_in_a_column(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, *map(program, ("gpipe", "1f1b", "zb_h1", "zb_v")))
    tops = page.evaluate(
        "timelines.map((each) => each.over.getBoundingClientRect().top)"
    )
    assert len(tops) == 4
    assert tops == sorted(set(tops))
    assert page.evaluate("Math.min(...timelines.map((each) => each.height))") > 60
    # None is out of sight.
    assert (
        page.evaluate(
            "Math.max(...timelines.map((each) => each.section.getBoundingClientRect().bottom))"
        )
        <= 800
    )


def test_a_run_stands_beside_its_prediction(page: Page, tmp_path: Path) -> None:
    """Rank 2 is twice as slow in the forward as predicted: in colour, op by op, and in words."""
    plan = schedlang.load("1f1b")
    took = Costs(forward_times=[1000, 1000, 2000, 1000], backward_times=[2000])
    run = recorded_as(tmp_path / "run.json", plan, took, took)
    given = ["--forward-times", "1000", "--backward-times", "2000"]
    view(page, tmp_path, program("1f1b"), str(run), *given)
    titles = page.locator("h2").all_inner_texts()
    assert "predicted" in titles[0]
    assert "measured" in titles[1]
    assert not any("moved" in title for title in titles)
    notes = page.locator(".notes").inner_text().splitlines()
    assert notes[0] == "rank 2 works 8 ms longer than predicted (+33%)"
    assert any(note.startswith("slow: stage 2 on rank 2") for note in notes)
    # Of rank 2 the second forward, which was predicted from 3 to 4.
    start = page.evaluate("""(() => {
        const [, { schedule }] = timelines, box = schedule.ops[2].first + 1;
        return (schedule.start[box] + schedule.end[box]) / 2;
    })()""")
    x, y = page.evaluate(
        f"[timelines[1].over.getBoundingClientRect().x + timelines[1].x({start}),"
        " timelines[1].over.getBoundingClientRect().y + timelines[1].y(2) + 8]"
    )
    page.mouse.move(x, y)
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("2F1 forward")
    assert "predicted 3 ms to 4 ms, takes 1 ms; the run took +100%" in tip
    # The same op is marked in the prediction, at its own time.
    word = page.evaluate(
        "(() => { const { linked, schedule } = timelines[0];"
        "return [schedule.word(linked.box), linked.time]; })()"
    )
    assert word == ["2F1", pytest.approx(start, rel=0.1)]
    fills = "timelines.map((each) => each.fill(each.schedule.ops[2].first + 1))"
    assert page.evaluate(fills) == ["#97d0f1", "#b2182b"]
    assert "over 1.5 times the predicted time" in page.locator("#legend").inner_text()
    page.get_by_label("measured over predicted").uncheck()
    assert page.evaluate(fills) == ["#97d0f1", "#97d0f1"]
    page.get_by_text("error by kind and rank").click()
    rows = page.locator("tr:visible").all_inner_texts()
    assert "forward, all ranks\t32 ms\t40 ms\t+25%" in rows
    assert any(row.startswith("rank 2\t24 ms\t32 ms\t+33%\t") for row in rows)
    assert any(row.startswith("makespan\t33 ms\t") for row in rows)
    assert violations(page) == []


def test_late_messages_explain_a_run(page: Page, tmp_path: Path) -> None:
    plan = schedlang.load("1f1b")
    took = Costs(forward_times=[1000], backward_times=[2000], p2p_time=500)
    run = recorded_as(tmp_path / "run.json", plan, took, took)
    view(page, tmp_path, program("1f1b"), str(run))
    (note,) = page.locator(".notes li").all_inner_texts()
    # Of its eight backwards, one is there when rank 0 comes to it; the others are half a
    # millisecond on their way while it waits.
    assert note == "messages to rank 0 come 3.5 ms later than predicted, added up"
    assert page.evaluate("timelines[1].errorOf(0)") == 2


#: The controls that are less than 32 pixels high or wide.
SMALL = """[...document.querySelectorAll('button, input, select, summary')]
    .filter((each) => each.checkVisibility())
    .map((each) => [each.id || each.outerHTML, each.getBoundingClientRect()])
    .filter(([, { width, height }]) => width < 32 || height < 32).map(([name]) => name)"""


@pytest.fixture
def phone(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Two schedules on a phone."""
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True
    )
    page = context.new_page()
    page.set_default_timeout(30 * SECOND)
    view(page, tmp_path, program("zb_h1"), program("zb_v"))
    yield page
    context.close()


def touch(session: CDPSession, kind: str, *points: tuple[float, float]) -> None:
    """Fingers on the screen: they come, move or go."""
    at = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(points)]
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})


def test_a_tap_is_a_click(phone: Page) -> None:
    """It says what is there, as long as nothing else is tapped, and follows its microbatch."""
    canvas = canvas_of(phone).bounding_box()
    assert canvas
    x, y = phone.evaluate("[timelines[0].x(2.5), timelines[0].y(0) + 8]")
    phone.touchscreen.tap(canvas["x"] + x, canvas["y"] + y)
    tip = phone.locator("#tip")
    assert tip.inner_text().startswith("0F2 forward")
    assert phone.locator("#flight").text_content().startswith("2: 2 to ")
    box = tip.bounding_box()
    assert box
    assert box["y"] + box["height"] <= 844
    x = phone.evaluate("timelines[0].x(5)")
    phone.touchscreen.tap(canvas["x"] + x, canvas["y"] + y)
    assert tip.inner_text().startswith("idle: ")
    assert phone.locator("#flight").text_content() == "all"


def test_two_fingers_zoom_and_one_scrolls(phone: Page) -> None:
    canvas = canvas_of(phone).bounding_box()
    assert canvas
    middle, y = canvas["x"] + canvas["width"] / 2, canvas["y"] + 60
    time = phone.evaluate(f"timelines[0].time({canvas['width'] / 2})")
    screen = phone.context.new_cdp_session(phone)
    touch(screen, "touchStart", (middle - 40, y))
    touch(screen, "touchStart", (middle - 40, y), (middle + 40, y))
    touch(screen, "touchMove", (middle - 80, y), (middle + 80, y))
    phone.wait_for_function("view.to - view.from < 20")
    start, end = phone.evaluate("[view.from, view.to]")
    assert end - start == pytest.approx(13.5, rel=0.1)
    now = phone.evaluate(f"timelines[0].time({canvas['width'] / 2})")
    assert now == pytest.approx(time, abs=0.3)
    touch(screen, "touchEnd")
    # Sideways, a finger moves the picture in time.
    touch(screen, "touchStart", (middle, y))
    touch(screen, "touchMove", (middle - 60, y))
    touch(screen, "touchMove", (middle - 80, y))
    touch(screen, "touchEnd")
    phone.wait_for_function(f"view.from > {start + 1}")
    # Up and down, it scrolls the page, if there is more of it.
    phone.set_viewport_size({"width": 390, "height": 560})
    for kind, at in [
        ("touchStart", 400),
        *(("touchMove", y) for y in range(380, 180, -20)),
    ]:
        touch(screen, kind, (middle, at))
        phone.wait_for_timeout(SECOND / 50)
    touch(screen, "touchEnd")
    phone.wait_for_function("scrollY > 100")
    assert phone.locator("#tip").is_hidden()


def test_a_phone_has_room(phone: Page) -> None:
    """Schedules stand below each other, controls are folded away, and nothing is too wide."""
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [canvas_of(phone, panel).bounding_box() for panel in (0, 1)]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert not phone.locator("#in").is_visible()
    assert phone.evaluate(SMALL) == []
    phone.get_by_role("button", name="controls and legend").click()
    assert phone.locator("#in").is_visible()
    assert phone.evaluate(SMALL) == []
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(phone) == []


def test_nothing_moves_with_a_click(page: Page, tmp_path: Path) -> None:
    """Neither the bar of controls nor the picture below it; what is said stands beside the rows."""
    view(page, tmp_path, program("zb_h1"), program("zb_v"))

    def places() -> list[float]:
        found: list[float] = page.evaluate(
            "[document.querySelector('header').offsetHeight, ...timelines.flatMap((each) => {"
            "const { x, y, width, height } = each.over.getBoundingClientRect();"
            "return [x, y, width, height]; })]"
        )
        return found

    before = places()
    # Ranks of both stand on one line, however long the titles are.
    assert before[2] == before[6]
    hover(page, 2.5, 0)
    page.mouse.click(*point(page, 2.5, 0))
    assert "in flight as it starts" in page.locator("#flight").inner_text()
    page.get_by_label("critical path").check()
    page.get_by_label("causes of idle time").uncheck()
    page.evaluate("show(3.123456, 4.123456)")
    page.wait_for_function("view.to < 5")
    assert places() == before
    tip = page.locator("#tip").bounding_box()
    canvas = canvas_of(page, 1).bounding_box()
    assert tip is None or (canvas and tip["x"] >= canvas["x"] + canvas["width"])
    assert page.evaluate(SMALL) == []


def test_rows_and_letters_grow_with_the_window(
    browser: Browser, page: Page, tmp_path: Path
) -> None:
    view(page, tmp_path, program("1f1b"))
    small = page.evaluate("timelines[0].pitch")
    large = browser.new_page(viewport={"width": 3840, "height": 2160})
    large.goto(page.url)
    large.wait_for_function("performance.getEntriesByName('drawn').length")
    height = large.evaluate("timelines[0].contentHeight")
    assert height > 2160 / 2
    assert large.evaluate("timelines[0].pitch") > 2 * small
    assert large.evaluate("parseFloat(timelines[0].font(12))") > 20
    large.close()


def test_zoom_by_keys_stays_on_the_op(page: Page, tmp_path: Path) -> None:
    view(page, tmp_path, program("1f1b"))
    page.mouse.click(*point(page, 2.5, 0))
    page.mouse.move(1, 1)
    for _ in range(6):
        page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 5")
    start, end = page.evaluate("[view.from, view.to]")
    assert start < 2.5 < end
    page.keyboard.press("0")
    canvas_of(page).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    for _ in range(6):
        page.keyboard.press("w")
    page.wait_for_function("view.to - view.from < 5")
    start, end = page.evaluate("[view.from, view.to]")
    assert start < 2.5 < end


def test_the_legend_is_of_what_is_drawn(page: Page, tmp_path: Path) -> None:
    """Where columns have shares, idle time has no patterns; rows that are low have no memory."""
    patterns = (
        "[...document.querySelectorAll('#legend i')]"
        ".filter((each) => each.style.background.includes('url')).length"
    )
    view(page, tmp_path, program("1f1b"))
    assert page.evaluate(patterns) > 0
    view(page, tmp_path, program("1f1b"), "-p", "ranks=64", "-p", "microbatches=512")
    legend = page.locator("#legend")
    assert page.evaluate(patterns) == 0
    assert "each column: the shares of its time" in legend.inner_text()
    assert "memory: in higher rows" in legend.inner_text()
    page.evaluate("view.rows = 8; show(0, 40)")
    page.wait_for_function(
        "!document.getElementById('legend').textContent.includes('column')"
    )
    assert page.evaluate(patterns) > 0
    assert "memory: in higher rows" not in legend.inner_text()


#: Where the text that goes on longest ends.
WIDEST = (
    "all => Math.max(...all.map((each) => each.getBBox().x + each.getBBox().width))"
)


def test_patterns_stand_in_for_letters(page: Page, tmp_path: Path) -> None:
    """Halves of backwards have theirs, and the legend too, once some box has no room for its letter."""
    view(page, tmp_path, program("zb_h1"))
    page.get_by_label("causes of idle time").uncheck()
    patterns = (
        "[...document.querySelectorAll('#legend span')]"
        ".filter((each) => each.innerHTML.includes('url')).map((each) => each.textContent)"
    )
    assert page.evaluate(patterns) == []
    view(page, tmp_path, program("zb_h1"), "-p", "microbatches=32")
    page.get_by_label("causes of idle time").uncheck()
    assert page.evaluate(patterns) == ["input gradient", "weight gradient"]
    page.evaluate("show(0, 10)")
    page.wait_for_function(f"!{patterns}.length")


def test_paper_has_what_is_seen_and_nothing_else(page: Page, tmp_path: Path) -> None:
    """What is saved ends below its legend, and what is printed fits on its sheet, in black on white."""
    page.emulate_media(color_scheme="dark")
    view(page, tmp_path, program("1f1b"))
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG", exact=True).click()
    download.value.save_as(tmp_path / "saved.svg")
    root = ElementTree.parse(tmp_path / "saved.svg").getroot()
    last = max(float(text.attrib["y"]) for text in root.iter(f"{SVG}text"))
    assert float(root.attrib["height"]) - last < 30
    # The legend stands right below the last row.
    rows = page.evaluate("timelines[0].contentHeight")
    assert float(root.attrib["height"]) < rows + 26 + 3 * 20
    page.emulate_media(media="print", color_scheme="dark")
    drawing = page.locator("#print svg")
    drawing.wait_for()
    box = drawing.bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1280
    assert not page.locator("header").is_visible()
    assert not page.locator("canvas").first.is_visible()
    assert page.locator("#print svg > rect").first.get_attribute("fill") == "#ffffff"
    assert page.locator("#print text", has_text="rank 3").count() == 1
    # No title is cut.
    assert page.locator("#print text").evaluate_all(WIDEST) <= 1040
    page.emulate_media(media="screen")
    assert page.locator("header").is_visible()
    view(page, tmp_path, program("zb_h1"), program("zb_v"))
    page.emulate_media(media="print")
    page.locator("#print svg").wait_for()
    assert page.locator("#print text").evaluate_all(WIDEST) <= 1040


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(
    page: Page, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    view(page, tmp_path, program("1f1b"), program("zb_h1"))
    hover(page, 5, 0)
    page.locator("summary").first.click()
    assert violations(page) == []


#: What is looked at by eye, since no assertion sees what is ugly.
SHEET = {
    "4 x 8": ("1f1b", ["-pranks=4", "-pmicrobatches=8"], ""),
    "16 x 64, critical path": (
        "zb_h1",
        ["-pranks=16", "-pmicrobatches=64", "--p2p-time=0.3"],
        "#path=1",
    ),
    "64 x 512": ("1f1b", ["-pranks=64", "-pmicrobatches=512"], ""),
    "64 x 512 x 4, higher rows": (
        "interleaved_1f1b",
        ["-pranks=64", "-pmicrobatches=512", "-pchunks=4"],
        "#rows=4&path=1",
    ),
    "two pipelines": ("dualpipe", [], ""),
    "recomputation": ("1f1b_recompute", ["--time-unit=ms"], ""),
}


def test_contact_sheet(page: Page, tmp_path: Path) -> None:
    """Pages of several sizes, light and dark, in build/contact-sheet/index.html."""
    folder = ROOT / "build" / "contact-sheet"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for title, (name, arguments, state) in SHEET.items():
        path = tmp_path / "view.html"
        assert main(["view", program(name), *arguments, "-o", str(path)]) == 0
        rows.append(f"<h2>{title}</h2>")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto("about:blank")
            page.goto(path.as_uri() + state)
            page.wait_for_function("performance.getEntriesByName('drawn').length")
            shot = f"{name}-{len(rows)}-{scheme}.png"
            page.screenshot(path=folder / shot)
            rows.append(f'<img src="{shot}" width="48%" alt="{title}, {scheme}">')
    (folder / "index.html").write_text(
        "<!doctype html><title>Pages</title>" + "\n".join(rows)
    )
    print(f"to be looked at: {folder / 'index.html'}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A program of one's own, and the address at which it is served."""
    path = tmp_path / "mine.sched"
    shutil.copy(program("1f1b"), path)
    command = [sys.executable, "-m", "schedlang", "view", str(path), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            yield path, server.stdout.readline().split()[1]
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


def test_sliders_that_were_not_moved_follow_the_others(
    browser: Browser, served: tuple[Path, str]
) -> None:
    """In this program, the default of one parameter is another one."""
    path, address = served
    shutil.copy(program("interleaved_1f1b"), path)
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("timelines.length && timelines[0].schedule.ranks === 4")
    page.get_by_label("ranks, exactly").fill("2")
    page.wait_for_function("timelines[0].schedule.ranks === 2")
    assert page.get_by_label("group, exactly").input_value() == "2"
    assert page.get_by_label("group, roughly").input_value() == "2"
    page.close()


def test_a_served_page_is_drawn_again(
    browser: Browser, served: tuple[Path, str]
) -> None:
    """When a slider is moved, and when the program is saved: right, wrong, and right again."""
    path, address = served
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("timelines.length && timelines[0].schedule.ranks === 4")
    page.get_by_label("ranks, exactly").fill("6")
    page.wait_for_function("timelines[0].schedule.ranks === 6")
    page.get_by_label("microbatches, roughly").fill("12")
    page.wait_for_function("timelines[0].schedule.flights.length === 12")
    text = path.read_text()
    path.write_text(text.replace("schedule", "shcedule", 1))
    page.get_by_role("alert").get_by_text("error[syntax]").wait_for(timeout=30 * SECOND)
    assert "the last program that was proved" in page.get_by_role("alert").inner_text()
    assert page.evaluate("timelines[0].schedule.ranks") == 6
    path.write_text(text.replace("one_f_one_b", "mine", 1))
    page.get_by_text("mine (ranks = 6, microbatches = 12)").first.wait_for(
        timeout=30 * SECOND
    )
    assert not page.get_by_role("alert").is_visible()
    page.close()


#: Where a served page asks for a program with other parameters.
DATA = re.compile(r"/data\?")


def test_a_served_page_is_grey_until_its_answer(
    browser: Browser, served: tuple[Path, str]
) -> None:
    """From the moment at which a slider is moved; and while its program is wrong, and when nobody
    answers.
    """
    path, address = served
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("timelines.length && timelines[0].schedule.ranks === 4")
    held: list[Route] = []
    page.route(DATA, lambda route: held.append(route))
    page.get_by_label("ranks, exactly").fill("6")
    assert page.locator("#state").inner_text() == "checking …"
    assert is_grey(page)
    # The answer to an older question is nobody's.
    page.get_by_label("ranks, exactly").fill("5")
    while len(held) < 2:
        page.wait_for_timeout(SECOND / 20)
    for route in reversed(held):
        route.continue_()
    page.wait_for_function("timelines[0].schedule.ranks === 5")
    assert not is_grey(page)
    assert page.locator("#state").inner_text() == ""
    page.unroute(DATA)
    path.write_text(path.read_text().replace("schedule", "shcedule", 1))
    page.get_by_role("alert").get_by_text("error[syntax]").wait_for(timeout=30 * SECOND)
    assert is_grey(page)
    page.route(DATA, lambda route: route.abort())
    page.get_by_label("ranks, exactly").fill("4")
    page.get_by_role("alert").get_by_text("nobody answers").wait_for(
        timeout=30 * SECOND
    )
    assert is_grey(page)
    page.close()


def is_grey(page: Page) -> bool:
    """Whether the picture is marked as one of something else."""
    found: bool = page.evaluate(
        "getComputedStyle(document.getElementById('schedules')).filter !== 'none'"
    )
    return found


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
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
        lambda route: (
            route.continue_() if "//127.0.0.1" in route.request.url else route.abort()
        ),
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
        timeout=60 * SECOND
    )
    page.close()
