"""Programs of the gallery, damaged; and a comparison of what is proved of all sizes with what the
compiler says at each: `python -m tests.support.damaged_programs FIRST COUNT`, see `make explore WHAT=damage`.

Each program is compared at one number of ranks up to 10, drawn at random, and at all numbers of
microbatches up to 30, or without a flush at some. Its certificate passes the checker, and does not
with a mistake in it.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from time import process_time

from schedlang.compiler import check_program
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.check_orders import check
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.result import Proof
from schedlang.files.sources import source_of
from tests.support.damaged_certificates import damaged_certificate, is_refused
from tests.support.mistakes import damaged
from tests.support.paths import PROGRAMS

#: Those without passes, whose order is short to write.
NAMES = [
    "1f1b",
    "1f1b_explicit",
    "1f1b_recompute",
    "bitpipe",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "forward_only",
    "frozen_1f1b",
    "gems",
    "gpipe",
    "gpipe_groups",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "looped_bfs",
    "looped_bfs_sharded",
    "pipe_offload",
    "seq1f1b",
    "terapipe",
    "two_encoders",
    "unet_1f1b",
    "zb_h1",
    "zb_h2",
    "zeropp",
]
#: Those without a flush, and at how many sizes they are compared: the compiler looks at many updates
#: until it says that one never goes on alike.
STREAMS = ["pipedream_2bw", "pipedream_replicated", "wpipe"]
_SIZES_OF_STREAMS = 4
MOST_MICROBATCHES = 30
MOST_RANKS = 10
#: After so many programs a run says how far it is.
_BLOCK = 100
#: The stage line of a V, in the place of its import.
_V = "stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s"


def said_of(proof: Proof, microbatches: int) -> str:
    """What a proof says of a size: the constraints are Python, too."""
    (verdict,) = proof.verdicts.values()
    for word in ("proved", "wrong", "refused"):
        constraint = getattr(verdict, word)
        # A set is cut short where it is long, and then says nothing.
        names = {"microbatches": microbatches}
        if (
            constraint
            and "…" not in constraint
            and eval(constraint, {"__builtins__": {}}, names)
        ):
            return word
    return "unknown"


def compiled(text: str, ranks: int, microbatches: int) -> str:
    """What the compiler says of a size."""
    params = {"ranks": ranks, "microbatches": microbatches}
    try:
        (said,) = check_program(source_of(text), params, ["portable"]).values()
    except CompileError as error:
        said = error.diagnostics
    codes = {each.code for each in said if each.severity == "error"}
    if not codes:
        return "proved"
    return "refused" if codes == {"require"} else "wrong"


def compare(
    seed: int, sizes: int, names: Sequence[str] = (*NAMES, *STREAMS)
) -> tuple[str, list[str]]:
    """The verdict on a damaged program, and what is wrong with it: at some numbers of microbatches,
    or at all of them, or with its certificate.
    """
    rng = random.Random(seed)
    name = rng.choice(names)
    if name in STREAMS:
        sizes = min(sizes, _SIZES_OF_STREAMS)
    whole = re.sub(
        r'import "lib/v.sched".*', _V, (PROGRAMS / f"{name}.sched").read_text()
    )
    text = damaged(whole, rng)
    # Mostly few: mistakes at the ends of a pipeline show there, and a proof is quick.
    ranks = (
        rng.randrange(1, 6) if rng.random() < 0.8 else rng.randrange(6, MOST_RANKS + 1)
    )
    try:
        proof = prove_for_all(text, {"ranks": ranks})
    except CompileError:
        return "no program", []
    wrong = []
    for microbatches in rng.sample(range(1, MOST_MICROBATCHES + 1), sizes):
        said = said_of(proof, microbatches)
        if said != "unknown" and said != (real := compiled(text, ranks, microbatches)):
            wrong.append(
                f"seed {seed}, {name}: {said} at {ranks} x {microbatches}, it is {real}"
            )
    if proof.certificate:
        check(proof.certificate)
        other, place = damaged_certificate(proof.certificate, rng)
        if not is_refused(other):
            wrong.append(
                f"seed {seed}, {name}: a certificate with another {place} passes"
            )
    (verdict,) = proof.verdicts.values()
    return verdict.word, wrong


def main(first: int, count: int) -> None:
    begin = process_time()
    verdicts: Counter[str] = Counter()
    disagreements = []
    for seed in range(first, first + count):
        verdict, wrong = compare(seed, MOST_MICROBATCHES)
        verdicts[verdict] += 1
        disagreements += wrong
        for each in wrong:
            print(each, flush=True)
        if seed % _BLOCK == _BLOCK - 1:
            took = process_time() - begin
            print(f"up to {seed}: {dict(verdicts)}, {took:.0f} s", flush=True)
    print(
        f"{count} damaged programs, {len(disagreements)} disagreements: {dict(verdicts)}"
    )
    sys.exit(bool(disagreements))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
