"""The files of this package that are not Python: the grammar, the gallery, the documentation."""

from pathlib import Path

# Links lead to the folders at the root of the repository; a wheel has the folders themselves.
PACKAGE = Path(__file__).parent.parent
GRAMMAR = PACKAGE / "grammars" / "sched.lark"
GALLERY = PACKAGE / "programs"
DOCS = PACKAGE / "docs"
