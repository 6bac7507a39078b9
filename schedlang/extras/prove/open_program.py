"""A program whose sizes are open: it is to be proved for all values of the parameters that are not
given. Also how a certificate stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen

from schedlang.compiler import check_program
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_params, check_type
from schedlang.extras.prove.check_orders import FORMAT, Wrong
from schedlang.files.sources import NO_FILE, source_of
from schedlang.language import syntax
from schedlang.language.codegen import generate
from schedlang.language.imports import inlined
from schedlang.language.loading import load, of_today
from schedlang.language.trees import tree_of
from schedlang.schedule.transports import transports


@frozen
class Program:
    """A program to be proved: `source` as it was given, `whole` with all that it imports, its
    syntax tree, the given parameters, and the transports.
    """

    source: Source
    whole: Source
    tree: syntax.Schedule
    params: Mapping[str, int]
    transports: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.tree.name.text

    @cached_property
    def claims(self) -> tuple[str, ...]:
        """The text of each claim `for all` sizes, in the order of the program."""
        sites = generate(self.tree, frozenset(), False).sites.claims.values()
        spans = sorted(
            (site.condition.span for site in sites if site.for_all),
            key=lambda span: span.start,
        )
        texts = (self.whole.text[span.start : span.end] for span in spans)
        return tuple(" ".join(text.split()) for text in texts)

    def errors_at(
        self, sizes: Mapping[str, int], transport: str
    ) -> tuple[Diagnostic, ...]:
        """The compiler's errors at one size, on one transport."""
        try:
            params = {**self.params, **sizes}
            diagnostics = check_program(self.source, params, [transport])[transport]
        except CompileError as error:
            diagnostics = error.diagnostics
        return tuple(each for each in diagnostics if each.severity == "error")

    def certificate(self, proof: Mapping[str, Any]) -> dict[str, Any]:
        """A certificate: the program's text, its parameters and transports, and the `proof`."""
        return {
            "format": FORMAT,
            "program": inlined(self.source),
            "params": dict(self.params),
            "transports": list(self.transports),
            **proof,
        }

    def proved_text(self, sizes: str, read: str, proved: str) -> str:
        """The sentences that `--check` prints: the sizes, what was `read` in the text, and what the
        checker `proved`.
        """
        given = "".join(f", {name} = {value}" for name, value in self.params.items())
        return (
            f"the certificate proves {self.name}{given} for {sizes} on "
            f"{', '.join(self.transports)}\n"
            f"  read in its text by schedc, for all these sizes: {read}\n"
            f"  proved of these by the checker: {proved}"
        )


def program_of(
    source: Source | str | Path, params: Mapping[str, int], names: Iterable[str]
) -> Program:
    """A program to be proved on the named transports. CompileError if it cannot be read; TypeError
    or ValueError for wrong arguments.
    """
    check_params("params", params)
    asked = tuple(names)
    for name in asked:
        transports(name)
    given = of_today(source_of(source))
    whole, tree = load(given)
    return Program(given, whole, tree, dict(params), asked)


def certified_program(document: Mapping[str, Any]) -> Program:
    """The program in a certificate. Wrong, or another error, unless the certificate has its whole
    text.
    """
    if document["format"] != FORMAT:
        raise Wrong("it has another format: prove it anew")
    check_type("program", document["program"], str, "the text of a program")
    # The text itself, never a path: the file may change.
    source = Source(NO_FILE, document["program"])
    if any(isinstance(item, syntax.Import) for item in tree_of(source).items):
        raise Wrong("its text imports files, which may be others tomorrow")
    program = program_of(source, document["params"], document["transports"])
    if not program.transports:
        raise Wrong("it has no transports")
    return program
