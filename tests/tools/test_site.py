"""The site that `make site` has built, and its playground, in a real headless Chromium: `make
test-browser`. It prints the times to first paint, until the compiler is there, and for each key.
"""

from __future__ import annotations

import json
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


#: What is looked at by eye.
SHEET = {
    "home": "index.html",
    "how to": "docs/hangs.html",
    "gallery": "programs/index.html",
    "a program": "programs/zb_v.html",
    "errors": "docs/errors/index.html",
    "the proof": "docs/proof.html",
    "Python": "docs/python.html",
    "playground": "playground/index.html",
    "playground, two chunks": "playground/index.html#program=zb_v",
}


def test_contact_sheet(page: Page, address: str) -> None:
    """Pages of each kind, light and dark, in build/contact-sheet/site.html."""
    folder = ROOT / "build" / "contact-sheet"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for title, path in SHEET.items():
        rows.append(f"<h2>{title}</h2>")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto("about:blank")
            page.goto(address + path)
            if path.startswith("playground"):
                page.wait_for_function("performance.getEntriesByName('ready').length")
                wait_for_answer(page)
            page.wait_for_timeout(SECOND)
            shot = f"site-{len(rows)}-{scheme}.png"
            page.screenshot(path=folder / shot)
            rows.append(f'<img src="{shot}" width="48%" alt="{title}, {scheme}">')
    (folder / "site.html").write_text(
        "<!doctype html><title>Site</title>" + "\n".join(rows)
    )
    print(f"to be looked at: {folder / 'site.html'}")
