"""Checks a certificate for any microbatches: python -m schedlang.extras.prove.check_orders FILE

For microbatches = base + period * n: a stage makes a thing once of each microbatch; a batch starts
right when the one before on its rank is over and all that it needs is there; weights are gathered,
gradients summed; figures are of these times (docs/proof.md). `schedc check` also compares
them with the program. [c, b, a] is c + b * n + a * k in round k of a piece; fractions are texts.
"""

import json
import sys
from fractions import Fraction
from re import fullmatch, sub
from typing import Any

FORMAT = "schedlang certificate 6"
BESIDE = {"UNSHARD": "<", "RESHARD": ">", "REDUCE_GRAD": "+"}
MAKES = {"F": "F", "B": "BW", "I": "B", "W": "W", "R": "R", **dict.fromkeys(BESIDE, "")}
ZERO = (0, 0, 0)
ONE = (1, 0, 0)


class Wrong(Exception):
    """The certificate does not prove what it says."""


def _hold(is_so: Any, what: Any) -> None:
    if not is_so:
        raise Wrong(what)


def _number(parts: Any, other: Any = str) -> Any:
    _hold([type(part) in (int, other) for part in parts] == [True] * 3, "no number")
    return tuple(part if type(part) is int else Fraction(part) for part in parts)


def _plus(one: Any, other: Any, factor: Any = 1) -> Any:
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def _at(number: Any, k: Any) -> Any:
    """A number in round k of its piece, where k itself is a number."""
    return _plus((*number[:2], 0), k, number[2])


def _is_least(one: Any, other: Any) -> Any:
    """Whether a number is at least another one for all n from 0 on."""
    return all(part >= 0 for part in _plus(one, other, -1))


def _over(makers: Any, maker: Any, k: Any, wanted: Any, both: Any) -> Any:
    """When a thing that is `wanted` is there: the end of round k of its maker."""
    _hold(maker >= 0 and (k[2] == 0 or both[0] != both[1]), "no such round")
    last, made, over = makers[maker]
    at = [_at(k, x) for x in both]
    _hold(all(_is_least(x, ZERO) and _is_least(last, x) for x in at), "no round")
    _hold([_at(made, x) for x in at] == [_at(wanted, x) for x in both], "another is made")
    return _at(over, k)


def check(document: Any) -> None:
    """Raise Wrong, or another error, unless the certificate holds."""
    _hold(document["format"] == FORMAT, "it has another format: prove it anew")
    for one in document["classes"]:
        _Class(one).check()


