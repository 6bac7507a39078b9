"""Sets and functions of sizes as text, in the words of a program."""

import re
from collections.abc import Sequence

import islpy as isl

from schedlang.extras.prove.sets.counting import RANK
from schedlang.extras.prove.sets.isl_functions import (
    between,
    constant,
    everywhere,
    number,
    symbol,
)
from schedlang.extras.prove.sets.numbers import BASE, Number
from schedlang.extras.prove.sets.statements import GROUPS, REST, UPDATES

_PRODUCT = re.compile(r"(\d)([A-Za-z_(])")
_REST = re.compile(r"\(([^()]*|\([^()]*\))\) mod (\d+)")
_FLOOR = re.compile(r"floor\(\(([^()]*)\)/(\d+)\)")


def condition_text(sizes: isl.Set, names: Sequence[str]) -> str:
    """The sizes of a set as a condition; empty if there are none. All sizes are known to be 1 or
    more.
    """
    if sizes.is_empty():
        return ""
    possible = possible_sizes(names)
    parts = []
    for part in sizes.coalesce().gist_params(possible).coalesce().get_basic_sets():
        parts.append(
            _words(str(isl.Set.from_basic_set(part)).split(":", 1)[-1].rstrip(" }"))
        )
    texts = [part.strip() for part in parts]
    if not texts or "" in texts or texts == ["true"]:
        return " and ".join(
            f"{'microbatches' if name == GROUPS else name} >= 1"
            for name in names
            if name not in (REST, UPDATES)
        )
    return " or ".join(
        f"({text})" if len(texts) > 1 and " and " in text else text for text in texts
    )


def possible_sizes(names: Sequence[str]) -> isl.Set:
    """All possible sizes: each is 1 or more."""
    possible = everywhere()
    for name in names:
        if name not in (GROUPS, REST):
            possible = possible & symbol(name).ge_set(number(1))
    if GROUPS in names:
        groups = symbol(GROUPS)
        rest = symbol(REST)
        possible = (
            possible & between(number(0), rest, symbol(BASE)) & groups.ge_set(number(0))
        )
        possible = possible & groups.add(rest).ge_set(number(1))
    return possible


def pieces_of(value: Number, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pieces of a function of sizes, and maybe of a rank: the condition and the value of
    each.
    """
    pieces = []
    for where, each in value.pieces():
        text = _text(each.low, where)
        if each.high is not None:
            of_microbatches = _times_base(each.high) if value.base == BASE else None
            high = _text(each.high, where)
            if of_microbatches is not None:
                text = _text(each.low.add(of_microbatches), where)
            elif high != "0":
                times = f"{_factor(high)} * {value.base}"
                text = times if text == "0" else f"{text} + {times}"
        condition = where
        at = condition.find_dim_by_name(isl.dim_type.param, RANK)
        if at >= 0:
            ranked = symbol(RANK).ge_set(number(0)) & symbol(RANK).lt_set(
                symbol("ranks")
            )
            condition = condition.gist_params(ranked)
        pieces.append((condition_text(condition, names), text))
    return tuple(pieces)


def _times_base(high: isl.PwAff) -> isl.PwAff | None:
    """A function times the base, if that is affine in the number of microbatches; else None."""
    ((_, function),) = high.get_pieces()
    at = function.find_dim_by_name(isl.dim_type.param, GROUPS)
    factor = (
        function.get_coefficient_val(isl.dim_type.param, at) if at >= 0 else isl.Val(0)
    )
    rest = high.sub(symbol(GROUPS).scale_val(factor))
    more = constant(rest, everywhere())
    if more is None:
        return None
    microbatches = symbol("microbatches").sub(symbol(REST)).scale_val(factor)
    return microbatches.add(symbol(BASE).scale_val(isl.Val(more)))


def _text(function: isl.PwAff, where: isl.Set) -> str:
    """A function of one piece as text."""
    text = str(function.gist_params(where))
    return _words(text[text.index("[(", text.index("{")) + 2 : text.rindex(")]")])


def _words(text: str) -> str:
    """isl's notation in the language of programs."""
    text = text.replace(RANK, "r").replace("false", "no size")
    for digit, operation in ((GROUPS, "/"), (REST, "%")):
        text = re.sub(rf"\b{digit}\b", f"microbatches {operation} ranks", text)
    text = _REST.sub(lambda found: f"{_only(found[1])} % {found[2]}", text)
    text = _FLOOR.sub(r"(\1) / \2", text)
    text = _PRODUCT.sub(r"\1 * \2", text)
    text = re.sub(r"(?<![<>!=])=(?!=)", "==", text)
    return re.sub(r"\s+", " ", text)


def _factor(text: str) -> str:
    """A sum in parentheses, as a factor."""
    return f"({text})" if re.search(r" [+-] ", text) else text


def _only(text: str) -> str:
    return text if re.fullmatch(r"\w+", text) else f"({text})"
