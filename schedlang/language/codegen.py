"""Syntax tree → Python, so that a program runs as fast as Python, not as a walk over its tree.

The Python of a program is made once and serves all sizes. Names become `v_name`; everything else
that it calls is a method or function of `schedlang.language.declarations`. Calls that can fail say
where they stand in the program with their last argument, a location: an index into its spans.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from types import CodeType

from attrs import define, evolve, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.language import expressions, syntax
from schedlang.language.expressions import references
from schedlang.language.scopes import BUILTINS, LARGEST
from schedlang.language.sites import WORDS_OF_STAGE, CallSite, ClaimSite, Sites
from schedlang.language.syntax import walk
from schedlang.language.trees import Itself

# A program, and its Python:
#
#     param ranks = 4                        v_ranks = param('ranks', lambda: 4, 1)
#     rank r {                               def program(v_r, op, held, chunks):
#         let warmup = ranks - 1 - r          v_warmup = ((v_ranks - 1) - v_r)
#         repeat warmup {                     for _ in repeat(v_warmup, 2, 4):
#             F(next)                          op((5, None, None))
#         }
#         for m in 0 .. 9 / r {               for v_m in count(0, divide_quotient(9, v_r, 6), 2, 7):
#             B(m)                             op((8, None, v_m))
#         }
#     }

_PYTHON = {"/": "//"}
#: The functions of operations that can fail.
_CHECKED = {"/": "divide_quotient", "%": "divide_rest", "*": "multiply"}
#: No parameter is larger than this.
LARGEST_PARAMETER = 10**9
#: Which operations give truth values.
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")

#: Ranks mostly ask for the same values of a function of one parameter, so they are remembered: to
#: look for one takes as long as a few operations, those of so many characters.
_TINY = 40
#: Of several parameters they are mostly others each time, and to look for these takes longer: so
#: such a function is remembered only if it is longer, with those that it calls.
_LONG = 1000
#: How many characters of a function that is not remembered are written out where it is called.
_SHORT = 300


def variable(name: str) -> str:
    """The Python name for a name of the program. Its prefix keeps Python's own words apart."""
    return f"v_{name}"


@frozen
class Code:
    """A program as Python: the items before its order, and the order as a function `program`."""

    items: CodeType
    program: CodeType
    spans: tuple[Span, ...]
    sites: Sites


def generate(
    tree: syntax.Schedule,
    positive: frozenset[str],
    notes_variables: bool,
    writer: type[Codegen] | None = None,
) -> Code:
    """The Python of a program, where some parameters are known to be 1 or more.

    If it `notes_variables`, the Python reports the values of all names before each statement of the
    order, and the value of a `let` behind it; and a chunk that a rank does not have is an error of
    its own. That is slower, and only needed for messages. The `writer` is `Codegen`, or a class
    derived from it for other kinds of numbers.
    """
    return _generate(Itself(tree), positive, notes_variables, Itself(writer or Codegen))


# Whoever looks for a size or a parameter compiles one program many times.
@lru_cache(16)
def _generate(
    key: Itself[syntax.Schedule],
    positive: frozenset[str],
    notes_variables: bool,
    writer: Itself[type[Codegen]],
) -> Code:
    tree = key.it
    codegen = writer.it(
        positive, any(isinstance(node, expressions.Decimal) for node in walk(tree))
    )
    # The first location stands for the schedule as a whole.
    codegen.location(tree.name)
    # The items come first: they bring the names into scope that the order may use.
    items = "\n".join(line for item in tree.items for line in codegen.item(item))
    order = next(
        item for item in tree.items if isinstance(item, syntax.Rank | syntax.Repeated)
    )
    codegen.notes_variables = notes_variables
    program = "\n".join(codegen.program(order))
    words = {site.word for site in codegen.sites.values()}
    sites = Sites(
        codegen.sites,
        codegen.claims,
        frozenset(codegen.parts),
        codegen.has_slices,
        _b_is_half(tree, words),
        codegen.order,
        codegen.interval,
    )
    return Code(
        compile(items, "<schedule>", "exec"),
        compile(program, "<schedule>", "exec"),
        tuple(codegen.spans),
        sites,
    )


