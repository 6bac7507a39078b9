"""Checks a certificate of `schedc prove`: python -m schedlang.parametric.check_certificate FILE

It shares no code with what makes certificates, and looks at what docs/proof.md says of each class
of sizes, microbatches = base + period * n for n = 0, 1, …: each stage does each op of each
microbatch once; each batch of ops starts right when the one before it on its rank is over and all
that it needs is there; the figures are those of these times. Numbers are lists: [c, b] is c + b *
n, and [c, b, a] is c + b * n + a * k in round k of a piece. Fractions are texts: "3/2".
"""

import hashlib
import json
import sys
from fractions import Fraction
from itertools import pairwise
from typing import Any

MAKES = {"F": "F", "B": "BW", "I": "B", "W": "W", "R": "R"}
_LAID_OUT = ("placement", "pipelines", "models", "edges")
ZERO = (Fraction(0), Fraction(0))
ONE = (Fraction(1), Fraction(0))


class Wrong(Exception):
    """The certificate does not prove what it says."""


def _hold(is_so: Any, what: Any) -> None:
    if not is_so:
        raise Wrong(what)


def _number(values: Any, count: Any, is_whole: Any = False) -> Any:
    _hold(type(values) is list and len(values) == count, "a number has other parts")
    _hold(all(type(value) in ((int,) if is_whole else (int, str)) for value in values), "no number")
    return tuple(map(Fraction, values))


def _plus(one: Any, other: Any, factor: Any = 1) -> Any:
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def _at(number: Any, k: Any) -> Any:
    """A number in round k of its piece: k depends on n, and maybe on a round elsewhere."""
    return (*_plus(number[:2], k[:2], number[2]), *(number[2] * step for step in k[2:]))


def _is_least(one: Any, other: Any) -> Any:
    """Whether a number is at least another one, for all n from 0 on."""
    return all(part >= 0 for part in _plus(one, other, -1))


def _largest(name: Any, said: Any, values: Any) -> None:
    said = _number(said, 2)
    _hold(said in values and all(_is_least(said, value) for value in values), f"the {name}")


