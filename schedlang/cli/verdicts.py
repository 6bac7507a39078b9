"""What `schedc check` prints: a verdict for each transport, or for each size."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from schedlang.compiler import Instance
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted, to_json


def errors(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics that are not warnings."""
    return [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]


def warnings(verdicts: Mapping[str, list[Diagnostic]]) -> list[Diagnostic]:
    """The warnings for some transports, each once: most are the same for all of them."""
    found: dict[tuple[str, str], Diagnostic] = {}
    for diagnostics in verdicts.values():
        for diagnostic in diagnostics:
            if diagnostic.severity == "warning":
                found[diagnostic.code, diagnostic.message] = diagnostic
    return list(found.values())


def verdicts_text(verdicts: Mapping[str, list[Diagnostic]]) -> str:
    """A line for each transport: proved, or the first thing that is wrong there."""
    width = max(map(len, verdicts))
    lines = []
    for name, diagnostics in verdicts.items():
        verdict = "proved"
        wrong = errors(diagnostics)
        if wrong:
            verdict = f"error[{wrong[0].code}]: {wrong[0].message}"
        lines.append(f"{name:<{width}}  {verdict}")
    return "\n".join(lines)


def verdicts_json(verdicts: Mapping[str, list[Diagnostic]]) -> list[dict[str, Any]]:
    """The verdicts for programs."""
    return [
        {
            "transport": name,
            "proved": not errors(diagnostics),
            "diagnostics": list(map(to_json, errors(diagnostics))),
            "warnings": list(map(to_json, warnings({name: diagnostics}))),
        }
        for name, diagnostics in verdicts.items()
    ]


def count_sizes(instances: Iterator[Instance], total: int) -> str:
    """How many sizes are proved, and how many the program refuses; CompileError for the first one
    that is wrong, which is the smallest.
    """
    proved = 0
    refused = 0
    for instance in instances:
        if instance.diagnostics:
            size = ", ".join(f"{name} = {value}" for name, value in instance.params.items())
            # Sizes come in order, so this is the smallest, where the mistake is easiest to see.
            first, *others = instance.diagnostics
            note = f"the smallest size where this is so: {size}"
            raise CompileError([first.with_note(note), *others])
        if instance.refused:
            refused += 1
        else:
            proved += 1
        # Somebody who watches sees how far it is; a file would only get longer.
        if sys.stderr.isatty():
            done = proved + refused
            end = "\n" if done == total else ""
            line = f"\r{done} of {counted(total, 'size')}"
            print(line, end=end, file=sys.stderr, flush=True)
    return f"{counted(proved, 'size')} proved, {refused} refused by the program's own `require`"
