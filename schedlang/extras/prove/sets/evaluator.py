"""Expressions of a program → functions and conditions of symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import islpy as isl
from attrs import define, field, frozen

from schedlang.extras.prove.sets.counting import RANK, renamed
from schedlang.extras.prove.sets.isl_functions import (
    indicator,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    Number,
    Unreadable,
    folded,
    joined,
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
from schedlang.language import expressions, syntax
from schedlang.language.scopes import BUILTINS
from schedlang.language.syntax import walk

_COMPARISONS: dict[str, Callable[[Number, Number, isl.Set], isl.Set]] = {
    "==": same,
    "!=": lambda one, other, where: where - same(one, other, where),
    "<": under,
    "<=": lambda one, other, where: where - under(other, one, where),
    ">": lambda one, other, where: under(other, one, where),
    ">=": lambda one, other, where: where - under(one, other, where),
}
_TRUTHS = {"and", "or", "not", *_COMPARISONS}


@frozen(eq=False)
class Mistake:
    """What is wrong with a program at some sizes: where it `holds`, of sizes, ranks and loops."""

    message: str
    holds: isl.Set


@frozen
class Unread:
    """The `value` of a name that is not affine: whoever needs it cannot be read either, but for
    costs, which may have decimals.
    """

    reason: Unreadable
    value: syntax.Node


#: A pipeline's stages by their numbers in it.
StageFunction = Callable[[isl.PwAff], isl.PwAff]


@define
class Scope:
    """The names that are known at one point of a program."""

    values: dict[str, Number | Unread] = field(factory=dict)
    functions: dict[str, tuple[syntax.Fn, Scope]] = field(factory=dict)
    pipelines: dict[str, StageFunction] = field(factory=dict)
    lists: dict[str, tuple[syntax.Node, ...]] = field(factory=dict)
    sequences: dict[str, tuple[syntax.Seq, Scope]] = field(factory=dict)
    #: The peak of each rank (RANK), in a claim.
    peak: isl.PwAff | None = None

    def inner(self) -> Scope:
        """The same names, for a block that may have more of its own."""
        return Scope(
            dict(self.values),
            dict(self.functions),
            self.pipelines,
            self.lists,
            self.sequences,
        )


@define
class Evaluator:
    """Evaluates expressions, and collects what is wrong with them; `own_stage` are the stages of a
    rank by the numbers of its chunks.
    """

    own_stages: Sequence[isl.PwAff] = ()
    mistakes: list[Mistake] = field(factory=list)

    def mistaken(self, message: str, holds: isl.Set) -> None:
        """Something is wrong in a program where a condition holds."""
        if not holds.is_empty():
            self.mistakes.append(Mistake(message, holds))

    def bind(self, let: syntax.Let, scope: Scope, where: isl.Set) -> None:
        """Evaluate `let name = value`. Where it cannot be read, whoever needs the value learns it;
        if it can also fail, nothing more can be said of the program.
        """
        try:
            scope.values[let.name.text] = self.value(let.value, scope, where)
        except Unreadable as reason:
            if _can_fail(let.value):
                raise
            scope.values[let.name.text] = Unread(reason, let.value)

    def plain(self, node: syntax.Node, scope: Scope, where: isl.Set) -> isl.PwAff:
        """The value of an expression that must not grow with a product of sizes."""
        try:
            return plain(self.value(node, scope, where), where)
        except Unreadable as unreadable:
            raise Unreadable(unreadable.reason, unreadable.span or node.span) from None

    def value(self, node: syntax.Node, scope: Scope, where: isl.Set) -> Number:
        """The value of an expression where a condition holds; truth values count as 0 and 1."""
        match node:
            case expressions.Number(value):
                return of_number(value)
            case expressions.Reference(name):
                known = scope.values[name]
                if isinstance(known, Unread):
                    raise known.reason
                return known
            case expressions.OwnStage(chunk):
                return Number(self.own_stage(node, chunk, scope, where))
            case expressions.Element():
                return self.element(node, scope, where)
            case expressions.Call(name, args):
                return self.call(name.text, args, scope, where)
            case expressions.Conditional(condition, value, other):
                then = self.truth(condition, scope, where)
                otherwise = where - then
                parts = [(then, value), (otherwise, other)]
                pieces = [
                    self.value(part, scope, case).within(case)
                    for case, part in parts
                    if not case.is_empty()
                ]
                return union(pieces) if pieces else of_number(0)
            case expressions.Unary("-", operand):
                return self.value(operand, scope, where).times(-1)
            case expressions.Binary(operator, left, right) if operator not in _TRUTHS:
                return self.arithmetic(node, operator, left, right, scope, where)
            case expressions.Binary() | expressions.Unary():
                return Number(indicator(self.truth(node, scope, where)))
            case expressions.Decimal(text):
                raise Unreadable(f"`{text}` is not a whole number", node.span)
        raise Unreadable("this cannot be read", node.span)

    def arithmetic(
        self,
        node: syntax.Node,
        operator: str,
        left_node: syntax.Node,
        right_node: syntax.Node,
        scope: Scope,
        where: isl.Set,
    ) -> Number:
        """The value of an operation on numbers."""
        left = self.value(left_node, scope, where)
        right = self.value(right_node, scope, where)
        if operator == "+":
            return folded(left.plus(right), where)
        if operator == "-":
            return folded(left.minus(right), where)
        if operator == "*":
            result = product(left, right, where)
            if result is None:
                what = "a product of two numbers that both depend on sizes"
                raise Unreadable(what, node.span, is_large=True)
            return folded(result, where)
        zero = same(right, of_number(0), where)
        self.mistaken("division by zero", zero)
        # Beyond the mistake, the program is read on as though it were right.
        where = where - zero
        if where.is_empty():
            return left
        whole = quotient(left, right, where)
        if whole is None:
            what = "a division by a number that depends on sizes"
            raise Unreadable(
                f"{what}, with more than a few outcomes", node.span, is_large=True
            )
        if operator == "/":
            return folded(whole, where)
        multiple = product(whole, right, where)
        if multiple is None:
            raise Unreadable(
                "a rest of a division by a number that depends on sizes", node.span
            )
        return folded(left.minus(multiple), where)

    def own_stage(
        self, node: syntax.Node, chunk: syntax.Node, scope: Scope, where: isl.Set
    ) -> isl.PwAff:
        """The stage that a rank holds as its chunk of a number."""
        index = self.plain(chunk, scope, where)
        pieces = []
        rest = where
        for position, stage in enumerate(self.own_stages):
            case = where & index.eq_set(number(position)) & stage.domain()
            if not case.is_empty():
                pieces.append(stage.intersect_domain(case))
                rest = rest - case
        self.mistaken("`stage(…)` of a chunk that the rank lacks", rest)
        return joined(pieces) if pieces else number(-1)

    def element(
        self, node: expressions.Element, scope: Scope, where: isl.Set
    ) -> Number:
        """A value of a list, by the cases of its number."""
        name = node.name.text
        index = self.plain(node.number, scope, where)
        pieces = []
        rest = where
        for position, value in enumerate(scope.lists[name]):
            case = where & index.eq_set(number(position))
            if not case.is_empty():
                pieces.append(self.value(value, scope, case).within(case))
                rest = rest - case
        self.mistaken(f"`{name}[…]` of a value that there is not", rest)
        return union(pieces) if pieces else of_number(0)

    def call(
        self, name: str, args: Sequence[syntax.Node], scope: Scope, where: isl.Set
    ) -> Number:
        """The value of a call: of a function that every program has, a pipeline's or its own."""
        values = [self.value(arg, scope, where) for arg in args]
        if name in BUILTINS:
            if name == "abs":
                return most([values[0], values[0].times(-1)], where)
            return least(values, where) if name == "min" else most(values, where)
        if name in scope.pipelines:
            if len(values) != 1:
                raise Unreadable(f"`{name}` numbers its pipelines")
            return Number(scope.pipelines[name](plain(values[0], where)))
        if scope.peak is not None and name == "peak":
            return Number(_peak(scope.peak, [plain(value, where) for value in values]))
        function, around = scope.functions[name]
        within = around.inner()
        names = (parameter.text for parameter in function.params)
        within.values.update(zip(names, values, strict=True))
        return self.value(function.body, within, where)

    def truth(self, node: syntax.Node, scope: Scope, where: isl.Set) -> isl.Set:
        """Where an expression holds, of where another condition does."""
        match node:
            # The right side is only asked where the left one holds: so it need not have a value
            # elsewhere.
            case expressions.Binary("and", left, right):
                return self.truth(right, scope, self.truth(left, scope, where))
            case expressions.Binary("or", left, right):
                first = self.truth(left, scope, where)
                return (first | self.truth(right, scope, where - first)).coalesce()
            case expressions.Unary("not", operand):
                return where - self.truth(operand, scope, where)
            case expressions.Binary(operator, left, right) if operator in _COMPARISONS:
                one = self.value(left, scope, where)
                other = self.value(right, scope, where)
                return _COMPARISONS[operator](one, other, where)
        return where - same(self.value(node, scope, where), of_number(0), where)


def _peak(of_ranks: isl.PwAff, rank: Sequence[isl.PwAff]) -> isl.PwAff:
    """The peak of a rank, or of all ranks the highest."""
    values = symbol("_value").eq_set(of_ranks)
    if rank:
        values = renamed(values, {RANK: "_rank"}) & symbol("_rank").eq_set(rank[0])
    values = without(values, ["_rank" if rank else RANK])
    return points(values, ["_value"]).dim_max(0)


def _can_fail(node: syntax.Node) -> bool:
    """Whether an expression may come to a division by zero, or to a stage or a value of a list
    that there is not.
    """
    for part in walk(node):
        match part:
            case expressions.Binary("/" | "%", _, expressions.Number(value)) if (
                value > 0
            ):
                continue
            case (
                expressions.Binary("/" | "%")
                | expressions.OwnStage()
                | expressions.Element()
            ):
                return True
            case expressions.Call(name) if name.text not in BUILTINS:
                return True
    return False
