"""The site that `make site` has built, and its playground, in a real headless Chromium: `make
test-browser`. It prints the times to first paint, until the compiler is there, and for each key.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import pytest

from schedlang.extras.editor.colours import coloured
from schedlang.extras.editor.playground import answers
from schedlang.files.programs import names, path_of, text_of
from tests.support.chromium import chromium, violations
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route

pytestmark = pytest.mark.browser

SITE = ROOT / "build" / "site"
SECOND = 1000
#: Pages of each kind.
PAGES = [
    "index.html",
    "docs/tutorial.html",
    "docs/clusters.html",
    "docs/proof.html",
    "docs/architecture.html",
    "docs/python.html",
    "docs/reference.html",
    "docs/reports/model-table.html",
    "docs/errors/index.html",
    "docs/errors/deadlock.html",
    "programs/index.html",
    "programs/zb_v.html",
    "playground/compare.html",
]
WRONG = "schedule s { param ranks = 2 param microbatches = 2 rank r { F(next) B(next) B(next) } }"
HANGS = """\
schedule warm {
    param ranks = 2
    param microbatches = 4
    rank r {
        let warmup = r
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
    }
}
"""

#: The controls that are less than 32 pixels high or wide; 1 pixel is for who does not see them.
SMALL = """[...document.querySelectorAll('button, input, select, summary, label[for], [role=button]')]
    .filter((each) => each.checkVisibility({ visibilityProperty: true, opacityProperty: true }))
    .map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
    .filter(([, { width, height }]) => width > 1 && (width < 32 || height < 32)).map(([name]) => name)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert (SITE / "index.html").exists(), "run `make site`, which builds it"
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(SITE))
    ) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page on which nothing may be reported: no error, no warning, and no request to another host
    or for what is not there.
    """
    heard: list[str] = []
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.set_default_timeout(180 * SECOND)

    def listen(message: ConsoleMessage) -> None:
        heard.append(message.text)

    def look(request: Request) -> None:
        if not request.url.startswith(
            (address, "data:", "blob:", "about:", SITE.as_uri())
        ):
            heard.append(request.url)

    opened.on("console", listen)
    opened.on("pageerror", lambda error: heard.append(str(error)))
    opened.on("request", look)
    yield opened
    opened.close()
    assert heard == []


# ----- the pages


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(
    page: Page, address: str, path: str, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(address + path)
    assert violations(page) == []


@pytest.mark.parametrize("path", [*PAGES, "playground/index.html"])
def test_a_phone_has_room(page: Page, address: str, path: str) -> None:
    """No page is wider than the screen, and no control is smaller than a finger."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(address + path)
    page.wait_for_timeout(SECOND)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(SMALL) == []


def test_diagrams_are_drawn(page: Page, address: str) -> None:
    page.goto(address + "docs/proof.html")
    # In its place, with a drawing that nothing outside can look into.
    page.wait_for_selector("div.mermaid")


