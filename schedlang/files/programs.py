"""The programs of the gallery, by their names."""

import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from schedlang.files.package import GALLERY
from schedlang.files.reading import unreadable


def names() -> list[str]:
    """The names of all programs, in alphabetical order."""
    return sorted(path.stem for path in GALLERY.glob("*.sched"))


def path_of(name: str) -> Path:
    """The file of a program, which may not be there."""
    return GALLERY / f"{name}.sched"


def called(path: str | Path) -> str:
    """What people call a file: a program of the gallery by its name, others by their path."""
    is_of_gallery = Path(path).suffix == ".sched" and Path(path).parent == GALLERY
    return Path(path).stem if is_of_gallery else str(path)


def text_of(name: str) -> str:
    """The text of a program."""
    return path_of(name).read_text(encoding="utf-8")


def title(text: str) -> str:
    """The first clause of a program's comment: the schedule's name, and where it comes from."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.removeprefix("# ") for line in lines)
    # A colon may also be part of a paper's title.
    first = re.match(r'(?:"[^"]*"|[^":]|:(?! ))*', comment)
    return first[0] if first else comment


class Family(NamedTuple):
    """Programs of the gallery that are alike: a name, what they have in common, and what each
    program is good for.
    """

    name: str
    meaning: str
    programs: dict[str, str]


def families() -> tuple[list[Family], list[str]]:
    """The families of the gallery, and the programs to start with: `gallery.txt` has them."""
    found: list[Family] = []
    starters: list[str] = []
    for line in (GALLERY / "gallery.txt").read_text(encoding="utf-8").splitlines():
        name, _, text = line.lstrip("* ").partition(": ")
        if line.startswith("*"):
            starters.append(name)
        if line.startswith(("* ", "  ")):
            found[-1].programs[name] = text
        elif text and not line.startswith("#"):
            found.append(Family(name, text, {}))
    return found, starters


def file_of(name: str) -> Path:
    """The file of a program of the gallery; CompileError for a name that it does not have."""
    known = names()
    if name in known:
        return path_of(name)
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    reason = "there is no such file, and no program of the gallery has this name"
    raise unreadable(name, reason, f"there is `{close[0]}`" if close else None)
