"""Checks a certificate of `schedc prove`: python -m schedlang.parametric.check_certificate FILE

It shares no code with what makes certificates. Of each class of sizes, microbatches = base + period
* n for n = 0, 1, …, it looks at what docs/proof.md says: each stage does each op of each microbatch
once; no batch of ops starts before the one before it on its rank is over and all that it needs is
there, and each starts right then; the figures are those of these times. Numbers are lists: [c, b]
is c + b * n, and [c, b, a] is c + b * n + a * k in round k of a piece. Fractions are texts: "3/2".
"""

import hashlib
import json
import sys
from fractions import Fraction
from itertools import pairwise
from typing import Any

MAKES = {"F": "F", "B": "BW", "I": "B", "W": "W", "R": "R"}
ZERO, ONE = (Fraction(0),) * 2, (Fraction(1), Fraction(0))
#: The piece before the first one of a rank: it is over at 0.
NOTHING: Any = 0, ONE, [(0, 0, (Fraction(0),) * 3)]


class Wrong(Exception):
    """The certificate does not prove what it says."""


def _hold(is_so: Any, what: Any) -> None:
    if not is_so:
        raise Wrong(what)


def _numbers(values: Any, count: Any) -> Any:
    _hold(type(values) is list and len(values) == count, "a number has other parts")
    _hold(all(type(value) in (int, str) for value in values), "a number is none")
    return tuple(map(Fraction, values))


def _plus(one: Any, other: Any) -> Any:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Any, other: Any) -> Any:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _times(number: Any, factor: Any) -> Any:
    return tuple(part * factor for part in number)


def _inside(cells: Any, begin: Any, end: Any) -> Any:
    return (when for low, high, when in cells if low[::-1] <= begin and end <= high[::-1])


def at(number: Any, k: Any) -> Any:
    """The number c + b * n + a * k, at a round k that depends on n."""
    return number[0] + number[2] * k[0], number[1] + number[2] * k[1]


def is_least(one: Any, other: Any) -> Any:
    """Whether a number is at least another one, for all n from 0 on."""
    return all(part >= 0 for part in _minus(one, other))


