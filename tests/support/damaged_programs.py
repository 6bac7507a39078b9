"""Programs of the gallery, damaged; and a comparison of what is proved of all sizes with what the
compiler says at each: `python -m tests.support.damaged_programs FIRST COUNT`, see `make prove-damage`.
"""

import random
import re
import sys
from collections import Counter

from schedlang.compiler import check_program
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.files.reading import source_of
from schedlang.parametric.check_certificate import check
from schedlang.parametric.prove import prove_for_all
from schedlang.parametric.result import Proof
from tests.support.paths import PROGRAMS

#: Those without passes and without transfers of their own, whose order is short to write.
NAMES = [
    "1f1b",
    "1f1b_recompute",
    "bitpipe",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "forward_only",
    "gems",
    "gpipe",
    "gpipe_groups",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "looped_bfs",
    "seq1f1b",
    "terapipe",
    "unet_1f1b",
    "zb_h1",
    "zb_h2",
]
MOST_MICROBATCHES = 30
MOST_RANKS = 10
#: The loop of a stage line in a V, in the place of its import.
_V = "stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s"
_CALL = r"[FBIW](?:\((?:[^{}()]|\([^()]*\))*\))?"


def damaged(rng: random.Random) -> tuple[str, str]:
    """A program of the gallery, and its text with one or two mistakes."""
    while True:
        name = rng.choice(NAMES)
        text = (PROGRAMS / f"{name}.sched").read_text()
        text = re.sub(r'import "lib/v.sched".*', _V, text)
        before = text
        for _ in range(rng.choice((1, 1, 2))):
            text = rng.choice(_MISTAKES)(text, rng)
        if text != before:
            return name, text


def _order(text: str) -> int:
    return text.index("rank r {")


def _replaced(text: str, rng: random.Random, pattern: str, replacement: object) -> str:
    """The text with one match of a pattern, in the order of ranks, replaced."""
    matches = list(re.finditer(pattern, text[_order(text) :]))
    if not matches:
        return text
    match = rng.choice(matches)
    new = replacement(match) if callable(replacement) else str(replacement)
    at = _order(text)
    return text[: at + match.start()] + new + text[at + match.end() :]


def _off_by_one(text: str, rng: random.Random) -> str:
    word = r"\b(?:\d+|ranks|microbatches|warmup|r)\b(?! \{)"
    sign = rng.choice("+-")
    return _replaced(text, rng, word, lambda match: f"({match.group()} {sign} 1)")


def _swapped(text: str, rng: random.Random) -> str:
    pair = rf"({_CALL})( +)({_CALL})"
    return _replaced(text, rng, pair, lambda match: f"{match.group(3)} {match.group(1)}")


def _other_comparison(text: str, rng: random.Random) -> str:
    return _replaced(text, rng, r"(?<= )(?:[<>]=?|==)(?= )", rng.choice(["<", "<=", ">", ">="]))


def _other_word(text: str, rng: random.Random) -> str:
    return _replaced(text, rng, r"\b[FBIW](?=\()", rng.choice("FBIW"))


def _left_out(text: str, rng: random.Random) -> str:
    return _replaced(text, rng, _CALL, "")


def _at_some_sizes(text: str, rng: random.Random) -> str:
    conditions = [
        f"microbatches > {rng.randrange(2, 28)}",
        f"microbatches <= {rng.randrange(2, 28)}",
        f"microbatches % 3 != {rng.randrange(3)}",
        f"r != {rng.randrange(4)}",
    ]
    condition = rng.choice(conditions)
    return _replaced(text, rng, _CALL, lambda match: f" if {condition} {{ {match.group()} }} ")


def _another_microbatch(text: str, rng: random.Random) -> str:
    number = rng.randrange(1, 20)
    others = [
        f"if m == {number} then {number + 1} else if m == {number + 1} then {number} else m",
        f"if m == {number} then 0 else m",
        f"if m + {number} < microbatches / 2 * 2 then m / 2 * 2 + 1 - m % 2 else m",
    ]
    return _replaced(text, rng, r"(?<=[FBI]\()m(?=\))", rng.choice(others))