def test_search_finds_also_from_a_folder(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    # The keys are heard once its scripts have run.
    page.wait_for_timeout(SECOND)
    page.keyboard.press("Control+k")
    page.wait_for_timeout(SECOND)
    page.keyboard.type("deadlock")
    page.get_by_text("Ranks wait for each other in a cycle").first.wait_for(
        timeout=20 * SECOND
    )


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("path", ["index.html", "programs/index.html"])
def test_it_is_there_at_once_and_stays_where_it_is(
    page: Page, address: str, path: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.add_init_script(SHIFTS)
    page.goto(address + path)
    page.wait_for_timeout(4 * SECOND)
    paint = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    shift = page.evaluate("shift")
    print(f"{path}, {width} wide: first paint {paint:.0f} ms, layout shift {shift:.3f}")
    # What Lighthouse calls good.
    assert paint < 1.8 * SECOND
    assert shift < 0.1


#: The sum of all layout shifts, as browsers count them.
SHIFTS = """window.shift = 0; new PerformanceObserver((list) => {
    for (const each of list.getEntries()) if (!each.hadRecentInput) window.shift += each.value;
}).observe({ type: 'layout-shift', buffered: true });"""


def test_the_front_page_has_a_program_that_can_be_changed(
    page: Page, address: str
) -> None:
    page.goto(f"{address}index.html")
    inner = page.frame_locator(".live iframe")
    picture = inner.frame_locator("#picture")
    assert picture.locator("h2").inner_text().startswith("one_f_one_b")
    # The compiler is loaded with the first key, and not by those who only look.
    assert not any("pyodide" in each for each in resources(page))
    inner.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text_of("gpipe"))
    picture.locator("h2").filter(has_text="gpipe").wait_for()
    assert inner.locator("#status").inner_text() in ("proved", "checking …")
    assert any("pyodide" in each for each in resources(page))


def resources(page: Page) -> list[str]:
    """The addresses of all that the page and those in it have loaded."""
    found: list[str] = []
    for frame in page.frames:
        found += frame.evaluate(
            "performance.getEntriesByType('resource').map((each) => each.name)"
        )
    return found


def test_the_gallery_filters_and_compares(page: Page, address: str) -> None:
    page.goto(f"{address}programs/index.html")
    cards = page.locator(".card")
    assert cards.count() == len(names())
    assert page.locator(".card img").evaluate_all(
        "all => all.every((each) => each.getAttribute('src').startsWith('thumbnails/'))"
    )
    families = page.locator(".gallery fieldset label")
    families.filter(has_text="Bidirectional").click()
    shown = page.locator(".card:visible")
    assert 3 <= shown.count() < 12
    assert page.locator("#dualpipe").is_visible()
    page.locator("#dualpipe label").click()
    families.first.click()
    page.locator("#zb_h1 label").click()
    page.get_by_role("link", name="Compare").first.click()
    frame = page.frame_locator("#picture")
    frame.locator("h2").nth(1).wait_for()
    titles = frame.locator("h2").all_text_contents()
    assert {each.partition(" ")[0] for each in titles} == {"dualpipe", "zb_h1"}
    # They cut the model alike, or the axis says in which share of it times are.
    page.select_option("select[name=other]", "zb_v")
    frame.locator("h2").filter(has_text="zb_v").wait_for()
    assert "of the model" in " ".join(frame.locator("h2 small").all_text_contents())


@pytest.mark.parametrize(
    ("query", "program"),
    [("zero bubble", "zb_1p"), ("interleaved", "interleaved_1f1b")],
)
def test_search_finds_programs_by_what_they_are(
    page: Page, address: str, query: str, program: str
) -> None:
    page.goto(f"{address}index.html")
    page.wait_for_timeout(SECOND)
    page.keyboard.press("Control+k")
    page.wait_for_timeout(SECOND)
    page.keyboard.type(query)
    # What is found has the words that were looked for in its address.
    first = page.locator("a[href*='?h=']").first
    first.wait_for(timeout=20 * SECOND)
    page.wait_for_timeout(SECOND)
    assert f"programs/{program}.html" in str(first.get_attribute("href"))


def test_light_and_dark_are_chosen_and_pictures_follow(
    page: Page, address: str
) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}programs/zb_v.html")
    picture = page.locator("img[src$='zb_v.svg']")
    assert brightness(page, picture.screenshot()) > 200
    # From the machine's choice to light, and to dark.
    for _ in range(2):
        page.locator("label[for^=__palette]:visible").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    page.wait_for_timeout(SECOND)
    assert brightness(page, picture.screenshot()) < 110
    page.goto(f"{address}playground/index.html#program=zb_v")
    page.wait_for_timeout(SECOND)
    assert brightness(page, page.screenshot()) < 110


def brightness(page: Page, picture: bytes) -> float:
    """The mean of a picture's pixels, from 0 to 255."""
    script = """async (data) => {
        const image = new Image(); image.src = 'data:image/png;base64,' + data; await image.decode();
        const canvas = Object.assign(document.createElement('canvas'), { width: 64, height: 64 });
        const pen = canvas.getContext('2d'); pen.drawImage(image, 0, 0, 64, 64);
        const { data: pixels } = pen.getImageData(0, 0, 64, 64);
        return pixels.reduce((sum, value, at) => sum + (at % 4 < 3 ? value : 0), 0) / (64 * 64 * 3);
    }"""
    found: float = page.evaluate(script, b64encode(picture).decode())
    return found


def test_links_have_a_title_a_text_and_a_picture(page: Page, address: str) -> None:
    page.goto(f"{address}programs/zb_v.html")
    told = page.locator("meta[property^='og:']").evaluate_all(
        "all => Object.fromEntries(all.map((each) => [each.getAttribute('property'), each.content]))"
    )
    assert told["og:title"].startswith("zb_v")
    assert "next to no idle time" in told["og:description"]
    assert told["og:image"].endswith("assets/card.png")
    assert page.evaluate("fetch('../assets/card.png').then((answer) => answer.ok)")
    assert page.locator(".md-logo img").first.evaluate(
        "(each) => each.naturalWidth > 0"
    )


# ----- the playground


def open_playground(page: Page, address: str, state: str = "") -> None:
    """The playground, with the compiler there and its first answer."""
    page.goto("about:blank")
    page.goto(f"{address}playground/index.html{state}")
    page.wait_for_function("performance.getEntriesByName('ready').length")
    wait_for_answer(page)


def wait_for_answer(page: Page) -> None:
    """All that was asked is answered."""
    page.wait_for_function(
        "document.body.dataset.answered === document.body.dataset.asked"
    )


