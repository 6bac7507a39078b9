"""What of a program's arithmetic can fail while it runs; the last argument of each is the place in
the program.
"""

from schedlang.language.faults import Fault
from schedlang.language.scopes import LARGEST

_NOT_ZERO = "where it may be 0, say what is then: `if n > 0 then m / n else 0`"


def quotient(left: int, right: int, location: int) -> int:
    """`left / right`, rounded down."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", location, _NOT_ZERO)
    return left // right


def rest(left: int, right: int, location: int) -> int:
    """`left % right`, with the sign of `right`."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", location, _NOT_ZERO)
    return left % right


def multiply(left: int, right: int, location: int) -> int:
    """`left * right`; repeated squaring is the one way to grow numbers without bound."""
    if abs(left) > LARGEST or abs(right) > LARGEST:
        raise Fault("too-large", "a number grows beyond 10^18", location)
    return left * right


def require(holds: int, reason: str | None, location: int) -> None:
    """`require holds, reason`."""
    if not holds:
        raise Fault(
            "require",
            f"the schedule requires: {reason}" if reason else "a requirement does not hold",
            location,
        )
