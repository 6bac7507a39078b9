"""What the words of a program mean together: which halves of backwards it has; and which of its
words are old, with the new ones to write in their place.
"""

from collections.abc import Collection, Iterable

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.source import Label, Source
from schedlang.language import syntax
from schedlang.language.names import OLD_OBJECTIVES


def splits_backward(tree: syntax.Schedule, words: Collection[str]) -> bool:
    """Whether a program with some words of ops has weight gradients apart: its own, or those of
    `fill W`.
    """
    return "W" in words or any(isinstance(item, syntax.Fill) for item in tree.items)


def writes_halves(tree: syntax.Schedule, words: Collection[str]) -> bool:
    """Whether a program with some words of ops writes `I` for the input half of a backward, so that
    `B` is a whole one.
    """
    return "I" in words or any(_is_word(item, "I") for item in tree.items)


def _is_word(node: syntax.Node, word: str) -> bool:
    """Whether a node is an op with some word, or a cost or an amount of memory of it."""
    match node:
        case syntax.Op(kind):
            return kind == word
        case syntax.Cost(of):
            return of == word
    return False


def old_forms(source: Source, tree: syntax.Schedule) -> list[Diagnostic]:
    """A warning for each old word of a program, which names the new one."""
    warnings: list[Diagnostic] = []

    def warn(message: str, locations: Iterable[syntax.Node], help: str) -> None:
        labels = [Label(node.span) for node in locations]
        if not labels:
            return
        more = counted(len(labels) - 1, "more place")
        notes = (f"and in {more}",) if len(labels) > 1 else ()
        first = (labels[0],)
        warnings.append(
            Diagnostic(
                "old-form", message, first, source, notes, help, severity="warning"
            )
        )

    nodes = list(syntax.walk(tree))
    words = {node.kind for node in nodes if isinstance(node, syntax.Op)}
    if splits_backward(tree, words) and not writes_halves(tree, words):
        halves = [node for node in nodes if _is_word(node, "B")]
        message = "`B` is the input half of a backward here, since weight gradients stand apart"
        warn(
            message,
            halves,
            "write `I` for the half: `B` is then a whole backward, as `BW` is",
        )
    for node in nodes:
        match node:
            case syntax.Objective(name) if name.text in OLD_OBJECTIVES:
                new = OLD_OBJECTIVES[name.text]
                warn(
                    f"`objective {name.text}` is an old name",
                    [node],
                    f"write `objective {new}`",
                )
            case syntax.Recompute(syntax.Name(text)):
                help = "write `recompute` and the range"
                warn(f"nothing uses the name `{text}`", [node], help)
    warn(
        "`squeeze` changes nothing: every op starts as soon as it can",
        _idle(tree),
        "leave it out",
    )
    return warnings


def _idle(tree: syntax.Schedule) -> list[syntax.Node]:
    """The `squeeze`s without effect. Only a `fill W` without a limit heeds slots: after a `squeeze`
    it has none.
    """
    idle: list[syntax.Node] = []
    is_heeded = False
    for item in reversed(tree.items):
        if isinstance(item, syntax.Fill) and item.limit is None:
            is_heeded = True
        if isinstance(item, syntax.Pass) and item.name == "squeeze" and not is_heeded:
            idle.append(item)
    return idle[::-1]
