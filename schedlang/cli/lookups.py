"""The commands that take neither a program nor a plan: what there is, and what it means."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping

from schedlang.cli.command_table import parser_of_all
from schedlang.cli.outputs import INPUTS, OUTPUTS
from schedlang.cli.usage import FINE, UsageError, near


def explain(options: argparse.Namespace) -> int:
    """Print what error codes mean."""
    from schedlang.report.explain import codes, page, summary

    known = codes()
    _check_known("code", options.codes, known, options)
    if options.format == "json":
        # With the whole page of those that were asked for.
        entries = []
        for code in options.codes or known:
            entry = {"code": code, "summary": summary(code)}
            entries.append(entry | ({"text": page(code)} if options.codes else {}))
        print(json.dumps(entries, indent=1))
    elif options.codes:
        print("\n".join(map(page, options.codes)), end="")
    else:
        width = max(map(len, known))
        for code in known:
            print(f"{code:{width}}  {summary(code)}")
    return FINE


def gallery(options: argparse.Namespace) -> int:
    """Print programs of the gallery, or list them by families."""
    from schedlang.files.programs import families, names, text_of, title

    programs = [name.removesuffix(".sched") for name in options.programs]
    _check_known("program", programs, names(), options)
    groups, starters = families()
    if programs and options.format != "json":
        print("\n".join(map(text_of, programs)), end="")
    elif options.format == "json":
        entries = []
        for family in groups:
            for name, use in family.programs.items():
                if not programs or name in programs:
                    summary = title(text_of(name))
                    entry = {"program": name, "summary": summary}
                    entry |= {"family": family.name, "use": use}
                    entries.append(
                        entry | ({"text": text_of(name)} if programs else {})
                    )
        print(json.dumps(entries, indent=1))
    else:
        uses = {name: use for family in groups for name, use in family.programs.items()}
        print("Start with these six")
        print("\n".join(_rows(starters, uses)))
        for family in groups:
            print(f"\n{family.name}: {family.meaning}")
            print("\n".join(_rows(family.programs, uses)))
        print("\nschedc gallery NAME prints a program, schedc view NAME draws it")
    return FINE


def _rows(names: Iterable[str], uses: Mapping[str, str]) -> Iterator[str]:
    """A line for each of some programs: its name, and what it is good for."""
    width = max(map(len, uses))
    for name in names:
        yield f"  {name:{width}}  {uses[name]}"


def _check_known(
    noun: str, asked: Iterable[str], known: list[str], options: argparse.Namespace
) -> None:
    """UsageError for a name that there is not."""
    for name in asked:
        if name not in known:
            way_out = near(name, known) or f"; all: `schedc {options.command}`"
            raise UsageError(f"there is no {noun} `{name}`{way_out}")


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