def check(document: Any) -> None:
    """Wrong, or another error, unless a certificate proves what it says."""
    _hold(document["format"] == "schedlang certificate 1", "another format")
    content = json.dumps([document["program"], document["params"]], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    _hold(digest == document["sha256"], "the program or its parameters are not those of the hash")
    _hold(document["classes"], "it proves nothing")
    for one in document["classes"]:
        Class(one).check()


class Class:
    """One class of sizes: pieces, each with its rank, its rounds and its batches of ops."""

    def __init__(self, one: Any) -> None:
        self.size = _numbers([one["base"], one["period"]], 2)
        _hold(is_least(self.size, (1, 1)), "there are no such sizes")
        self.slices, self.stride = one["slices"], one["stride"]
        _hold(type(self.slices) is int and type(self.stride) is int, "a number is none")
        self.placement, self.pipelines = one["placement"], one["pipelines"]
        self.units = [_numbers(units, 2) for units in one["units"]]
        starts = [start for start, _ in self.pipelines]
        self.skips = [(start + a, start + b) for start in starts for a, b in one["skips"]]
        _hold(all(a + 1 < b for a, b in self.skips), "a skip leads to the next stage")
        self.ways = {tuple(key): Fraction(way) for *key, way in one["ways"]}
        _hold(all(way >= 0 for way in self.ways.values()), "a message comes before it is sent")
        self.takes, self.amounts, self.figures = one["takes"], one["amounts"], one["figures"]
        self.pieces: list[Any] = []
        self.made: dict[Any, list[Any]] = {}
        self.keeps: set[int] = set()
        for rank, pieces in enumerate(one["ranks"]):
            for piece in pieces:
                self._add(rank, piece)

    def _add(self, rank: Any, piece: Any) -> None:
        rounds = _numbers(piece["rounds"], 2)
        _hold(is_least(rounds, ONE), "a piece has no rounds")
        _hold(rounds[0].denominator == rounds[1].denominator == 1, "there are parts of rounds")
        batches = []
        for batch in piece["batches"]:
            ops = [(kind, stage, _numbers(of, 3)) for kind, stage, *of in batch["ops"]]
            takes = sum(Fraction(self.takes[kind][stage]) for kind, stage, _ in ops)
            _hold(takes > 0, "an op takes no time")
            start = _numbers(batch["start"], 3)
            batches.append((ops, start, _plus(start, (takes, 0, 0)), takes, batch["waits"]))
            for kind, stage, microbatch in ops:
                _hold(stage >= 0 and self.placement[stage] == rank, "on another rank")
                _hold(rounds == ONE or abs(microbatch[2]) == self.stride, "another stride")
                _hold(rounds != ONE or microbatch[2] == start[2] == 0, "one round has no next")
                for thing in MAKES[kind]:
                    self.made.setdefault((thing, stage), []).append((rounds, microbatch))
        self.pieces.append((rank, rounds, batches))

    def check(self) -> None:
        """Wrong unless all of it is so."""
        stages = list(range(len(self.placement)))
        ordered = [stage for start, stop in self.pipelines for stage in range(start, stop)]
        _hold(ordered == stages == list(range(len(self.units))), "the stages are others")
        sizes = [_times(self.units[start], Fraction(1, self.slices)) for start, _ in self.pipelines]
        _hold(tuple(map(sum, zip(*sizes, strict=True))) == self.size, "other microbatches")
        alike = all(self.units[s] == self.units[a] for a, b in self.pipelines for s in range(a, b))
        _hold(alike, "the stages of a pipeline run other microbatches")
        training = any(thing in "BW" for thing, _ in self.made)
        wanted = {(thing, stage) for thing in ("FBW" if training else "F") for stage in stages}
        for thing, stage in wanted | set(self.made):
            self._once(thing, stage)
        self.keeps = {s for s in stages if training and ("R", s) not in self.made}
        for number in range(len(self.pieces)):
            self._starts(number)
        self._check_figures()

    def _once(self, thing: Any, stage: Any) -> None:
        """Whether a thing is made once of each microbatch of a stage."""
        ranges: dict[int, list[Any]] = {rest: [] for rest in range(self.stride)}
        for rounds, (c, b, a) in self.made.get((thing, stage), []):
            low = (c, b) if a >= 0 else at((c, b, a), _minus(rounds, ONE))
            rest = low[0] % self.stride
            begin = _times(_minus(low, (rest, 0)), Fraction(1, self.stride))
            _hold(begin[0].denominator == begin[1].denominator == 1, "a microbatch is no number")
            ranges[int(rest)].append((begin, _plus(begin, rounds)))
        for rest, of in ranges.items():
            of.sort(key=lambda each: each[0][::-1])
            c, b = self.units[stage]
            last = ((c - rest + self.stride - 1) // self.stride, b / self.stride)
            borders = [ZERO, *(end for _, end in of)]
            _hold([*(begin for begin, _ in of), last] == borders, f"{thing} of stage {stage}")

    def _needs(self, kind: Any, stage: Any, rest: Any) -> Any:
        """What an op needs: a thing, of a stage, so many microbatches or slices on."""
        ((start, stop),) = [of for of in self.pipelines if of[0] <= stage < of[1]]
        before = [stage - 1] * (stage > start) + [a for a, b in self.skips if b == stage]
        after = [stage + 1] * (stage + 1 < stop) + [b for a, b in self.skips if a == stage]
        if kind == "F":
            yield from (("F", other, 0) for other in before)
            yield from [("F", stage, -1)] * (rest > 0)
        if kind in "BI":
            yield "R" if ("R", stage) in self.made else "F", stage, 0
            yield from (("B", other, 0) for other in after)
            yield from [("B", stage, 1)] * (rest + 1 < self.slices)
        if kind in "WR":
            yield "B" if kind == "W" else "F", stage, 0

    def _starts(self, number: Any) -> None:
        """Whether each batch of a piece starts when all is there that it waits for, and no later;
        a wait is a list of rounds, from one up to another, and when all is there in them.
        """
        rank, rounds, batches = self.pieces[number]
        for place, (ops, start, _, _, cells) in enumerate(batches):
            waits = [[(ZERO, rounds, batches[place - 1][2])]]
            if not place:
                same = number and self.pieces[number - 1][0] == rank
                _, of, before = self.pieces[number - 1] if same else NOTHING
                c, b, a = batches[-1][2]
                first = (ZERO, ONE, (*at(before[-1][2], _minus(of, ONE)), 0))
                waits = [[first, (ONE, rounds, (c - a, b, a))][: 1 + (rounds != ONE)]]
            for (kind, stage, (c, b, a)), own in zip(ops, cells, strict=True):
                given = {tuple(key): rows for *key, rows in own}
                _hold(b % self.slices == a % self.slices == 0, "slices differ by the round")
                for thing, of, on in self._needs(kind, stage, c % self.slices):
                    way = self.ways.get((thing, stage, of), 0) * (self.placement[of] != rank)
                    wanted = (c + on, b, a)
                    there = [self._cell(thing, of, wanted, row) for row in given[thing, of, on]]
                    waits.append([(x, y, _plus(end, (way, 0, 0))) for x, y, end in there])
            borders = sorted({x for of in waits for y in of for x in y[:2]}, key=lambda x: x[::-1])
            _hold(borders[0] == ZERO and borders[-1] == rounds, "rounds are left out")
            for begin, end in pairwise(borders):
                _hold(is_least(_minus(end, begin), ONE), "rounds have no order")
                inside = [list(_inside(of, begin[::-1], end[::-1])) for of in waits]
                _hold(all(len(of) == 1 for of in inside), "what is needed is not made")
                late = [_minus(start, of[0]) for of in inside]
                spare = [(at(of, begin), at(of, _minus(end, ONE))) for of in late]
                _hold(all(is_least(x, ZERO) for of in spare for x in of), "a start is too early")
                _hold((ZERO, ZERO) in spare, "a start is too late")

    def _cell(self, thing: Any, stage: Any, wanted: Any, row: Any) -> Any:
        """Some rounds, and when what is wanted in them is there: made in round k of a piece."""
        begin, end, piece, place, k = row
        begin, end, k = _numbers(begin, 2), _numbers(end, 2), _numbers(k, 3)
        _hold(piece >= 0 and place >= 0, "there is no such piece")
        _, rounds, batches = self.pieces[piece]
        ops, _, (c, b, a), _, _ = batches[place]
        made = [of for kind, on, of in ops if thing in MAKES[kind] and on == stage]
        made = [(x + z * k[0], y + z * k[1], z * k[2]) for x, y, z in made]
        one = _minus(end, begin) == ONE
        _hold(not one or k[2] == 0, "one round has no next")
        same = [of for of in made if at(of, begin) == at(wanted, begin)]
        _hold(any(one or of[2] == wanted[2] for of in same), "another microbatch is made")
        for ends in at(k, begin), at(k, _minus(end, ONE)):
            _hold(is_least(ends, ZERO) and is_least(_minus(rounds, ONE), ends), "no such round")
        _hold(all(part.denominator == 1 for part in (*begin, *end, *k)), "no such round")
        return begin, end, (c + a * k[0], b + a * k[1], a * k[2])

    def _check_figures(self) -> None:
        numbers = sorted(set(self.placement))
        ranks = [[of for of in self.pieces if of[0] == rank] for rank in numbers]
        ends = [at(own[-1][2][-1][2], _minus(own[-1][1], ONE)) for own in ranks]
        starts = [own[0][2][0][1][:2] for own in ranks]
        busy = [self._total(own, lambda batch: batch[3]) for own in ranks]
        _hold(ZERO in starts, "nothing starts at 0")
        self._largest("makespan", self.figures["makespan"], ends)
        self._largest("span", self.figures["span"], list(map(_minus, ends, starts)))
        self._largest("work", self.figures["work"], busy)
        for own, peak in zip(ranks, self.figures["peak"], strict=True):
            held: Any = ZERO
            levels: list[Any] = [ZERO]
            for _, rounds, batches in own:
                level: Any = 0
                seen: list[Any] = []
                for kind, stage, _ in (op for batch in batches for op in batch[0]):
                    amount = Fraction(self.amounts[kind][stage])
                    seen.append(level + max(amount, 0))
                    level += amount if kind != "F" or stage in self.keeps else 0
                last = _plus(held, _times(_minus(rounds, ONE), level))
                levels += [_plus(of, (more, 0)) for more in seen for of in (held, last)]
                held = _plus(held, _times(rounds, level))
            self._largest("peak", peak, levels)

    def _total(self, pieces: Any, of: Any) -> Any:
        sums = [_times(rounds, sum(map(of, batches))) for _, rounds, batches in pieces]
        return tuple(map(sum, zip(*sums, strict=True)))

    def _largest(self, name: Any, said: Any, values: Any) -> None:
        said = _numbers(said, 2)
        _hold(said in values and all(is_least(said, value) for value in values), f"the {name}")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        check(json.load(file))
    print("the certificate proves what it says")