class _Class:
    """A class: pieces (last round, batches, when the rank is free), and who makes each thing."""

    def __init__(self, one: Any) -> None:
        _hold(min(one["base"], one["period"], one["slices"]) > 0, "no sizes")
        self.one = one
        self.ways = {tuple(key): _number(way) for *key, way in one["ways"]}
        _hold(all(_is_least(way, ZERO) for way in self.ways.values()), "received before it is sent")
        #: Of the ops of a kind and a stage: how long they take, what they hold meanwhile and after.
        self.ops = {(kind, stage): list(map(_number, of)) for kind, stage, *of in one["ops"]}
        self.pieces: list[Any] = []
        self.made: dict[Any, list[Any]] = {("F", at): [] for at in range(len(one["placement"]))}
        #: Of each rank: when it ends, how long it runs, how long it works, what it holds at times.
        self.ranks = [self._rank(*each) for each in enumerate(one["ranks"])]

    def _rank(self, rank: Any, pieces: Any) -> Any:
        free = ZERO
        work = ZERO
        held = ZERO
        levels = [ZERO]
        done: list[Any] = []
        starts = []
        for piece in pieces:
            last = _plus(_number(piece["rounds"], int), ONE, -1)
            _hold(_is_least(last, ZERO), "a piece has no rounds")
            batches = [self._batch(batch, rank, last) for batch in piece["batches"]]
            starts += [_at(start, ZERO) for ops, start, *_ in batches if ops[0][0] not in BESIDE]
            self.pieces.append((last, batches, free))
            free = _at(batches[-1][2], last)
            work = _plus(work, _plus(last, ONE), sum(end[0] - at[0] for _, at, end, _ in batches))
            level = ZERO
            before = len(levels)
            ops = [op for batch in batches for op in batch[0]]
            for kind, stage, _ in ops:
                _, while_it_runs, after = self.ops[kind, stage]
                _hold(_is_least(while_it_runs, max(ZERO, after)), "an op holds less as it runs")
                levels.append(_plus(_plus(held, level), while_it_runs))
                level = _plus(level, after)
            # A peak is in the first or the last round. What holds of two rounds holds of all.
            _hold(last == ZERO or level[1:] == (0, 0), "rounds add by n")
            levels += [_plus(of, last, level[0]) for of in levels[before:]]
            held = _plus(_plus(held, level), last, level[0])
            done += ops * (1 if last == ZERO else 2)
        for stage in {op[1] for op in done}:
            of = "".join(BESIDE.get(kind, kind) for kind, other, _ in done if other == stage)
            _hold(fullmatch("(<[FBIWR]*>)*|[^<>]*", of.replace("+", "")), "weights are not there")
            _hold(fullmatch(r"([BW]+\+)*|[BW]*", sub("[^BW+]", "", of)), "gradients are not summed")
        return free, _plus(free, starts[0], -1), work, levels

    def _batch(self, batch: Any, rank: Any, last: Any) -> Any:
        ops = [(kind, stage, _number(of, int)) for kind, stage, *of in batch["ops"]]
        start = _number(batch["start"])
        by_round = [start[2], *(of[2] for kind, _, of in ops if kind not in BESIDE or of != ZERO)]
        _hold([step == 0 for step in by_round] == [last == ZERO] * len(by_round), "rounds are one")
        end = _plus(start, map(sum, zip(*(self.ops[op[:2]][0] for op in ops), strict=True)))
        _hold(_is_least(end, start) and (end == start) == (ops[0][0] in BESIDE), "no time is taken")
        for kind, stage, of in ops:
            _hold(stage >= 0 and self.one["placement"][stage] == rank, "on another rank")
            for thing in MAKES[kind]:
                self.made.setdefault((thing, stage), []).append((last, of, end))
        return ops, start, end, batch["waits"]

    def check(self) -> None:
        """Check all statements about this class."""
        for (_, stage), made in self.made.items():
            self._once(_number(self.one["units"][stage], int), made)
        for piece in self.pieces:
            self._starts(*piece)
        _hold(any(end == span for end, span, *_ in self.ranks), "nothing starts at 0")
        *times, levels = zip(*self.ranks, strict=True)
        of = self.one["figures"]
        said = [of["makespan"], of["span"], of["work"], *of["peak"]]
        for figure, values in zip(map(_number, said), [*times, *levels], strict=True):
            _hold(figure in values and all(_is_least(figure, of) for of in values), "no figure")

    def _once(self, units: Any, made: Any) -> None:
        """Check that a thing is made once of each microbatch, in loops that go on by one step."""
        step = max((abs(of[2]) for _, of, _ in made), default=0) or 1
        follows = {}
        for last, of, _ in made:
            _hold(of[2] in (0, step, -step), "loops go on by other steps")
            first = _at(of, last if of[2] < 0 else ZERO)
            _hold(first not in follows, "an op is there twice")
            follows[first] = _plus(first, _plus(last, ONE), step)
        for at in [(rest, 0, 0) for rest in range(step)]:
            while at in follows:
                at = follows.pop(at)
            _hold(_plus(at, units, -1) in [(c, 0, 0) for c in range(step)], "an op is missing")
        _hold(not follows, "an op is of no microbatch")

    def _needs(self, kind: Any, stage: Any, of: Any) -> Any:
        """What an op needs: the thing, its stage, and its microbatch or slice."""
        slices = self.one["slices"]
        _hold(of[1] % slices == of[2] % slices == 0, "slices differ by the round")
        if kind == "F":
            yield from (("F", a, of) for a, b in self.one["edges"] if b == stage)
            yield from [("F", stage, _plus(of, ONE, -1))] * (of[0] % slices > 0)
        if kind in "BI":
            yield "R" if ("R", stage) in self.made else "F", stage, of
            yield from (("B", b, of) for a, b in self.one["gradients"] if a == stage)
            yield from [("B", stage, _plus(of, ONE))] * (of[0] % slices < slices - 1)
        if kind in "WR":
            yield "B" if kind == "W" else "F", stage, of

    def _starts(self, last: Any, batches: Any, free: Any) -> None:
        """Check that each batch of a piece starts when all that it waits for is there, no later."""
        before = [_at(batches[-1][2], (-1, 0, 1)), *(end for _, _, end, _ in batches)]
        for place, (ops, start, _, waits) in enumerate(batches):
            begin = ZERO
            for until, rows in waits:
                end = _number(until, int)
                both = begin, _plus(end, ONE, -1)
                _hold(_is_least(both[1], begin), "rounds have no order")
                is_first = place == 0 and begin == ZERO
                _hold(not is_first or end == ONE, "the first round has the piece before it")
                there = [free if is_first else before[place]]
                for (kind, stage, of), row in zip(ops, rows, strict=True):
                    needs = sorted(self._needs(kind, stage, of))
                    for (thing, other, wanted), (maker, k) in zip(needs, row, strict=True):
                        over = _over(self.made[thing, other], maker, _number(k, int), wanted, both)
                        there.append(_plus(over, self.ways.get((thing, stage, other), ZERO)))
                late = [[_at(_plus(start, of, -1), k) for k in both] for of in there]
                _hold(all(_is_least(x, ZERO) for of in late for x in of), "a start is too early")
                _hold([ZERO, ZERO] in late, "a start is too late")
                begin = end
            _hold(begin == _plus(last, ONE), "rounds are left out")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        check(json.load(file))
    print("the certificate is right of its orders: `schedc check` reads the program")
