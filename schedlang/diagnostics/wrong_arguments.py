"""Wrong arguments of public functions, refused before any work is done: a TypeError or ValueError
that says the argument's name, what was given, and what is wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any

#: The most characters that a message shows of what was given.
_WIDTH = 60
#: What is shown as it would be written; of anything else a message says the class.
_WRITTEN = (str, bytes, int, float, list, tuple, set, dict, type(None))

Types = type | tuple[type, ...]
#: Parameters of a program by name: whole numbers, and lists of them.
Params = Mapping[str, int | Sequence[int]]


def shown(value: Any) -> str:
    """What was given, in a message: `'plan.json'`, `[1, 2]`, `a Plan`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not isinstance(value, _WRITTEN):
        name = type(value).__name__
        return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def check_type(name: str, value: Any, wanted: Types, what: str) -> None:
    """TypeError unless an argument is of some types, in words `what`."""
    if not isinstance(value, wanted):
        raise TypeError(f"`{name}` is {shown(value)}: it must be {what}")


def check_flag(name: str, value: Any) -> None:
    """TypeError unless an argument is True or False."""
    check_type(name, value, bool, "True or False")


def check_whole(
    name: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """TypeError unless an argument is a whole number, ValueError unless it is in a range, both of
    whose ends are in it.
    """
    what = "a whole number"
    what += "" if least is None else f" from {least}"
    what += "" if most is None else f" to {most}"
    # For Python, True is a whole number.
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {shown(value)}: it must be {what}")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"`{name}` is {number}: it must be {what}")


def check_number(name: str, value: Any, above: float | None = None) -> None:
    """TypeError unless an argument is a number, ValueError unless it is finite, and above another
    one.
    """
    what = "a finite number" if above is None else f"a finite number above {above:g}"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {shown(value)}: it must be {what}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"`{name}` is {shown(value)}: it must be {what}") from None
    if not isfinite(number) or (above is not None and value <= above):
        raise ValueError(f"`{name}` is {number:g}: it must be {what}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """ValueError unless an argument is one of some words."""
    words = list(choices)
    if not isinstance(value, str) or value not in words:
        listed = ", ".join(map(repr, words))
        raise ValueError(f"`{name}` is {shown(value)}: it must be one of {listed}")


def check_params(name: str, params: Any) -> None:
    """TypeError unless an argument is a mapping of names to whole numbers, or lists of them."""
    what = "a mapping of names to whole numbers, such as {'ranks': 4}"
    check_type(name, params, Mapping, what)
    for key, value in params.items():
        check_type(f"a name in {name}", key, str, "text")
        is_list = isinstance(value, list | tuple) and value
        for each in value if is_list else [value]:
            check_whole(f"{name}[{key!r}]", each)
