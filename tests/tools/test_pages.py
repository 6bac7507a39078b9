"""The pages of the site, before they are built."""

import tomllib
from string import Template

import pytest

from schedlang.files.programs import names
from tests.support.paths import DOCS, ROOT
from tools.website.pages import for_site, gallery_entries


def entries(navigation: list[dict[str, object]]) -> list[str]:
    """The pages in a navigation."""
    pages: list[str] = []
    for entry in navigation:
        for below in entry.values():
            pages += entries(below) if isinstance(below, list) else [str(below)]
    return pages


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "tools" / "website" / "zensical.toml").read_text()
    config = tomllib.loads(Template(text).substitute(gallery=gallery_entries()))
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
