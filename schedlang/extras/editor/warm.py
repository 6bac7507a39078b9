"""What a process has loaded that looks at programs; importing this takes a second."""

import gc

from schedlang.extras.editor import (
    analysis,
    completion,
    renaming,
    semantics,
    signatures,
)
from schedlang.language.grammar import grammar, words

__all__ = ["analysis", "completion", "renaming", "semantics", "signatures"]

grammar()
words()
# What is loaded is no garbage, and a copy that does not look through it shares its memory.
gc.freeze()
