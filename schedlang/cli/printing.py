"""What commands print: for people, or as a JSON document for programs."""

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def json_text(document: Any, indent: int | None = None) -> str:
    """A document as JSON."""
    # It is only loaded where somebody asks for it.
    import json

    return json.dumps(document, indent=indent)


def text_or_json(
    options: argparse.Namespace,
    found: T,
    text_of: Callable[[T], str],
    json_of: Callable[[T], Any],
) -> str:
    """What was found, as the options ask for it: a text, or a document of JSON."""
    if options.format == "json":
        return json_text(json_of(found))
    return text_of(found)


def written(options: argparse.Namespace) -> str:
    """That the file of the options was written."""
    if options.format == "json":
        return json_text({"output": options.output})
    return f"wrote {options.output}"
