"""The checks of a program before it runs: the parts that it must have, and the names and arguments
in each.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from attrs import define, field

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.language import expressions, syntax
from schedlang.language.scopes import FIGURES, Declared, Scopes, is_decimal
from schedlang.language.sites import WORDS_OF_STAGE
from schedlang.language.syntax import walk
from schedlang.on_demand import on_demand
from schedlang.schedule.schedule import MESSAGE_TYPES, OBJECTIVES, WEIGHT_RULES

if TYPE_CHECKING:
    from schedlang.language.hints import nearest
else:
    nearest = on_demand("schedlang.language.hints.nearest")

#: How many statements sequences may come to where they run each other, and what counts as one.
_MOST_WRITTEN = 10_000
_STATEMENTS = (syntax.Run, syntax.Op, syntax.Let)
#: How many arguments an op takes: a microbatch, and before it a stage.
_ARGUMENTS = (1, 2)
#: Ops that need none: a bare `W` is the oldest one owed; one of a whole stage, such as a bare `U`,
#: is that of all stages of the rank.
_MAY_BE_BARE = {"W": (0, 2)} | dict.fromkeys(WORDS_OF_STAGE, (0, 1))

#: What happens in a block without an op that it cannot have: a collective, or `U`.
_WITHOUT = (
    "without it, stages are gathered and summed as `schedc view --shards` shows",
    "without it, the optimizer steps come after all backwards",
)

#: What is chosen by a name that is one of a few, by the word of its item.
CHOICES: dict[str, tuple[str, Collection[str]]] = {
    "objective": ("objective", OBJECTIVES),
    "send": ("type of messages", MESSAGE_TYPES),
    "weights": ("rule of weights", WEIGHT_RULES),
}
#: What has no cost of its own for each microbatch.
_BY_STAGE = ("U", "overlap", "sum", "gather")


def check_names(source: Source, tree: syntax.Schedule) -> list[Diagnostic]:
    """Everything wrong with the program that does not depend on its parameters."""
    checker = Checker(source)
    checker.required_parts(tree)
    checker.block(tree.items, {})
    return checker.diagnostics


@define
class Checker(Scopes):
    """Walks the tree with the names in scope."""

    has_slices: bool = False
    #: The names of the models so far.
    models: set[str] = field(factory=set)
    #: How many statements each sequence has, with those of the sequences that it runs.
    written: dict[str, int] = field(factory=dict)

    def required_parts(self, tree: syntax.Schedule) -> None:
        """Check that a schedule has the parameters `ranks` and `microbatches`, one `rank` or
        `block`, and at most one `stage`.
        """
        here = Label(tree.name.span)
        params = {
            item.name.text for item in tree.items if isinstance(item, syntax.Param)
        }
        self.has_slices = "slices" in params
        for name in ("ranks", "microbatches"):
            if name not in params:
                self.report(
                    "missing-part",
                    f"the schedule has no `param {name}`",
                    here,
                    help=f"add `param {name} = 4`",
                )
        orders = [
            item
            for item in tree.items
            if isinstance(item, syntax.Rank | syntax.Repeated)
        ]
        if not orders:
            help = "add `rank r { … }`, what every rank does"
            self.report(
                "missing-part",
                "the schedule has no `rank` and no `block`",
                here,
                help=help,
            )
        stages = [item for item in tree.items if isinstance(item, syntax.Stage)]
        once: dict[str, list[syntax.Node]] = {
            "`rank` or `block`": [*orders],
            "`stage`": [*stages],
        }
        for item in tree.items:
            match item:
                case syntax.Choice(word) | syntax.PerRank(word):
                    called, _ = CHOICES.get(word, (f"`{word}`", ()))
                    once.setdefault(called, []).append(item)
        ways = [item for item in tree.items if isinstance(item, syntax.Pipeline)]
        for way in ways:
            if way.word != ways[0].word:
                message = "a schedule has pipelines, which are replicas of one model, or models"
                labels = Label(way.name.span), Label(ways[0].name.span)
                self.report(
                    "pipelines", message, *labels, help=f"write `{ways[0].word}`"
                )
        for words, parts in once.items():
            for again in parts[1:]:
                self.report(
                    "repeated-part",
                    f"a schedule has one {words}",
                    Label(again.span),
                    Label(parts[0].span),
                )

    def block(
        self, statements: tuple[syntax.Node, ...], scope: dict[str, Declared]
    ) -> None:
        """Check statements that share a scope; a name is known from its declaration on."""
        functions = {
            node.name.text: node for node in statements if isinstance(node, syntax.Fn)
        }
        self.functions |= functions.keys()
        for statement in statements:
            self.statement(statement, scope, functions)

    def statement(
        self,
        node: syntax.Node,
        scope: dict[str, Declared],
        functions: dict[str, syntax.Fn],
    ) -> None:
        """Check a statement of a rank, or else an item of the schedule."""
        match node:
            case syntax.Let(name, value):
                self.expression(value, scope)
                self.declare(name, scope, is_decimal=is_decimal(value, scope))
            case syntax.List(name, values, length, is_param):
                if length is not None:
                    self.whole(length, "the length of a list", scope)
                for value in values:
                    if is_param:
                        self.whole(value, "a value of a parameter", scope)
                    else:
                        self.expression(value, scope)
                has_decimals = any(is_decimal(value, scope) for value in values)
                self.declare(name, scope, is_decimal=has_decimals, is_list=True)
            case syntax.Fn(name, params, body):
                gives_decimals = False
                # The body of one that calls itself would tell the same mistake again, as an unknown
                # name.
                if not self.recursion(node, functions, scope):
                    inner = self.inner(scope, *params)
                    self.expression(body, inner)
                    gives_decimals = is_decimal(body, inner)
                self.declare(name, scope, (len(params), len(params)), gives_decimals)
            case syntax.Run(_, args):
                self.run(node, scope)
                for arg in args:
                    self.whole(arg, "an argument of a sequence", scope)
            case syntax.For(name, range, step, body):
                self.bounds(range, scope)
                if step is not None:
                    self.whole(step, "the step of a range", scope)
                self.block(body.statements, self.inner(scope, name))
            case syntax.Repeat(count, body):
                self.whole(count, "a number of rounds", scope)
                self.block(body.statements, dict(scope))
            case syntax.If(condition, then, otherwise):
                self.expression(condition, scope)
                self.block(then.statements, dict(scope))
                if isinstance(otherwise, syntax.Block):
                    self.block(otherwise.statements, dict(scope))
                elif otherwise is not None:
                    self.block((otherwise,), dict(scope))
            case syntax.Op(kind, args):
                self.op(node, kind, args, _MAY_BE_BARE.get(kind, _ARGUMENTS), scope)
            case syntax.Overlap(ops):
                self.block(ops, scope)
                self.are_alike(ops)
            case syntax.Part(_, body):
                self.block(body.statements, dict(scope))
            case _:
                self.item(node, scope, functions)

    def are_alike(self, ops: tuple[syntax.Op, ...]) -> None:
        """Check that what overlaps are either ops that compute or transfers."""
        for op in ops:
            if op.is_transfer != ops[0].is_transfer:
                message = "an `overlap` has ops that compute, or transfers"
                help = "write one for the ops, and one for the transfers"
                labels = Label(op.span), Label(ops[0].span)
                self.report("overlap", message, *labels, help=help)
                return

    def size(self, body: syntax.Block) -> int:
        """The number of statements in a block, those of the sequences that it runs included."""
        nodes = [node for node in walk(body) if isinstance(node, _STATEMENTS)]
        runs = [node for node in nodes if isinstance(node, syntax.Run)]
        return len(nodes) + sum(self.written.get(run.name.text, 0) for run in runs)

    def item(
        self,
        node: syntax.Node,
        scope: dict[str, Declared],
        functions: dict[str, syntax.Fn],
    ) -> None:
        """Check an item of the schedule."""
        match node:
            case syntax.Param(name, default):
                if default is not None:
                    self.whole(default, "a parameter", scope)
                self.declare(name, scope)
            case syntax.Require(condition):
                self.expression(condition, scope)
            case syntax.Assert(condition):
                # A name of the program hides a figure of that name.
                figures = {
                    name: Declared(node.span, arity) for name, arity in FIGURES.items()
                }
                self.expression(condition, figures | scope)
            case syntax.Stage(name, range, rank):
                self.bounds(range, scope)
                self.whole(rank, "the number of a rank", self.inner(scope, name))
            case syntax.Pipeline(_, name, number, range, microbatches, stage):
                inner = self.inner(scope, number) if number else scope
                if range is not None:
                    self.bounds(range, scope)
                self.whole(microbatches, "a number of microbatches", inner)
                self.item(stage, inner, functions)
                arguments = 2 if number else 1
                self.declare(name, scope, arity=(arguments, arguments))
                if node.word == "model":
                    self.models.add(name.text)
            case syntax.Seq(name, params, body):
                self.in_rank = True
                self.block(body.statements, self.inner(scope, *params))
                self.in_rank = False
                self.written[name.text] = written = self.size(body)
                if written > _MOST_WRITTEN:
                    message = f"sequences of sequences come to more than {_MOST_WRITTEN:,} ops"
                    self.report("nesting", message, Label(name.span))
                    # Told once: what runs this one is not told of for the same reason.
                    self.written[name.text] = 0
                self.declare(name, scope, (len(params), len(params)), is_sequence=True)
            case syntax.Rank(name, body):
                self.in_rank = True
                self.block(body.statements, self.inner(scope, name))
                self.in_rank = False
            case syntax.Repeated(microbatches, interval, rows):
                self.whole(interval, "a number of slots", scope)
                inner = self.inner(scope, *microbatches)
                for row in rows:
                    self.row(row, inner, functions)
            case _:
                self.setting(node, scope)

    def setting(self, node: syntax.Node, scope: dict[str, Declared]) -> None:
        """Check an item that says how the schedule is to be taken: passes, weights, costs."""
        match node:
            case syntax.Frozen(expressions.Reference() as model):
                self.frozen_model(model)
            case syntax.Pass(_, syntax.Range() as range) | syntax.Frozen(
                syntax.Range() as range
            ):
                self.bounds(range, scope)
            case syntax.Weights(rule, updates, stages):
                self.choice("weights", rule)
                if rule.text == "delay" and updates is None:
                    message = "`weights delay` without a number of updates"
                    help = "write `weights delay(1)`"
                    self.report("wrong-arguments", message, Label(rule.span), help=help)
                if updates is not None:
                    self.whole(updates, "a number of updates", scope)
                if stages is not None:
                    self.bounds(stages, scope)
            case syntax.Pass("fill", syntax.Node() as limit):
                self.expression(limit, scope)
            case syntax.Pass("gather", syntax.Node() as limit):
                self.whole(limit, "a number of stages", scope)
            case syntax.PerRank("link" | "keeper" as word, indices, value):
                self.cost(node)
                what = f"the number of a {'rank' if word == 'keeper' else word}"
                self.whole(value, what, self.inner(scope, *(indices or ())))
            case syntax.Cost(_, indices, value):
                self.cost(node)
                self.expression(value, self.inner(scope, *(indices or ())))
            case syntax.Edge(_, name, range, earlier, later):
                self.bounds(range, scope)
                inner = self.inner(scope, name)
                self.whole(earlier, "the number of a stage", inner)
                self.whole(later, "the number of a stage", inner)
            case syntax.Choice(word, name):
                self.choice(word, name)

    def choice(self, word: str, name: syntax.Name) -> None:
        """Check a name that is one of a few, behind a word."""
        what, names = CHOICES[word]
        if name.text not in names:
            known = " or ".join(f"`{each}`" for each in names)
            help = nearest(name.text, names, name.span) or f"it is {known}"
            message = f"no {what} `{name.text}`"
            self.report("unknown-name", message, Label(name.span), help=help)

    def frozen_model(self, model: expressions.Reference) -> None:
        """Check the name of a model that is frozen."""
        if model.name not in self.models:
            help = nearest(model.name, self.models, model.span)
            way_out = "write `frozen 0 .. 2` for stages, or the name of a `model` above this line"
            message = f"no model `{model.name}`"
            self.report(
                "unknown-name", message, Label(model.span), help=help or way_out
            )

    def cost(self, cost: syntax.Cost) -> None:
        """Check the indices of a cost."""
        forms: dict[int, str] = {1: "(s)"}
        is_memory = isinstance(cost, syntax.Memory)
        item = f"{'memory' if is_memory else 'cost'} {cost.word}"
        if isinstance(cost, syntax.PerRank):
            item = cost.word
            forms = {1: "(r)"}
        elif cost.word == "send" and not is_memory:
            forms = {2: "(r, q)"}
        elif cost.word not in (*_BY_STAGE, "send"):
            forms |= {2: "(s, m)", 3: "(s, m, k)"} if self.has_slices else {2: "(s, m)"}
        if cost.indices is None or len(cost.indices) in forms:
            return
        known = " or ".join(f"`{item}{form}`" for form in ("", *forms.values()))
        message = f"`{item}` with {counted(len(cost.indices), 'name')}"
        labels = Label(Span(cost.indices[0].span.start, cost.indices[-1].span.end))
        self.report("wrong-arguments", message, labels, help=f"write {known}")

    def row(
        self,
        row: syntax.Row,
        scope: dict[str, Declared],
        functions: dict[str, syntax.Fn],
    ) -> None:
        """Check the ops of some stages in a building block."""
        self.bounds(row.range, scope)
        inner = self.inner(scope, row.name)
        for placed in row.ops:
            self.statement(placed.op, inner, functions)
            self.whole(placed.slot, "the number of a slot", inner)
            if placed.op.kind in WORDS_OF_STAGE:
                help = _WITHOUT[placed.op.kind == "U"]
                self.report(
                    "block",
                    f"a block has the ops of microbatches, `{placed.op.kind}` is of none",
                    Label(placed.op.span),
                    help=help,
                )
            elif placed.op.is_transfer:
                message = "a block has no transfers: the compiler places them"
                label = Label(placed.op.span)
                self.report("block", message, label, help="leave it out")
            elif any(isinstance(arg, expressions.Next) for arg in placed.op.args):
                message = (
                    "an op of a block names its microbatch: `next` is for what ranks do"
                )
                self.report("next", message, Label(placed.op.span))
            elif len(placed.op.args) < (3 if self.has_slices else 2):
                form = "(s, m, k)" if self.has_slices else "(s, m)"
                help = f"write `{placed.op.kind}{form} at …`"
                self.report(
                    "wrong-arguments",
                    "an op of a block names its stage",
                    Label(placed.op.span),
                    help=help,
                )

    def op(
        self,
        node: syntax.Node,
        word: str,
        args: tuple[syntax.Node, ...],
        arity: tuple[int, int],
        scope: dict[str, Declared],
    ) -> None:
        """Check an op's arguments: a stage where the rank has several, and a microbatch, which may
        be `next`.
        """
        least, most = arity
        slice = ", k" if self.has_slices else ""
        if self.has_slices and word not in WORDS_OF_STAGE:
            least = min(least, 1) * 2
            most = 3
        if not least <= len(args) <= most:
            form = f"`{word}(m{slice})` or `{word}(s, m{slice})`"
            if word in WORDS_OF_STAGE:
                form = f"`{word}(s)`"
            self.report(
                "wrong-arguments",
                f"`{word}` with {counted(len(args), 'argument')}",
                Label(node.span),
                help=f"write {form}",
            )
        for number, arg in enumerate(args):
            is_last = number == len(args) - 1
            allowed = is_last and word not in WORDS_OF_STAGE and not self.has_slices
            match arg:
                case expressions.Next() if allowed:
                    continue
                case expressions.Reference(name) if allowed and name not in scope:
                    # It may be the one word that is no name.
                    self.reference(arg, name, scope | {"next": Declared(arg.span)})
                    continue
            self.whole(arg, "the number of a stage, a microbatch or a slice", scope)
