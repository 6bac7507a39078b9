"""What to write in place of a name that a program does not have."""

from collections.abc import Iterable
from difflib import get_close_matches

from attrs import frozen

from schedlang.diagnostics.repair import Edit, Hint, another_word
from schedlang.diagnostics.source import Span


@frozen
class Foreign:
    """A name of another language: what to say of it, and what to write, where that is one word."""

    help: str
    write: str | None = None


#: Names that people bring from other languages. A program has none of them unless it declares it.
_NAMES = {
    "True": Foreign("write `1`: it counts as true", "1"),
    "true": Foreign("write `1`: it counts as true", "1"),
    "False": Foreign("write `0`: it counts as false", "0"),
    "false": Foreign("write `0`: it counts as false", "0"),
    "world_size": Foreign("the number of ranks is `ranks`", "ranks"),
    "num_ranks": Foreign("the number of ranks is `ranks`", "ranks"),
    "nranks": Foreign("the number of ranks is `ranks`", "ranks"),
    "pp_size": Foreign("the number of ranks is `ranks`", "ranks"),
    "num_stages": Foreign(
        "the number of stages is not a name of its own: give it one with `let`"
    ),
    "stages": Foreign(
        "the number of stages is not a name of its own: give it one with `let`"
    ),
    "num_microbatches": Foreign(
        "the number of microbatches is `microbatches`", "microbatches"
    ),
    "n_microbatches": Foreign(
        "the number of microbatches is `microbatches`", "microbatches"
    ),
    "num_chunks": Foreign("declare it: `param chunks = 2`"),
    "idle": Foreign("the idle time of all ranks is `bubble`", "bubble"),
    "rank": Foreign(
        "a rank's number has the name behind `rank`, as r in `rank r { … }`"
    ),
}

#: Functions of other languages, and what to write in their place.
_FUNCTIONS = {
    "ceil": "`(a + b - 1) / b` is a quotient rounded up",
    "ceildiv": "`(a + b - 1) / b` is a quotient rounded up",
    "floor": "`/` rounds down by itself",
    "int": "numbers are whole by themselves",
    "float": "numbers are whole",
    "round": "`/` rounds down, `(2 * a + b) / (2 * b)` to the nearest",
    "divmod": "write `a / b` and `a % b`",
    "mod": "write `a % b`",
    "pow": "there is no power: write a product, `2 * 2 * 2`",
    "range": "a range is `0 .. n`, and stands in `for m in 0 .. n { … }`",
    "memory": "what rank r holds at most is `peak(r)`",
    "len": "name the length of a list with `let`",
    "sum": "write the sum as a formula, or name it with `let`",
    "f": "a forward is `F`",
    "b": "a backward is `B`",
}


def nearest(name: str, known: Iterable[str], place: Span | None = None) -> Hint | None:
    """The closest known name, if one is close, to put where the other one stands in the program."""
    close = get_close_matches(name, known, n=2)
    # Who writes `stashed` means `stash` rather than `unstashed`, which has more letters in common.
    close.sort(key=lambda word: not name.startswith(word))
    return another_word(close[0], place) if close else None


def foreign_name(name: str, place: Span) -> Hint | None:
    """What to write in place of a name of another language."""
    if name not in _NAMES:
        return None
    foreign = _NAMES[name]
    edits = () if foreign.write is None else (Edit(place, foreign.write),)
    return Hint(foreign.help, edits)


def foreign_function(name: str) -> str | None:
    """What to write in place of a function of another language."""
    return _FUNCTIONS.get(name)
