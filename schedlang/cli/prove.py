"""`schedc prove`: a program for any number of microbatches."""

import argparse
import json
import sys
from typing import Any

from schedlang.cli.diagnosed import print_diagnostics
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, WRONG, UsageError


def proved_for_all(options: argparse.Namespace, source: Any) -> bool:
    """Whether a program that compiles is proved for any number of microbatches; if not, say where
    it is.
    """
    from schedlang.parametric.prove import prove_for_all

    params = {name: of for name, of in options.params.items() if name != "microbatches"}
    with progress(f"proving {source.path}"):
        proof = prove_for_all(source, params, (options.transport,))
    if not proof.holds:
        print(proof.text, file=sys.stderr)
    return proof.holds


def prove(options: argparse.Namespace) -> int:
    """Prove a program for any number of microbatches, and print where it holds."""
    from schedlang.files.reading import read_source
    from schedlang.files.writing import write_text
    from schedlang.parametric.prove import prove_for_all
    from schedlang.schedule.transports import NAMES

    source = read_source(options.file)
    if source.is_plan:
        raise UsageError(f"`{options.file}` is a plan, of one size: `schedc check` proves it")
    names = NAMES if options.transport == "all" else (options.transport,)
    with progress(f"proving {source.path}"):
        proof = prove_for_all(source, options.params, names)
    if options.output:
        if proof.certificate is None:
            raise UsageError("there is no certificate: nothing is proved for all sizes of a class")
        write_text(json.dumps(proof.certificate, indent=1) + "\n", options.output)
    if options.format == "json":
        print(json.dumps({"file": options.file, **proof.to_json()}, indent=1))
        return FINE if proof.holds else WRONG
    print(proof.text)
    diagnostics = {
        (diagnostic.code, diagnostic.message): diagnostic
        for verdict in proof.verdicts.values()
        for diagnostic in verdict.diagnostics
    }
    if diagnostics:
        print_diagnostics(list(diagnostics.values()), options)
    return FINE if proof.holds else WRONG
