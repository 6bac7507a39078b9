"""Sets and functions of sizes in a program's own words."""

import re
from collections.abc import Sequence

import islpy as isl

from schedlang.parametric.ranks.counting import RANK
from schedlang.parametric.ranks.symbols import everywhere, number, symbol

_PRODUCT = re.compile(r"(\d)([A-Za-z_(])")
_REST = re.compile(r"\(([^()]*|\([^()]*\))\) mod (\d+)")
_FLOOR = re.compile(r"floor\(\(([^()]*)\)/(\d+)\)")


def condition_text(sizes: isl.Set, names: Sequence[str]) -> str:
    """The sizes of a set as a constraint; empty if there are none. All sizes are 1 or more."""
    if sizes.is_empty():
        return ""
    positive = everywhere()
    for name in names:
        positive = positive & symbol(name).ge_set(number(1))
    parts = []
    for part in sizes.coalesce().gist_params(positive).coalesce().get_basic_sets():
        parts.append(_words(str(isl.Set.from_basic_set(part)).split(":", 1)[-1].rstrip(" }")))
    texts = [part.strip() for part in parts]
    if not texts or "" in texts or texts == ["true"]:
        return " and ".join(f"{name} >= 1" for name in names)
    return " or ".join(
        f"({text})" if len(texts) > 1 and " and " in text else text for text in texts
    )


def pieces_of(function: isl.PwAff, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pieces of a function of sizes, and maybe of a rank: each a condition and a value."""
    pieces = []
    for where, value in function.get_pieces():
        text = str(isl.PwAff.from_aff(value))
        inside = text[text.index("[(", text.index("{")) + 2 : text.rindex(")]")]
        condition = where
        at = condition.find_dim_by_name(isl.dim_type.param, RANK)
        if at >= 0:
            ranked = symbol(RANK).ge_set(number(0)) & symbol(RANK).lt_set(symbol("ranks"))
            condition = condition.gist_params(ranked)
        pieces.append((condition_text(condition, names), _words(inside)))
    return tuple(pieces)


def _words(text: str) -> str:
    """isl's notation in the language's."""
    text = text.replace(RANK, "r").replace("false", "no size")
    text = _REST.sub(lambda found: f"{_only(found[1])} % {found[2]}", text)
    text = _FLOOR.sub(r"(\1) / \2", text)
    text = _PRODUCT.sub(r"\1 * \2", text)
    text = re.sub(r"(?<![<>!=])=(?!=)", "==", text)
    return re.sub(r"\s+", " ", text)


def _only(text: str) -> str:
    return text if re.fullmatch(r"\w+", text) else f"({text})"
