"""The pages of the site: those of the repository as they are, laid out as they are there, so that
their links lead where they do on a git host; a page for each program of the gallery, with its
picture and its figures; and the reference of Python.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from schedlang.cli.main import main
from schedlang.files.programs import families, names, path_of, text_of, title
from tools.pages import reference

ROOT = Path(__file__).parents[2]
#: The folders of which all files are on the site.
_FOLDERS = ("docs", "programs", "examples")
#: A fence, and the words behind its language, which are for the tests.
_FENCE = re.compile(r"^( *```[a-z]+) .*$", re.M)
#: A link to a page that has another name on the site.
_README = re.compile(r"(\]\((?!https?:)[^)\s]*?)README\.md")
_PROGRAM = re.compile(r"(\]\((?!https?:)[^)\s]*?)\.sched\)")


def write_pages(folder: Path) -> None:
    """Write all pages to a folder, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
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


def for_site(text: str) -> str:
    """A page of the repository as the generator takes it."""
    text = _FENCE.sub(r"\1", text)
    text = _README.sub(r"\1index.md", text)
    return _PROGRAM.sub(r"\1.md)", text)


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
    parts = [
        f"# {name}",
        f"{title(text_of(name))}.",
        f"[Open it in the playground](../playground/index.html#program={name}){{ .md-button }}",
        f"![{name}: what each rank does, over time]({picture.name})",
        _block("sched", path_of(name).read_text("utf-8")),
        "## Figures",
        _console("simulate", name),
        "## Idle time",
        _console("simulate", name, "--why"),
    ]
    return "\n\n".join([*parts, ""])


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
