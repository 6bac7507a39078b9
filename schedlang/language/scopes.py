"""Names and where they are known, and what can be said of an expression before it has a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.language import expressions, syntax
from schedlang.language.expressions import calls, children
from schedlang.on_demand import on_demand

if TYPE_CHECKING:
    from schedlang.diagnostics.repair import Hint
    from schedlang.language.hints import foreign_function, foreign_name, nearest
else:
    # For programs that are wrong.
    foreign_function = on_demand("schedlang.language.hints.foreign_function")
    foreign_name = on_demand("schedlang.language.hints.foreign_name")
    nearest = on_demand("schedlang.language.hints.nearest")

#: The most arguments of a function that takes any number of them.
_ANY = 255
#: Functions that every program has, with the least and most arguments they take.
BUILTINS = {"min": (1, _ANY), "max": (1, _ANY), "abs": (1, 1)}

#: What an `assert` can speak of: figures of the schedule at its costs, see
#: `schedlang.language.claims`. `peak` and `versions` are of a rank, or without one the highest of
#: all.
FIGURES = {
    "peak": (0, 1),
    "versions": (0, 1),
    "staleness": None,
    "makespan": None,
    "work": None,
    "bubble": None,
    "span": None,
    "span_bubble": None,
}

#: The figures that each rank has.
FIGURES_OF_RANKS = tuple(name for name, arity in FIGURES.items() if arity)

#: Numbers of a program stay within plus and minus this.
LARGEST = 10**18
_MOST_DIGITS = 18


@frozen
class Declared:
    """A name in scope. `arity` is the least and the greatest number of arguments of a function,
    None for a value. `is_decimal` is set if the value, the result of the function, or a value of
    the list need not be whole.
    """

    span: Span
    arity: tuple[int, int] | None = None
    is_decimal: bool = False
    is_list: bool = False
    is_sequence: bool = False


def _figures(scope: Mapping[str, Declared]) -> str | None:
    """A help for claims: the figures that they may use. None outside of claims."""
    figures = [name for name in FIGURES if name in scope]
    if len(figures) < len(FIGURES):
        return None
    shown = (name if FIGURES[name] is None else f"{name}(r)" for name in figures)
    return f"a claim is about {', '.join(f'`{each}`' for each in shown)}"


@define
class Scopes:
    """Checks expressions with the names in scope, a dictionary that inner blocks copy."""

    source: Source
    diagnostics: list[Diagnostic] = field(factory=list)
    #: Whether what is checked stands in a `rank`.
    in_rank: bool = False
    #: Functions of the blocks entered so far, also those declared below the place of a call.
    functions: set[str] = field(factory=set)

    def report(
        self, code: str, message: str, *labels: Label, help: str | Hint | None = None
    ) -> None:
        """Record a mistake. The first label is its place."""
        text = help if help is None or isinstance(help, str) else help.text
        edits = () if help is None or isinstance(help, str) else help.edits
        self.diagnostics.append(
            Diagnostic(code, message, labels, self.source, help=text, edits=edits)
        )

    def declare(
        self,
        name: syntax.Name,
        scope: dict[str, Declared],
        arity: tuple[int, int] | None = None,
        is_decimal: bool = False,
        is_list: bool = False,
        is_sequence: bool = False,
    ) -> None:
        """Bring a name into scope. A name never has two meanings at one place."""
        if name.text in BUILTINS:
            self.report(
                "duplicate-name",
                f"`{name.text}` is a built-in function",
                Label(name.span),
            )
        elif name.text in scope:
            first = Label(scope[name.text].span, "first declared here")
            help = "choose another name: one has the same meaning wherever it is known"
            message = f"`{name.text}` is already declared"
            self.report("duplicate-name", message, Label(name.span), first, help=help)
        else:
            scope[name.text] = Declared(
                name.span, arity, is_decimal, is_list, is_sequence
            )

    def inner(
        self, scope: dict[str, Declared], *names: syntax.Name
    ) -> dict[str, Declared]:
        """A scope inside another, with names of its own."""
        inner = dict(scope)
        for name in names:
            self.declare(name, inner)
        return inner

    def recursion(
        self, fn: syntax.Fn, functions: dict[str, syntax.Fn], scope: dict[str, Declared]
    ) -> bool:
        """Report a function that calls itself, directly or through functions declared below it."""
        for call in calls(fn.body):
            callee = call.name.text
            # A function that was declared above was looked at there.
            if callee in scope or callee not in functions:
                continue
            if callee == fn.name.text or _reaches(
                functions[callee], fn.name.text, functions
            ):
                message = f"function `{fn.name.text}` calls itself"
                help = "a function is a formula: it may call others, not itself"
                self.report("recursion", message, Label(call.span), help=help)
                return True
        return False

    def bounds(self, range: syntax.Range, scope: dict[str, Declared]) -> None:
        """Check a range's two expressions."""
        self.whole(range.start, "the start of a range", scope)
        self.whole(range.stop, "the end of a range", scope)

    def whole(self, node: syntax.Node, what: str, scope: dict[str, Declared]) -> None:
        """Check an expression that must be a whole number, since it counts or numbers something."""
        self.expression(node, scope)
        if is_decimal(node, scope):
            message = f"{what} is a whole number, this is a decimal"
            help = "decimals are for `cost`, `memory`, `assert` and what these refer to"
            self.report("decimal", message, Label(node.span), help=help)

    def expression(self, node: syntax.Node, scope: dict[str, Declared]) -> None:
        """Check an expression and those within it."""
        match node:
            case expressions.Reference(name):
                self.reference(node, name, scope)
            case expressions.Call(name, args):
                self.call(node, name, len(args), scope)
            case expressions.Element(name, number):
                self.element(node, name, scope)
                if is_decimal(number, scope):
                    self.whole(number, "the number of a value", scope)
            case expressions.Number(value) if value > LARGEST:
                self.report("too-large", "a number beyond 10^18", Label(node.span))
            case expressions.Decimal(text) if is_too_long(text):
                self.report(
                    "too-large", "a number of more than 18 digits", Label(node.span)
                )
            case expressions.OwnStage(number) if is_decimal(number, scope):
                self.whole(number, "the number of a chunk", scope)
            case expressions.Next():
                message = (
                    "`next` stands only for the microbatch of an op, as in `F(s, next)`"
                )
                self.report("next", message, Label(node.span))
            case expressions.OwnStage() if not self.in_rank:
                message = "`stage(…)` is a stage of a rank's own: it stands only within `rank`"
                self.report("unknown-name", message, Label(node.span))
        for child in children(node):
            self.expression(child, scope)

    def reference(
        self, node: syntax.Node, name: str, scope: dict[str, Declared]
    ) -> None:
        """Check that a name is known, as a value."""
        if name in BUILTINS:
            message = f"`{name}` is a function: write `{name}(…)`"
            self.report("unknown-name", message, Label(node.span))
        elif name not in scope:
            values = [
                name for name, declared in scope.items() if declared.arity is None
            ]
            self.report(
                "unknown-name",
                f"no name `{name}` in scope",
                Label(node.span),
                help=foreign_name(name, node.span)
                or nearest(name, values, node.span)
                or _figures(scope),
            )
        elif scope[name].is_sequence:
            self.report("unknown-name", _sequence(name), Label(node.span))
        elif scope[name].arity is not None:
            self.report(
                "unknown-name",
                f"`{name}` is a function: write `{name}(…)`",
                Label(node.span),
            )
        elif scope[name].is_list:
            message = f"`{name}` is a list: write `{name}[0]` for its first value"
            self.report("unknown-name", message, Label(node.span))

    def element(
        self, node: syntax.Node, name: syntax.Name, scope: dict[str, Declared]
    ) -> None:
        """Check that a name is known, as a list."""
        declared = scope.get(name.text)
        if declared is not None and declared.is_list:
            return
        lists = [known for known in scope if scope[known].is_list]
        help = nearest(name.text, lists, name.span)
        what = (
            f"no list `{name.text}` in scope"
            if declared is None
            else f"`{name.text}` is no list"
        )
        way_out = "a list is declared as `let depth = [3, 2, 1]`"
        self.report("unknown-name", what, Label(name.span), help=help or way_out)

    def call(
        self,
        node: syntax.Node,
        name: syntax.Name,
        count: int,
        scope: dict[str, Declared],
    ) -> None:
        """Check that a function is known, and the number of its arguments."""
        declared = scope.get(name.text)
        if declared is not None and declared.is_sequence:
            self.report("unknown-name", _sequence(name.text), Label(name.span))
            return
        if declared is not None and declared.arity is not None:
            least, most = declared.arity
        elif name.text in BUILTINS:
            least, most = BUILTINS[name.text]
        else:
            if name.text in self.functions:
                help: str | Hint | None = (
                    "it is declared below: move it above this line"
                )
            else:
                functions = [known for known in scope if scope[known].arity is not None]
                help = (
                    foreign_function(name.text)
                    or nearest(name.text, [*BUILTINS, *functions], name.span)
                    or _figures(scope)
                )
            self.report(
                "unknown-name",
                f"no function `{name.text}` in scope",
                Label(name.span),
                help=help,
            )
            return
        self.arguments(node, name, count, least, most)

    def run(self, node: syntax.Run, scope: dict[str, Declared]) -> None:
        """Check that a sequence is known, and the number of its arguments."""
        name = node.name
        declared = scope.get(name.text)
        if declared is None or declared.arity is None or not declared.is_sequence:
            known = [known for known in scope if scope[known].is_sequence]
            help = nearest(name.text, known, name.span)
            way_out = "a sequence is declared as `seq drain(n) { … }`"
            message = f"no sequence `{name.text}` in scope"
            if declared is not None:
                message = f"`{name.text}` is no sequence"
            self.report("unknown-name", message, Label(name.span), help=help or way_out)
            return
        self.arguments(node, name, len(node.args), *declared.arity)

    def arguments(
        self, node: syntax.Node, name: syntax.Name, count: int, least: int, most: int
    ) -> None:
        """Check a number of arguments."""
        if not least <= count <= most:
            if least == most:
                takes = counted(least, "argument")
            elif most == _ANY:
                takes = f"{counted(least, 'argument')} or more"
            else:
                takes = f"{least} to {most} arguments"
            self.report(
                "wrong-arguments",
                f"`{name.text}` with {counted(count, 'argument')}, it takes {takes}",
                Label(node.span),
            )


