"""Names that people bring from other languages, and what to write in their place."""

#: What to write in place of names that no program has unless it declares them.
NAMES = {
    "True": "write `1`: it counts as true",
    "true": "write `1`: it counts as true",
    "False": "write `0`: it counts as false",
    "false": "write `0`: it counts as false",
    "world_size": "the number of ranks is `ranks`",
    "num_ranks": "the number of ranks is `ranks`",
    "nranks": "the number of ranks is `ranks`",
    "pp_size": "the number of ranks is `ranks`",
    "num_stages": "the number of stages is not a name of its own: give it one with `let`",
    "stages": "the number of stages is not a name of its own: give it one with `let`",
    "num_microbatches": "the number of microbatches is `microbatches`",
    "n_microbatches": "the number of microbatches is `microbatches`",
    "num_chunks": "declare it: `param chunks = 2`",
    "rank": "a rank's number has the name behind `rank`, as r in `rank r { … }`",
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
    "len": "name the length of a list with `let`",
    "sum": "write the sum as a formula, or name it with `let`",
    "f": "a forward is `F`",
    "b": "a backward is `B`",
}
