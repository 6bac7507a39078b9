"""What is wrong with a claim that does not hold, told with the values of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import frozen

from schedlang.diagnostics.diagnostic import number_text
from schedlang.diagnostics.repair import Edit
from schedlang.diagnostics.source import Source
from schedlang.language import expressions, syntax
from schedlang.language.faults import Fault
from schedlang.language.scopes import FIGURES, FIGURES_OF_RANKS
from schedlang.language.sites import ClaimSite, Figures
from schedlang.schedule.exact_text import exact_text
from schedlang.schedule.findings import Finding
from schedlang.schedule.schedule import Claim, Schedule

#: Gives the value of an expression in a claim.
ValueOf = Callable[[syntax.Node], Any]

#: The figures of the whole schedule, in the order in which they are told.
_OF_ALL = ("makespan", "work", "bubble", "span", "span_bubble", "staleness")
_TERMS = (
    expressions.Reference,
    expressions.Call,
    expressions.Element,
    expressions.OwnStage,
)
#: By such a share of them, figures may be rounded where they are not exact.
_ROUNDING = 1e-9
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


def is_told(site: ClaimSite, value: ValueOf, rounded: Mapping[str, float]) -> bool:
    """Whether no comparison of a claim depends on rounding. `rounded` has the figures that may be
    rounded, each with a number that is at least as large.
    """
    waiting: list[syntax.Node] = [site.condition]
    while waiting:
        node = waiting.pop()
        waiting += expressions.children(node)
        names = expressions.references(node) & rounded.keys()
        if not names or not isinstance(node, expressions.Binary):
            continue
        if node.operator in _COMPARISONS:
            left = value(node.left)
            right = value(node.right)
            most = max(abs(left), abs(right), *map(rounded.__getitem__, names))
            if abs(left - right) <= _ROUNDING * most:
                return False
    return True


def untold(schedule: Schedule, claim: Claim) -> Finding:
    """The finding for a claim whose comparison depends on rounding."""
    text = _text(schedule.source, claim.statement.condition)
    return Finding(
        "assert",
        f"`{text}` cannot be told: costs have too many digits for sums of them to be exact",
        claim.rank,
        claim.location,
        help="write the costs with fewer digits, or claim a little more or less",
    )


def wrong_claim(
    schedule: Schedule, claim: Claim, figures: Figures, value: ValueOf
) -> Finding:
    """The finding for a claim that does not hold: its comparisons, with the values in them."""
    site: ClaimSite = claim.statement
    said = (
        f"the schedule claims: {site.reason}"
        if site.reason
        else "a claim does not hold"
    )
    judge = _Judge(schedule.source, value)
    failing = list(judge.comparisons(site.condition))
    sides = "; ".join(map(judge.sides, failing))
    message = f"{said}: {sides}" if sides else said
    message += "" if claim.rank is None else f", on rank {claim.rank}"
    # A dictionary, since it keeps the order and has each term once.
    terms = dict.fromkeys(term for node in failing for term in judge.terms(node))
    label = f"where {', '.join(terms)}" if terms else ""
    help = _figures(schedule, figures)
    return Finding("assert", message, claim.rank, claim.location, label, help=help)


def what_holds(
    source: Source, condition: syntax.Node, values: Sequence[ValueOf]
) -> tuple[Edit, ...]:
    """Edits of a claim after which it holds by all of some values, as those of all ranks: a
    comparison that fails compares its figure with the value that it has. None for a claim that is
    more than comparisons joined by `and`.
    """
    edits = []
    waiting: list[syntax.Node] = [condition]
    while waiting:
        node = waiting.pop(0)
        match node:
            case expressions.Binary("and", left, right):
                waiting[:0] = [left, right]
            case expressions.Binary(operator) if operator in _COMPARISONS:
                edit = _comparison_that_holds(source, node, values)
                if edit is None:
                    return ()
                if edit.text:
                    edits.append(edit)
            case _:
                return ()
    return tuple(edits)


def _comparison_that_holds(
    source: Source, node: expressions.Binary, values: Sequence[ValueOf]
) -> Edit | None:
    """The edit after which a comparison holds: without a text if it does, None if there is none."""
    sides = (node.left, node.right)
    figures = [each for each in sides if expressions.references(each) & FIGURES.keys()]
    try:
        if all(value(node) for value in values):
            return Edit(node.span, "")
        if len(figures) != 1:
            return None
        found = {value(figures[0]) for value in values}
    except Fault:
        return None
    is_left = figures[0] is node.left
    if node.operator == "==" and len(found) == 1:
        operator = "=="
        bound = found.pop()
    elif node.operator[0] in "<>":
        operator = f"{node.operator[0]}="
        bound = max(found) if (operator == "<=") == is_left else min(found)
    else:
        return None
    texts = [_text(source, figures[0]), exact_text(bound)]
    return Edit(node.span, f" {operator} ".join(texts if is_left else texts[::-1]))


@frozen
class _Judge:
    """Tells the values of the parts of one claim."""

    source: Source
    value: ValueOf

    def comparisons(self, condition: syntax.Node) -> Iterator[expressions.Binary]:
        """The comparisons that make the claim fail."""
        waiting: list[syntax.Node] = [condition]
        while waiting:
            node = waiting.pop(0)
            match node:
                case expressions.Binary("or", left, right):
                    waiting[:0] = [left, right]
                case expressions.Binary("and", left, right):
                    # What stands behind one that fails was never asked.
                    waiting[:0] = [right if self.value(left) else left]
                case expressions.Unary("not", operand):
                    waiting[:0] = [operand]
                case expressions.Binary(operator) if operator in _COMPARISONS:
                    yield node

    def sides(self, node: expressions.Binary) -> str:
        """A comparison with the values of its two sides."""
        text = _text(self.source, node)
        left = self.value(node.left)
        right = self.value(node.right)
        of = number_text
        # What looks equal is told to its last digit, if it is not.
        if left != right and of(left) == of(right):
            of = exact_text
        values = f"{of(left)} {node.operator} {of(right)}"
        if text == values:
            return f"`{text}`"
        # Under a `not`, it is what holds that makes the claim fail.
        return f"`{text}` {'holds,' if self.value(node) else 'is'} {values}"

    def terms(self, node: syntax.Node) -> Iterator[str]:
        """The values of the names and calls within an expression."""
        for child in expressions.children(node):
            yield from self.terms(child)
        if isinstance(node, _TERMS):
            # Where it stands in a branch that was not taken, it need not have a value.
            with suppress(Fault):
                yield f"{_text(self.source, node)} = {number_text(self.value(node))}"


def _text(source: Source, node: syntax.Node) -> str:
    """An expression as the program has it, on one line."""
    return " ".join(source.text[node.span.start : node.span.end].split())


def _figures(schedule: Schedule, figures: Figures) -> str:
    """All figures, as a help."""
    texts = [f"{name} {number_text(getattr(figures, name))}" for name in _OF_ALL]
    for name in FIGURES_OF_RANKS:
        values = " ".join(map(number_text, getattr(figures, name)))
        texts.append(f"{name} per rank {values}")
    frozen = ", ".join(map(str, schedule.layout.frozen))
    where = f" with the frozen stages {frozen}" if frozen else ""
    return f"the figures{where} are {', '.join(texts)}"
