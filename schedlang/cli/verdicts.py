"""What `schedc check` prints: a verdict for each transport, or for each size."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from schedlang.compiler import Instance
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted, to_json


def errors(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Those that are not warnings."""
    return [each for each in diagnostics if each.severity == "error"]


def warnings(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Those that are warnings, each once."""
    return list(
        {
            (each.code, each.message): each for each in diagnostics if each.severity == "warning"
        }.values()
    )


def verdicts_text(found: Mapping[str, list[Diagnostic]]) -> str:
    """A line for each transport: proved, or the first thing that is wrong there."""
    width = max(map(len, found))
    lines = []
    for name, diagnostics in found.items():
        wrong = errors(diagnostics)
        lines.append(
            f"{name:<{width}}  "
            f"{f'error[{wrong[0].code}]: {wrong[0].message}' if wrong else 'proved'}"
        )
    return "\n".join(lines)


def verdicts_json(found: Mapping[str, list[Diagnostic]]) -> list[dict[str, Any]]:
    """The verdicts for machines."""
    return [
        {
            "transport": name,
            "proved": not errors(diagnostics),
            "diagnostics": list(map(to_json, errors(diagnostics))),
            "warnings": list(map(to_json, warnings(diagnostics))),
        }
        for name, diagnostics in found.items()
    ]


def count_instances(instances: Iterator[Instance], total: int) -> str:
    """How many sizes are proved and refused; CompileError for the first one that is wrong, which is
    the smallest.
    """
    proved = refused = 0
    for instance in instances:
        if instance.diagnostics:
            size = ", ".join(f"{name} = {value}" for name, value in instance.params.items())
            first, *others = instance.diagnostics
            note = f"the smallest size where this is so: {size}"
            raise CompileError([first.with_note(note), *others])
        proved = proved + (not instance.refused)
        refused = refused + instance.refused
        if sys.stderr.isatty():
            end = "\n" if proved + refused == total else ""
            print(
                f"\r{proved + refused} of {counted(total, 'size')}",
                end=end,
                file=sys.stderr,
                flush=True,
            )
    return f"{counted(proved, 'size')} proved, {refused} refused by the program's own `require`"
