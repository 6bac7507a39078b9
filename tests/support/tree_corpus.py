"""Tree-sitter's own format of tests, editors/tree-sitter-sched/test/corpus: programs with their trees.

`tree-sitter test` runs them where that command is; here they are read, and written, for a parser
that Lark makes of the same grammar.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import evolve, frozen
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

_CASE = re.compile(r"^={3,}\n(.+)\n((?::.+\n)*)={3,}\n", re.M)
_LINE = "=" * 18


@frozen
class Case:
    """A program, and its tree as tree-sitter writes it; none of a text that is no program."""

    title: str
    is_wrong: bool
    text: str
    tree: str

    def __str__(self) -> str:
        mark = ":error\n" if self.is_wrong else ""
        head = f"{_LINE}\n{self.title}\n{mark}{_LINE}"
        return f"{head}\n\n{self.text}\n\n---\n\n{self.tree}".rstrip() + "\n"


def cases(path: Path) -> Iterator[Case]:
    """The cases of a file."""
    _, *pieces = _CASE.split(path.read_text("utf-8"))
    for title, marks, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text, _, tree = body.partition("\n---\n")
        yield Case(title, ":error" in marks, text.strip("\n"), tree.strip())


def parsed(case: Case, parser: Lark) -> Case:
    """A case with the tree that a parser makes of its program."""
    try:
        tree = parser.parse(case.text)
    except UnexpectedInput:
        return evolve(case, is_wrong=True, tree="")
    return evolve(
        case, is_wrong=False, tree="\n".join(_lines(tree, _comments(case.text)))
    )


def written(found: Iterable[Case]) -> str:
    """A file of cases."""
    return "\n".join(map(str, found))


def _comments(text: str) -> tuple[int, ...]:
    """Where comments begin, in a text without any `#` in its strings."""
    return tuple(match.start() for match in re.finditer("#", text))


def _lines(tree: Tree[Token], comments: Iterable[int]) -> Iterator[str]:
    """A node and those within it, each in a line of its own.

    A comment is part of the innermost node that goes on behind it.
    """
    places = sorted(comments)
    parts: list[tuple[int, list[str]]] = []
    for child in tree.children:
        if isinstance(child, Token):
            continue
        start = child.meta.start_pos
        end = child.meta.end_pos
        within = [place for place in places if start < place < end]
        places = [place for place in places if place not in within]
        parts.append((start, list(_lines(child, within))))
    parts += [(place, ["(comment)"]) for place in places]
    lines = [f"  {line}" for _, piece in sorted(parts) for line in piece]
    if not lines:
        yield f"({tree.data})"
        return
    yield f"({tree.data}"
    yield from lines[:-1]
    yield f"{lines[-1]})"
