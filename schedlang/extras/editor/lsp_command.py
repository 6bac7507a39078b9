"""`schedc lsp`: the language server. It has no options: an editor sends its settings."""

import argparse
import sys

from schedlang.cli.options import Command
from schedlang.cli.usage import FINE, USAGE

COMMAND = Command(
    "The language server, which editors start: see docs/editor.md.",
    "extras.editor.lsp_command.lsp",
    "",
    {},
)


def lsp(_: argparse.Namespace) -> int:
    """Serve an editor until it ends."""
    try:
        # It loads the extra `lsp`.
        from schedlang.extras.editor.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        print(
            "error: the language server needs pygls: pip install 'schedlang[lsp]'",
            file=sys.stderr,
        )
        return USAGE
    serve()
    return FINE