@frozen
class _Formula:
    """The body of a function as Python, with `{0}`, `{1}`, … for its parameters; its length
    together with the functions that it calls; whether it gives a truth value, and whether its
    results are cached.
    """

    text: str
    size: int
    is_truth: bool
    is_remembered: bool = False

    @property
    def is_short(self) -> bool:
        """Whether calls of the function are replaced by its body."""
        return not self.is_remembered and len(self.text) <= _SHORT

    def takes(self, args: tuple[syntax.Node, ...]) -> bool:
        """Whether a call with some arguments may be replaced by the body: each argument is then
        evaluated once, as in a call, or is as cheap as a name.
        """
        long = [index for index, arg in enumerate(args) if not _is_short(arg)]
        if not long:
            return True
        # One of which the order counts, and where nothing says that it is not needed.
        is_read_once = len(long) == 1 == self.text.count(_parameter(long[0]))
        may_skip = any(word in self.text for word in (" if ", " and ", " or "))
        return is_read_once and not may_skip


def _parameter(index: int) -> str:
    """The placeholder of a parameter in a formula."""
    return f"{{{index}}}"


@define
class _Scope:
    """The names that are known at one place of the program."""

    #: Values, and of those the variables of loops.
    values: list[str] = field(factory=list)
    loops: list[str] = field(factory=list)
    #: Functions, and lists, which are functions of a number.
    functions: dict[str, syntax.Fn | syntax.List] = field(factory=dict)
    #: What the functions give, but for lists.
    formulas: dict[str, _Formula] = field(factory=dict)

    def copy(self) -> _Scope:
        """A copy, for a block that may declare more names."""
        return _Scope(
            self.values[:], self.loops[:], dict(self.functions), dict(self.formulas)
        )