def _sequence(name: str) -> str:
    return f"`{name}` is a sequence: write `run {name}(…)`, as a statement"


def is_decimal(node: syntax.Node, scope: dict[str, Declared]) -> bool:
    """Whether an expression may give a decimal, judged by the decimals in it."""
    match node:
        case expressions.Decimal():
            return True
        case expressions.Reference(name):
            return name in scope and scope[name].is_decimal
        case expressions.Element(name):
            return name.text in scope and scope[name.text].is_decimal
        case expressions.Call(name, args):
            is_function = name.text in scope and scope[name.text].is_decimal
            return is_function or any(is_decimal(arg, scope) for arg in args)
        case expressions.Conditional(_, value, other):
            return is_decimal(value, scope) or is_decimal(other, scope)
        case expressions.Unary("-", operand):
            return is_decimal(operand, scope)
        case expressions.Binary("+" | "-" | "*" | "/" | "%", left, right):
            return is_decimal(left, scope) or is_decimal(right, scope)
    return False


def is_too_long(text: str) -> bool:
    """Whether a decimal has more digits before or behind its point than numbers may have."""
    whole, _, decimals = text.partition(".")
    return max(len(whole.lstrip("-0")), len(decimals.rstrip("0"))) > _MOST_DIGITS


def _reaches(fn: syntax.Fn, name: str, functions: dict[str, syntax.Fn]) -> bool:
    """Whether a function calls `name`, directly or through others."""
    seen = {fn.name.text}
    waiting = [fn]
    while waiting:
        for call in calls(waiting.pop().body):
            if call.name.text == name:
                return True
            if call.name.text in functions and call.name.text not in seen:
                seen.add(call.name.text)
                waiting.append(functions[call.name.text])
    return False
