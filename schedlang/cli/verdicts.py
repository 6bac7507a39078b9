"""What `schedc check` prints: a verdict for each transport."""

from collections.abc import Mapping
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.rendering import to_json


def errors(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics that are not warnings."""
    return [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]


def warnings(verdicts: Mapping[str, list[Diagnostic]]) -> list[Diagnostic]:
    """The warnings for some transports, each once: most are the same for all of them."""
    first: dict[tuple[str, str], Diagnostic] = {}
    for diagnostics in verdicts.values():
        for diagnostic in diagnostics:
            if diagnostic.severity == "warning":
                first[diagnostic.code, diagnostic.message] = diagnostic
    return list(first.values())


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
