"""docs/proved.md: the gallery, proved for any number of microbatches, and of ranks; see `make prove`.

`python -m tests.support.proof_page [FIRST LAST]`, by default for 2 to 16 ranks; with `any` for the
table for any number of ranks alone.
"""

import sys
from time import process_time

from schedlang.extras.prove.pieces.classes import prove_for_all
from schedlang.extras.prove.result import Proof
from schedlang.extras.prove.sets.proofs import prove_for_all_ranks
from schedlang.extras.workers import processes
from schedlang.schedule.transports import NAMES
from tests.support.paths import GALLERY, PROGRAMS

HEAD = """# The gallery, proved for every size

What `schedc prove` says of each program at {first} to {last} ranks, with its other parameters at their defaults, for any
number of microbatches: that it is proved on `portable` and on each other transport; *followed* where that is so of the
pattern that its passes follow; or why it is not proved. [proof.md](proof.md) has the argument.
`make prove RANKS="{first} {last}"` writes this page.

| program | ranks | verdict | for | bubble |
|---|---|---|---|---|"""

ANY_RANKS = """
## For any number of ranks

What `schedc prove --any-ranks` says, with the other parameters at their defaults
([proof_ranks.md](proof_ranks.md)).

| program | verdict | for | bubble |
|---|---|---|---|"""


#: What a row says of a program at some ranks.
Row = tuple[str, str, str]


def row(case: tuple[int, str]) -> tuple[Row, float]:
    """Of so many ranks and a program: the verdict on all transports, the sizes, and the bubble; and
    how much processor time it took, in seconds.
    """
    ranks, name = case
    begin = process_time()
    proof = prove_for_all(PROGRAMS / f"{name}.sched", {"ranks": ranks}, NAMES)
    return said_of(proof), process_time() - begin


def said_of(proof: Proof) -> Row:
    """The verdict on all transports, the sizes, and the bubble."""
    verdicts = {verdict.word for verdict in proof.verdicts.values()}
    verdict = proof.verdicts["portable"]
    word = verdicts.pop() if len(verdicts) == 1 else "differs by transport"
    where = verdict.proved or verdict.refused
    if verdict.word == "followed":
        where = verdict.followed
    if verdict.word == "wrong":
        where = f"wrong for {verdict.wrong}"
    if verdict.word == "not proved":
        where = verdict.reason
    elif where:
        where = f"`{where}`"
    bubble = next((law.pieces for law in proof.laws if law.figure == "bubble"), ())
    return word, where, f"`{bubble[-1][1]}`" if bubble else ""


def any_ranks_row(name: str) -> str:
    """The row of a program in the table for any number of ranks: the bubble has all its pieces."""
    proof = prove_for_all_ranks(PROGRAMS / f"{name}.sched", {}, NAMES)
    word, where, bubble = said_of(proof)
    pieces = next((law.pieces for law in proof.laws if law.figure == "bubble"), ())
    if len(pieces) > 1:
        bubble = "; ".join(
            f"`{value}` for `{condition}`" for condition, value in pieces
        )
    return f"| {name} | {word} | {where} | {bubble} |"


def any_ranks() -> None:
    """Print the table for any number of ranks."""
    print(ANY_RANKS)
    with processes() as workers:
        for text in workers.map(any_ranks_row, [path.stem for path in GALLERY]):
            print(text, flush=True)


def main(first: int, last: int) -> None:
    print(HEAD.format(first=first, last=last))
    names = [path.stem for path in GALLERY]
    # Those that take longest first, so that all cores have something to do until the end.
    cases = [(ranks, name) for ranks in range(last, first - 1, -1) for name in names]
    rows = {}
    with processes() as workers:
        for (ranks, name), done in zip(cases, workers.map(row, cases), strict=True):
            rows[ranks, name] = done
            print(f"{name} at {ranks}: {done[1]:.1f} s", file=sys.stderr, flush=True)
    for name in names:
        at = first
        while at <= last:
            # Ranks that follow each other with one verdict share a row.
            said, _ = rows[at, name]
            end = at
            while (end + 1, name) in rows and rows[end + 1, name][0] == said:
                end += 1
            of = str(at) if end == at else f"{at} to {end}"
            print(f"| {name} | {of} | {' | '.join(said)} |")
            at = end + 1
    slowest = sorted(((took, *case) for case, (_, took) in rows.items()), reverse=True)[
        :8
    ]
    told = ", ".join(f"{name} at {ranks} {took:.0f} s" for took, ranks, name in slowest)
    total = sum(took for _, took in rows.values())
    print(f"processor time: {total:.0f} s; {told}", file=sys.stderr)
    any_ranks()


if __name__ == "__main__":
    if sys.argv[1:] == ["any"]:
        any_ranks()
        sys.exit()
    main(*map(int, sys.argv[1:3]) if len(sys.argv) > 1 else (2, 16))