@define
class Codegen:
    """Generates Python for one program.

    On the way, `spans` collects the places that locations refer to, `sites` the ops and `claims`
    the claims. Parameters in `positive` are known to be 1 or more, so dividing by them is safe. If
    the program `has_decimals`, numbers need not be whole.
    """

    positive: frozenset[str] = frozenset()
    has_decimals: bool = False
    notes_variables: bool = False
    spans: list[Span] = field(factory=list)
    sites: dict[int, CallSite] = field(factory=dict)
    claims: dict[int, ClaimSite] = field(factory=dict)
    parts: list[str] = field(factory=list)
    pipelines: set[str] = field(factory=set)
    sequences: dict[str, syntax.Seq] = field(factory=dict)
    has_slices: bool = False
    order: int = 0
    interval: int = 0
    _scope: _Scope = field(factory=_Scope)
    #: How many of the values in scope the items before the order have.
    _items: int = 0
    _part: str = ""
    #: The parameters of the function whose formula is being written, as they stand there.
    _parameters: dict[str, str] = field(factory=dict)
    #: The size of the functions that it calls.
    _called: int = 0

    def location(self, node: syntax.Node) -> int:
        """The index in `spans` of a node's span."""
        self.spans.append(node.span)
        return len(self.spans) - 1

    # Expressions

    def expression(self, node: syntax.Node) -> str:
        """A Python expression. Truth values are Python's, which count as 0 and 1."""
        match node:
            case expressions.Number(value):
                return str(value)
            case expressions.Decimal(text):
                return f"decimal({text!r})"
            case expressions.Reference(name):
                return self._parameters.get(name, variable(name))
            case expressions.Next():
                return "None"
            case expressions.OwnStage(number):
                location = self.location(node)
                if self.notes_variables:
                    return f"own_stage({self.expression(number)}, {location})"
                return f"chunks[{self.expression(number)}]"
            case expressions.Element(name, number):
                return f"{variable(name.text)}({self.expression(number)}, {self.location(node)})"
            case expressions.Call(name, args):
                return self.call(name.text, args)
            case expressions.Conditional(condition, value, other):
                value_text = self.expression(value)
                condition_text = self.condition(condition)
                return (
                    f"({value_text} if {condition_text} else {self.expression(other)})"
                )
            case expressions.Binary("and" | "or") | expressions.Unary("not"):
                text = self.condition(node)
                # Python's own would give one of its operands, as in `2 and 3`.
                return text if self.is_truth(node) else f"bool({text})"
            case expressions.Unary(operator, operand):
                return f"({operator} {self.expression(operand)})"
            case expressions.Binary(operator, left, right):
                return self.binary(node, operator, left, right)
        raise TypeError(f"not an expression: {node}")

    def condition(self, node: syntax.Node) -> str:
        """A Python expression with the same truth value, where only that matters."""
        match node:
            case expressions.Binary("and" | "or" as operator, left, right):
                return f"({self.condition(left)} {operator} {self.condition(right)})"
            case expressions.Unary("not", operand):
                return f"(not {self.condition(operand)})"
        return self.expression(node)

    def is_truth(self, node: syntax.Node) -> bool:
        """Whether the Python of an expression gives a truth value."""
        match node:
            case expressions.Binary("and" | "or", left, right):
                return self.is_truth(left) and self.is_truth(right)
            case expressions.Binary(operator):
                return operator in _COMPARISONS
            case expressions.Unary(operator):
                return operator == "not"
            case expressions.Call(name):
                formula = self._scope.formulas.get(name.text)
                return formula is not None and formula.is_truth
        return False

    def call(self, name: str, args: tuple[syntax.Node, ...]) -> str:
        """The call of a function; or the body of a short function, if the arguments allow it."""
        values = list(map(self.expression, args))
        # Of a single argument, Python's `min` and `max` want a list.
        if name in BUILTINS and len(args) == 1 and name != "abs":
            return values[0]
        formula = self._scope.formulas.get(name)
        if formula and formula.is_short and formula.takes(args):
            self._called += formula.size - len(formula.text)
            return formula.text.format(*values)
        self._called += formula.size if formula else 0
        called = name if name in BUILTINS else variable(name)
        return f"{called}({', '.join(values)})"

    def formula(self, function: syntax.Fn) -> _Formula:
        """The body of a function."""
        self._called = 0
        self._parameters = {
            param.text: _parameter(index) for index, param in enumerate(function.params)
        }
        text = self.expression(function.body)
        self._parameters = {}
        size = len(text) + self._called
        return _Formula(text, size, self.is_truth(function.body))

    def binary(
        self, node: syntax.Node, operator: str, left: syntax.Node, right: syntax.Node
    ) -> str:
        """An operation. Division checks its divisor, and multiplication the size of its result,
        unless the right operand is known to be safe.
        """
        left_text = self.expression(left)
        right_text = self.expression(right)
        # Whether it rounds down depends on the values of both sides, which only the run knows.
        if operator == "/" and self.has_decimals:
            return f"divide({left_text}, {right_text}, {self.location(node)})"
        is_literal = isinstance(right, expressions.Number) and right.value > 0
        if operator in _CHECKED and not is_literal:
            location = self.location(node)
            # A call takes many times as long as an operator, so only what may fail is one.
            if not 0 < self.bound(right) <= LARGEST:
                return f"{_CHECKED[operator]}({left_text}, {right_text}, {location})"
        return f"({left_text} {_PYTHON.get(operator, operator)} {right_text})"

    def bound(self, node: syntax.Node) -> int:
        """The greatest value of an expression that is known to be 1 or more; 0 if that is not
        known.
        """
        match node:
            case expressions.Number(value):
                return value
            case expressions.Reference(name):
                return LARGEST_PARAMETER if name in self.positive else 0
            case expressions.Binary("*", left, right):
                return self.bound(left) * self.bound(right)
        return 0

    def function(self, parameter: syntax.Name | None, *values: syntax.Node) -> str:
        """One expression, or a tuple of several, as a lambda of a name."""
        name = variable(parameter.text) if parameter else ""
        texts = [self.expression(value) for value in values]
        result = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
        return f"lambda {name}: {result}"

    def bounds(self, range: syntax.Range) -> str:
        """The two ends of a range, as two arguments."""
        return f"{self.expression(range.start)}, {self.expression(range.stop)}"

    # What stands before the order

    def item(self, item: syntax.Node) -> list[str]:
        """The lines of an item of the schedule. The order of the ranks has none here."""
        match item:
            case syntax.Param(name, default):
                self.has_slices |= name.text == "slices"
                value = f"lambda: {self.expression(default)}" if default else "None"
                place = self.location(item)
                line = f"{variable(name.text)} = param({name.text!r}, {value}, {place})"
                self._scope.values.append(name.text)
                return [line]
            case syntax.Fn(name, params):
                lines = self.statement(item)
                # What it calls and refers to stays the same.
                formula = self._scope.formulas[name.text]
                if formula.size <= (_LONG if len(params) > 1 else _TINY):
                    return lines
                self._scope.formulas[name.text] = evolve(formula, is_remembered=True)
                return ["@remembered", *lines]
            case syntax.List(is_param=True):
                return [self.list_of_user(item)]
            case syntax.List(length=syntax.Node() as length):
                count = f"{len(item.values)}, {self.expression(length)}"
                place = self.location(item)
                check = f"check_length({item.name.text!r}, {count}, {place})"
                return [*self.statement(item), check]
            case syntax.Let() | syntax.List() | syntax.Require() | syntax.Assert():
                return self.statement(item)
            case syntax.Stage():
                return [f"stages({self.stage_line(item)})"]
            case syntax.Pipeline():
                return [self.pipeline(item)]
            case syntax.Seq(name):
                # Its statements stand where they run: what an op is depends on where that is.
                self.sequences[name.text] = item
                return []
            case syntax.Rank() | syntax.Repeated() | syntax.Choice():
                return []
        return [self.setting(item)]

    def list_of_user(self, item: syntax.List) -> str:
        """The line of a list that a user may give."""
        assert item.length is not None
        name = item.name.text
        texts = "".join(f"{self.expression(value)}, " for value in item.values)
        arguments = f"{self.expression(item.length)}, {self.location(item)}"
        # In a claim it is a value: the tree does not have what the user gives.
        self._scope.values.append(name)
        return (
            f"{variable(name)} = param_list({name!r}, lambda: ({texts}), {arguments})"
        )

    def stage_line(self, item: syntax.Stage) -> str:
        """The number of stages and the rank of each, as one argument."""
        rank = self.function(item.name, item.rank)
        locations = f"{self.location(item)}, {self.location(item.rank)}"
        return f"stage_line({self.bounds(item.range)}, {rank}, {locations})"

    def pipeline(self, item: syntax.Pipeline) -> str:
        """The line of one pipeline, or of several that differ by a number."""
        name = item.name.text
        self.pipelines.add(name)
        share = self.location(item.microbatches)
        arguments = (
            f"{self.stage_line(item.stage)}, {self.expression(item.microbatches)}"
        )
        if item.number is None:
            return f"{variable(name)} = pipeline({name!r}, {share}, {arguments})"
        assert item.range
        number = variable(item.number.text)
        return (
            f"{variable(name)} = pipelines({name!r}, {share}, {self.bounds(item.range)}, "
            f"{self.location(item.range)}, lambda {number}: ({arguments}))"
        )

    def setting(self, item: syntax.Node) -> str:
        """The line of an item about weights, costs, edges or passes."""
        match item:
            case syntax.Weights(rule, updates, stages):
                delay = self.expression(updates) if updates else "0"
                on = (
                    f"{self.bounds(stages)}, {self.location(stages)}"
                    if stages
                    else "0, None, 0"
                )
                return f"weights({rule.text!r}, {delay}, {on}, {self.location(item)})"
            case syntax.Edge(word, name, range, earlier, later):
                ends = self.function(name, earlier, later)
                return f"{word}({self.bounds(range)}, {ends}, {self.location(item)})"
            case syntax.Frozen(expressions.Reference(name) as model):
                return f"frozen_model({name!r}, {self.location(model)})"
            case syntax.Frozen(syntax.Range() as range):
                return f"frozen({self.bounds(range)}, {self.location(range)})"
            case syntax.Cost(word, indices, value):
                called = word if isinstance(item, syntax.PerRank) else "price"
                is_memory = isinstance(item, syntax.Memory | syntax.PerRank)
                names = ", ".join(variable(name.text) for name in indices or ())
                of = f"lambda {names}: {self.expression(value)}"
                locations = f"{self.location(item)}, {self.location(value)}"
                return f"{called}({word!r}, {is_memory}, {of}, {len(indices or ())}, {locations})"
            case syntax.Pass(name, given):
                match given:
                    case None:
                        values = ""
                    case syntax.Range():
                        values = f"{self.bounds(given)}, {self.location(given)}"
                    case _:
                        values = f"{self.expression(given)},"
                return f"run_pass({name!r}, ({values}), {self.location(item)})"
        raise TypeError(f"not an item: {item}")

    # The order

    def program(self, order: syntax.Rank | syntax.Repeated) -> list[str]:
        """A Python function `program` of a rank, or of a block's microbatches.

        It calls `op` with a location, a stage and a microbatch, then a slice and a slot where there
        are any. `held` are the stages of the rank, `chunks` the same by number.
        """
        self._items = len(self._scope.values)
        self.order = self.location(order)
        if isinstance(order, syntax.Repeated):
            return self.building_block(order)
        self._scope.values.append(order.name.text)
        head = f"def program({variable(order.name.text)}, op, held, chunks):"
        return [head, *self.block(order.body.statements)]

    def block(self, statements: tuple[syntax.Node, ...], *loops: str) -> list[str]:
        """The indented lines of a block, within loops over some names."""
        outside = self._scope
        self._scope = outside.copy()
        self._scope.values += loops
        self._scope.loops += loops
        lines = [line for statement in statements for line in self.told(statement)]
        self._scope = outside
        return [f" {line}" for line in lines or ["pass"]]

    def told(self, statement: syntax.Node) -> list[str]:
        """The lines of one statement of the order; with `notes_variables`, also the report of its
        names.
        """
        if not self.notes_variables:
            return self.statement(statement)
        lines = [self.see(), *self.statement(statement)]
        if isinstance(statement, syntax.Let):
            name = statement.name
            lines.append(f"see_let({name.span.start}, {variable(name.text)})")
        return lines

    def see(self) -> str:
        """The line that reports the values of all names of the order so far."""
        names = self._scope.values[self._items :]
        values = ", ".join(f"{name!r}: {variable(name)}" for name in names)
        return f"see({{{values}}})"

    def statement(self, node: syntax.Node) -> list[str]:
        """The lines of one statement."""
        match node:
            case syntax.Let(name, value):
                line = f"{variable(name.text)} = {self.expression(value)}"
                self._scope.values.append(name.text)
                return [line]
            case syntax.List(name, values):
                texts = "".join(f"{self.expression(value)}, " for value in values)
                self._scope.functions[name.text] = node
                return [f"{variable(name.text)} = listed({name.text!r}, ({texts}))"]
            case syntax.Fn(name, params):
                names = [variable(param.text) for param in params]
                formula = self.formula(node)
                self._scope.functions[name.text] = node
                self._scope.formulas[name.text] = formula
                returned = formula.text.format(*names)
                return [
                    f"def {variable(name.text)}({', '.join(names)}): return {returned}"
                ]
            case syntax.Require(condition, reason):
                holds = self.expression(condition)
                return [f"require({holds}, {reason!r}, {self.location(condition)})"]
            case syntax.For(name, range, step, body):
                arguments = (
                    f"{self.bounds(range)}, {self.weight(body)}, {self.location(range)}"
                )
                numbers = f"count({arguments})"
                if step is not None:
                    by = f"{self.expression(step)}, {self.location(step)}"
                    numbers = f"by_steps({arguments}, {by})"
                loop = f"for {variable(name.text)} in {numbers}:"
                return [loop, *self.block(body.statements, name.text)]
            case syntax.Repeat(count, body):
                arguments = f"{self.expression(count)}, {self.weight(body)}, {self.location(count)}"
                return [f"for _ in repeat({arguments}):", *self.block(body.statements)]
            case syntax.If():
                return self.branches(node)
            case syntax.Run(name, args):
                return self.run(self.sequences[name.text], args)
            case syntax.Assert():
                return [self.claim(node)]
            case syntax.Part():
                return self.part(node)
            case syntax.Overlap(parts):
                before = len(self.sites)
                lines = [line for part in parts for line in self.told(part)]
                # All that was written in between, in the order of the text.
                batch = list(self.sites)[before:]
                for location in batch:
                    self.sites[location] = evolve(self.sites[location], batch=batch[0])
                return lines
            case syntax.Op(kind, args):
                return [self.op(kind, args, node)]
        raise TypeError(f"not a statement: {node}")

    def run(self, sequence: syntax.Seq, args: tuple[syntax.Node, ...]) -> list[str]:
        """The lines of a sequence, as a function with names of its own, and its call."""
        function = f"run_{variable(sequence.name.text)}"
        names = [param.text for param in sequence.params]
        values = ", ".join(map(self.expression, args))
        head = f"def {function}({', '.join(map(variable, names))}):"
        outside = self._scope
        self._scope = outside.copy()
        self._scope.values += [name for name in names if name not in outside.values]
        body = self.block(sequence.body.statements)
        self._scope = outside
        return [head, *body, f"{function}({values})"]

    def part(self, node: syntax.Part) -> list[str]:
        """The lines of `warmup` or `steady`, of which a rank has one each."""
        location = self.location(node)
        if node.name in self.parts:
            return [f"repeated_part({node.name!r}, {location})"]
        self.parts.append(node.name)
        self._part = node.name
        lines = self.block(node.body.statements)
        self._part = ""
        return ["if True:", *lines]

    def branches(self, node: syntax.If) -> list[str]:
        """An `if` with its `else if`s; these do not nest in Python either."""
        lines = [
            f"if {self.condition(node.condition)}:",
            *self.block(node.then.statements),
        ]
        while isinstance(node.otherwise, syntax.If):
            node = node.otherwise
            lines += [
                f"elif {self.condition(node.condition)}:",
                *self.block(node.then.statements),
            ]
        if node.otherwise is not None:
            lines += ["else:", *self.block(node.otherwise.statements)]
        return lines

    def op(
        self,
        word: str,
        args: tuple[syntax.Node, ...],
        node: syntax.Node,
        slot: syntax.Node | None = None,
    ) -> str:
        """The line that adds an op to the calls; in a building block it has a slot."""
        location = self.location(node)
        values = [self.expression(arg) for arg in args]
        is_bare = not values
        slices = 1 if self.has_slices else 0
        if word in WORDS_OF_STAGE:
            # A bare one is one call for each stage of the rank.
            stage = "s" if is_bare else values[0]
            values = [stage, "0", *["0"] * slices]
        else:
            # What is left open is at the left: a bare `W` leaves all open, `F(m)` its stage.
            values = values or ["None"] * (1 + slices)
            values = ["None"] * (2 + slices - len(values)) + values
        self.sites[location] = CallSite(
            word,
            names_stage=values[0] != "None",
            is_next=values[1] == "None",
            is_bare=is_bare,
            part=self._part,
            loops=tuple(self._scope.loops),
        )
        if slot is not None:
            values.append(self.expression(slot))
        call = f"op(({location}, {', '.join(values)}))"
        return f"for s in held: {call}" if word in WORDS_OF_STAGE and is_bare else call

    def weight(self, body: syntax.Node) -> int:
        """The most steps that one round of a loop counts, inner loops left out."""
        match body:
            case syntax.Op():
                return 1
            case syntax.Overlap(parts) | syntax.Block(parts):
                return 1 + sum(map(self.weight, parts))
            case syntax.If(_, then, otherwise):
                return max(
                    self.weight(then), self.weight(otherwise) if otherwise else 0
                )
            case syntax.Run(name):
                return self.weight(self.sequences[name.text].body)
        return 0

    def claim(self, node: syntax.Assert) -> str:
        """The line that records a claim, with the values of the names in it."""
        location = self.location(node.condition)
        # What the condition refers to, and what the functions refer to that it calls.
        values: list[str] = []
        functions: dict[str, syntax.Fn | syntax.List] = {}
        figures: set[str] = set()
        # Each expression with the names that are its function's own parameters, and so no names of
        # the program.
        waiting: list[tuple[syntax.Node, set[str]]] = [(node.condition, set())]
        while waiting:
            expression, parameters = waiting.pop()
            for name in sorted(references(expression) - parameters - functions.keys()):
                if name in self._scope.functions:
                    function = functions[name] = self._scope.functions[name]
                    if isinstance(function, syntax.List):
                        waiting += [(value, set()) for value in function.values]
                    else:
                        waiting.append(
                            (function.body, {param.text for param in function.params})
                        )
                elif name in self._scope.values:
                    values.append(name)
                elif name not in self.pipelines and name not in BUILTINS:
                    figures.add(name)
        # In the order of their declarations, since a function calls those above it.
        order = [name for name in self._scope.functions if name in functions]
        self.claims[location] = ClaimSite(
            node.condition,
            node.reason,
            tuple(functions[name] for name in order),
            frozenset(figures),
            self.has_decimals,
            node.for_all is not None,
        )
        shown = ", ".join(
            f"{name!r}: {variable(name)}" for name in dict.fromkeys(values)
        )
        return f"claim({location}, {{{shown}}})"

    def building_block(self, block: syntax.Repeated) -> list[str]:
        """Two Python functions: one calls the ops of a block's microbatches, and one gives the
        interval of the block.
        """
        self.interval = self.location(block.interval)
        lines = [f"def interval(): return {self.expression(block.interval)}"]
        microbatches = [name.text for name in block.microbatches]
        lines.append(f"def program({', '.join(map(variable, microbatches))}, op):")
        self._scope.values += microbatches
        self._scope.loops += microbatches
        for row in block.rows:
            arguments = (
                f"{self.bounds(row.range)}, {len(row.ops)}, {self.location(row.range)}"
            )
            lines.append(f" for {variable(row.name.text)} in count({arguments}):")
            lines += self.row(row)
        return [*lines, " pass"]

    def row(self, row: syntax.Row) -> list[str]:
        """The lines of the ops of some stages in a building block."""
        outside = self._scope
        self._scope = outside.copy()
        self._scope.values.append(row.name.text)
        self._scope.loops.append(row.name.text)
        lines = ["  pass"]
        for placed in row.ops:
            if self.notes_variables:
                lines.append(f"  {self.see()}")
            op = placed.op
            lines.append(f"  {self.op(op.kind, op.args, op, placed.slot)}")
        self._scope = outside
        return lines


def _b_is_half(tree: syntax.Schedule, words: Collection[str]) -> bool:
    """Whether `B` means the input half of a backward: the program has weight gradients apart, its
    own or those of `fill W`, and writes no `I`.
    """
    passes = [item.name for item in tree.items if isinstance(item, syntax.Pass)]
    splits = "W" in words or "fill" in passes
    priced = {item.word for item in tree.items if isinstance(item, syntax.Cost)}
    return splits and "I" not in priced.union(words)


def _is_short(node: syntax.Node) -> bool:
    """Whether an expression is as cheap as a name, and cannot fail: a name, a number, or a sum or
    difference of two.
    """
    match node:
        case expressions.Binary("+" | "-", left, right):
            return _is_atom(left) and _is_atom(right)
    return _is_atom(node)


def _is_atom(node: syntax.Node) -> bool:
    return isinstance(node, expressions.Reference | expressions.Number)
