"""Checks a certificate of `schedc prove`: python -m schedlang.parametric.check_certificate FILE

It shares no code with what makes certificates, and looks at what docs/proof.md says of each class
of sizes, microbatches = base + period * n for n = 0, 1, …: each stage does each op of each
microbatch once; each batch of ops starts right when the one before it on its rank is over and all
that it needs is there; the figures are those of these times. Numbers are lists: [c, b, a] is c + b
* n + a * k in round k of a piece, and [c, b] is c + b * n. Fractions are texts: "3/2".
"""

import hashlib
import json
import sys
from fractions import Fraction
from typing import Any

MAKES = {"F": "F", "B": "BW", "I": "B", "W": "W", "R": "R"}
ZERO, ONE = (0, 0, 0), (1, 0, 0)


class Wrong(Exception):
    """The certificate does not prove what it says."""


def _hold(is_so: Any, what: Any) -> None:
    if not is_so:
        raise Wrong(what)


def _exact(value: Any) -> Any:
    _hold(type(value) in (int, str), "no number")
    return value if type(value) is int else Fraction(value)


def _number(values: Any) -> Any:
    _hold(type(values) is list and len(values) in (2, 3), "a number has other parts")
    return (*map(_exact, values), 0)[:3]


def _plus(one: Any, other: Any, factor: Any = 1) -> Any:
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def _at(number: Any, k: Any) -> Any:
    """A number in round k of its piece: k depends on n, and maybe on a round elsewhere."""
    return _plus((*number[:2], 0), k, number[2])


def _is_least(one: Any, other: Any) -> Any:
    """Whether a number is at least another one, for all n from 0 on."""
    return all(part >= 0 for part in _plus(one, other, -1))


def _largest(name: Any, said: Any, values: Any) -> None:
    said = _number(said)
    _hold(said in values and all(_is_least(said, value) for value in values), f"the {name}")


