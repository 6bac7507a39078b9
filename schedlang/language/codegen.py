"""Syntax tree → Python text, so that a program runs as fast as Python, not as a walk over its tree.

Names become `v_name`, and those of parameters their values. What can go wrong while a program runs
calls a function that knows its place in the program: the last argument of each such call is an
index into `spans`.
"""

from attrs import define, field

from schedlang.diagnostics.source import Span
from schedlang.language import expressions, syntax
from schedlang.language.scopes import BUILTINS, LARGEST

_PYTHON = {"/": "//"}
#: The functions of operations that can fail.
_CHECKED = {"/": "divide_quotient", "%": "divide_rest", "*": "multiply"}


def variable(name: str) -> str:
    """The Python name of a program's name; the prefix keeps Python's own words apart."""
    return f"v_{name}"


@define
class Codegen:
    """Generates Python for parts of one program.

    `spans` collects the places that the text refers to, `words` the words of its ops; `params` are
    those bound so far. A program `is_plain` if it has compute ops only. `ops` are the places of its
    ops, `arities` how many arguments they have, those of bare ops apart, which are `bare` while the
    program runs. `overlaps` has for each place of an op that overlaps with others that of the first
    of them.
    """

    spans: list[Span] = field(factory=list)
    words: set[str] = field(factory=set)
    params: dict[str, int] = field(factory=dict)
    is_plain: bool = True
    arities: set[int] = field(factory=set)
    overlaps: dict[int, int] = field(factory=dict)
    ops: list[int] = field(factory=list)

    def place(self, node: syntax.Node) -> int:
        """The index in `spans` of a node's place."""
        self.spans.append(node.span)
        return len(self.spans) - 1

    def expression(self, node: syntax.Node) -> str:
        """A Python expression; truth values are Python's, which count as 0 and 1."""
        match node:
            case expressions.Number(value):
                return str(value)
            case expressions.Reference(name):
                return f"({self.params[name]})" if name in self.params else variable(name)
            case expressions.Next():
                return "None"
            case expressions.Call(name, args):
                called = name.text if name.text in BUILTINS else variable(name.text)
                if name.text in BUILTINS and len(args) == 1 and name.text != "abs":
                    return self.expression(args[0])
                return f"{called}({', '.join(map(self.expression, args))})"
            case expressions.Conditional(condition, value, other):
                parts = [self.expression(each) for each in (value, condition, other)]
                return "({} if {} else {})".format(*parts)
            case expressions.Unary(operator, operand):
                return f"({operator} {self.expression(operand)})"
            case expressions.Binary(operator, left, right):
                return self.binary(node, operator, left, right)
        raise TypeError(f"not an expression: {node}")

    def binary(
        self, node: syntax.Node, operator: str, left: syntax.Node, right: syntax.Node
    ) -> str:
        """An operation; division looks at its divisor and multiplication at its size, unless a
        known number is safe.
        """
        operands = self.expression(left), self.expression(right)
        literal = isinstance(right, expressions.Number) and right.value > 0
        if operator in _CHECKED and not literal:
            place = self.place(node)
            if not 0 < self.constant(right) <= LARGEST:
                return f"{_CHECKED[operator]}({', '.join(operands)}, {place})"
        if operator in ("and", "or"):
            return f"bool({operands[0]} {operator} {operands[1]})"
        return f"({operands[0]} {_PYTHON.get(operator, operator)} {operands[1]})"

    def constant(self, node: syntax.Node) -> int:
        """The value of an expression of numbers and parameters; 0 of any other."""
        match node:
            case expressions.Number(value):
                return value
            case expressions.Reference(name):
                return self.params.get(name, 0)
            case expressions.Binary("*", left, right):
                return self.constant(left) * self.constant(right)
        return 0

    def program(self, order: syntax.Rank | syntax.Repeated) -> str:
        """A Python function `program`: of a rank's number, that records its ops; or of a block's
        microbatches.
        """
        if isinstance(order, syntax.Repeated):
            return self.building_block(order)
        return "\n".join(
            [f"def program({variable(order.name.text)}):", *self.block(order.body.statements)]
        )

    def block(self, statements: tuple[syntax.Node, ...]) -> list[str]:
        """The indented lines of a block."""
        lines = [line for statement in statements for line in self.statement(statement)]
        return [f" {line}" for line in lines or ["pass"]]

    def statement(self, node: syntax.Node) -> list[str]:
        """The lines of one statement."""
        match node:
            case syntax.Let(name, value):
                return [f"{variable(name.text)} = {self.expression(value)}"]
            case syntax.Fn(name, params, body):
                names = ", ".join(variable(each.text) for each in params)
                return [f"def {variable(name.text)}({names}): return {self.expression(body)}"]
            case syntax.Require(condition, reason):
                return [
                    f"require({self.expression(condition)}, {reason!r}, {self.place(condition)})"
                ]
            case syntax.For(name, range, body):
                bounds = f"{self.expression(range.start)}, {self.expression(range.stop)}"
                loop = (
                    f"for {variable(name.text)} in count({bounds}, {_weight(body)}, "
                    f"{self.place(range)}):"
                )
                return [loop, *self.block(body.statements)]
            case syntax.Repeat(count, body):
                loop = (
                    f"for _ in repeat({self.expression(count)}, {_weight(body)}, "
                    f"{self.place(count)}):"
                )
                return [loop, *self.block(body.statements)]
            case syntax.If():
                return self.branches(node)
            case syntax.Assert(condition, reason):
                used = sorted(expressions.references(condition))
                return [
                    f"claim(lambda: {self.expression(condition)}, {reason!r}, "
                    f"{self.place(condition)}, {used})"
                ]
            case syntax.Part(name, body):
                self.is_plain = False
                return [
                    f"if begin_part({name!r}, {self.place(node)}):",
                    *self.block(body.statements),
                    "end_part()",
                ]
            case syntax.Exchange(parts) | syntax.Overlap(parts):
                before = len(self.ops)
                lines = [line for each in parts for line in self.statement(each)]
                self.overlaps |= {place: self.ops[before] for place in self.ops[before:]}
                return ["begin_batch()", *lines, "end_batch()"]
            case syntax.Op(kind, args):
                self.is_plain &= kind != "U"
                return [self.op("op", kind, args, node)]
            case syntax.Transfer(direction, passed, args):
                self.is_plain = False
                return [self.op("transfer", f"{direction} {passed}", args, node)]
        raise TypeError(f"not a statement: {node}")

    def building_block(self, block: syntax.Repeated) -> str:
        """A Python function of a block's microbatches that places its ops."""
        lines = []
        for row in block.rows:
            bounds = f"{self.expression(row.range.start)}, {self.expression(row.range.stop)}"
            weight = len(row.ops)
            lines.append(
                f" for {variable(row.name.text)} in count({bounds}, {weight}, "
                f"{self.place(row.range)}):"
            )
            for placed in row.ops:
                self.words.add(placed.op.kind)
                args = "".join(f"{self.expression(arg)}, " for arg in placed.op.args)
                slot = self.expression(placed.slot)
                lines.append(
                    f"  place({placed.op.kind!r}, ({args}), {slot}, {self.place(placed.op)})"
                )
        parameters = ", ".join(variable(each.text) for each in block.microbatches)
        return "\n".join([f"def program({parameters}):", *lines, " pass"])

    def branches(self, node: syntax.If) -> list[str]:
        """An `if` with its `else if`s; these do not nest in Python either."""
        lines = [f"if {self.expression(node.condition)}:", *self.block(node.then.statements)]
        while isinstance(node.otherwise, syntax.If):
            node = node.otherwise
            lines += [f"elif {self.expression(node.condition)}:", *self.block(node.then.statements)]
        if node.otherwise is not None:
            lines += ["else:", *self.block(node.otherwise.statements)]
        return lines

    def op(self, function: str, word: str, args: tuple[syntax.Node, ...], node: syntax.Node) -> str:
        """A call that records an op: its word, its place, and its arguments, as one tuple."""
        place = self.place(node)
        self.words.add(word)
        self.ops.append(place)
        if args:
            self.arities.add(len(args))
        values = "".join(f", {self.expression(arg)}" for arg in args) if args else ", *bare"
        return f"{function}(({word!r}, {place}{values}))"


def _weight(body: syntax.Node) -> int:
    """How many steps one round of a loop counts at most, loops within it apart."""
    match body:
        case syntax.Op() | syntax.Transfer():
            return 1
        case syntax.Exchange(parts) | syntax.Overlap(parts) | syntax.Block(parts):
            return 1 + sum(map(_weight, parts))
        case syntax.If(_, then, otherwise):
            return max(_weight(then), _weight(otherwise) if otherwise else 0)
    return 0
