"""docs/reports/proved.md: the gallery, proved for any number of microbatches, and of ranks.

What has numbers that depend on the ranks is told once for many ranks: `_told` writes such a number
as a function of the ranks.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from time import process_time

from schedlang.cli.workers import processes
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.result import Proof
from schedlang.extras.prove.sets.proofs import prove_for_all_ranks
from schedlang.schedule.transports import NAMES
from tests.support.paths import GALLERY, PROGRAMS

#: The numbers of ranks at which each program is proved.
RANKS = range(2, 17)

PAGE = """# The gallery, proved for every size

`make regenerate WHAT=proved` writes this page; it takes hours. [The proof](../proof.md) has the argument.

## At 2 to 16 ranks

What `schedc check --for microbatches=any` says of each program at each number of ranks, with its other parameters at their defaults, for any
number of microbatches. *Proved* and *followed* hold on `portable` and on each other transport; *followed* is proved for the
pattern that the program's passes were seen to follow. A program *refuses* a size by its own `require`. Where a condition or
a bubble is another number at each number of ranks, it stands as a function of `ranks` that gives all of them; where there
is no such function, `[8,13,18]` are the numbers at the ranks in turn.

| program | ranks | verdict | for | bubble |
|---|---|---|---|---|
{rows}

## For any number of ranks

What `schedc check --for ranks=any` says, with the other parameters at their defaults.

| program | verdict | for | bubble |
|---|---|---|---|
{proved}

Not proved, and why:

{reasons}
"""

#: What a row says of a program at some ranks: verdict, sizes, bubble.
Row = tuple[str, str, str]


def row(case: tuple[int, str]) -> tuple[Row, float]:
    """The verdict of a program at a number of ranks, and the processor time of the proof."""
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


def any_ranks_row(name: str) -> Row:
    """The same for any number of ranks; the bubble has all its pieces."""
    proof = prove_for_all_ranks(PROGRAMS / f"{name}.sched", {}, NAMES)
    word, where, bubble = said_of(proof)
    pieces = next((law.pieces for law in proof.laws if law.figure == "bubble"), ())
    if len(pieces) > 1:
        parts = [f"`{value}` for `{condition}`" for condition, value in pieces]
        bubble = "; ".join(parts)
    return word, where, bubble


def page(rows: dict[tuple[int, str], Row], any_ranks: dict[str, Row]) -> str:
    """The page, from the rows by ranks and program, and those for any number of ranks."""
    names = list(any_ranks)
    lines = [line for name in names for line in _merged(name, rows)]
    reasons: dict[str, list[str]] = {}
    proved = []
    for name, (word, where, bubble) in any_ranks.items():
        if word == "not proved":
            # What the text of the program says there stands before the reason.
            reasons.setdefault(re.sub(r"^`[^`]*`: ", "", where), []).append(f"`{name}`")
        else:
            proved.append(f"| {name} | {word} | {where} | {bubble} |")
    told = [f"- {why}: {', '.join(programs)}" for why, programs in reasons.items()]
    return PAGE.format(
        rows="\n".join(lines), proved="\n".join(proved), reasons="\n".join(told)
    )


def _merged(name: str, rows: dict[tuple[int, str], Row]) -> Iterator[str]:
    """The lines of a program: its ranks with one verdict, in the same words, share one."""
    lines: dict[tuple[str, ...], dict[int, Row]] = {}
    for ranks, said in ((ranks, rows[ranks, name]) for ranks in RANKS):
        key = tuple(re.sub(r"\d+", "0", text) for text in said)
        lines.setdefault(key, {})[ranks] = said
    for said_at in lines.values():
        at = [*said_at]
        cells = (_told(at, column) for column in zip(*said_at.values(), strict=True))
        yield f"| {name} | {_ranges(at)} | {' | '.join(cells)} |"


def _told(ranks: list[int], texts: Iterable[str]) -> str:
    """Texts that differ in numbers alone as one, whose numbers depend on the ranks."""
    pieces = [re.split(r"(\d+)", text) for text in texts]
    # Every other piece is a number.
    told = "".join(
        _number(ranks, [*map(int, column)]) if place % 2 else column[0]
        for place, column in enumerate(zip(*pieces, strict=True))
    )
    # A number that stands alone needs no parentheses.
    return re.sub(r"`\(([^()]*)\)`", r"`\1`", told)


def _number(ranks: list[int], values: list[int]) -> str:
    """Numbers at some ranks: as one, as `slope * ranks + rest`, or in turn."""
    if len(set(values)) == 1:
        return str(values[0])
    slope, remainder = divmod(values[1] - values[0], ranks[1] - ranks[0])
    rest = values[0] - slope * ranks[0]
    line = [slope * each + rest for each in ranks]
    if remainder or line != values or len(ranks) < 3:
        return f"[{','.join(map(str, values))}]"
    if slope == 1 and not rest:
        return "ranks"
    product = "ranks" if slope == 1 else f"{slope} * ranks"
    sign = "+" if rest > 0 else "-"
    return f"({product} {sign} {abs(rest)})" if rest else f"({product})"


def _ranges(ranks: list[int]) -> str:
    """Numbers of ranks: `2 to 16`, `4, 6 to 9`."""
    starts = [each for each in ranks if each - 1 not in ranks]
    ends = [each for each in ranks if each + 1 not in ranks]
    return ", ".join(
        str(start) if start == end else f"{start} to {end}"
        for start, end in zip(starts, ends, strict=True)
    )


def files() -> dict[str, str]:
    """Prove all, and give the page by its path in the repository."""
    names = [path.stem for path in GALLERY]
    # Those that take longest first, so that all cores have something to do until the end.
    cases = [(ranks, name) for ranks in reversed(RANKS) for name in names]
    rows = {}
    with processes() as workers:
        for (ranks, name), done in zip(cases, workers.map(row, cases), strict=True):
            rows[ranks, name], took = done
            print(f"{name} at {ranks}: {took:.1f} s", file=sys.stderr, flush=True)
        any_ranks = dict(zip(names, workers.map(any_ranks_row, names), strict=True))
    return {"docs/reports/proved.md": page(rows, any_ranks)}