def write(page: Page, text: str) -> None:
    """Replace the program."""
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)
    wait_for_answer(page)


def verdicts(page: Page) -> list[str]:
    return page.locator("#verdicts td").all_text_contents()


def drawn(page: Page) -> str:
    """The title of the schedule in the picture."""
    return page.frame_locator("#picture").locator("h2").inner_text()


def test_first_paint_and_time_for_a_key(page: Page, address: str) -> None:
    """Of 8 ranks and 32 microbatches: a key, until the last verdict is shown."""
    page.goto(f"{address}playground/index.html")
    page.wait_for_selector("#figures td")
    paint = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    there = page.evaluate("performance.now()")
    page.wait_for_function("performance.getEntriesByName('ready').length")
    ready = page.evaluate("performance.getEntriesByName('ready')[0].startTime")
    for name, value in (("ranks", "8"), ("microbatches", "32")):
        page.locator(f"#parameters input[name={name}]").fill(value)
        wait_for_answer(page)
    assert "ranks = 8, microbatches = 32" in drawn(page)
    page.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    for letter in "# ten keys":
        page.keyboard.type(letter)
        wait_for_answer(page)
    keys: list[list[float]] = []
    for letter in " and on":
        page.evaluate("performance.clearMeasures()")
        page.keyboard.type(letter)
        wait_for_answer(page)
        times = page.evaluate(
            "['drawn', 'answered'].map((name) => performance.getEntriesByName(name)[0].duration)"
        )
        keys.append(times)
    pictures, ends = zip(*keys, strict=True)
    print(
        f"playground: first paint {paint:.0f} ms, first picture and figures {there:.0f} ms, compiler"
        f" there after {ready:.0f} ms; 8 x 32, a key until the picture: {median(pictures):.0f} ms,"
        f" until the last verdict: {median(ends):.0f} ms"
    )


