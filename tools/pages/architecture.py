"""The drawing of the packages in docs/architecture.md, from the imports.

An arrow is an import. One that follows from two others is left out, so every package may import
whatever can be reached from it, and does not import anything else.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from grimp import ImportGraph, build_graph

ROOT = Path(__file__).parents[2]
PAGE = "docs/architecture.md"
#: Above the packages: what `python -m` starts.
ENTRANCES = ("schedlang.__main__", "schedlang.runtime.__main__")


def room_of(module: str) -> str | None:
    """The package in which a module is drawn; None for what is not drawn."""
    if module == "schedlang" or module.startswith(ENTRANCES):
        return None
    return module.removeprefix("schedlang.").split(".")[0]


def imports_of(graph: ImportGraph) -> dict[str, set[str]]:
    """For every package those that its modules import."""
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        room = room_of(module)
        if room is None:
            continue
        others = map(room_of, graph.find_modules_directly_imported_by(module))
        imports.setdefault(room, set()).update(
            each for each in others if each not in (None, room)
        )
    return imports


def reached(imports: dict[str, set[str]], room: str) -> set[str]:
    """All packages that a package imports, directly or through others."""
    found: set[str] = set()
    following = [room]
    while following:
        new = imports[following.pop()] - found
        found |= new
        following += new
    return found


def floors(imports: dict[str, set[str]]) -> list[list[str]]:
    """The packages from the top: each stands above all that it imports. ValueError for a circle."""
    heights: dict[str, int] = {}
    while len(heights) < len(imports):
        ready = [
            room
            for room, others in imports.items()
            if room not in heights and others <= heights.keys()
        ]
        if not ready:
            raise ValueError(
                f"a circle among {sorted(imports.keys() - heights.keys())}"
            )
        for room in ready:
            heights[room] = 1 + max(
                (heights[other] for other in imports[room]), default=-1
            )
    top = max(heights.values())
    return [
        sorted(room for room in heights if heights[room] == height)
        for height in range(top, -1, -1)
    ]


def drawing(graph: ImportGraph) -> str:
    """The drawing, in the language of Mermaid, which GitHub draws."""
    return "\n".join(["graph TD", *_arrows(imports_of(graph))]) + "\n"


def _arrows(imports: dict[str, set[str]]) -> Iterator[str]:
    order = [room for floor in floors(imports) for room in floor]
    for room in order:
        # An arrow that can be gone by others is not drawn.
        implied = {far for near in imports[room] for far in reached(imports, near)}
        for other in sorted(imports[room] - implied, key=order.index):
            yield f"    {room} --> {other}"


def package_graph() -> ImportGraph:
    """The imports of all modules of schedlang."""
    return build_graph("schedlang", cache_dir=None)


def files() -> dict[str, str]:
    """docs/architecture.md with the drawing as it is now."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    drawn = f"```mermaid\n{drawing(package_graph())}```"
    return {
        PAGE: re.sub(r"^```mermaid\n.*?^```", drawn, text, count=1, flags=re.M | re.S)
    }