def _another_warm_up(text: str, rng: random.Random) -> str:
    def other(match: re.Match[str]) -> str:
        old = match.group(2)
        new = rng.choice(
            [
                f"max({old} - 1, 0)",
                f"min({old} + 1, microbatches)",
                "0",
                "min(r, microbatches)",
                f"if r == {rng.randrange(4)} then min(1, microbatches) else {old}",
                f"if microbatches > {rng.randrange(2, 20)} then max({old} - 1, 0) else {old}",
            ]
        )
        return match.group(1) + new

    return _replaced(text, rng, r"(let (?:warmup|ahead|rest) = )(.*)", other)


def _another_placement(text: str, rng: random.Random) -> str:
    if "stage s" in text:
        return text
    rank = rng.choice(["ranks - 1 - s", "(s + 1) % ranks", "if s == 0 then ranks - 1 else s - 1"])
    at = _order(text)
    return f"{text[:at]}stage s in 0 .. ranks on {rank}\n    {text[at:]}"


def _backwards(text: str, rng: random.Random) -> str:
    loop = r"for m in (\S+) \.\. (\S+) +\{ F\(m\) +\}"

    def other(match: re.Match[str]) -> str:
        start, stop = match.groups()
        return f"for m in {start} .. {stop} {{ F({stop} - 1 - m + {start}) }}"

    return _replaced(text, rng, loop, other)


def _by_steps(text: str, rng: random.Random) -> str:
    """Another order, or, where a step leaves some out, not all of them."""
    loop = r"(for m in \S+ \.\. \S+)( +\{)"
    step = rng.choice([-1, -1, 2, -2, 3])
    rest = rng.choice(["", "for m in 1 .. microbatches by 2 { B(m) }  "]) if step == 2 else ""

    def other(match: re.Match[str]) -> str:
        return f"{rest}{match.group(1)} by {step}{match.group(2)}"

    return _replaced(text, rng, loop, other)


_MISTAKES = (
    _off_by_one,
    _swapped,
    _other_comparison,
    _other_word,
    _left_out,
    _at_some_sizes,
    _another_microbatch,
    _another_warm_up,
    _another_warm_up,
    _another_placement,
    _backwards,
    _by_steps,
)


def said_of(proof: Proof, microbatches: int) -> str:
    """What a proof says of a size: the constraints are Python, too."""
    (verdict,) = proof.verdicts.values()
    for word in ("proved", "wrong", "refused"):
        constraint = getattr(verdict, word)
        # A set is cut short where it is long, and then says nothing.
        names = {"microbatches": microbatches}
        if constraint and "…" not in constraint and eval(constraint, {"__builtins__": {}}, names):
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


def compare(seed: int, sizes: int) -> tuple[str, list[str]]:
    """The verdict on a damaged program, and what is wrong with it: some numbers of microbatches, or
    all of them, and the certificate.
    """
    rng = random.Random(seed)
    name, text = damaged(rng)
    ranks = rng.randrange(1, 6) if rng.random() < 0.8 else rng.randrange(6, MOST_RANKS + 1)
    try:
        proof = prove_for_all(text, {"ranks": ranks})
    except CompileError:
        return "no program", []
    wrong = []
    for microbatches in rng.sample(range(1, MOST_MICROBATCHES + 1), sizes):
        said = said_of(proof, microbatches)
        real = compiled(text, ranks, microbatches)
        if said not in ("unknown", real):
            wrong.append(f"seed {seed}, {name}: {said} at {ranks} x {microbatches}, it is {real}")
    if proof.certificate:
        check(proof.certificate)
    (verdict,) = proof.verdicts.values()
    return verdict.word, wrong


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    verdicts: Counter[str] = Counter()
    disagreements = []
    for number in range(first, first + count):
        verdict, wrong = compare(number, MOST_MICROBATCHES)
        verdicts[verdict] += 1
        disagreements += wrong
    print(*disagreements, sep="\n")
    print(f"{count} damaged programs, {len(disagreements)} disagreements: {dict(verdicts)}")
    sys.exit(bool(disagreements))
