"""The command `schedc fmt`: programs in the one style."""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

from schedlang.cli.diagnosed import exit_code_of, print_diagnostics
from schedlang.cli.usage import FINE, WRONG, UsageError
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted
from schedlang.files.reading import STANDARD_INPUT, read_bytes, read_source, shown
from schedlang.files.writing import write_text


@frozen
class _File:
    """A file: what it has, and what it has in style."""

    path: str
    old: str
    new: str

    @property
    def changes(self) -> bool:
        """Whether it is not in style."""
        return self.new != self.old


def fmt(options: argparse.Namespace) -> int:
    """Write programs in the one style, or say which are not in it."""
    only_looks = options.check or options.diff
    files, wrong = _read(_paths(options.files))
    for file in files:
        if file.path == STANDARD_INPUT:
            # Whoever sends a program wants it back, in style or not.
            if not only_looks and options.format != "json":
                print(file.new, end="")
        elif file.changes and not only_looks:
            write_text(file.new, file.path)
    _report(options, files, only_looks)
    if wrong:
        print_diagnostics(wrong, options)
        return exit_code_of(wrong)
    return WRONG if only_looks and any(file.changes for file in files) else FINE


def _paths(given: Iterable[str]) -> Iterator[str]:
    """The files that a command line names, with those in its folders."""
    for path in given:
        if path == STANDARD_INPUT or not os.path.isdir(path):
            yield path
            continue
        files = sorted(Path(path).rglob("*.sched"))
        if not files:
            raise UsageError(f"there is no file NAME.sched in the folder `{path}`")
        yield from map(str, files)


def _read(paths: Iterable[str]) -> tuple[list[_File], list[Diagnostic]]:
    """Files and what is in them in style; and what is wrong with those that are no programs."""
    # It loads lark and its tables.
    from schedlang.language.formatting import formatted

    files = []
    wrong = []
    # A dictionary, since it keeps the order and has each file once.
    for path in dict.fromkeys(paths):
        try:
            source = read_source(path)
            # With its own line ends, which are of the style too.
            old = read_bytes(path).decode()
            files.append(_File(path, old, formatted(source)))
        except CompileError as error:
            wrong += error.diagnostics
    return files, wrong


def _report(options: argparse.Namespace, files: list[_File], only_looks: bool) -> None:
    """Say of each file what was done, or would be."""
    if options.format == "json":
        print(json.dumps({"files": [_document(file) for file in files]}, indent=1))
        return
    changed = [file for file in files if file.changes]
    if options.diff:
        for file in changed:
            print(_diff(file), end="")
        return
    named = [file for file in files if file.path != STANDARD_INPUT or only_looks]
    if not named:
        return
    for file in changed:
        if file in named:
            print(f"{'not in style' if only_looks else 'wrote'}: {shown(file.path)}")
    in_style = sum(not file.changes for file in named)
    if in_style:
        print(f"{counted(in_style, 'file')} in style")


def _document(file: _File) -> dict[str, object]:
    """The same for programs; what was read from standard input comes back in it."""
    document: dict[str, object] = {"file": shown(file.path), "changed": file.changes}
    if file.path == STANDARD_INPUT:
        document["text"] = file.new
    return document


def _diff(file: _File) -> str:
    """What would change in a file, as `diff -u` prints it."""
    from difflib import unified_diff

    name = shown(file.path)
    # Not `splitlines`, which would also cut lines where comments have characters of other kinds.
    old = [f"{line}\n" for line in file.old.split("\n")]
    new = [f"{line}\n" for line in file.new.split("\n")]
    return "".join(unified_diff(old[:-1] + _last(file.old), new[:-1], name, name))


def _last(text: str) -> list[str]:
    """The last line of a text that does not end with a line end, as `diff` shows it."""
    line = text.rpartition("\n")[2]
    return [f"{line}\n\\ No newline at end of file\n"] if line else []
