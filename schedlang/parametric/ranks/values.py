"""Expressions of a program → functions and conditions of symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import islpy as isl
from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.language import expressions, syntax
from schedlang.language.scopes import BUILTINS
from schedlang.language.syntax import walk
from schedlang.parametric.ranks.symbols import (
    constant,
    floor_by,
    floor_by_symbol,
    indicator,
    number,
)

_COMPARISONS: dict[str, Callable[[isl.PwAff, isl.PwAff], isl.Set]] = {
    "==": isl.PwAff.eq_set,
    "!=": isl.PwAff.ne_set,
    "<": isl.PwAff.lt_set,
    "<=": isl.PwAff.le_set,
    ">": isl.PwAff.gt_set,
    ">=": isl.PwAff.ge_set,
}
_TRUTHS = {"and", "or", "not", *_COMPARISONS}


class Unreadable(Exception):
    """What no quasi-affine function says, and so is not proved for every size."""

    def __init__(self, reason: str, span: Span | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.span = span


@frozen(eq=False)
class Mistake:
    """What is wrong with a program at some sizes: where it `holds`, of sizes, ranks and loops."""

    code: str
    message: str
    span: Span | None
    holds: isl.Set


@frozen
class Unread:
    """The value of a name that is not affine: whoever needs it cannot be read either."""

    reason: Unreadable


#: A pipeline's stages by their numbers in it.
StageFunction = Callable[[isl.PwAff], isl.PwAff]


@define
class Scope:
    """The names that are known at one point of a program."""

    values: dict[str, isl.PwAff | Unread] = field(factory=dict)
    functions: dict[str, tuple[syntax.Fn, Scope]] = field(factory=dict)
    pipelines: dict[str, StageFunction] = field(factory=dict)
    lists: dict[str, tuple[syntax.Node, ...]] = field(factory=dict)
    sequences: dict[str, tuple[syntax.Seq, Scope]] = field(factory=dict)

    def inner(self) -> Scope:
        """The same names, for a block that may have more of its own."""
        return Scope(
            dict(self.values), dict(self.functions), self.pipelines, self.lists, self.sequences
        )


@define
class Evaluator:
    """Evaluates expressions, and collects what is wrong with them; `own_stage` are the stages of a
    rank by the numbers of its chunks.
    """

    own_stages: Sequence[isl.PwAff] = ()
    mistakes: list[Mistake] = field(factory=list)

    def mistaken(self, code: str, message: str, node: syntax.Node, holds: isl.Set) -> None:
        """Something is wrong in a program where a condition holds."""
        if not holds.is_empty():
            self.mistakes.append(Mistake(code, message, node.span, holds))

    def bind(self, let: syntax.Let, scope: Scope, where: isl.Set) -> None:
        """Evaluate `let name = value`. Where it cannot be read, whoever needs the value learns it;
        if it can also fail, nothing more can be said of the program.
        """
        try:
            scope.values[let.name.text] = self.value(let.value, scope, where)
        except Unreadable as reason:
            if _can_fail(let.value):
                raise
            scope.values[let.name.text] = Unread(reason)

    def value(self, node: syntax.Node, scope: Scope, where: isl.Set) -> isl.PwAff:
        """The value of an expression where a condition holds; truth values count as 0 and 1."""
        match node:
            case expressions.Number(value):
                return number(value)
            case expressions.Reference(name):
                known = scope.values[name]
                if isinstance(known, Unread):
                    raise known.reason
                return known
            case expressions.OwnStage(chunk):
                return self.own_stage(node, chunk, scope, where)
            case expressions.Element():
                return self.element(node, scope, where)
            case expressions.Call(name, args):
                return self.call(name.text, args, scope, where)
            case expressions.Conditional(condition, value, other):
                then = self.truth(condition, scope, where)
                otherwise = where - then
                parts = [(then, value), (otherwise, other)]
                pieces = [
                    self.value(part, scope, case).intersect_domain(case)
                    for case, part in parts
                    if not case.is_empty()
                ]
                return pieces[0] if len(pieces) == 1 else _union(pieces)
            case expressions.Unary("-", operand):
                return self.value(operand, scope, where).neg()
            case expressions.Binary(operator, left, right) if operator not in _TRUTHS:
                return self.arithmetic(node, operator, left, right, scope, where)
            case expressions.Binary() | expressions.Unary():
                return indicator(self.truth(node, scope, where))
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
    ) -> isl.PwAff:
        """The value of an operation on numbers."""
        left = self.value(left_node, scope, where)
        right = self.value(right_node, scope, where)
        if operator == "+":
            return left.add(right)
        if operator == "-":
            return left.sub(right)
        factor = constant(right, where)
        if operator == "*":
            if factor is not None:
                return left.scale_val(isl.Val(factor))
            factor = constant(left, where)
            if factor is not None:
                return right.scale_val(isl.Val(factor))
            raise Unreadable("a product of two numbers that both depend on sizes", node.span)
        zero = where & right.eq_set(number(0))
        self.mistaken("division-by-zero", "division by zero", node, zero)
        where = where - zero
        if factor == 0:
            return left
        if factor is not None:
            quotient = floor_by(left, factor)
        else:
            by_cases = floor_by_symbol(left, right, where)
            if by_cases is None:
                what = "a division by a number that depends on sizes"
                raise Unreadable(f"{what}, with more than a few outcomes", node.span)
            quotient = by_cases
        if operator == "/":
            return quotient
        return left.sub(self.product(quotient, right, where))

    def product(self, quotient: isl.PwAff, divisor: isl.PwAff, where: isl.Set) -> isl.PwAff:
        """A quotient times what it was divided by, of which one has few values."""
        factor = constant(divisor, where)
        if factor is not None:
            return quotient.scale_val(isl.Val(factor))
        pieces = []
        for case, value in quotient.get_pieces():
            assert value.is_cst()
            times = divisor.scale_val(value.get_constant_val())
            pieces.append(times.intersect_domain(case))
        return _union(pieces)

    def own_stage(
        self, node: syntax.Node, chunk: syntax.Node, scope: Scope, where: isl.Set
    ) -> isl.PwAff:
        """The stage that a rank holds as its chunk of a number."""
        index = self.value(chunk, scope, where)
        pieces = []
        rest = where
        for position, stage in enumerate(self.own_stages):
            case = where & index.eq_set(number(position)) & stage.domain()
            if not case.is_empty():
                pieces.append(stage.intersect_domain(case))
                rest = rest - case
        self.mistaken("no-such-stage", "`stage(…)` of a chunk that the rank lacks", node, rest)
        return _union(pieces) if pieces else number(-1)

    def element(self, node: expressions.Element, scope: Scope, where: isl.Set) -> isl.PwAff:
        """A value of a list, by the cases of its number."""
        name = node.name.text
        index = self.value(node.number, scope, where)
        pieces = []
        rest = where
        for position, value in enumerate(scope.lists[name]):
            case = where & index.eq_set(number(position))
            if not case.is_empty():
                pieces.append(self.value(value, scope, case).intersect_domain(case))
                rest = rest - case
        self.mistaken("no-such-value", f"`{name}[…]` of a value that there is not", node, rest)
        return _union(pieces) if pieces else number(0)

    def call(
        self, name: str, args: Sequence[syntax.Node], scope: Scope, where: isl.Set
    ) -> isl.PwAff:
        """The value of a call: of a function that every program has, a pipeline's or its own."""
        values = [self.value(arg, scope, where) for arg in args]
        if name in BUILTINS:
            if name == "abs":
                return values[0].max(values[0].neg())
            result = values[0]
            for value in values[1:]:
                result = result.min(value) if name == "min" else result.max(value)
            return result
        if name in scope.pipelines:
            if len(values) != 1:
                raise Unreadable(f"`{name}` numbers its pipelines")
            return scope.pipelines[name](values[0])
        function, around = scope.functions[name]
        within = around.inner()
        names = (parameter.text for parameter in function.params)
        within.values.update(zip(names, values, strict=True))
        return self.value(function.body, within, where)

    def truth(self, node: syntax.Node, scope: Scope, where: isl.Set) -> isl.Set:
        """Where an expression holds, of where another condition does."""
        match node:
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
                return where & _COMPARISONS[operator](one, other)
        return where & self.value(node, scope, where).ne_set(number(0))


def _union(pieces: Sequence[isl.PwAff]) -> isl.PwAff:
    """The functions of several cases, of which no two hold together, as one."""
    result = pieces[0]
    for piece in pieces[1:]:
        result = result.union_add(piece)
    return result.coalesce()


def _can_fail(node: syntax.Node) -> bool:
    """Whether an expression may come to a division by zero, or to a stage or a value of a
    list that there is not."""
    for part in walk(node):
        match part:
            case expressions.Binary("/" | "%", _, expressions.Number(value)) if value > 0:
                continue
            case expressions.Binary("/" | "%") | expressions.OwnStage() | expressions.Element():
                return True
            case expressions.Call(name) if name.text not in BUILTINS:
                return True
    return False
