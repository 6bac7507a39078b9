"""Programs, as scripts and commands give them: the path or the name of one, or its text."""

import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_type
from schedlang.files.reading import read_source
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.files.programs import file_of
else:
    # For programs of the gallery.
    file_of = on_demand("schedlang.files.programs.file_of")

#: The path that messages give for a program that is in no file.
NO_FILE = "<text>"


def may_name(text: str) -> bool:
    """Whether a text may be the name of a program: it is no file, no path, and has no ending."""
    return "/" not in text and "." not in text and not os.path.lexists(text)


def source_of(program: Source | str | Path, name: str = "source") -> Source:
    """A program, given as itself, by the path of its file, as its text, or by its name in the
    gallery, where no file has this name.

    Text that has a `{` is that of a program, since every program has one; other text is a path.
    CompileError for a file that cannot be read; TypeError names the argument `name`, if it is
    anything else.
    """
    if isinstance(program, Source):
        return program
    if isinstance(program, str) and "{" in program:
        return Source(NO_FILE, program)
    check_type(
        name, program, (str, PathLike), "a path, the text of a program, or a Source"
    )
    if program == "":
        raise ValueError(
            f"`{name}` is '': it must be a path, the text of a program, or a Source"
        )
    if isinstance(program, str) and may_name(program):
        return read_source(file_of(program))
    return read_source(Path(program))
