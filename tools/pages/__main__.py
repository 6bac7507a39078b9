"""Writes generated files: `python -m tools.pages [NAME …]`, by default all that need no long run.

Each writer is a module whose function `files` gives the text of each of its files, by the path in
the repository.
"""

import sys
from importlib import import_module
from pathlib import Path

from schedlang.files.writing import write_text

ROOT = Path(__file__).parents[2]
#: Writers that need the source alone. A test holds their files current.
FROM_SOURCE = {
    "architecture": "tools.pages.architecture",
    "gallery": "tools.pages.gallery",
    "gains": "tools.pages.gains",
    "gpu": "tools.pages.gpu",
    "pictures": "tools.pages.pictures",
    "textmate": "tools.grammars.textmate",
    "together": "tools.pages.together",
    "transports": "tools.pages.transport_table",
    "tree-sitter": "tools.grammars.tree_sitter",
}
#: Writers of what a long run has found: `make models`, `make mutation`, `make explore`. The proofs
#: of `proved` take hours by themselves.
FROM_RUNS = {
    "models": "tools.pages.models",
    "mutation": "tools.pages.mutation",
    "proved": "tools.pages.proved",
    "transformers": "tools.pages.transformers",
    "verification": "tools.pages.verification",
}


def files(name: str) -> dict[str, str]:
    """The files of one writer."""
    module = import_module((FROM_SOURCE | FROM_RUNS)[name])
    found: dict[str, str] = module.files()
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or FROM_SOURCE:
        for path, text in files(name).items():
            write_text(text, ROOT / path)
