"""What a user is told beside a deadlock or a missing op: the smallest size that shows a deadlock,
and a proved repair.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from schedlang.advice.repairs import MISSING, candidates
from schedlang.advice.smallest import MOST_WORK, smallest
from schedlang.compiler import compile_tree
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.repair import Repair
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import Params
from schedlang.files.sources import NO_FILE
from schedlang.language import syntax
from schedlang.language.expand import parameters
from schedlang.language.expressions import Number
from schedlang.language.loading import load
from schedlang.schedule.transports import PORTABLE

#: The mistakes that are about who waits for whom.
WAITS = frozenset({"deadlock", "first-use", "unmatched-send", "unmatched-receive"})
#: The mistakes that get advice.
ADVISED = WAITS | {MISSING}


def advise(
    error: CompileError,
    source: Source,
    params: Params,
    forward_only: bool = False,
    transport: str = PORTABLE,
) -> CompileError:
    """The error that `compile` has raised; its first diagnostic that can be advised on is.

    The others stay as they are: advice takes many trials, and one repair may mend all.
    """
    diagnostics = list(error.diagnostics)
    for index, diagnostic in enumerate(diagnostics):
        if diagnostic.code in ADVISED:
            whole, tree = load(source)
            all_params = parameters(tree, params)
            lists = {
                name: value
                for name, value in params.items()
                if isinstance(value, Sequence)
            }
            adviser = _Adviser(
                source, whole, tree, all_params, lists, forward_only, transport
            )
            diagnostics[index] = adviser.advise(diagnostic)
            break
    return CompileError(diagnostics)


def add_advice(error: CompileError) -> None:
    """Add advice to an error of `compile`, once."""
    if error.compiled is not None:
        advised = advise(error, *error.compiled)
        error.compiled = None
        error.diagnostics[:] = advised.diagnostics


@frozen
class _Adviser:
    """Compiles variants of a program, for one mistake of it.

    `whole` is the program with the texts of its imports, `tree` its syntax tree.
    """

    source: Source
    whole: Source
    tree: syntax.Schedule
    params: dict[str, int]
    #: The lists that the user gives; they stay as they are.
    lists: dict[str, Sequence[int]]
    forward_only: bool
    transport: str

    def advise(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic with the smallest size and a repair, where they are found."""

        def fails(params: Mapping[str, int]) -> bool:
            return diagnostic.code in self.codes(
                self.whole, self.tree, params, self.transport
            )

        # A missing op is told at once, however many there are.
        if diagnostic.code == MISSING and prod(self.params.values()) > MOST_WORK:
            return diagnostic
        sizes = [self.params]
        small = smallest(self.params, fails)
        if small:
            if diagnostic.code in WAITS:
                note = f"the smallest size that shows it: `{self.command(small)}`"
                diagnostic = diagnostic.with_note(note)
            # A repair that fails fails sooner there.
            sizes.insert(0, small)
        larger = self.params | {"microbatches": 2 * self.params["microbatches"]}
        if diagnostic.code == MISSING and fails(larger):
            # One op more may be enough at one size, and a loop is meant.
            sizes.append(larger)
        for repair in candidates(self.source, self.tree, diagnostic):
            if self.proves(repair, sizes):
                return evolve(diagnostic, repair=repair)
        return diagnostic

    def codes(
        self,
        source: Source,
        tree: syntax.Schedule,
        params: Mapping[str, int],
        transport: str,
    ) -> set[str]:
        """The codes of what is wrong with a program at a size."""
        try:
            compile_tree(
                source,
                tree,
                {**self.lists, **params},
                forward_only=self.forward_only,
                transport=transport,
            )
        except CompileError as error:
            return {diagnostic.code for diagnostic in error.diagnostics}
        return set()

    def proves(self, repair: Repair, sizes: Iterable[Mapping[str, int]]) -> bool:
        """Whether the program with a repair is proved at all of some sizes."""
        try:
            whole, tree = load(repair.apply(self.source))
        except CompileError:
            return False
        transport = repair.transport or self.transport
        return not any(self.codes(whole, tree, params, transport) for params in sizes)

    def command(self, params: Mapping[str, int]) -> str:
        """The command that compiles the program at a size; in a script, the parameters."""
        if self.source.path == NO_FILE:
            return ", ".join(f"{name} = {value}" for name, value in params.items())
        words = ["schedc", "compile", self.source.path]
        for item in self.tree.items:
            if isinstance(item, syntax.Param):
                name = item.name.text
                # A parameter at its default needs no option.
                if params[name] != _literal(item.default):
                    words += ["-p", f"{name}={params[name]}"]
        for name, values in self.lists.items():
            words += ["-p", f"{name}={','.join(map(str, values))}"]
        if self.forward_only:
            words.append("--forward-only")
        if self.transport != PORTABLE:
            words += ["--transport", self.transport]
        return shlex.join(words)


def _literal(node: syntax.Node | None) -> int | None:
    """The value of an expression that is a number as it stands."""
    return node.value if isinstance(node, Number) else None
