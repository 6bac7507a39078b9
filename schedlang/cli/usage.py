"""Exit codes, which are the same for all commands, and the error for a wrong command line."""

from collections.abc import Iterable

#: All is well: it is proved, written or printed.
FINE = 0
#: The program, table, plan or trace is wrong, or what was asked does not hold.
WRONG = 1
#: Wrong usage; a file that cannot be read or written; something that is not installed.
USAGE = 2
#: Ended by Ctrl-C, as shells report it: 128 and the number of the signal.
INTERRUPTED = 130
#: The reader of the output has gone, as shells report it.
CLOSED_PIPE = 141


#: The kinds of files that one command writes, by their endings, and how it is called.
WRITERS = {
    **dict.fromkeys(("html", "svg", "pdf", "png"), "schedc view FILE -o {}"),
    "csv": "schedc export FILE --to torch-csv -o {}",
}


class UsageError(Exception):
    """The command line is wrong: an option, or options that do not go together."""


def near(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message on a word that there is not: the nearest one that there is, if any; they
    are alike to `cutoff` at least, where 1 is equal.
    """
    # It is only loaded for a mistake.
    from difflib import get_close_matches

    close = get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"; did you mean `{close[0]}`?" if close else ""
