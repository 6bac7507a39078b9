"""The pages of the site, before they are built."""

import tomllib

import pytest

from schedlang.compiler import compile
from schedlang.files.programs import names
from tests.support.paths import DOCS, ROOT
from tools.website.build import configuration
from tools.website.front import front_page, gallery_page
from tools.website.pages import for_site, heading, in_both_schemes
from tools.website.thumbnails import thumbnail


def entries(navigation: list[dict[str, object]]) -> list[str]:
    """The pages in a navigation."""
    pages: list[str] = []
    for entry in navigation:
        for below in entry.values():
            pages += entries(below) if isinstance(below, list) else [str(below)]
    return pages


def test_every_page_is_in_the_navigation() -> None:
    config = tomllib.loads(configuration())
    pages = [page.relative_to(ROOT).as_posix() for page in DOCS.glob("*.md")]
    pages += [
        page.relative_to(ROOT).as_posix() for page in (DOCS / "reports").glob("*.md")
    ]
    pages += [f"programs/{name}.md" for name in names()]
    pages += [
        "index.md",
        "CONTRIBUTING.md",
        "programs/index.md",
        "docs/errors/index.md",
        "docs/reference.md",
    ]
    assert sorted(entries(config["project"]["nav"])) == sorted(pages)


def test_what_is_for_tests_alone_is_not_on_the_site() -> None:
    text = "```sched first.sched wrong\nschedule s {}\n```\n```sh elsewhere: two machines\nls\n```\n"
    assert for_site(text) == "```sched\nschedule s {}\n```\n```sh\nls\n```\n"


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](../README.md#run-it)", "[a](../index.md#run-it)"),
        ("[a](../programs/README.md)", "[a](../programs/index.md)"),
        ("[a](../programs/zb_v.sched)", "[a](../programs/zb_v.md)"),
        ("[a](costs.md)", "[a](costs.md)"),
        ("[a](https://example.com/README.md)", "[a](https://example.com/README.md)"),
    ],
)
def test_links(link: str, on_the_site: str) -> None:
    assert for_site(link) == on_the_site


def test_the_front_page_and_the_gallery_keep_what_their_readmes_say() -> None:
    readme = (ROOT / "README.md").read_text()
    front = front_page(readme)
    assert front.endswith(readme.partition("```sh")[2])
    assert "schedule one_f_one_b {" in front
    gallery = gallery_page((ROOT / "programs" / "README.md").read_text())
    for name in names():
        assert f'<li class="card" id="{name}"' in gallery
        # The table of figures leads to the pages of the programs.
        assert f"| [{name}]({name}.md) |" in gallery


def test_a_program_is_headed_by_its_paper() -> None:
    assert heading("zb_1p") == "# zb_1p: Zero Bubble Pipeline Parallelism"
    assert heading("gpipe") == "# gpipe"


def test_pictures_of_the_site() -> None:
    picture = (DOCS / "pictures" / "1f1b.svg").read_text()
    both = in_both_schemes(picture)
    assert "prefers-color-scheme: dark" in both
    assert both.count("<rect") == picture.count("<rect")
    plan = compile("zb_v")
    # A box for each op.
    assert thumbnail(plan).count("M") == sum(map(len, plan.ranks)) - sum(
        plan.columns.is_transfer
    )
