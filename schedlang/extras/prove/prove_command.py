"""`schedc check --for microbatches=any`: a proof for any number of microbatches or ranks; and the
certificates of such proofs.
"""

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from schedlang.cli.printing import json_text
from schedlang.cli.usage import FINE, WRONG, UsageError

#: The parameters of which a program can be proved for any value.
_ANY = ("microbatches", "ranks", "slices")


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


def check(options: argparse.Namespace, source: Any) -> int:
    """Check a certificate, and print what it proves, or why it proves nothing."""
    from json import loads

    from schedlang.cli.progress import progress
    from schedlang.extras.prove.certificates import what_it_proves
    from schedlang.extras.prove.check_orders import Wrong

    if options.params or options.output:
        raise UsageError(
            f"`{options.file}` is a certificate, which has its program and its parameters: "
            "leave out -p, --for and -o"
        )
    document = loads(source.text)
    # One for any number of ranks has sets of statements.
    if "statements" in document:
        _check_extra()
    wrong = ""
    proves = ""
    try:
        with progress(f"checking {options.file}"):
            proves = what_it_proves(document)
    except Wrong as error:
        wrong = str(error)
    if options.format == "json":
        answer = {"file": options.file, "holds": not wrong, "wrong": wrong}
        print(json_text({**answer, "proves": proves}))
    else:
        print(f"the certificate does not hold: {wrong}" if wrong else proves)
    return WRONG if wrong else FINE


def _prover(options: argparse.Namespace) -> Any:
    """What proves a program for the parameters that are any; UsageError for other ones."""
    from schedlang.cli.inputs import read_cost_options
    from schedlang.schedule.costs import UNIT

    for name, values in options.ranges.items():
        if name not in _ANY:
            raise UsageError(
                f"--for {name}=any: a program is proved for any {', '.join(_ANY)}; of others, name "
                f"the values: --for {name}=1..4"
            )
        if values is not None:
            raise UsageError(
                f"--for {name}=A..B looks at sizes one by one, NAME=any at all of them at once: "
                f"give one size, -p {name}={values[0]}, or ranges alone"
            )
        if name in options.params:
            raise UsageError(f"`{name}` has a -p and a --for: give one of them")
    if read_cost_options(options) != UNIT:
        raise UsageError(
            "NAME=any proves a program at its own costs: write them into it, as cost F = 2"
        )
    if options.ranges.keys() == {"microbatches"}:
        from schedlang.extras.prove.pieces.prover import prove_for_all

        return prove_for_all
    _check_extra()
    from schedlang.extras.prove.sets.proofs import prove_for_all_ranks

    return prove_for_all_ranks


def prove(options: argparse.Namespace, source: Any) -> int:
    """Prove a program for any number of microbatches or ranks, and print where it holds."""
    from schedlang.cli.diagnosed import print_diagnostics
    from schedlang.cli.inputs import wrong_as_usage
    from schedlang.cli.progress import progress
    from schedlang.files.writing import write_text
    from schedlang.schedule.transports import NAMES

    prove_for_all = _prover(options)
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
