"""Programs with a mistake or two in what their ranks do: a bound that is off by one, two ops that have
changed places, another warm-up, another placement, a missing `if`.
"""

import re
from collections.abc import Callable
from random import Random

_CALL = r"(?:[FBIW]|unshard|reshard|reduce)(?:\((?:[^{}()]|\([^()]*\))*\))?"
_NAMES = r"\b(?:ranks|microbatches|warmup|r|m)\b"
#: What stands for another name, as a word that binds it or as its first appearance.
_USED = r"(?<!rank )(?<!for )(?<!let )(?<!fn )"


def damaged(text: str, rng: Random) -> str:
    """A program with one or two mistakes, without its comments."""
    text = re.sub(r" *#[^\n]*", "", text)
    before = text
    # A mistake may find nothing to change, or another one may undo it.
    while text == before:
        for _ in range(rng.choice((1, 1, 2))):
            text = rng.choice(_MISTAKES)(text, rng)
    return text


def _order(text: str) -> int:
    return text.index("rank r {")


def _replaced(
    text: str,
    rng: Random,
    pattern: str,
    replacement: str | Callable[[re.Match[str]], str],
) -> str:
    """The text with one match of a pattern, in the order of ranks, replaced."""
    order = _order(text)
    matches = list(re.finditer(pattern, text[order:]))
    if not matches:
        return text
    match = rng.choice(matches)
    new = replacement if isinstance(replacement, str) else replacement(match)
    return text[: order + match.start()] + new + text[order + match.end() :]


def _declared(text: str, line: str) -> str:
    """The text with one more line before the order of ranks."""
    order = _order(text)
    return f"{text[:order]}{line}\n    {text[order:]}"


def _off_by_one(text: str, rng: Random) -> str:
    word = rf"{_USED}(?:\b\d+\b|{_NAMES})(?! \{{)"
    sign = rng.choice("+-")
    return _replaced(text, rng, word, lambda match: f"({match.group()} {sign} 1)")


def _another_name(text: str, rng: Random) -> str:
    others = ("ranks", "r", "microbatches", "(ranks - 1 - r)")
    return _replaced(text, rng, rf"{_USED}{_NAMES}(?! \{{)", rng.choice(others))


def _swapped(text: str, rng: Random) -> str:
    pair = rf"({_CALL})(\s+)({_CALL})"
    return _replaced(
        text,
        rng,
        pair,
        lambda match: f"{match.group(3)}{match.group(2)}{match.group(1)}",
    )


def _without_if(text: str, rng: Random) -> str:
    condition = r"\bif [^{]*\{([^{}]*)\}(?! *else)"
    return _replaced(text, rng, condition, lambda match: match.group(1))


def _other_comparison(text: str, rng: Random) -> str:
    comparisons = ["<", "<=", ">", ">=", "=="]
    return _replaced(text, rng, r"(?<= )(?:[<>]=?|==)(?= )", rng.choice(comparisons))


def _other_word(text: str, rng: Random) -> str:
    return _replaced(text, rng, r"\b[FBIW](?=\()", rng.choice("FBIW"))


def _left_out(text: str, rng: Random) -> str:
    return _replaced(text, rng, _CALL, "")


def _at_some_sizes(text: str, rng: Random) -> str:
    # Right at most sizes and wrong at some: a proof for all sizes must find the border.
    conditions = [
        f"microbatches > {rng.randrange(2, 28)}",
        f"microbatches <= {rng.randrange(2, 28)}",
        f"microbatches % 3 != {rng.randrange(3)}",
        f"r != {rng.randrange(4)}",
    ]
    condition = rng.choice(conditions)
    return _replaced(
        text, rng, _CALL, lambda match: f" if {condition} {{ {match.group()} }} "
    )


def _another_microbatch(text: str, rng: Random) -> str:
    number = rng.randrange(1, 20)
    # Two microbatches that change places, one that takes another's, and pairs that are turned
    # around up to a point.
    others = [
        f"if m == {number} then {number + 1} else if m == {number + 1} then {number} else m",
        f"if m == {number} then 0 else m",
        f"if m + {number} < microbatches / 2 * 2 then m / 2 * 2 + 1 - m % 2 else m",
    ]
    return _replaced(text, rng, r"(?<=[FBI]\()m(?=\))", rng.choice(others))


def _another_warm_up(text: str, rng: Random) -> str:
    def other(match: re.Match[str]) -> str:
        old = match.group(2)
        new = rng.choice(
            [
                f"max({old} - 1, 0)",
                f"min({old} + 1, microbatches)",
                "0",
                "min(r, microbatches)",
                f"if r == {rng.randrange(4)} then min(1, microbatches) else {old}",
                f"if microbatches > {rng.randrange(2, 20)} then max({old} - 1, 0) else {old}",
            ]
        )
        return match.group(1) + new

    return _replaced(text, rng, r"(let (?:warmup|ahead|rest) = )(.*)", other)


def _backwards(text: str, rng: Random) -> str:
    loop = r"for m in (\S+) \.\. (\S+) +\{ F\(m\) +\}"

    def other(match: re.Match[str]) -> str:
        start, stop = match.groups()
        return f"for m in {start} .. {stop} {{ F({stop} - 1 - m + {start}) }}"

    return _replaced(text, rng, loop, other)


def _by_steps(text: str, rng: Random) -> str:
    """Another order, or, where a step leaves some out, not all of them."""
    loop = r"(for m in \S+ \.\. \S+)( +\{)"
    step = rng.choice([-1, -1, 2, -2, 3])
    rest = (
        rng.choice(["", "for m in 1 .. microbatches by 2 { B(m) }  "])
        if step == 2
        else ""
    )

    def other(match: re.Match[str]) -> str:
        return f"{rest}{match.group(1)} by {step}{match.group(2)}"

    return _replaced(text, rng, loop, other)


def _another_placement(text: str, rng: Random) -> str:
    if "stage s" in text:
        return text
    ranks = ["ranks - 1 - s", "(s + 1) % ranks", "if s == 0 then ranks - 1 else s - 1"]
    return _declared(text, f"stage s in 0 .. ranks on {rng.choice(ranks)}")


def _frozen_stages(text: str, rng: Random) -> str:
    return _declared(
        text, f"frozen {rng.choice(['0 .. 1', '1 .. 2', '0 .. ranks - 1'])}"
    )


def _another_edge(text: str, rng: Random) -> str:
    word = "edge" if "edge s" in text else "skip"
    first = rng.randrange(2)
    return _declared(
        text, f"{word} s in {first} .. {first + 1} from s to s + {rng.choice((2, 3))}"
    )


_MISTAKES = (
    _off_by_one,
    _off_by_one,
    _another_name,
    _swapped,
    _without_if,
    _other_comparison,
    _other_word,
    _left_out,
    _at_some_sizes,
    _another_microbatch,
    _another_warm_up,
    _another_warm_up,
    _backwards,
    _by_steps,
    _another_placement,
    _frozen_stages,
    _another_edge,
)
