"""What is said of a file that is no plan: what it is, and which command takes it."""

from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.files.file_kinds import FileKind, kind_of_document, kind_of_file
from schedlang.plan.file import plan_error
from schedlang.plan.plan import FORMAT


def not_a_plan_file(path: str | Path, error: Exception) -> CompileError:
    """The error for a file that is no JSON document, or not a whole one."""
    kind = kind_of_file(path)
    if kind not in (
        FileKind.PLAN,
        FileKind.OBJECT,
        FileKind.DAMAGED,
        FileKind.TEXT,
    ):
        message = f"it is {kind.called}, not a plan"
        return plan_error(path, message, help=kind.help(path))
    message = f"not a whole plan file: {error}"
    return plan_error(path, message, help="write it again with `schedc compile -o`")


def not_a_plan(path: str | Path, document: Any) -> CompileError:
    """The error for a document that is no plan, or one of another format."""
    kind = kind_of_document(document)
    if kind not in (FileKind.PLAN, FileKind.OBJECT):
        message = f"it is {kind.called}, not a plan"
        return plan_error(path, message, help=kind.help(path))
    if not isinstance(document, dict) or "format" not in document:
        help = "`schedc compile -o` writes a plan"
        return plan_error(path, "not a plan file: it has no `format`", help=help)
    message = f"the format is `{document['format']}`, this is a reader of `{FORMAT}`"
    help = "compile the program again with this version of schedc"
    return plan_error(path, message, help=help)