def check(document: Any) -> None:
    """Wrong, or another error, unless a certificate proves what it says."""
    _hold(document["format"] == "schedlang certificate 2", "another format")
    content = json.dumps([document["program"], document["params"]], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    _hold(digest == document["sha256"], "the program or its parameters are not those of the hash")
    _hold(document["classes"], "it proves nothing")
    for one in document["classes"]:
        _Class(one).check()


class _Class:
    """A class of sizes: pieces, each with its rank, its rounds, its batches, and when its rank is
    free for it; a batch has its ops, its start, its end, and for its rounds what it waits for.
    """

    def __init__(self, one: Any) -> None:
        self.one, self.slices, self.placement = one, one["slices"], one["placement"]
        self.ways = {tuple(key): _exact(way) for *key, way in one["ways"]}
        _hold(all(way >= 0 for way in self.ways.values()), "a message comes before it is sent")
        self.pieces: list[Any] = []
        self.made: dict[Any, list[Any]] = {(thing, stage): [] for thing, stage in one["makes"]}
        #: Of each rank: its first start, its last end, its work, and what it holds in pieces.
        self.ranks = [self._added(*each) for each in enumerate(one["ranks"])]

    def _added(self, rank: Any, pieces: Any) -> Any:
        begin, free, work, held, levels = (), ZERO, ZERO, ZERO, [ZERO]
        for piece in pieces:
            rounds = _number(piece["rounds"])
            last = _plus(rounds, ONE, -1)
            _hold(_is_least(last, ZERO), "a piece has no rounds")
            batches = [self._batch(batch, last == ZERO) for batch in piece["batches"]]
            level, within = 0, []
            for kind, stage, of in (op for batch in batches for op in batch[0]):
                _hold(stage >= 0 and self.placement[stage] == rank, "on another rank")
                for thing in MAKES[kind]:
                    self.made.setdefault((thing, stage), []).append((rounds, of))
                while_it_runs, after = map(_exact, self.one["holds"][kind][stage])
                within.append((level + while_it_runs, 0, 0))
                level += after
            levels += [_plus(of, on) for of in within for on in (held, _plus(held, last, level))]
            held = _plus(held, rounds, level)
            work = _plus(work, rounds, sum(end[0] - start[0] for _, start, end, _ in batches))
            self.pieces.append((rank, rounds, batches, free))
            free = _at(batches[-1][2], last)
            begin = begin or _at(batches[0][1], ZERO)
        return begin, free, work, levels

    def _batch(self, batch: Any, is_once: Any) -> Any:
        ops = [(kind, stage, _number(of)) for kind, stage, *of in batch["ops"]]
        start = _number(batch["start"])
        takes = sum(_exact(self.one["takes"][kind][stage]) for kind, stage, _ in ops)
        _hold(takes > 0, "an op takes no time")
        numbers = [start, *(of for _, _, of in ops)]
        _hold(all((of[2] == 0) == is_once for of in numbers), "rounds are later, and for others")
        return ops, start, _plus(start, (takes, 0, 0)), batch["waits"]

    def check(self) -> None:
        """Wrong unless all of it is so."""
        for (_, stage), made in self.made.items():
            self._once(_number(self.one["units"][stage]), made)
        for piece in self.pieces:
            self._starts(*piece)
        figures = self.one["figures"]
        _hold(any(begin == ZERO for begin, *_ in self.ranks), "nothing starts at 0")
        _largest("makespan", figures["makespan"], [end for _, end, *_ in self.ranks])
        _largest("span", figures["span"], [_plus(end, of, -1) for of, end, *_ in self.ranks])
        _largest("work", figures["work"], [work for *_, work, _ in self.ranks])
        for (*_, levels), peak in zip(self.ranks, figures["peak"], strict=True):
            _largest("peak", peak, levels)

    def _once(self, units: Any, made: Any) -> None:
        """Whether a thing is made once of each microbatch, which rounds go through by one step."""
        step = max((abs(of[2]) for _, of in made), default=0) or 1
        ranges: dict[Any, list[Any]] = {rest: [] for rest in range(step)}
        _hold(units[1] % step == 0, "rounds have other steps")
        for rounds, of in made:
            _hold(abs(of[2]) in (0, step) and of[1] % step == 0, "rounds have other steps")
            c, b, _ = of if of[2] >= 0 else _at(of, _plus(rounds, ONE, -1))
            ranges[c % step].append((b // step, c // step, rounds))
        for rest, some in ranges.items():
            at = ZERO
            end = (units[1] // step, -((rest - units[0]) // step), ZERO)
            for b, c, rounds in [*sorted(some), end]:
                _hold(at == (c, b, 0), "an op is not there once of each microbatch")
                at = _plus(at, rounds)

    def _needs(self, kind: Any, stage: Any, rest: Any) -> Any:
        """What an op needs: a thing, of a stage, so many microbatches or slices on."""
        if kind == "F":
            yield from (("F", a, 0) for a, b in self.one["edges"] if b == stage)
            yield from [("F", stage, -1)] * (rest > 0)
        if kind in "BI":
            yield "R" if ("R", stage) in self.made else "F", stage, 0
            yield from (("B", b, 0) for a, b in self.one["edges"] if a == stage)
            yield from [("B", stage, 1)] * (rest + 1 < self.slices)
        if kind in "WR":
            yield "B" if kind == "W" else "F", stage, 0

    def _starts(self, rank: Any, rounds: Any, batches: Any, free: Any) -> None:
        """Whether each batch of a piece starts when all that it waits for is there, no later."""
        for place, (ops, start, _, waits) in enumerate(batches):
            begin = ZERO
            for until, rows in waits:
                end = _number(until)
                both = begin, _plus(end, ONE, -1)
                _hold(_is_least(both[1], begin), "rounds have no order")
                there = [batches[place - 1][2]]
                if not place:
                    there = [_at(batches[-1][2], (-1, 0, 1)) if begin != ZERO else free]
                    _hold(begin != ZERO or end == ONE, "the first round has the piece before it")
                for (kind, stage, (c, b, a)), own in zip(ops, rows, strict=True):
                    _hold(b % self.slices == a % self.slices == 0, "slices differ by the round")
                    given = {tuple(need): row for *need, row in own}
                    for thing, of, on in self._needs(kind, stage, c % self.slices):
                        way = self.ways.get((thing, stage, of), 0) * (self.placement[of] != rank)
                        over = self._over(thing, of, (c + on, b, a), given[thing, of, on], both)
                        there.append(_plus(over, (way, 0, 0)))
                late = [[_at(_plus(start, of, -1), k) for k in both] for of in there]
                _hold(all(_is_least(x, ZERO) for of in late for x in of), "a start is too early")
                _hold([ZERO, ZERO] in late, "a start is too late")
                begin = end
            _hold(begin == rounds, "rounds are left out")

    def _over(self, thing: Any, stage: Any, wanted: Any, row: Any, both: Any) -> Any:
        """When what is wanted in some rounds is there: made by a batch of a piece, in round k."""
        piece, place, k = row[0], row[1], _number(row[2])
        _hold(piece >= 0 and place >= 0 and (k[2] == 0 or both[0] != both[1]), "no such round")
        _, rounds, batches, _ = self.pieces[piece]
        at = [_at(k, x) for x in both]
        _hold(all(_is_least(x, ZERO) and _is_least(rounds, _plus(x, ONE)) for x in at), "no round")
        ops, _, over, _ = batches[place]
        made = [of for kind, on, of in ops if thing in MAKES[kind] and on == stage]
        same = ([_at(of, x) for x in at] == [_at(wanted, x) for x in both] for of in made)
        _hold(any(same), "another microbatch is made")
        return _at(over, k)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        check(json.load(file))
    print("the certificate proves what it says")