def test_every_program_of_the_gallery(
    page: Page, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One click on its page opens each; in the list on top they are all. Of each the same is said as
    outside of a browser, where numbers are twice as wide.
    """
    # Programs import files by where they stand.
    monkeypatch.chdir(path_of("1f1b").parent)
    open_playground(page, address)
    select = page.locator("#programs")
    assert select.locator("option").evaluate_all(
        "all => all.map((each) => each.value)"
    ) == [
        "",
        *names(),
    ]
    for name in names():
        select.select_option(name)
        wait_for_answer(page)
        assert set(verdicts(page)) == {"proved"}, name
        told = {
            next(iter(answer)): answer
            for answer in map(json.loads, answers(text_of(name), {}))
        }
        assert page.locator("#bubbles").text_content() == told["bubbles"]["bubbles"]
        rows = page.locator("#figures tr").evaluate_all(
            "all => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert rows == told["figures"]["figures"]
    page.goto(f"{address}programs/chimera.html")
    page.get_by_role("link", name="Open it in the playground").click()
    page.wait_for_function("document.body.dataset.asked")
    wait_for_answer(page)
    assert select.input_value() == "chimera"
    assert drawn(page).startswith("chimera")


def test_a_program_of_the_gallery_is_there_before_the_compiler(
    page: Page, address: str
) -> None:
    held: list[Route] = []
    page.route("**/wheels.json", lambda route: held.append(route))
    page.goto(f"{address}playground/index.html#program=zb_v")
    page.wait_for_function("document.querySelectorAll('#verdicts td').length")
    assert drawn(page).startswith("zb_v")
    page.locator("#programs").select_option("gpipe")
    page.wait_for_function(
        "document.querySelector('#bubbles').textContent.startsWith('gpipe')"
    )
    assert set(verdicts(page)) == {"proved"}
    assert page.locator("#status").inner_text() == "loading the compiler …"
    assert green(page) == []
    held[0].continue_()
    wait_for_answer(page)
    assert page.locator("#status").inner_text() == "proved"
    assert {"proved"} == set(green(page))


#: The texts of all elements that are in the colour of what is right.
GREEN = """(() => {
    const good = document.createElement('i');
    good.style.color = 'var(--good)';
    document.body.append(good);
    const colour = getComputedStyle(good).color;
    good.remove();
    const leaves = [...document.querySelectorAll('body *')].filter((each) => !each.children.length);
    return leaves.filter((each) => each.checkVisibility() && !each.closest('.cm-editor')
        && getComputedStyle(each).color === colour && each.textContent).map((each) => each.textContent);
})()"""


def green(page: Page) -> list[str]:
    found: list[str] = page.evaluate(GREEN)
    return found


def is_outdated(page: Page) -> bool:
    """Whether the picture says that it is of an earlier text."""
    frame = page.frame_locator("#picture")
    greys = frame.locator("#schedules").evaluate(
        "(each) => getComputedStyle(each).filter !== 'none'"
    )
    said = frame.locator("#state").inner_text()
    assert greys == bool(said)
    return bool(greys)


def test_no_text_has_the_verdict_of_another_before_the_compiler_is_there(
    page: Page, address: str
) -> None:
    held: list[Route] = []
    page.route("**/wheels.json", lambda route: held.append(route))
    page.goto(f"{address}playground/index.html")
    page.wait_for_function("document.querySelectorAll('#verdicts td').length")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(HANGS)
    assert page.locator("#status").inner_text() == "loading the compiler …"
    assert green(page) == []
    assert "proved" not in page.locator("body").inner_text()
    assert is_outdated(page)
    held[0].continue_()
    wait_for_answer(page)
    assert page.locator("#status").inner_text() == "1 error"
    assert green(page) == []
    assert "proved" not in page.locator("#findings").inner_text()
    assert is_outdated(page)


#: A worker that gives its answers when it is told to.
HELD = """(() => {
    const held = [], Plain = Worker;
    let holds = false;
    window.hold = (value) => {
        holds = value;
        if (!holds) for (const give of held.splice(0)) give();
    };
    window.Worker = class extends Plain {
        set onmessage(hear) { super.onmessage = (event) => holds ? held.push(() => hear(event)) : hear(event); }
    };
})()"""


def test_from_the_key_on_nothing_is_called_proved(page: Page, address: str) -> None:
    page.add_init_script(HELD)
    open_playground(page, address)
    assert page.locator("#status").inner_text() == "proved"
    assert not is_outdated(page)
    page.evaluate("hold(true)")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("#")
    assert page.locator("#status").inner_text() == "checking …"
    assert green(page) == []
    assert "proved" not in page.locator("#findings").inner_text()
    assert is_outdated(page)
    # The answers to the older text come when there is a newer one, and are dropped.
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(HANGS)
    page.wait_for_timeout(3 * SECOND)
    page.evaluate("hold(false)")
    wait_for_answer(page)
    assert page.locator("#status").inner_text() == "1 error"
    assert green(page) == []
    assert is_outdated(page)
    write(page, text_of("1f1b"))
    assert page.locator("#status").inner_text() == "proved"
    assert set(green(page)) == {"proved"}
    assert not is_outdated(page)


def test_mistakes_and_repairs(page: Page, address: str) -> None:
    open_playground(page, address)
    write(page, WRONG)
    assert "error[missing-op]" in page.locator("#messages").inner_text()
    assert "error" in page.locator("#status").inner_text()
    assert page.locator(".cm-lintRange-error").count()
    write(page, HANGS)
    assert "ranks 0-1 wait for each other" in page.locator("#messages").inner_text()
    page.locator(".cm-lint-marker-error").first.hover()
    page.get_by_role("button", name="count `warmup`").first.click()
    wait_for_answer(page)
    assert page.locator("#status").inner_text() == "proved"
    assert page.locator("#messages").is_hidden()
    assert "ranks - 1 - r" in page.locator(".cm-content").inner_text()


def test_colours_are_those_of_the_grammar(page: Page, address: str) -> None:
    open_playground(page, address)
    text = "schedule fill { param ranks = 2 rank r { F(next) } } # words that are names"
    write(page, text)
    seen = page.locator(".cm-line span[class^=tok-]").evaluate_all(
        "all => all.map((each) => [each.className, each.textContent])"
    )
    assert seen == [
        [f"tok-{of.value}", text[start:end]] for start, end, of in coloured(text)
    ]


def test_an_address_shows_others_the_same(page: Page, address: str) -> None:
    open_playground(page, address, "#program=zb_v")
    assert drawn(page).startswith("zb_v")
    page.locator("#parameters input[name=microbatches]").fill("12")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("# 🙂")
    wait_for_answer(page)
    page.wait_for_function("location.hash.startsWith('#code=')")
    page.wait_for_timeout(200)
    state = page.evaluate("location.hash")
    open_playground(page, address, state)
    assert "microbatches = 12" in drawn(page)
    assert page.locator(".cm-content").inner_text().rstrip().endswith("# 🙂")
    assert page.locator("#programs").input_value() == ""


def test_a_program_without_an_end_is_stopped(page: Page, address: str) -> None:
    open_playground(page, address)
    slow = text_of("1f1b").replace(
        "param microbatches = 8", "param microbatches = 400000"
    )
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(slow)
    page.wait_for_function(
        "document.querySelector('#status').textContent === 'stopped'"
    )
    write(page, text_of("1f1b"))
    assert set(verdicts(page)) == {"proved"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_is_accessible(
    page: Page, address: str, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    open_playground(page, address)
    assert violations(page) == []
    write(page, WRONG)
    assert violations(page) == []
