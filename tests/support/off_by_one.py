"""Programs with a mistake: a number or a bound that is off by one, two ops that have changed places,
another comparison, another name, an `if` that is missing.
"""

import re
from random import Random

_OPS = r"[FBIWR]\([^()]*\)"
_NAMES = r"\b(?:ranks|microbatches|warmup|r|m)\b(?! *\{)"


def damaged(text: str, random: Random) -> str:
    """A program with one mistake in what its ranks do, sometimes two; it claims nothing."""
    text = re.sub(r"#[^\n]*", "", text)
    begin = text.index("rank r")
    head, body = (
        re.sub(r"assert[^\n]*", "", text[:begin]),
        re.sub(r"assert[^\n]*", "", text[begin:]),
    )
    for _ in range(random.choice((1, 1, 1, 2))):
        body = random.choice(_DAMAGES)(body, random)
    return head + body


def _place(pattern: str, body: str, random: Random) -> re.Match[str] | None:
    places = [
        place
        for place in re.finditer(pattern, body)
        if body[: place.start()].split()[-1:] not in (["rank"], ["for"], ["let"], ["fn"])
    ]
    return random.choice(places) if places else None


def _replaced(body: str, place: re.Match[str] | None, by: str) -> str:
    return body if place is None else body[: place.start()] + by + body[place.end() :]


def _number(body: str, random: Random) -> str:
    place = _place(r"\b\d+\b", body, random)
    by = str(max(0, int(place[0]) + random.choice((-1, 1)))) if place else ""
    return _replaced(body, place, by)


def _off_by_one(body: str, random: Random) -> str:
    place = _place(_NAMES, body, random)
    return _replaced(body, place, f"({place[0]} {random.choice('+-')} 1)" if place else "")


def _swapped(body: str, random: Random) -> str:
    place = _place(rf"({_OPS})(\s+)({_OPS})", body, random)
    return _replaced(body, place, f"{place[3]}{place[2]}{place[1]}" if place else "")


def _without_if(body: str, random: Random) -> str:
    place = _place(r"\bif [^{]*\{([^{}]*)\}(?! *else)", body, random)
    return _replaced(body, place, place[1] if place else "")


def _comparison(body: str, random: Random) -> str:
    place = _place(r"<=|>=|<|>|==", body, random)
    return _replaced(body, place, random.choice(("<", ">", "<=", ">=", "==")))


def _another_name(body: str, random: Random) -> str:
    place = _place(_NAMES, body, random)
    return _replaced(body, place, random.choice(("ranks", "r", "microbatches", "(ranks - 1 - r)")))


_DAMAGES = (_number, _off_by_one, _swapped, _without_if, _comparison, _another_name)
