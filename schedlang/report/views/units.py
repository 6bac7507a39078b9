"""Times and amounts of memory as people write them."""

from typing import Final

#: The units of time, by the number of seconds in each: names as in `--time-unit`, and as printed.
SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PRINTED: Final = {"us": "µs", "ms": "ms", "s": "s"}
#: The units of memory, each a thousand of the one before.
BYTES: Final = ("B", "kB", "MB", "GB", "TB")


def time_text(value: float, seconds: float | None, digits: int = 10) -> str:
    """A time: `12.5` in a unit that nobody knows; in one of so many `seconds`, `12.5 ms`.

    The unit is the largest in which it is at least 1.
    """
    if seconds is None:
        return f"{value:.{digits}g}"
    unit = unit_of(value * seconds)
    return f"{value * seconds / SECONDS[unit]:.{min(digits, 5)}g} {PRINTED[unit]}"


def unit_of(seconds: float) -> str:
    """The unit of time in which a number of seconds is best written."""
    if not seconds:
        return "s"
    fitting = [unit for unit, length in SECONDS.items() if abs(seconds) >= length]
    return fitting[-1] if fitting else "us"


def bytes_text(amount: float) -> str:
    """A number of bytes: `1.5 GB`."""
    for unit in BYTES[:-1]:
        if abs(amount) < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} {BYTES[-1]}"
