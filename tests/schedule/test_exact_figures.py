"""Figures of time and memory at decimal costs are exact: held against a longest path in fractions."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import schedlang
from schedlang import CompileError, Kind, Plan, compile, simulate
from schedlang.schedule.actions import is_transfer
from tests.support.own_needs import needs
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.sizes import examples

RANKS = 3
MICROBATCHES = 5
#: Programs without costs of their own, and the kinds of ops that they have, as programs call them.
KINDS = {
    "gpipe": "FB",
    "1f1b": "FB",
    "1f1b_recompute": "FBR",
    "zb_h1": "FIW",
    "v_half": "FIW",
}
Op = tuple[int, int, int]


@frozen
class Sloped:
    """A cost that depends on two numbers, such as a stage and a microbatch: in thousandths, what it
    is, and how much more for each.
    """

    parts: tuple[int, int, int]

    def text(self, one: str, other: str) -> str:
        """The expression in a program."""
        base, *slopes = (f"{part / 1000:.3f}" for part in self.parts)
        return f"{base} + {slopes[0]} * {one} + {slopes[1]} * {other}"

    def at(self, one: int, other: int) -> Fraction:
        base, by_one, by_other = self.parts
        return Fraction(base + by_one * one + by_other * other, 1000)


thousandths = st.integers(0, 1999)
sloped = st.builds(Sloped, st.tuples(st.integers(1, 29999), thousandths, thousandths))


@frozen
class Costs:
    """What ops and transfers of a program take, and what forwards hold."""

    program: str
    times: dict[str, Sloped]
    send: Sloped
    held: Sloped

    def text(self, claim: str) -> str:
        """The program with these costs, and a claim in place of its own."""
        lines = (PROGRAMS / f"{self.program}.sched").read_text().splitlines()
        lines = [line for line in lines if not line.lstrip().startswith("assert")]
        end = len(lines) - lines[::-1].index("}") - 1
        items = [
            f"cost {kind}(s, m) = {of.text('s', 'm')}"
            for kind, of in self.times.items()
        ]
        items.append(f"cost send(r, q) = {self.send.text('r', 'q')}")
        items.append(f"memory F(s, m) = {self.held.text('s', 'm')}")
        return "\n".join([*lines[:end], *items, f"assert {claim}", "}"])

    def compiled(self, claim: str) -> Plan:
        return compile(self.text(claim), {"ranks": RANKS, "microbatches": MICROBATCHES})

    def holds(self, claim: str) -> bool:
        """Whether the program compiles with a claim; if not, it is the claim that fails."""
        try:
            self.compiled(claim)
        except CompileError as error:
            codes = [diagnostic.code for diagnostic in error.diagnostics]
        else:
            return True
        assert codes == ["assert"]
        return False


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    program = draw(st.sampled_from(sorted(KINDS)))
    times = {kind: draw(sloped) for kind in KINDS[program]}
    return Costs(program, times, draw(sloped), draw(sloped))


@frozen
class Figures:
    """The exact figures of a plan."""

    starts: dict[Op, Fraction]
    ends: dict[Op, Fraction]
    ranks: Sequence[Sequence[Op]]
    peaks: Sequence[Fraction]

    @property
    def makespan(self) -> Fraction:
        return max(self.ends.values()) - min(self.starts.values())

    @property
    def work(self) -> Fraction:
        return max(
            sum(self.ends[op] - self.starts[op] for op in ops) for ops in self.ranks
        )

    @property
    def span(self) -> Fraction:
        return max(self.ends[ops[-1]] - self.starts[ops[0]] for ops in self.ranks)


def figures_of(plan: Plan, costs: Costs) -> Figures:
    """The longest path through the ops of a plan, each behind the one before it on its rank, and
    behind what it needs and the way from there.
    """
    ranks = [
        [
            (kind, stage, microbatch)
            for kind, stage, microbatch in zip(
                actions.kind, actions.stage, actions.microbatch, strict=True
            )
            if not is_transfer(kind)
        ]
        for actions in plan.ranks
    ]
    place = plan.layout.placement
    starts: dict[Op, Fraction] = {}
    ends: dict[Op, Fraction] = {}
    waiting = [list(ops) for ops in ranks]
    while any(waiting):
        for rank, ops in enumerate(waiting):
            done = len(ranks[rank]) - len(ops)
            while ops:
                free = ends[ranks[rank][done - 1]] if done else Fraction(0)
                op = ops[0]
                kind, stage, microbatch = op
                # A gradient of an input is made by a whole backward, or by an input half.
                wanted = [
                    (Kind.I if made == Kind.B and "I" in costs.times else made, *rest)
                    for made, *rest in needs(plan, *op)
                ]
                if not all(need in ends for need in wanted):
                    break
                arrivals = [
                    ends[need]
                    + (
                        0
                        if place[need[1]] == rank
                        else costs.send.at(place[need[1]], rank)
                    )
                    for need in wanted
                ]
                starts[op] = max([free, *arrivals])
                ends[op] = starts[op] + costs.times[Kind(kind).name].at(
                    stage, microbatch
                )
                ops.pop(0)
                done += 1
    return Figures(starts, ends, ranks, [_peak(plan, ops, costs) for ops in ranks])


def _peak(plan: Plan, ops: Sequence[Op], costs: Costs) -> Fraction:
    """The most that a rank holds: from the forward, or its recomputation, to the last use."""
    held = most = Fraction(0)
    last = Kind.W if "W" in costs.times else Kind.B
    for kind, stage, microbatch in ops:
        amount = costs.held.at(stage, microbatch)
        if kind in (Kind.F, Kind.R):
            most = max(most, held + amount)
            if kind == Kind.R or (stage, microbatch) not in plan.recomputed:
                held += amount
        elif kind == last:
            held -= amount
    return most


def decimal(value: Fraction) -> str:
    """A number of thousandths as a program has it."""
    thousandths = value * 1000
    assert thousandths.denominator == 1
    return f"{thousandths.numerator // 1000}.{thousandths.numerator % 1000:03d}"


@given(costs())
@examples(2000, usual=24, deadline=None)
@pytest.mark.slow
def test_claims_are_judged_exactly(costs: Costs) -> None:
    """What equals a figure is neither more nor less than it, not by the last digit."""
    plan = costs.compiled("makespan > 0")
    figures = figures_of(plan, costs)
    execution = simulate(plan, ideal=True)
    assert execution.timeline.makespan == float(figures.makespan)
    assert execution.timeline.span == float(figures.span)
    assert max(execution.timeline.busy) == float(figures.work)
    assert execution.peak_memory == tuple(map(float, figures.peaks))
    makespan = decimal(figures.makespan)
    equal = [
        f"makespan == {makespan} and makespan <= {makespan} and makespan >= {makespan}",
        f"work == {decimal(figures.work)} and span == {decimal(figures.span)}",
        f"bubble == {decimal(figures.makespan - figures.work)}",
        f"span_bubble == {decimal(figures.span - figures.work)}",
        *(
            f"peak({rank}) == {decimal(peak)}"
            for rank, peak in enumerate(figures.peaks)
        ),
    ]
    assert costs.holds(" and ".join(equal))
    unequal = [
        f"makespan > {makespan} or makespan < {makespan}",
        f"makespan + 0.000000000000000001 <= {makespan}",
    ]
    assert not costs.holds(" or ".join(unequal))


#: Whole numbers; where there is no use for one, it is not asked for.
WHOLE = {
    "forward_times": 103,
    "backward_times": 209,
    "input_times": 117,
    "weight_times": 91,
    "recompute_times": 97,
    "update_times": 7,
    "offload_times": 33,
    "reload_times": 41,
    "exchange_times": 19,
    "overlap_times": 251,
    "sum_times": 13,
    "gather_times": 17,
    "p2p_time": 11,
    "forward_memory": 301,
    "input_memory": -102,
    "weight_memory": -199,
    "backward_memory": -301,
}


def at(costs: dict[str, float]) -> schedlang.Costs:
    return schedlang.Costs(
        **{
            name: number if name == "p2p_time" else (number,)
            for name, number in costs.items()
        }
    )


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_in_thousandths_all_is_a_thousandth(path: Path) -> None:
    """Each bar, to the bit: what ends at one time in whole numbers does so in decimals, too."""
    plan = compile(path)
    decimals = at({name: number / 1000 for name, number in WHOLE.items()})
    for is_ideal in (True, False):
        whole = simulate(plan, at(WHOLE), is_ideal)
        parts = simulate(plan, decimals, is_ideal)
        assert parts.timeline.makespan == whole.timeline.makespan / 1000
        assert parts.timeline.busy == [busy / 1000 for busy in whole.timeline.busy]
        assert parts.peak_memory == tuple(peak / 1000 for peak in whole.peak_memory)
        for of_parts, of_whole in zip(
            (*parts.timeline.ranks, *parts.timeline.copies),
            (*whole.timeline.ranks, *whole.timeline.copies),
            strict=True,
        ):
            assert list(of_parts.end) == [end / 1000 for end in of_whole.end]
