"""What can be said of a program before it runs: names, arguments, and the parts a schedule must have."""

from collections.abc import Iterable
from difflib import get_close_matches

from attrs import define, field, frozen

from schedlang import expressions, syntax
from schedlang.diagnostics import Diagnostic, Label, counted
from schedlang.expressions import calls, children
from schedlang.source import Source, Span

#: Functions that every program has, with the least and most arguments they take.
BUILTINS = {"min": (1, 255), "max": (1, 255), "abs": (1, 1)}

#: Numbers of a program stay within plus and minus this.
LARGEST = 10**18

#: How many arguments an op takes; a bare `W` is the oldest one owed, a bare `U` all stages of the rank.
_OP_ARGS = {"F": (1, 2), "B": (1, 2), "BW": (1, 2), "W": (0, 2), "R": (1, 2), "U": (0, 1)}

#: What an `assert` can speak of: figures of the schedule at its costs, see `schedlang.claims`.
FIGURES = {
    "peak": 1,
    "versions": 1,
    "staleness": None,
    "makespan": None,
    "work": None,
    "bubble": None,
    "span": None,
    "span_bubble": None,
}


@frozen
class _Declared:
    """A name in scope; `arity` is None for a value."""

    span: Span
    arity: int | None = None


def check_names(source: Source, tree: syntax.Schedule) -> list[Diagnostic]:
    """Everything wrong with the program that does not depend on its parameters."""
    checker = _Checker(source)
    checker.required_parts(tree)
    checker.block(tree.items, {})
    return checker.found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A help line with the closest known name, if one is close."""
    close = get_close_matches(name, known, n=1)
    return f"there is `{close[0]}`" if close else None


@define
class _Checker:
    """Walks the tree with the names in scope; a scope is a dictionary that inner blocks copy."""

    source: Source
    found: list[Diagnostic] = field(factory=list)
    has_slices: bool = False
    #: Functions of the blocks entered so far, also those declared below the place of a call.
    functions: set[str] = field(factory=set)

    def report(self, code: str, message: str, *labels: Label, help: str | None = None) -> None:
        self.found.append(Diagnostic(code, message, labels, self.source, help=help))

    def required_parts(self, tree: syntax.Schedule) -> None:
        """A schedule has the parameters `ranks` and `microbatches`, one `rank` or `block`, at most one `stage`."""
        here = Label(tree.name.span)
        params = {item.name.text for item in tree.items if isinstance(item, syntax.Param)}
        self.has_slices = "slices" in params
        for name in ("ranks", "microbatches"):
            if name not in params:
                self.report("missing-part", f"the schedule has no `param {name}`", here, help=f"add `param {name} = 4`")
        orders = [item for item in tree.items if isinstance(item, syntax.Rank | syntax.Repeated)]
        if not orders:
            help = "add `rank r { … }`, what every rank does"
            self.report("missing-part", "the schedule has no `rank` and no `block`", here, help=help)
        stages = [item for item in tree.items if isinstance(item, syntax.Stage)]
        for parts, words in ((orders, "`rank` or `block`"), (stages, "`stage`")):
            for again in parts[1:]:
                self.report("repeated-part", f"a schedule has one {words}", Label(again.span), Label(parts[0].span))

    def block(self, statements: tuple[syntax.Node, ...], scope: dict[str, _Declared]) -> None:
        """Check statements that share a scope; a name is known from its declaration on."""
        functions = {each.name.text: each for each in statements if isinstance(each, syntax.Fn)}
        self.functions |= functions.keys()
        for statement in statements:
            self.statement(statement, scope, functions)

    def statement(self, node: syntax.Node, scope: dict[str, _Declared], functions: dict[str, syntax.Fn]) -> None:
        """Check a statement of a rank, or else an item of the schedule."""
        match node:
            case syntax.Let(name, value):
                self.expression(value, scope)
                self.declare(name, scope)
            case syntax.Fn(name, params, body):
                if not self.recursion(node, functions, scope):
                    self.expression(body, self.inner(scope, *params))
                self.declare(name, scope, len(params))
            case syntax.For(name, range, body):
                self.bounds(range, scope)
                self.block(body.statements, self.inner(scope, name))
            case syntax.Repeat(count, body):
                self.expression(count, scope)
                self.block(body.statements, dict(scope))
            case syntax.If(condition, then, otherwise):
                self.expression(condition, scope)
                self.block(then.statements, dict(scope))
                if otherwise is not None:
                    inner = otherwise.statements if isinstance(otherwise, syntax.Block) else (otherwise,)
                    self.block(inner, dict(scope))
            case syntax.Op(kind, args):
                self.op(node, kind, args, _OP_ARGS[kind], scope)
            case syntax.Transfer(direction, passed, args):
                self.op(node, f"{direction} {passed}", args, (1, 2), scope)
            case syntax.Exchange(parts) | syntax.Overlap(parts):
                self.block(parts, scope)
            case syntax.Part(_, body):
                self.block(body.statements, dict(scope))
            case _:
                self.item(node, scope, functions)

    def item(self, node: syntax.Node, scope: dict[str, _Declared], functions: dict[str, syntax.Fn]) -> None:
        """Check an item of the schedule."""
        match node:
            case syntax.Param(name, default):
                if default is not None:
                    self.expression(default, scope)
                self.declare(name, scope)
            case syntax.Require(condition):
                self.expression(condition, scope)
            case syntax.Assert(condition):
                figures = {name: _Declared(node.span, arity) for name, arity in FIGURES.items()}
                self.expression(condition, figures | scope)
            case syntax.Stage(name, range, rank):
                self.bounds(range, scope)
                self.expression(rank, self.inner(scope, name))
            case syntax.Pipeline(name, microbatches, stage):
                self.expression(microbatches, scope)
                self.item(stage, scope, functions)
                self.declare(name, scope, arity=1)
            case syntax.Rank(name, body):
                self.block(body.statements, self.inner(scope, name))
            case syntax.Repeated(microbatches, interval, rows):
                self.expression(interval, scope)
                inner = self.inner(scope, *microbatches)
                for row in rows:
                    self.row(row, inner, functions)
            case _:
                self.setting(node, scope)

    def setting(self, node: syntax.Node, scope: dict[str, _Declared]) -> None:
        """Check an item that says how the schedule is to be taken: passes, weights, costs."""
        match node:
            case syntax.Recompute(_, range):
                self.bounds(range, scope)
            case syntax.Weights(rule, stages):
                if rule.updates is not None:
                    self.expression(rule.updates, scope)
                if stages is not None:
                    self.bounds(stages, scope)
            case syntax.Cost(word, stage, value):
                self.expression(value, self.inner(scope, stage) if stage else scope)
                if word == "send" and stage:
                    self.report("wrong-arguments", "`cost send` is one for all transfers", Label(stage.span))

    def row(self, row: syntax.Row, scope: dict[str, _Declared], functions: dict[str, syntax.Fn]) -> None:
        """Check the ops of some stages in a building block."""
        self.bounds(row.range, scope)
        inner = self.inner(scope, row.name)
        for placed in row.ops:
            self.statement(placed.op, inner, functions)
            self.expression(placed.slot, inner)
            if len(placed.op.args) < 2:
                help = f"write `{placed.op.kind}(s, m) at …`"
                self.report("wrong-arguments", "an op of a block names its stage", Label(placed.op.span), help=help)

    def declare(self, name: syntax.Name, scope: dict[str, _Declared], arity: int | None = None) -> None:
        """Bring a name into scope; a name never has two meanings in one place."""
        if name.text in BUILTINS:
            self.report("duplicate-name", f"`{name.text}` is a built-in function", Label(name.span))
        elif name.text in scope:
            first = Label(scope[name.text].span, "first declared here")
            self.report("duplicate-name", f"`{name.text}` is already declared", Label(name.span), first)
        else:
            scope[name.text] = _Declared(name.span, arity)

    def inner(self, scope: dict[str, _Declared], *names: syntax.Name) -> dict[str, _Declared]:
        """A scope inside another, with names of its own."""
        inner = dict(scope)
        for name in names:
            self.declare(name, inner)
        return inner

    def recursion(self, fn: syntax.Fn, functions: dict[str, syntax.Fn], scope: dict[str, _Declared]) -> bool:
        """Report a function that calls itself, directly or through functions declared below it."""
        for call in calls(fn.body):
            callee = call.name.text
            if callee in scope or callee not in functions:
                continue
            if callee == fn.name.text or _reaches(functions[callee], fn.name.text, functions):
                self.report("recursion", f"function `{fn.name.text}` calls itself", Label(call.span))
                return True
        return False

    def op(
        self,
        node: syntax.Node,
        word: str,
        args: tuple[syntax.Node, ...],
        arity: tuple[int, int],
        scope: dict[str, _Declared],
    ) -> None:
        """Check an op's arguments: a stage where the rank has several, and a microbatch, which may be `next`."""
        least, most = arity
        slice = ", k" if self.has_slices else ""
        if self.has_slices and word != "U":
            least, most = min(least, 1) * 2, 3
        if not least <= len(args) <= most:
            form = f"`{word}(s)`" if word == "U" else f"`{word}(m{slice})` or `{word}(s, m{slice})`"
            self.report(
                "wrong-arguments",
                f"`{word}` with {counted(len(args), 'argument')}",
                Label(node.span),
                help=f"write {form}",
            )
        for place, arg in enumerate(args):
            allowed = place == len(args) - 1 and word != "U" and not self.has_slices
            if not (isinstance(arg, expressions.Next) and allowed):
                self.expression(arg, scope)

    def bounds(self, range: syntax.Range, scope: dict[str, _Declared]) -> None:
        self.expression(range.start, scope)
        self.expression(range.stop, scope)

    def expression(self, node: syntax.Node, scope: dict[str, _Declared]) -> None:
        match node:
            case expressions.Reference(name):
                self.reference(node, name, scope)
            case expressions.Call(name, args):
                self.call(node, name, len(args), scope)
            case expressions.Number(value) if value > LARGEST:
                self.report("too-large", "a number beyond 10^18", Label(node.span))
            case expressions.Next():
                message = "`next` stands only for the microbatch of an op, as in `F(s, next)`"
                self.report("next", message, Label(node.span))
        for child in children(node):
            self.expression(child, scope)

    def reference(self, node: syntax.Node, name: str, scope: dict[str, _Declared]) -> None:
        if name not in scope:
            values = [each for each, declared in scope.items() if declared.arity is None]
            self.report("unknown-name", f"no name `{name}` in scope", Label(node.span), help=nearest(name, values))
        elif scope[name].arity is not None:
            self.report("unknown-name", f"`{name}` is a function: write `{name}(…)`", Label(node.span))

    def call(self, node: syntax.Node, name: syntax.Name, count: int, scope: dict[str, _Declared]) -> None:
        declared = scope.get(name.text)
        if declared is not None and declared.arity is not None:
            least, most = declared.arity, declared.arity
        elif name.text in BUILTINS:
            least, most = BUILTINS[name.text]
        else:
            known = [*BUILTINS, *(each for each, known in scope.items() if known.arity is not None)]
            below = "it is declared below: move it above this line" if name.text in self.functions else None
            help = below or nearest(name.text, known)
            self.report("unknown-name", f"no function `{name.text}` in scope", Label(name.span), help=help)
            return
        if not least <= count <= most:
            takes = f"it takes {counted(least, 'argument')}{'' if least == most else ' or more'}"
            self.report(
                "wrong-arguments", f"`{name.text}` with {counted(count, 'argument')}, {takes}", Label(node.span)
            )


def _reaches(fn: syntax.Fn, name: str, functions: dict[str, syntax.Fn]) -> bool:
    """Whether a function calls `name`, directly or through others."""
    seen, waiting = {fn.name.text}, [fn]
    while waiting:
        for call in calls(waiting.pop().body):
            if call.name.text == name:
                return True
            if call.name.text in functions and call.name.text not in seen:
                seen.add(call.name.text)
                waiting.append(functions[call.name.text])
    return False
