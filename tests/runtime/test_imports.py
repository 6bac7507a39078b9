"""What private parts of torch the runtime uses stands in one folder."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

import schedlang.runtime


def private_names(path: Path) -> set[str]:
    """The names with an underscore in front that a module reads of others than itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls" | "ctx"))
                | ast.Attribute(value=ast.Call(func=ast.Name(id="super")))
            ):
                pass
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=module, names=names) if module:
                found.update([*module.split("."), *(each.name for each in names)])
            case ast.Import(names=names):
                found.update(part for each in names for part in each.name.split("."))
    # Names like `__class__` are Python's own.
    return {
        name for name in found if name.startswith("_") and not name.startswith("__")
    }


def test_private_parts_of_torch_stand_in_one_folder() -> None:
    # `os._exit`, `sys._current_frames`, and what named tuples have.
    allowed = {
        "_current_frames",
        "_exit",
        "_replace",
    }
    (folder,) = schedlang.runtime.__path__
    for path in Path(folder).rglob("*.py"):
        if path.parent.name != "torch_private":
            assert private_names(path) <= allowed, path
