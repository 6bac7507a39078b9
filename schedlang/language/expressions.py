"""The syntax tree of expressions: one class per grammar rule.

Fields stand in the order of the rule's parts. Trees compare without their places in the text.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from schedlang.diagnostics.source import Span


@frozen(eq=False, repr=False)
class Node:
    """A piece of a program; `span` is its place in the text.

    Comparison and `repr` are written here once. attrs would generate them for each class, which
    takes longer than to load the classes.
    """

    span: Span = field(kw_only=True)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values of all fields but the span."""
        names: tuple[str, ...] = self.__match_args__
        return tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash((type(self), self.parts))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


@frozen(eq=False, repr=False)
class Name(Node):
    """A name where it is given: of a parameter, a variable, a function."""

    text: str


@frozen(eq=False, repr=False)
class Conditional(Node):
    """`if condition then value else other`."""

    condition: Node
    value: Node
    other: Node


@frozen(eq=False, repr=False)
class Binary(Node):
    """Two operands and an operator, as it is written."""

    operator: str
    left: Node
    right: Node


@frozen(eq=False, repr=False)
class Unary(Node):
    """`-operand` or `not operand`."""

    operator: str
    operand: Node


@frozen(eq=False, repr=False)
class Number(Node):
    """A whole number."""

    value: int


@frozen(eq=False, repr=False)
class Decimal(Node):
    """A number with a point, as it is written: `1.50`."""

    text: str


@frozen(eq=False, repr=False)
class Reference(Node):
    """A name where it is used."""

    name: str


@frozen(eq=False, repr=False)
class Call(Node):
    """`name(args)`."""

    name: Name
    args: tuple[Node, ...]


@frozen(eq=False, repr=False)
class Element(Node):
    """`name[number]`: a value of a list."""

    name: Name
    number: Node


@frozen(eq=False, repr=False)
class Next(Node):
    """`next`, as an argument of an op: the next microbatch that this rank has not done yet."""


@frozen(eq=False, repr=False)
class OwnStage(Node):
    """`stage(number)`: the stage that a rank holds as its chunk of this number."""

    number: Node


def children(node: Node) -> tuple[Node, ...]:
    """The expressions directly within an expression."""
    match node:
        case Conditional(condition, value, other):
            return condition, value, other
        case Binary(_, left, right):
            return left, right
        case Unary(_, operand):
            return (operand,)
        case OwnStage(number) | Element(_, number):
            return (number,)
        case Call(_, args):
            return args
    return ()


def calls(node: Node) -> list[Call]:
    """The calls anywhere in an expression."""
    own = [node] if isinstance(node, Call) else []
    return own + [call for child in children(node) for call in calls(child)]


def references(node: Node) -> set[str]:
    """The names of values and functions anywhere in an expression."""
    own = (
        {node.name}
        if isinstance(node, Reference)
        else {node.name.text}
        if isinstance(node, Call | Element)
        else set()
    )
    return own.union(*map(references, children(node)))