def check(document: Any) -> None:
    """Wrong, or another error, unless a certificate proves what it says."""
    _hold(document["format"] == "schedlang certificate 1", "another format")
    content = json.dumps([document["program"], document["params"]], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    _hold(digest == document["sha256"], "the program or its parameters are not those of the hash")
    _hold(document["classes"], "it proves nothing")
    for one in document["classes"]:
        _Class(one).check()


class _Class:
    """A class of sizes: pieces, each with its rank, its rounds, its last round, and its batches."""

    def __init__(self, one: Any) -> None:
        self.size = _number([one["base"], one["period"]], 2, True)
        self.slices, self.stride = map(int, _number([one["slices"], one["stride"]], 2, True))
        self.placement, self.pipelines, self.models, self.edges = map(one.get, _LAID_OUT)
        self.stages = list(range(len(self.placement)))
        self.frozen = one["frozen"]
        self.units = [_number(units, 2, True) for units in one["units"]]
        self.ways = {tuple(key): Fraction(way) for *key, way in one["ways"]}
        self.takes = one["takes"]
        self.amounts = one["amounts"]
        self.figures = one["figures"]
        _hold(_is_least(self.size, (1, 1)), "there are no such sizes")
        _hold(all(a < b for a, b in self.edges), "an edge does not lead forward")
        _hold(len(set(map(tuple, self.edges))) == len(self.edges), "an edge is there twice")
        _hold(set(self.frozen) <= set(self.stages), "there is no such stage")
        _hold(all(way >= 0 for way in self.ways.values()), "a message comes before it is sent")
        self.pieces: list[Any] = []
        self.made: dict[Any, list[Any]] = {}
        for rank, pieces in enumerate(one["ranks"]):
            for piece in pieces:
                self._add(rank, piece)

    def _add(self, rank: Any, piece: Any) -> None:
        rounds = _number(piece["rounds"], 2, True)
        batches = []
        last = _plus(rounds, ONE, -1)
        _hold(_is_least(last, ZERO), "a piece has no rounds")
        for batch in piece["batches"]:
            ops = [(kind, stage, _number(of, 3, True)) for kind, stage, *of in batch["ops"]]
            takes = sum(Fraction(self.takes[kind][stage]) for kind, stage, _ in ops)
            _hold(takes > 0, "an op takes no time")
            start = _number(batch["start"], 3)
            batches.append((ops, start, _plus(start, (takes, 0, 0)), takes, batch["waits"]))
            for kind, stage, of in ops:
                _hold(stage >= 0 and self.placement[stage] == rank, "on another rank")
                # All pieces that grow go on by one stride, up or down: so their microbatches are
                # told by rest and quotient.
                steps = (of[2], start[2]) if last == ZERO else (abs(of[2]) - self.stride,)
                _hold(not any(steps), "another stride")
                for thing in MAKES[kind]:
                    self.made.setdefault((thing, stage), []).append((rounds, last, of))
        self.pieces.append((rank, rounds, last, batches))

    def check(self) -> None:
        """Wrong unless all of it is so."""
        ordered = [stage for start, stop in self.pipelines for stage in range(start, stop)]
        _hold(ordered == self.stages == list(range(len(self.units))), "the stages are others")
        size = ZERO
        # Pipelines are replicas, which share the microbatches, or models: the first has them.
        sharing = self.pipelines[:1] if self.models else self.pipelines
        for start, stop in self.pipelines:
            _hold(set(self.units[start:stop]) == {self.units[start]}, "stages run other numbers")
            if [start, stop] in sharing:
                size = _plus(size, self.units[start], Fraction(1, self.slices))
        _hold(size == self.size, "other microbatches")
        # Only what is trained, or comes after something that is, has a backward.
        backward: set[Any] = set()
        for stage in self.stages * any(thing in "BW" for thing, _ in self.made):
            if stage not in self.frozen or any(a in backward for a, b in self.edges if b == stage):
                backward.add(stage)
        wanted = {("F", stage) for stage in self.stages} | {("B", stage) for stage in backward}
        wanted |= {("W", stage) for stage in backward - set(self.frozen)}
        for thing, stage in wanted | set(self.made):
            self._once(thing, stage)
        for number in range(len(self.pieces)):
            self._starts(number)
        self._check_figures({stage for stage in backward if ("R", stage) not in self.made})

    def _once(self, thing: Any, stage: Any) -> None:
        """Whether a thing is made once of each microbatch of a stage."""
        ranges: dict[Any, list[Any]] = {rest: [] for rest in range(self.stride)}
        for rounds, last, of in self.made.get((thing, stage), []):
            # Where microbatches count down, the last round has the first.
            c, b = of[:2] if of[2] >= 0 else _at(of, last)
            begin = (c // self.stride, b / self.stride)
            _hold(begin[1].denominator == 1, "a microbatch is no number")
            ranges[c % self.stride].append((begin, _plus(begin, rounds)))
        for rest, of in ranges.items():
            of.sort(key=lambda each: each[0][::-1])
            c, b = self.units[stage]
            end = ((c - rest + self.stride - 1) // self.stride, b / self.stride)
            # Ranges of quotients, laid end to end, must be all of them:
            #
            #     0 ├── first piece ──┼── rounds ──┼── last piece ──┤ end
            borders = [ZERO, *(end for _, end in of)]
            _hold([*(begin for begin, _ in of), end] == borders, f"{thing} of stage {stage}")

    def _needs(self, kind: Any, stage: Any, rest: Any) -> Any:
        """What an op needs: a thing, of a stage, so many microbatches or slices on."""
        if kind == "F":
            yield from (("F", a, 0) for a, b in self.edges if b == stage)
            yield from [("F", stage, -1)] * (rest > 0)
        if kind in "BI":
            yield "R" if ("R", stage) in self.made else "F", stage, 0
            yield from (("B", b, 0) for a, b in self.edges if a == stage)
            yield from [("B", stage, 1)] * (rest + 1 < self.slices)
        if kind in "WR":
            yield "B" if kind == "W" else "F", stage, 0

    def _starts(self, number: Any) -> None:
        """Whether each batch of a piece starts when all is there that it waits for, and no later;
        a wait is a list of rounds, from one up to another, and when all is there in them.
        """
        rank, rounds, last, batches = self.pieces[number]
        for place, (ops, start, _, _, cells) in enumerate(batches):
            # What a batch waits for, each with its rounds and when it is there: the batch before it
            # on its rank, and what its ops need. The first batch of a piece follows the piece
            # before in round 0, and its own last batch in all others.
            waits = [[(ZERO, rounds, batches[place - 1][2])]]
            if not place:
                before = [x for x in self.pieces[:number][-1:] if x[0] == rank]
                over = _at(before[0][3][-1][2], before[0][2]) if before else ZERO
                waits = [[(ZERO, ONE, (*over, 0))]]
                if last != ZERO:
                    waits[0].append((ONE, rounds, _at(batches[-1][2], (-1, 0, 1))))
            for (kind, stage, (c, b, a)), own in zip(ops, cells, strict=True):
                given = {tuple(key): rows for *key, rows in own}
                _hold(b % self.slices == a % self.slices == 0, "slices differ by the round")
                for thing, of, on in self._needs(kind, stage, c % self.slices):
                    way = self.ways.get((thing, stage, of), 0) * (self.placement[of] != rank)
                    rows = [self._cell(thing, of, (c + on, b, a), x) for x in given[thing, of, on]]
                    waits.append([(x, y, _plus(end, (way, 0, 0))) for x, y, end in rows])
            # Between two borders nothing changes but by the round, so the first and the last round
            # there say it of all: a number that is 0 or more at both is so between them. Reversed,
            # since for large n what grows more is larger.
            borders = sorted({x[::-1] for of in waits for cell in of for x in cell[:2]})
            _hold(borders[0] == ZERO and borders[-1] == rounds[::-1], "rounds are left out")
            for begin, end in pairwise(borders):
                first = begin[::-1]
                final = _plus(end[::-1], ONE, -1)
                _hold(_is_least(final, first), "rounds have no order")
                inside = [[z for x, y, z in of if x[::-1] <= begin < y[::-1]] for of in waits]
                _hold(all(len(of) == 1 for of in inside), "what is needed is not made")
                late = [_plus(start, of[0], -1) for of in inside]
                spare = [(_at(of, first), _at(of, final)) for of in late]
                _hold(all(_is_least(x, ZERO) for of in spare for x in of), "a start is too early")
                _hold((ZERO, ZERO) in spare, "a start is too late")

    def _cell(self, thing: Any, stage: Any, wanted: Any, row: Any) -> Any:
        """Some rounds, and when what is wanted in them is there: made in round k of a piece."""
        begin, end, k = (_number(row[i], 2 + (i == 4), True) for i in (0, 1, 4))
        final = _plus(end, ONE, -1)
        _hold(row[2] >= 0 and row[3] >= 0 and (final != begin or k[2] == 0), "no such round")
        _, _, last, batches = self.pieces[row[2]]
        for at in _at(k, begin), _at(k, final):
            _hold(_is_least(at, ZERO) and _is_least(last, at), "no such round")
        ops, _, over, _, _ = batches[row[3]]
        made = [_at(of, k) for kind, on, of in ops if thing in MAKES[kind] and on == stage]
        same = (all(_at(of, x) == _at(wanted, x) for x in (begin, final)) for of in made)
        _hold(any(same), "another microbatch is made")
        return begin, end, _at(over, k)

    def _check_figures(self, keeps: Any) -> None:
        ends = []
        starts = []
        works = []
        for rank, peak in zip(sorted(set(self.placement)), self.figures["peak"], strict=True):
            held = ZERO
            work = ZERO
            levels = [ZERO]
            own = [of for of in self.pieces if of[0] == rank]
            for _, rounds, last, batches in own:
                level: Any = Fraction(0)
                seen: list[Any] = []
                for kind, stage, _ in (op for batch in batches for op in batch[0]):
                    amount = Fraction(self.amounts[kind][stage])
                    seen.append(level + max(amount, 0))
                    level += amount * (kind != "F" or stage in keeps)
                both = held, _plus(held, last, level)
                levels += [_plus(of, (more, 0)) for more in seen for of in both]
                held = _plus(held, rounds, level)
                work = _plus(work, rounds, sum(takes for _, _, _, takes, _ in batches))
            _largest("peak", peak, levels)
            works.append(work)
            starts.append(own[0][3][0][1][:2])
            ends.append(_at(own[-1][3][-1][2], own[-1][2]))
        _hold(ZERO in starts, "nothing starts at 0")
        _largest("makespan", self.figures["makespan"], ends)
        _largest("span", self.figures["span"], list(map(_plus, ends, starts, [-1] * len(ends))))
        _largest("work", self.figures["work"], works)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        check(json.load(file))
    print("the certificate proves what it says")
