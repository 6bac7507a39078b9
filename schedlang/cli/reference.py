"""The commands that take neither a program nor a plan: what there is, and what it means."""

import argparse
import json
from collections.abc import Callable

from schedlang.cli.command_table import parser_of_all
from schedlang.cli.outputs import INPUTS, OUTPUTS
from schedlang.cli.usage import FINE, UsageError, near


def explain(options: argparse.Namespace) -> int:
    """Print what error codes mean."""
    from schedlang.report.explain import codes, page, summary

    return _print_pages(options, "code", options.codes, codes(), summary, page)


def gallery(options: argparse.Namespace) -> int:
    """Print programs of the gallery, or list them."""
    from schedlang.files.programs import names, text_of, title

    programs = [name.removesuffix(".sched") for name in options.programs]
    return _print_pages(
        options,
        "program",
        programs,
        names(),
        lambda name: title(text_of(name)),
        text_of,
    )


def _print_pages(
    options: argparse.Namespace,
    noun: str,
    asked: list[str],
    known: list[str],
    summary: Callable[[str], str],
    page: Callable[[str], str],
) -> int:
    """Print the pages that are asked for, or else a list of all there are."""
    for name in asked:
        if name not in known:
            way_out = near(name, known) or f"; all: `schedc {options.command}`"
            raise UsageError(f"there is no {noun} `{name}`{way_out}")
    if options.format == "json":
        # With the whole text of those that were asked for.
        entries = []
        for name in asked or known:
            entry = {noun: name, "summary": summary(name)}
            if asked:
                entry["text"] = page(name)
            entries.append(entry)
        print(json.dumps(entries, indent=1))
    elif asked:
        print("\n".join(map(page, asked)), end="")
    else:
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {summary(name)}")
    return FINE


def completion(options: argparse.Namespace) -> int:
    """Print the script with which a shell completes command lines."""
    # It is only loaded here: what it prints is made once, and costs no command anything.
    import shtab

    from schedlang.files.programs import names
    from schedlang.report.explain import codes
    from schedlang.schedule.transports import NAMES

    words = {"transport": NAMES, "codes": codes(), "programs": names()}
    parser = parser_of_all()
    # shtab takes words from `choices`, also where a command line may name more than these.
    for command in parser.commands.values():
        for action in command.arguments():
            if action.dest in (*INPUTS, *OUTPUTS):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            action.choices = words.get(action.dest, action.choices)
            if action.dest == "checkpoint":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return FINE
