"""The commands that compare schedules, and say why they take as long as they do."""

import argparse
import json

from schedlang.commands.given import UsageError, costs_given, load_priced


def explain_bubble(options: argparse.Namespace) -> int:
    """Print the causes of idle time, the critical path, and what a faster op would give."""
    from schedlang.bubbles.report import explain_bubble, explanation_json, explanation_text

    found = explain_bubble(*load_priced(options))
    print(json.dumps(explanation_json(found)) if options.json else explanation_text(found))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print the figures of several schedules in one table."""
    from schedlang.compare import compare, comparison_json, comparison_text

    try:
        entries = compare(options.files, dict(options.params), costs_given(options))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.sort == "makespan":
        entries.sort(key=lambda entry: entry.makespan)
    print(json.dumps(comparison_json(entries)) if options.json else comparison_text(entries))
    return 0
