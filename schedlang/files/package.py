"""Where this package keeps what is no Python: the grammar, the gallery, the pages of
documentation.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
GRAMMAR = PACKAGE / "grammars" / "sched.lark"
GALLERY = PACKAGE / "programs"
DOCS = PACKAGE / "docs"
