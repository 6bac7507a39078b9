"""The arithmetic of programs whose sizes are symbols.

The Python of a program (`schedlang.extras.prove.sets.symbolic_code`) runs once for all sizes and
ranks, and once for all rounds of a loop. Its numbers are plain ones as far as they are known, and
`Value`s where they depend on symbols. `Evaluator.where` is the condition under which the program
comes to the place that runs; what runs within an `if` or a loop runs with a narrower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import islpy as isl
from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, renamed
from schedlang.extras.prove.sets.isl_functions import (
    everywhere,
    indicator,
    number,
    points,
    rational,
    scaled,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    Number,
    Unreadable,
    folded,
    least,
    most,
    of_number,
    plain,
    product,
    quotient,
    same,
    under,
    union,
)

_COMPARISONS: dict[str, Callable[[Number, Number, isl.Set], isl.Set]] = {
    "==": same,
    "!=": lambda one, other, where: where - same(one, other, where),
    "<": under,
    "<=": lambda one, other, where: where - under(other, one, where),
    ">": lambda one, other, where: under(other, one, where),
    ">=": lambda one, other, where: where - under(one, other, where),
}


@frozen(eq=False)
class Mistake:
    """A mistake of a program, and where it occurs: a condition of sizes, ranks and loops."""

    message: str
    holds: isl.Set


def _operator(method: str, *args: Any, is_reflected: bool = False) -> Any:
    """An operator of `Value`, as a method of its evaluator."""

    def operate(self: Value, other: Any) -> Any:
        sides = (other, self) if is_reflected else (self, other)
        return getattr(self.evaluator, method)(*args, *sides)

    return operate


@define(eq=False)
class Value:
    """A number that depends on symbols."""

    evaluator: Evaluator

    __add__ = _operator("sum", 1)
    __radd__ = _operator("sum", 1, is_reflected=True)
    __sub__ = _operator("sum", -1)
    __rsub__ = _operator("sum", -1, is_reflected=True)
    __mul__ = _operator("multiply")
    __floordiv__ = _operator("divide")
    __mod__ = _operator("rest")
    __lt__ = _operator("compare", "<")
    __le__ = _operator("compare", "<=")
    __gt__ = _operator("compare", ">")
    __ge__ = _operator("compare", ">=")
    __eq__ = _operator("compare", "==")
    __ne__ = _operator("compare", "!=")
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return self * -1

    def __bool__(self) -> bool:
        raise TypeError("a condition on sizes is neither true nor false")


@define(eq=False)
class Symbolic(Value):
    """A number as a function of symbols. One that is a `decimal` need not be whole."""

    number: Number
    is_decimal: bool = False


@define(eq=False)
class Truth(Value):
    """The truth value of a condition: where it holds, of where the program then came."""

    holds: isl.Set
    where: isl.Set


@define(eq=False)
class Unread(Value):
    """The value of a `let` that is not affine: whoever needs it cannot be read either."""

    reason: Unreadable


@define
class Evaluator:
    """Evaluates operations at the place that runs, and collects the mistakes of the program.

    `spans` are the places of the program. `own_stages` are the stages of the rank, by the numbers
    of its chunks.
    """

    spans: Sequence[Span]
    where: isl.Set
    own_stages: Sequence[isl.PwAff] = ()
    mistakes: list[Mistake] = field(factory=list)

    def names(self) -> dict[str, Any]:
        """The functions that the Python of a program calls for its arithmetic."""
        return {
            "decimal": Fraction,
            "divide": self.divide,
            "divide_quotient": self.divide,
            "divide_rest": self.rest,
            "multiply": self.multiply,
            "abs": lambda value: self.highest(value, -value),
            "min": self.lowest,
            "max": self.highest,
            "listed": self.listed,
            "own_stage": self.own_stage,
            "let": self.let,
            "either": self.either,
            "both": self.both,
            "one_of": self.one_of,
            "negated": self.negated,
            "branches": self.branches,
            # Values have no hash to look them up by.
            "remembered": lambda function: function,
        }

    @contextmanager
    def within(self, where: isl.Set) -> Iterator[None]:
        """Evaluate under another condition."""
        outside = self.where
        self.where = where
        try:
            yield
        finally:
            self.where = outside

    def mistaken(self, message: str, holds: isl.Set) -> None:
        """Record that the program is wrong where a condition holds."""
        if not holds.is_empty():
            self.mistakes.append(Mistake(message, holds))

    def span(self, location: int | None) -> Span | None:
        """The place of a location in the program."""
        return None if location is None else self.spans[location]

    # Values

    def number(self, value: Any) -> Number:
        """A value as a number."""
        match value:
            case Symbolic():
                return value.number
            case Truth():
                return Number(indicator(value.holds))
            case Unread():
                raise value.reason
            case Fraction():
                return Number(rational(value))
        return of_number(int(value))

    def plain(self, value: Any, location: int | None = None) -> isl.PwAff:
        """A value that must not grow with a product of sizes."""
        try:
            return plain(self.number(value), self.where)
        except Unreadable as unreadable:
            span = unreadable.span or self.span(location)
            raise Unreadable(unreadable.reason, span) from None

    def truth(self, value: Any) -> isl.Set:
        """The part of `where` in which a condition holds."""
        match value:
            case Truth():
                # An intersection with what contains it is the same set, of maybe more pieces.
                is_here = value.where is self.where
                return value.holds if is_here else self.where & value.holds
            case Value():
                return self.where - same(self.number(value), of_number(0), self.where)
        return self.where if value else self.where - self.where

    def truth_value(self, holds: isl.Set) -> Truth:
        """A condition that holds in a part of `where`, as a value."""
        return Truth(self, holds, self.where)

    def let(self, value: Callable[[], Any], can_fail: bool) -> Any:
        """The value of a `let`. One that is not affine does no harm where nobody needs it; but if
        it can also fail, nothing more can be said of the program.
        """
        try:
            return value()
        except Unreadable as reason:
            if can_fail:
                raise
            return Unread(self, reason)

    # Arithmetic. With decimals it is exact, and factors and divisors do not depend on sizes.

    def sum(self, sign: int, left: Any, right: Any) -> Symbolic:
        """The sum of two values, or their difference."""
        total = self.number(left).plus(self.number(right).times(sign))
        return self.result(total, left, right)

    def result(self, value: Number, *operands: Any) -> Symbolic:
        """The value of an operation: a decimal if one of its operands is."""
        return Symbolic(self, folded(value, self.where), are_decimals(*operands))

    def multiply(self, left: Any, right: Any, location: int | None = None) -> Any:
        """The product of two values."""
        if not isinstance(left, Value) and not isinstance(right, Value):
            return left * right
        if are_decimals(left, right):
            one, other = map(self.plain, (left, right))
            if not one.is_cst():
                one, other = other, one
            multiple = other.scale_val(self.constant(one, location))
            return self.result(Number(multiple), left, right)
        result = product(self.number(left), self.number(right), self.where)
        if result is None:
            what = "a product of two numbers that both depend on sizes"
            raise Unreadable(what, self.span(location), is_large=True)
        return self.result(result)

    def divide(self, left: Any, right: Any, location: int | None = None) -> Any:
        """The quotient of two values, rounded down unless one is a decimal."""
        if are_decimals(left, right):
            divisor = self.constant(self.plain(right), location)
            if divisor.is_zero():
                raise Unreadable("a division by zero", self.span(location))
            part = self.plain(left).scale_down_val(divisor)
            return self.result(Number(part), left, right)
        return self.divided(left, right, location)[0]

    def constant(self, factor: isl.PwAff, location: int | None) -> isl.Val:
        """A factor or divisor of decimals."""
        if not factor.is_cst() or factor.n_piece() != 1:
            what = "decimals, times or over what depends on sizes"
            raise Unreadable(what, self.span(location))
        ((_, constant),) = factor.get_pieces()
        return constant.get_constant_val()

    def rest(self, left: Any, right: Any, location: int | None = None) -> Any:
        """The remainder of a division."""
        whole, where = self.divided(left, right, location)
        one, other = map(self.number, (left, right))
        if where.is_empty():
            return whole
        multiple = product(self.number(whole), other, where)
        if multiple is None:
            what = "a rest of a division by a number that depends on sizes"
            raise Unreadable(what, self.span(location))
        return Symbolic(self, folded(one.minus(multiple), where))

    def divided(
        self, left: Any, right: Any, location: int | None
    ) -> tuple[Any, isl.Set]:
        """The quotient of two values, rounded down, and where the divisor is not zero."""
        one, other = map(self.number, (left, right))
        zero = same(other, of_number(0), self.where)
        self.mistaken("division by zero", zero)
        # Beyond the mistake, the program is read on as though it were right.
        where = self.where - zero
        if where.is_empty():
            return left, where
        whole = quotient(one, other, where)
        if whole is None:
            what = "a division by a number that depends on sizes, with more than a few outcomes"
            raise Unreadable(what, self.span(location), is_large=True)
        return Symbolic(self, folded(whole, where)), where

    def lowest(self, *values: Any) -> Any:
        """The minimum of some values."""
        return self.extreme(min, least, values)

    def highest(self, *values: Any) -> Any:
        """The maximum of some values."""
        return self.extreme(max, most, values)

    def extreme(
        self,
        of_known: Callable[[Iterable[Any]], Any],
        of_numbers: Callable[[Sequence[Number], isl.Set], Number],
        values: Sequence[Any],
    ) -> Any:
        """The minimum or maximum of some values."""
        if not any(isinstance(value, Value) for value in values):
            return of_known(values)
        if are_decimals(*values):
            raise Unreadable("the minimum or maximum of decimals that depend on sizes")
        return Symbolic(self, of_numbers([*map(self.number, values)], self.where))

    def compare(self, operator: str, left: Any, right: Any) -> Truth:
        """The condition that two values compare so."""
        one, other = map(self.number, (left, right))
        if are_decimals(left, right):
            difference, _ = scaled(self.plain(left).sub(self.plain(right)))
            one, other = Number(difference), of_number(0)
        return self.truth_value(_COMPARISONS[operator](one, other, self.where))

    # Cases

    def either(
        self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]
    ) -> Any:
        """The value of a choice, of which each side is evaluated where it is taken."""
        holds = self.truth(condition)
        return self.of_cases([(holds, then), (self.where - holds, otherwise)])

    def of_cases(self, cases: Sequence[tuple[isl.Set, Callable[[], Any]]]) -> Any:
        """The value of one of several expressions, by cases of which no two hold together."""
        values = []
        for case, value in cases:
            if not case.is_empty():
                with self.within(case):
                    values.append((case, value()))
        if not values:
            return 0
        pieces = [self.number(value).within(case) for case, value in values]
        are_some = are_decimals(*(value for _, value in values))
        return Symbolic(self, union(pieces), are_some)

    def both(self, left: Any, right: Callable[[], Any]) -> Truth:
        """`left and right`: the right side is asked only where the left one holds, so it need not
        have a value elsewhere.
        """
        holds = self.truth(left)
        with self.within(holds):
            both = self.truth(right())
        return self.truth_value(both)

    def one_of(self, left: Any, right: Callable[[], Any]) -> Truth:
        """`left or right`: the right side is asked only where the left one does not hold."""
        first = self.truth(left)
        with self.within(self.where - first):
            second = self.truth(right())
        return self.truth_value((first | second).coalesce())

    def negated(self, value: Any) -> Truth:
        """`not value`."""
        return self.truth_value(self.where - self.truth(value))

    def branches(self, *conditions: Callable[[], Any]) -> Iterator[int]:
        """The branches of an `if` that are taken somewhere, by number, each run under its
        condition.
        """
        rest = self.where
        for number_of, condition in enumerate(conditions):
            with self.within(rest):
                holds = self.truth(condition())
            rest = rest - holds
            if not holds.is_empty():
                with self.within(holds):
                    yield number_of
        if not rest.is_empty():
            with self.within(rest):
                yield len(conditions)

    def own_stage(self, chunk: Any, location: int) -> Any:
        """The stage that a rank holds as its chunk of a number."""
        stages = [
            (stage.domain(), lambda stage=stage: Symbolic(self, Number(stage)))
            for stage in self.own_stages
        ]
        missing = "`stage(…)` of a chunk that the rank lacks"
        return self.chosen(chunk, stages, missing, location)

    def listed(
        self, name: str, values: Sequence[Callable[[], Any]]
    ) -> Callable[[Any, int], Any]:
        """A list: a function of an index and a location."""
        all_values = [(everywhere(), value) for value in values]

        def value_of(index: Any, location: int) -> Any:
            missing = f"`{name}[…]` of a value that there is not"
            return self.chosen(index, all_values, missing, location)

        return value_of

    def chosen(
        self,
        index: Any,
        values: Sequence[tuple[isl.Set, Callable[[], Any]]],
        missing: str,
        location: int,
    ) -> Any:
        """One of several values by its index; each exists where a condition holds."""
        at = self.plain(index, location)
        cases = []
        rest = self.where
        for position, (there, value) in enumerate(values):
            case = self.where & at.eq_set(number(position)) & there
            cases.append((case, value))
            rest = rest - case
        self.mistaken(missing, rest)
        return self.of_cases(cases)


def are_decimals(*values: Any) -> bool:
    """Whether one of some values need not be whole."""
    return any(
        isinstance(value, Fraction)
        or (isinstance(value, Symbolic) and value.is_decimal)
        for value in values
    )


def peak_function(evaluator: Evaluator, peaks: isl.PwAff) -> Callable[..., Symbolic]:
    """`peak` in a claim: of a rank, or without one the highest of all."""

    def peak(*rank: Any) -> Symbolic:
        values = symbol("_value").eq_set(peaks)
        if rank:
            values = renamed(values, {RANK: "_rank"})
            values = values & symbol("_rank").eq_set(evaluator.plain(rank[0]))
        values = without(values, ["_rank" if rank else RANK])
        return Symbolic(evaluator, Number(points(values, ["_value"]).dim_max(0)))

    return peak
