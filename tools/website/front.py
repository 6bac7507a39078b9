"""The front page of the site, the page of the gallery, and the card that links to the site show."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from schedlang.compiler import compile
from schedlang.files.programs import Family, families, names, text_of
from schedlang.report.views.png import png_of
from schedlang.report.views.svg import FONTS
from tools.website.thumbnails import HEIGHT, WIDTH, boxes, thumbnail

#: The program on the front page and on the card.
FIRST = "1f1b"
#: The family of the programs to begin with, beside their own families.
_STARTERS = "Start with these"
#: The size of a card, as those who show one ask for; an image has two pixels for one of its SVG.
_CARD = (1200, 630)


def front_page(readme: str) -> str:
    """The first page: the README, with a program to change and its picture in place of its title
    and its picture.
    """
    _, claim, _, rest = readme.split("\n\n", 3)
    program = escape(text_of(FIRST).rstrip())
    still = (
        f'<div class="still"><pre><code>{program}</code></pre>'
        f'<img src="programs/{FIRST}.svg" alt="{FIRST}: what each rank does, over time"></div>'
    )
    links = {
        "Playground": "playground/index.html",
        "Tutorial": "docs/tutorial.md",
        "Gallery": "programs/index.md",
        "Train": "docs/train.md",
    }
    buttons = [
        f"[{name}]({link}){{ .md-button{' .md-button--primary' if not number else ''} }}"
        for number, (name, link) in enumerate(links.items())
    ]
    return "\n\n".join(
        [
            "---\nhide:\n  - navigation\n  - toc\n---",
            '<div class="hero" markdown>',
            "# schedlang: pipeline schedules that are proved",
            f'<p class="claim">{" ".join(claim.split())}</p>',
            " ".join(buttons),
            f'<div class="live" data-program="{FIRST}">{still}</div>',
            "</div>",
            rest,
        ]
    )


def gallery_page(readme: str) -> str:
    """The page of the gallery: a card for each program, and the figures of all."""
    groups, starters = families()
    choices = ["", _STARTERS, *(family.name for family in groups)]
    radios = "".join(
        f'<label><input type="radio" name="family" value="{escape(name)}"'
        f"{'' if name else ' checked'}>{escape(name or 'all')}</label>"
        for name in choices
    )
    cards = "\n".join(
        _card(name, use, family, starters)
        for family in groups
        for name, use in family.programs.items()
    )
    _, _, figures = readme.partition("## Figures\n")
    return "\n".join(
        [
            "---\nhide:\n  - toc\n---",
            "# The gallery\n",
            "The published schedules. Each has a page with its text, its picture, its figures, and",
            "why its ranks are idle; and opens in the playground, where it can be changed.\n",
            '<div class="gallery">',
            f"<fieldset><legend>family</legend>{radios}</fieldset>",
            '<p><a class="md-button compare" href="../playground/compare.html">'
            "Compare two programs</a></p>",
            f'<ul class="cards">\n{cards}\n</ul>',
            "</div>\n",
            "## Figures",
            re.sub(r"\]\(#(\w+)\)", r"](\1.md)", figures),
        ]
    )


def _card(name: str, use: str, family: Family, starters: Sequence[str]) -> str:
    """A program in the gallery: its thumbnail, its name, and what it is good for."""
    listed = [family.name, *([_STARTERS] if name in starters else [])]
    return (
        f'<li class="card" id="{name}" data-family="{escape("|".join(listed))}">'
        f'<a href="{name}.html"><img src="thumbnails/{name}.svg" alt="" loading="lazy"'
        f' width="{WIDTH}" height="{HEIGHT}">{name}</a>'
        f"<span>{escape(use[0].upper() + use[1:])}</span>"
        f'<label><input type="checkbox" name="compare" value="{name}">compare</label></li>'
    )


def write_pictures(folder: Path) -> None:
    """Write the thumbnails of the gallery and the card, to the folder of the pages."""
    thumbnails = folder / "programs" / "thumbnails"
    thumbnails.mkdir()
    for name in names():
        (thumbnails / f"{name}.svg").write_text(thumbnail(compile(name)), "utf-8")
    (folder / "assets" / "card.png").write_bytes(png_of(card()))


def card() -> str:
    """The picture that a link to the site shows, as an SVG."""
    width, height = _CARD
    drawn = boxes(compile("zb_v"), width - 120, 260)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width // 2}" height="{height // 2}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONTS}">'
        f'<rect width="{width}" height="{height}" fill="#16213a"/>'
        '<text x="60" y="130" font-size="76" font-weight="600" fill="#ffffff">schedlang</text>'
        '<text x="60" y="196" font-size="36" fill="#c9d6f2">Pipeline-parallel training schedules:'
        " write them, prove them, run them</text>"
        f'<g transform="translate(60 290)">{drawn}</g></svg>'
    )
