"""The pages of the site: those of the repository as they are, laid out as they are there, so that
their links lead where they do on a git host; a page for each program of the gallery, with its
picture and its figures; and the reference of Python.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from schedlang.cli.main import main
from schedlang.files.programs import families, names, path_of, text_of, title
from schedlang.report.views import palette
from schedlang.report.views.svg import GRID, HELD
from tools.pages import reference
from tools.website.front import front_page, gallery_page

ROOT = Path(__file__).parents[2]
#: The folders of which all files are on the site.
_FOLDERS = ("docs", "programs", "examples")
#: A fence, and the words behind its language, which are for the tests.
_FENCE = re.compile(r"^( *```[a-z]+) .*$", re.M)
#: A link to a page that has another name on the site.
_README = re.compile(r"(\]\((?!https?:)[^)\s]*?)README\.md")
_PROGRAM = re.compile(r"(\]\((?!https?:)[^)\s]*?)\.sched\)")


#: The colours of a picture on a dark page. Letters on boxes stay as they are: each has the colour
#: that its own box asks for.
_DARK = (
    "@media (prefers-color-scheme: dark) { svg { fill: #e8ebef } "
    "svg > rect:first-of-type, pattern rect:only-of-type { fill: #15191f } "
    f'[fill="{palette.WRONG}"] {{ fill: #ff8a80 }} '
    f'path[stroke="{palette.INK}"] {{ stroke: #e8ebef }} '
    f'[stroke="{palette.PAPER}"] {{ stroke: #15191f }} '
    f'[stroke="{GRID}"] {{ stroke: #3b444f }} '
    f'[fill="{HELD}"] {{ fill: #55606c }} '
    "pattern > rect:first-child { fill-opacity: 0.2 } }"
)


def write_pages(folder: Path) -> None:
    """Write all pages to a folder, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    readme = (ROOT / "README.md").read_text("utf-8")
    (folder / "README.md").write_text(front_page(readme), "utf-8")
    gallery = folder / "programs" / "README.md"
    gallery.write_text(gallery_page(gallery.read_text("utf-8")), "utf-8")
    for name in names():
        (folder / "programs" / f"{name}.md").write_text(
            _program_page(name, folder), "utf-8"
        )
    (folder / "docs" / "errors" / "README.md").write_text(_errors_page(), "utf-8")
    (folder / "docs" / "reference.md").write_text(reference.page(), "utf-8")
    # A host of files shows the README of a folder; a server of sites shows its index.
    for path in folder.rglob("*.md"):
        path.write_text(for_site(path.read_text("utf-8")), "utf-8")
        if path.name == "README.md":
            path.rename(path.with_name("index.md"))
    for path in folder.rglob("*.svg"):
        path.write_text(in_both_schemes(path.read_text("utf-8")), "utf-8")


def for_site(text: str) -> str:
    """A page of the repository as the generator takes it."""
    text = _FENCE.sub(r"\1", text)
    text = _README.sub(r"\1index.md", text)
    return _PROGRAM.sub(r"\1.md)", text)


def in_both_schemes(picture: str) -> str:
    """A picture of a schedule that is dark on a dark page."""
    head, tag, rest = picture.partition("</title>\n")
    return f"{head}{tag}<style>{_DARK}</style>\n{rest}" if tag else picture


def gallery_entries() -> str:
    """The programs of the gallery as entries of the navigation, by families."""
    lines = []
    for family in families()[0]:
        lines.append(f'        {{ "{family.name}" = [')
        for name in family.programs:
            lines.append(f'            {{ "{name}" = "programs/{name}.md" }},')
        lines.append("        ] },")
    return "\n".join(lines)


def _program_page(name: str, folder: Path) -> str:
    """A program with its picture, its figures and why its ranks are idle, from the commands that
    say these; and the picture.
    """
    picture = folder / "programs" / f"{name}.svg"
    _printed("view", name, "--causes", "-o", str(picture))
    head = title(text_of(name))
    family, use = next(
        (family, family.programs[name])
        for family in families()[0]
        if name in family.programs
    )
    parts = [
        f"---\ndescription: {json.dumps(f'{head}: {use}.')}\n---",
        heading(name),
        f"{head}.",
        f"**{use[0].upper()}{use[1:]}.** Family: [{family.name}](README.md?family={family.name}).",
        f"[Open it in the playground](../playground/index.html#program={name}){{ .md-button }}",
        f"![{name}: what each rank does, over time]({picture.name})",
        _block("sched", path_of(name).read_text("utf-8")),
        "## Figures",
        _console("simulate", name),
        "## Idle time",
        _console("simulate", name, "--why"),
    ]
    return "\n\n".join([*parts, ""])


def heading(name: str) -> str:
    """The heading of a program's page: its name and its paper's, by which people search for it."""
    paper = re.search(r"\d{4}, ([A-Z][^,;)]+)", title(text_of(name)))
    return f"# {name}: {paper[1]}" if paper else f"# {name}"


def _console(*arguments: str) -> str:
    """A command with what it prints."""
    command = " ".join(["schedc", *arguments])
    return _block("console", f"$ {command}\n{_printed(*arguments)}")


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _printed(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    with redirect_stdout(StringIO()) as printed:
        code = main(list(arguments))
    if code != 0:
        raise RuntimeError(f"schedc {' '.join(arguments)} ended with {code}")
    return printed.getvalue()


def _errors_page() -> str:
    """All errors, each with the first sentence of its page."""
    lines = [
        "# Errors",
        "",
        "Every message of the compiler has a code, and every code has a page, which",
        "`schedc explain CODE` prints.",
        "",
        "| code | what it means |",
        "|---|---|",
    ]
    for code, meaning in _errors():
        lines.append(f"| [{code}]({code}.md) | {meaning} |")
    return "\n".join([*lines, ""])


def _errors() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "docs" / "errors").glob("*.md")):
        _, paragraph, *_ = path.read_text("utf-8").split("\n\n")
        sentence = re.split(r"(?<=[.:;])\s", paragraph.replace("\n", " "))[0].rstrip(
            ":;"
        )
        yield path.stem, sentence.replace("|", "\\|")
