"""What a user is told beside a standstill of a program: the smallest size that shows it, a repair
that is proved.
"""

import shlex
from collections.abc import Iterable, Mapping

from attrs import evolve, frozen

from schedlang.advice.repairs import candidates
from schedlang.advice.smallest import smallest
from schedlang.compiler import compile_tree
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.repair import Repair
from schedlang.diagnostics.source import Source
from schedlang.language import syntax
from schedlang.language.expand import parameters
from schedlang.language.expressions import Number
from schedlang.language.imports import load
from schedlang.schedule.transports import PORTABLE

#: The mistakes that have to do with who waits for whom.
STANDSTILLS = frozenset({"deadlock", "first-use", "unmatched-send", "unmatched-receive"})


def advise(
    error: CompileError,
    source: Source,
    params: Mapping[str, int],
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> CompileError:
    """The error that `compile` has raised, with advice on its first standstill, if it has one."""
    first = next((each for each in error.diagnostics if each.code in STANDSTILLS), None)
    if first is None:
        return error
    loaded, tree = load(source)
    asked = _Asked(source, loaded, tree, parameters(tree, params), forward_only, transport)
    return CompileError(
        [asked.advise(each) if each is first else each for each in error.diagnostics]
    )


@frozen
class _Asked:
    """What was to be compiled: a program, also with its imports and as a tree, for some parameters
    and a transport.
    """

    source: Source
    loaded: Source
    tree: syntax.Schedule
    params: dict[str, int]
    forward_only: bool
    transport: str

    def advise(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic with the smallest size and a repair, where they are found."""
        loaded = self.loaded, self.tree
        small = smallest(
            self.params,
            lambda params: diagnostic.code in self.codes(*loaded, params, self.transport),
        )
        if small:
            diagnostic = diagnostic.with_note(
                f"the smallest size that shows it: `{self.command(small)}`"
            )
        sizes = [small, self.params] if small else [self.params]
        tried = candidates(self.source, self.tree, diagnostic)
        return evolve(
            diagnostic, repair=next((each for each in tried if self.proves(each, sizes)), None)
        )

    def codes(
        self, source: Source, tree: syntax.Schedule, params: Mapping[str, int], transport: str
    ) -> set[str]:
        """What is wrong with a program at a size."""
        try:
            compile_tree(source, tree, params, forward_only=self.forward_only, transport=transport)
        except CompileError as error:
            return {each.code for each in error.diagnostics}
        return set()

    def proves(self, repair: Repair, sizes: Iterable[Mapping[str, int]]) -> bool:
        """Whether the program with a repair is proved at all of some sizes."""
        try:
            loaded = load(repair.apply(self.source))
        except CompileError:
            return False
        return not any(
            self.codes(*loaded, params, repair.transport or self.transport) for params in sizes
        )

    def command(self, params: Mapping[str, int]) -> str:
        """The command that compiles the program at a size."""
        words = ["schedc", "compile", self.source.path]
        for item in self.tree.items:
            # What a default says already needs no option.
            if isinstance(item, syntax.Param) and params[item.name.text] != _literal(item.default):
                words += ["-p", f"{item.name.text}={params[item.name.text]}"]
        words += ["--forward-only"] if self.forward_only else []
        words += ["--transport", self.transport] if self.transport != PORTABLE else []
        return shlex.join(words)


def _literal(node: syntax.Node | None) -> int | None:
    return node.value if isinstance(node, Number) else None
