"""`schedc prove`: a program for any number of microbatches, and of ranks.

What takes time to import is imported by the functions: `schedc --help` loads this file.
"""

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from schedlang.cli.options import PARAMS, TRANSPORT_OR_ALL, Command, file, output
from schedlang.cli.printing import json_text
from schedlang.cli.usage import FINE, WRONG, UsageError

COMMAND = Command(
    "prove a program for any number of microbatches",
    "extras.prove.prove_command.prove",
    "programs/1f1b.sched -p ranks=8",
    {
        **file(),
        **PARAMS,
        **TRANSPORT_OR_ALL,
        "--any-ranks": "for any number of ranks, too, and of slices, where they are not given with "
        "-p; it needs the extra `prove`",
        **output("FILE", "write the certificate, which a checker of its own reads"),
        "--check": "FILE is a certificate: check it, and that it is one of its program for all "
        "sizes; say what it proves",
    },
)


def proved_for_all(options: argparse.Namespace, source: Any) -> bool:
    """Prove a program that compiles for any number of microbatches. If that fails, print for which
    sizes it holds and why not for the others.
    """
    from schedlang.cli.progress import progress
    from schedlang.extras.prove.pieces.prover import prove_for_all

    params = {name: of for name, of in options.params.items() if name != "microbatches"}
    with progress(f"proving {source.path}"):
        proof = prove_for_all(source, params, (options.transport,))
    if not proof.holds:
        print(proof.text, file=sys.stderr)
    return proof.holds


def _check_extra() -> None:
    """Raise UsageError if the packages for any number of ranks are not installed."""
    if find_spec("islpy") is None or find_spec("ortools") is None:
        raise UsageError(
            "any number of ranks needs an extra: pip install 'schedlang[prove]'"
        )


def _check(options: argparse.Namespace, text: str) -> int:
    """Check a certificate; print what it proves, or why it does not hold."""
    from json import JSONDecodeError, loads

    from schedlang.cli.progress import progress
    from schedlang.extras.prove.certificates import what_it_proves
    from schedlang.extras.prove.check_orders import Wrong

    if options.params or options.output:
        raise UsageError(
            "--check reads a certificate, which has its program and its parameters"
        )
    wrong = ""
    proves = ""
    try:
        with progress(f"checking {options.file}"):
            document = loads(text)
            # A certificate for any number of ranks has statements.
            if isinstance(document, dict) and "statements" in document:
                _check_extra()
            proves = what_it_proves(document)
    except Wrong as error:
        wrong = str(error)
    except JSONDecodeError as error:
        wrong = f"it is no certificate: {error}"
    if options.format == "json":
        answer = {"file": options.file, "holds": not wrong, "wrong": wrong}
        print(json_text({**answer, "proves": proves}))
    else:
        print(f"the certificate does not hold: {wrong}" if wrong else proves)
    return WRONG if wrong else FINE


def prove(options: argparse.Namespace) -> int:
    """Prove a program for any number of microbatches; print the sizes at which it is proved, and
    its formulas.
    """
    from schedlang.cli.diagnosed import print_diagnostics
    from schedlang.cli.inputs import wrong_as_usage
    from schedlang.cli.progress import progress
    from schedlang.extras.prove.pieces.prover import prove_for_all
    from schedlang.files.reading import read_source
    from schedlang.files.writing import write_text
    from schedlang.schedule.transports import NAMES

    if options.any_ranks:
        _check_extra()
        from schedlang.extras.prove.sets.proofs import (
            prove_for_all_ranks as prove_for_all,
        )
    source = read_source(options.file)
    if options.check:
        return _check(options, source.text)
    if source.is_plan:
        raise UsageError(
            f"`{options.file}` is a plan, of one size: `schedc check` proves it"
        )
    names = NAMES if options.transport == "all" else (options.transport,)
    with progress(f"proving {source.path}"), wrong_as_usage():
        proof = prove_for_all(source, options.params, names)
    if options.output:
        try:
            certificate = proof.certificate
        except ValueError as error:
            raise UsageError(f"there is no certificate: {error}") from None
        if certificate is None:
            raise UsageError(
                "there is no certificate: nothing is proved for all sizes of a class"
            )
        write_text(json_text(certificate, indent=1) + "\n", options.output)
    if options.format == "json":
        print(json_text({"file": options.file, **proof.to_json()}, indent=1))
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
