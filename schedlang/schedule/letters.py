"""The letters of ops in torch's tables and traces."""

from collections.abc import Iterable

#: The letters of torch 2.5 and 2.6, and what they are called now.
_OLD_LETTERS = {"BW": "B", "B": "I"}


def letters_of(written: Iterable[str]) -> dict[str, str]:
    """The meaning of torch's letters for ops where it differs from ours, by the letters that occur
    in a table or a trace.

    Old versions of torch write `BW` for a whole backward, and `B` and `W` for its halves. A `W`
    without any `I` comes from one of them.
    """
    letters = set(written)
    is_old = "BW" in letters or ("W" in letters and "I" not in letters)
    return _OLD_LETTERS if is_old else {}
