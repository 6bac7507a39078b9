"""What a program calls where an operation can fail; `place` is its index in the program's spans."""

from schedlang.names import LARGEST
from schedlang.recorder import Fault


def quotient(left: int, right: int, place: int) -> int:
    """`left / right`, rounded down."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", place)
    return left // right


def rest(left: int, right: int, place: int) -> int:
    """`left % right`."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", place)
    return left % right


def multiply(left: int, right: int, place: int) -> int:
    """`left * right`, while that is a number a program may have."""
    if abs(left) > LARGEST or abs(right) > LARGEST:
        raise Fault("too-large", "a number grows beyond 10^18", place)
    return left * right


def require(holds: int, reason: str | None, place: int) -> None:
    """`require holds, "reason"`."""
    if not holds:
        raise Fault("require", f"the schedule requires: {reason}" if reason else "a requirement does not hold", place)
