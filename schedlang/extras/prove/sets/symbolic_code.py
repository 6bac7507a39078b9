"""The Python of a program whose sizes are symbols.

Where the compiler's has one outcome, it may have several: both sides of a condition run, each
where it holds. What may have no value is a function, which is called only where it is needed.

    let warmup = min(ranks - 1 - r, 4)     v_warmup = let(lambda: min(…, 4), False)
    if r > 0 { F(next) }                   for case in branches(lambda: (v_r > 0)):
                                            if case == 0:
                                             op((5, None, None))
"""

from __future__ import annotations

from schedlang.language import expressions, syntax
from schedlang.language.codegen import Codegen, variable
from schedlang.language.scopes import BUILTINS
from schedlang.language.syntax import walk


class SymbolicCodegen(Codegen):
    """Generates this Python for one program."""

    def expression(self, node: syntax.Node) -> str:
        """A Python expression."""
        match node:
            case expressions.OwnStage(number):
                return f"own_stage({self.expression(number)}, {self.location(node)})"
            case expressions.Conditional(condition, value, other):
                texts = ", lambda: ".join(
                    map(self.expression, (condition, value, other))
                )
                return f"either({texts})"
            case expressions.Binary("and" | "or") | expressions.Unary("not"):
                return self.condition(node)
        return super().expression(node)

    def condition(self, node: syntax.Node) -> str:
        """A Python expression for a condition."""
        match node:
            case expressions.Binary("and" | "or" as operator, left, right):
                function = "both" if operator == "and" else "one_of"
                return f"{function}({self.condition(left)}, lambda: {self.condition(right)})"
            case expressions.Unary("not", operand):
                return f"negated({self.condition(operand)})"
        return self.expression(node)

    def call(self, name: str, args: tuple[syntax.Node, ...]) -> str:
        """The call of a function; functions are never written out where they are called."""
        values = ", ".join(map(self.expression, args))
        return f"{name if name in BUILTINS else variable(name)}({values})"

    def statement(self, node: syntax.Node) -> list[str]:
        """The lines of one statement."""
        match node:
            case syntax.Let(name, value):
                text = f"lambda: {self.expression(value)}, {_can_fail(value)}"
                self._scope.values.append(name.text)
                return [f"{variable(name.text)} = let({text})"]
            case syntax.List(name, values):
                texts = "".join(
                    f"lambda: {self.expression(value)}, " for value in values
                )
                self._scope.functions[name.text] = node
                return [f"{variable(name.text)} = listed({name.text!r}, ({texts}))"]
        return super().statement(node)

    def branches(self, node: syntax.If) -> list[str]:
        """An `if` with its `else if`s: a loop over the cases that occur."""
        conditions = []
        blocks = []
        otherwise: syntax.Node | None = node
        while isinstance(otherwise, syntax.If):
            conditions.append(f"lambda: {self.condition(otherwise.condition)}")
            blocks.append(self.block(otherwise.then.statements))
            otherwise = otherwise.otherwise
        if isinstance(otherwise, syntax.Block):
            blocks.append(self.block(otherwise.statements))
        lines = [f"for case in branches({', '.join(conditions)}):"]
        for number, block in enumerate(blocks):
            lines.append(f" {'elif' if number else 'if'} case == {number}:")
            lines += [f" {line}" for line in block]
        return lines

    def part(self, node: syntax.Part) -> list[str]:
        """The lines of `warmup` or `steady`."""
        head, *lines = super().part(node)
        return [f"for _ in part({node.name!r}):", *lines] if lines else [head]


def _can_fail(node: syntax.Node) -> bool:
    """Whether an expression may divide by zero, or ask for a stage or a list's value that does not
    exist.
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
