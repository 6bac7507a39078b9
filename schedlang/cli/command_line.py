"""The parser of a command line: argparse, with the manners of the commands that people know.

Options may stand between the files, none may be abbreviated, a value can be given once, and a
misspelt word is answered with the nearest one.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from schedlang.cli.usage import WRITERS, UsageError, near

_HELP = ("-h", "--help")
#: An option that is so much like another one, where 1 is equal, is misspelt, and no parameter.
_SPELT_ALIKE = 0.85


class Parser(argparse.ArgumentParser):
    """The parser of one command, or of `schedc` as a whole; UsageError for what is wrong."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._rare: list[argparse.Action] = []
        self._lists: set[str] = set()
        self._files: set[str] = set()
        #: Those of the commands, of the parser of all commands.
        self.commands: dict[str, Parser] = {}
        # `None` is an argument that does not say what to do with its value.
        for action in (None, "store"):
            self.register("action", action, _Once)
        help = "show this help; `--help all` explains every option"
        self.add_argument(*_HELP, action="store_true", help=help)

    def arguments(self) -> list[argparse.Action]:
        """All that the parser takes: files and options."""
        return self._actions

    def add(
        self,
        names: Sequence[str],
        settings: dict[str, Any],
        group: Any = None,
        takes: str = "",
        is_rare: bool = False,
    ) -> None:
        """Add an option or an argument, to a `group` if it is in one. A rare option is only named
        by `--help`, and explained by `--help all`.

        It may take `numbers`: `1,1,2`, or each as an argument, `1 1 2`. What follows and is no
        number is not one of them, as argparse would have it, but a file. Or it takes `files`: each
        behind the name of the option, or one behind the other.
        """
        action = (group or self).add_argument(*names, **settings)
        if is_rare:
            self._rare.append(action)
        if takes == "numbers":
            self._lists.update(names)
        if takes == "files":
            self._files.add(action.dest)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options in some arguments, in any order; with `--help` among them, the process prints
        help and ends.
        """
        for place, arg in enumerate(args):
            if arg in _HELP:
                self.print_help(everything=args[place + 1 : place + 2] == ["all"])
                self.exit()
        joined = self._joined(args)
        options, others = self.parse_known_intermixed_args(joined, namespace)
        if others and not self._take(others, joined, options):
            self.error(self._about(others))
        return options

    def _take(self, others: list[str], args: Sequence[str], options: Any) -> bool:
        """Whether files that are too many stand behind one of an option that takes files, as a
        shell writes `--costs *.json`: then they are its own.
        """
        for name in self._files:
            files = getattr(options, name) or []
            for place, arg in enumerate(args):
                behind = args[place + 1 : place + 1 + len(others)]
                if (
                    arg in files
                    and behind == others
                    and not any(map(_is_option, others))
                ):
                    files += others
                    return True
        return False

    def error(self, message: str) -> NoReturn:
        """The message alone, without the usage, which `--help` prints."""
        raise UsageError(message)

    def print_help(self, file: Any = None, everything: bool = False) -> None:
        """Print the help, of the frequent options or of `everything`; argparse's own would not say
        that it cannot be written.
        """
        if not everything and self._rare:
            for action in self._rare:
                action.help = argparse.SUPPRESS
            names = ", ".join(action.option_strings[-1] for action in self._rare)
            others = f"more options, which --help all explains: {names}"
            self.epilog = f"{_wrapped(others)}\n\n{self.epilog}"
        print(self.format_help(), end="", file=file)

    def _joined(self, args: Sequence[str]) -> list[str]:
        """The arguments, with the numbers of each list in one of them, with commas."""
        joined: list[str] = []
        is_list = False
        for arg in args:
            if is_list and _is_number(arg):
                # The first one stands behind the name of the option.
                joined[-1] += f"{'=' if joined[-1] in self._lists else ','}{arg}"
                continue
            is_list = arg in self._lists
            joined.append(arg)
        return joined

    def _about(self, others: Sequence[str]) -> str:
        """What is wrong with arguments that nobody takes, of which an option is the cause of the
        others.
        """
        options = list(filter(_is_option, others))
        if not options:
            return f"`{others[0]}` is one argument too many"
        name, _, value = options[0].partition("=")
        word = name.lstrip("-")
        if word in WRITERS:
            way_out = WRITERS[word].format(f"NAME.{word}")
            return f"there is no option `{name}`: the name of a file says it, {way_out}"
        known = [word for action in self._actions for word in action.option_strings]
        number = value or next(iter(others[others.index(options[0]) + 1 :]), "")
        is_param = "-p" in known and number.removeprefix("-").isdecimal()
        if is_param and not near(name, known, _SPELT_ALIKE):
            way_out = f"-p {word}={number} sets a parameter of the program"
            return f"there is no option `{name}`: {way_out}"
        return f"there is no option `{name}`{near(name, known)}"


def _wrapped(text: str) -> str:
    """A text in lines as wide as argparse has them."""
    from shutil import get_terminal_size
    from textwrap import fill

    width = get_terminal_size().columns - 2
    return fill(text, width, break_on_hyphens=False)


def _is_option(text: str) -> bool:
    return text.startswith("-") and len(text) > 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Once(argparse.Action):
    """Keep a value; an error if the same option comes again, since one of the two would be lost."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if option_string and self.dest in given:
            raise argparse.ArgumentError(self, "it is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Named(argparse.Action):
    """Keep values by their names, as a dictionary; an error if a name comes again."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep one more value, as argparse calls it."""
        name, value = values
        # Not the default itself, which all command lines share.
        known = dict(getattr(namespace, self.dest))
        if name in known:
            raise argparse.ArgumentError(self, f"`{name}` is given twice")
        setattr(namespace, self.dest, known | {name: value})
