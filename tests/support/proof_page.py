"""docs/proved.md: the gallery, proved for any number of microbatches; see `make prove`.

`python -m tests.support.proof_page [FIRST LAST]`, by default for 2 to 16 ranks.
"""

import sys

from schedlang.compiler import processes
from schedlang.parametric.prove import prove_for_all
from schedlang.schedule.transports import NAMES
from tests.support.paths import GALLERY

HEAD = """# The gallery, proved for every size

What `schedc prove` says of each program at {first} to {last} ranks, with its other parameters at their defaults, for any
number of microbatches: that it is proved on `portable` and on each other transport; *followed* where that is so of the
pattern that its passes follow; or why it is not proved. [proof.md](proof.md) has the argument. `make prove` writes this
page.

| program | ranks | verdict | for | bubble |
|---|---|---|---|---|"""


def row(case: tuple[str, int]) -> tuple[str, int, str, str, str]:
    """A program at some ranks: the verdict on all transports, the sizes, and the bubble."""
    name, ranks = case
    path = next(path for path in GALLERY if path.stem == name)
    proof = prove_for_all(path, {"ranks": ranks}, NAMES)
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
    return name, ranks, word, where, f"`{bubble[-1][1]}`" if bubble else ""


def main(first: int, last: int) -> None:
    print(HEAD.format(first=first, last=last))
    cases = [(path.stem, ranks) for path in GALLERY for ranks in range(first, last + 1)]
    with processes() as pool:
        rows = list(pool.map(row, cases))
    at = 0
    while at < len(rows):
        # Ranks that follow each other with one verdict share a row.
        name, ranks, *said = rows[at]
        end = at
        while end + 1 < len(rows) and rows[end + 1][0] == name and [*rows[end + 1][2:]] == said:
            end += 1
        of = str(ranks) if end == at else f"{ranks} to {rows[end][1]}"
        print(f"| {name} | {of} | {' | '.join(said)} |")
        at = end + 1


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]) if len(sys.argv) > 1 else (2, 16))
