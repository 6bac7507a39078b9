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


class Wrong(Exception):
    """The certificate does not prove what it says."""


def _hold(is_so: Any, what: Any) -> None:
    if not is_so:
        raise Wrong(what)


def _number(values: Any, count: Any) -> Any:
    _hold(type(values) is list and len(values) == count, "a number has other parts")
    _hold(all(type(value) in (int, str) for value in values), "a number is none")
    return tuple(map(Fraction, values))


def _plus(one: Any, other: Any, factor: Any = 1) -> Any:
    """One number and so many times another one."""
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def _at(number: Any, k: Any) -> Any:
    """The number c + b * n + a * k, at a round k that depends on n."""
    return _plus(number[:2], k, number[2])


def _last(rounds: Any) -> Any:
    return _plus(rounds, ONE, -1)


def _is_least(one: Any, other: Any) -> Any:
    """Whether a number is at least another one, for all n from 0 on."""
    return all(part >= 0 for part in _plus(one, other, -1))


def _is_whole(number: Any) -> Any:
    return all(part.denominator == 1 for part in number)


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
    """One class of sizes: pieces, each with its rank, its rounds and its batches of ops."""

    def __init__(self, one: Any) -> None:
        self.size = _number([one["base"], one["period"]], 2)
        _hold(_is_least(self.size, (1, 1)), "there are no such sizes")
        self.slices, self.stride = one["slices"], one["stride"]
        _hold(type(self.slices) is int and type(self.stride) is int, "a number is none")
        self.placement, self.pipelines, self.edges = (
            one["placement"],
            one["pipelines"],
            one["edges"],
        )
        self.stages, self.frozen = list(range(len(self.placement))), one["frozen"]
        self.units = [_number(units, 2) for units in one["units"]]
        _hold(all(a < b for a, b in self.edges), "an edge does not lead forward")
        _hold(set(self.frozen) <= set(self.stages), "there is no such stage")
        self.ways = {tuple(key): Fraction(way) for *key, way in one["ways"]}
        _hold(all(way >= 0 for way in self.ways.values()), "a message comes before it is sent")
        self.takes, self.amounts, self.figures = one["takes"], one["amounts"], one["figures"]
        self.pieces: list[Any] = []
        self.made: dict[Any, list[Any]] = {}
        for rank, pieces in enumerate(one["ranks"]):
            for piece in pieces:
                self._add(rank, piece)

    def _add(self, rank: Any, piece: Any) -> None:
        rounds = _number(piece["rounds"], 2)
        _hold(_is_least(rounds, ONE) and _is_whole(rounds), "a piece has no such rounds")
        batches = []
        for batch in piece["batches"]:
            ops = [(kind, stage, _number(of, 3)) for kind, stage, *of in batch["ops"]]
            takes = sum(Fraction(self.takes[kind][stage]) for kind, stage, _ in ops)
            _hold(takes > 0, "an op takes no time")
            start = _number(batch["start"], 3)
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
        ordered = [stage for start, stop in self.pipelines for stage in range(start, stop)]
        _hold(ordered == self.stages == list(range(len(self.units))), "the stages are others")
        size = ZERO
        for start, stop in self.pipelines:
            alike = all(self.units[stage] == self.units[start] for stage in range(start, stop))
            _hold(alike, "the stages of a pipeline run other microbatches")
            size = _plus(size, self.units[start], Fraction(1, self.slices))
        _hold(size == self.size, "other microbatches")
        # Only what is trained, or comes after something that is, has a backward.
        backward: set[Any] = set()
        for stage in self.stages * any(thing in "BW" for thing, _ in self.made):
            if stage not in self.frozen or any(a in backward for a, b in self.edges if b == stage):
                backward.add(stage)
        trained = backward - set(self.frozen)
        wanted = {("F", stage) for stage in self.stages} | {("B", stage) for stage in backward}
        for thing, stage in wanted | {("W", stage) for stage in trained} | set(self.made):
            self._once(thing, stage)
        for number in range(len(self.pieces)):
            self._starts(number)
        self._check_figures({stage for stage in backward if ("R", stage) not in self.made})

    def _once(self, thing: Any, stage: Any) -> None:
        """Whether a thing is made once of each microbatch of a stage."""
        ranges: dict[int, list[Any]] = {rest: [] for rest in range(self.stride)}
        for rounds, of in self.made.get((thing, stage), []):
            low = of[:2] if of[2] >= 0 else _at(of, _last(rounds))
            rest = low[0] % self.stride
            begin = _plus(ZERO, (low[0] - rest, low[1]), Fraction(1, self.stride))
            _hold(_is_whole(begin), "a microbatch is no number")
            ranges[int(rest)].append((begin, _plus(begin, rounds)))
        for rest, of in ranges.items():
            of.sort(key=lambda each: each[0][::-1])
            c, b = self.units[stage]
            last = ((c - rest + self.stride - 1) // self.stride, b / self.stride)
            borders = [ZERO, *(end for _, end in of)]
            _hold([*(begin for begin, _ in of), last] == borders, f"{thing} of stage {stage}")

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
        rank, rounds, batches = self.pieces[number]
        for place, (ops, start, _, _, cells) in enumerate(batches):
            waits = [[(ZERO, rounds, batches[place - 1][2])]]
            if not place:
                (c, b, a), over = batches[-1][2], ZERO
                if number and self.pieces[number - 1][0] == rank:
                    over = _at(self.pieces[number - 1][2][-1][2], _last(self.pieces[number - 1][1]))
                first = [(ZERO, ONE, (*over, 0))]
                waits = [first if rounds == ONE else [*first, (ONE, rounds, (c - a, b, a))]]
            for (kind, stage, (c, b, a)), own in zip(ops, cells, strict=True):
                given = {tuple(key): rows for *key, rows in own}
                _hold(b % self.slices == a % self.slices == 0, "slices differ by the round")
                for thing, of, on in self._needs(kind, stage, c % self.slices):
                    way = self.ways.get((thing, stage, of), 0) * (self.placement[of] != rank)
                    rows = [self._cell(thing, of, (c + on, b, a), x) for x in given[thing, of, on]]
                    waits.append([(x, y, _plus(end, (way, 0, 0))) for x, y, end in rows])
            borders = sorted({x for of in waits for y in of for x in y[:2]}, key=lambda x: x[::-1])
            _hold(borders[0] == ZERO and borders[-1] == rounds, "rounds are left out")
            for begin, end in pairwise(borders):
                _hold(_is_least(_plus(end, begin, -1), ONE), "rounds have no order")
                inside = [[z for x, y, z in of if _is_inside(begin, end, x, y)] for of in waits]
                _hold(all(len(of) == 1 for of in inside), "what is needed is not made")
                late = [_plus(start, of[0], -1) for of in inside]
                spare = [(_at(of, begin), _at(of, _last(end))) for of in late]
                _hold(all(_is_least(x, ZERO) for of in spare for x in of), "a start is too early")
                _hold((ZERO, ZERO) in spare, "a start is too late")

    def _cell(self, thing: Any, stage: Any, wanted: Any, row: Any) -> Any:
        """Some rounds, and when what is wanted in them is there: made in round k of a piece."""
        begin, end, k = _number(row[0], 2), _number(row[1], 2), _number(row[4], 3)
        _hold(row[2] >= 0 and row[3] >= 0 and _is_whole((*begin, *end, *k)), "no such round")
        _, rounds, batches = self.pieces[row[2]]
        ops, _, over, _, _ = batches[row[3]]
        is_one = _plus(end, begin, -1) == ONE
        _hold(not is_one or k[2] == 0, "one round has no next")
        made = [_in_round(of, k) for kind, on, of in ops if thing in MAKES[kind] and on == stage]
        same = [of for of in made if _at(of, begin) == _at(wanted, begin)]
        _hold(any(is_one or of[2] == wanted[2] for of in same), "another microbatch is made")
        for ends in _at(k, begin), _at(k, _last(end)):
            _hold(_is_least(ends, ZERO) and _is_least(_last(rounds), ends), "no such round")
        return begin, end, _in_round(over, k)

    def _check_figures(self, keeps: Any) -> None:
        ranks = [[of for of in self.pieces if of[0] == rank] for rank in set(self.placement)]
        ends = [_at(own[-1][2][-1][2], _last(own[-1][1])) for own in ranks]
        starts = [own[0][2][0][1][:2] for own in ranks]
        _hold(ZERO in starts, "nothing starts at 0")
        works, peaks = zip(*(self._amounts(own, keeps) for own in ranks), strict=True)
        _largest("makespan", self.figures["makespan"], ends)
        _largest(
            "span", self.figures["span"], [_plus(*of, -1) for of in zip(ends, starts, strict=True)]
        )
        _largest("work", self.figures["work"], works)
        for levels, peak in zip(peaks, self.figures["peak"], strict=True):
            _largest("peak", peak, levels)

    def _amounts(self, pieces: Any, keeps: Any) -> Any:
        """How long a rank works, and all that it holds at a time."""
        work, held, levels = ZERO, ZERO, [ZERO]
        for _, rounds, batches in pieces:
            level: Any = 0
            seen: list[Any] = []
            for kind, stage, _ in (op for batch in batches for op in batch[0]):
                amount = Fraction(self.amounts[kind][stage])
                seen.append(level + max(amount, 0))
                level += amount if kind != "F" or stage in keeps else 0
            last = _plus(held, _last(rounds), level)
            levels += [_plus(of, (more, 0)) for more in seen for of in (held, last)]
            held, work = _plus(held, rounds, level), _plus(work, rounds, sum(x[3] for x in batches))
        return work, levels


def _is_inside(begin: Any, end: Any, low: Any, high: Any) -> Any:
    return low[::-1] <= begin[::-1] and end[::-1] <= high[::-1]


def _in_round(number: Any, k: Any) -> Any:
    """A number of another piece in its round k, which depends on n and the round here."""
    return (*_at(number, k[:2]), number[2] * k[2])


def _largest(name: Any, said: Any, values: Any) -> None:
    said = _number(said, 2)
    _hold(said in values and all(_is_least(said, value) for value in values), f"the {name}")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        check(json.load(file))
    print("the certificate proves what it says")
