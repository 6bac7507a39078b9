"""Names that people bring from other languages, and what to write in their place."""

from attrs import frozen


@frozen
class Foreign:
    """A name of another language: what to say of it, and what to write, where that is one word."""

    help: str
    write: str | None = None


#: What to write in place of names that no program has unless it declares them.
NAMES = {
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

#: The same of functions.
FUNCTIONS = {
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
