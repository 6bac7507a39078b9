"""Golden files of many messages: a section for each mistake, with what was written and the answer.

Such a file is also the list of its cases, which `cases` reads. Who adds one writes a section without
an answer; `pytest --update-golden` fills it in.
"""

from pathlib import Path

_BEGIN = "=" * 80 + "\n"
_ANSWER = "-" * 80 + "\n"


def section(shown: str, answer: str) -> str:
    """What is wrong, and below it what the user is told."""
    return f"{_BEGIN}{shown.rstrip()}\n{_ANSWER}{answer.rstrip()}\n"


def cases(path: Path) -> list[str]:
    """What is wrong in each section of a file, without the answers."""
    _, *sections = path.read_text(encoding="utf-8").split(_BEGIN)
    assert sections, f"{path} has no sections"
    return [each.partition(_ANSWER)[0].removesuffix("\n") for each in sections]
