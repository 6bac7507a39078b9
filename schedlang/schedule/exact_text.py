"""Numbers as programs write them."""

from fractions import Fraction

from schedlang.schedule.fixed_point import meant


def exact_text(value: float | Fraction) -> str:
    """A number exactly, as a program writes it: without an exponent, whole if it is whole, and as a
    quotient if it is no decimal.
    """
    exact = meant(value)
    whole, rest = divmod(abs(exact.numerator), exact.denominator)
    digits = ""
    # A decimal comes to its end once all factors 2 and 5 of its denominator are used up.
    while rest and len(digits) < exact.denominator.bit_length():
        digit, rest = divmod(10 * rest, exact.denominator)
        digits += str(digit)
    if rest:
        return f"{exact.numerator}.0 / {exact.denominator}"
    sign = "-" if exact < 0 else ""
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"
