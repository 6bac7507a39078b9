"""A program to be proved for all sizes that are not given, and what certificates have of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen

from schedlang.compiler import check_program
from schedlang.diagnostics.arguments import check_params, check_type
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.extras.prove.check_orders import FORMAT, Wrong
from schedlang.files.reading import NO_FILE, source_of
from schedlang.language import syntax
from schedlang.language.codegen import generate
from schedlang.language.imports import inlined, load
from schedlang.language.trees import tree_of
from schedlang.schedule.transports import transports


@frozen
class Program:
    """A program: its source as it was given, and with all that it imports; its tree; the
    parameters that are given, and the transports on which it is to be proved.
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
        """What it claims `for all` sizes, in its own order and words."""
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
        """The errors that the compiler finds at a size, on a transport."""
        try:
            params = {**self.params, **sizes}
            diagnostics = check_program(self.source, params, [transport])[transport]
        except CompileError as error:
            diagnostics = error.diagnostics
        return tuple(each for each in diagnostics if each.severity == "error")

    def certificate(self, proof: Mapping[str, Any]) -> dict[str, Any]:
        """The certificate that has a proof of the program, with its text."""
        return {
            "format": FORMAT,
            "program": inlined(self.source),
            "params": dict(self.params),
            "transports": list(self.transports),
            **proof,
        }

    def proved_text(self, sizes: str, read: str, proved: str) -> str:
        """What a certificate proves of the program: for which sizes, and by whom."""
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
    """A program with some of its parameters, to be proved on some transports. CompileError for one
    that cannot be read, TypeError or ValueError for wrong arguments.
    """
    check_params("params", params)
    asked = tuple(names)
    for name in asked:
        transports(name)
    given = source_of(source)
    whole, tree = load(given)
    return Program(given, whole, tree, dict(params), asked)


def certified_program(document: Mapping[str, Any]) -> Program:
    """The program in a certificate; Wrong, or another error, where it is not all in the text."""
    if document["format"] != FORMAT:
        raise Wrong("it has another format: prove it anew")
    check_type("program", document["program"], str, "the text of a program")
    # The text, and never the path of a file: there may be another one tomorrow.
    source = Source(NO_FILE, document["program"])
    if any(isinstance(item, syntax.Import) for item in tree_of(source).items):
        raise Wrong("its text imports files, which may be others tomorrow")
    program = program_of(source, document["params"], document["transports"])
    if not program.transports:
        raise Wrong("it has no transports")
    return program
