"""The calls of a rank turned into actions all at once, against the same calls taken one by one."""

from collections import Counter, OrderedDict

import pytest
from attrs import define, field

from schedlang import CompileError, Source
from schedlang.language.declarations import declare
from schedlang.language.expand import expand
from schedlang.language.loading import load
from schedlang.language.record import record
from schedlang.language.sites import Sites
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from tests.support.short_programs import short_programs

Row = tuple[int, int, int]


@define
class OneByOne:
    """What the documents say that calls mean, one after the other; KeyError for a wrong one."""

    layout: Layout
    sites: Sites
    held: list[int]
    rows: list[Row] = field(factory=list)
    done: dict[tuple[str, int], set[int]] = field(factory=dict)
    owed: "OrderedDict[tuple[int, int], None]" = field(factory=OrderedDict)

    def take(self, place: int, stage: int | None, microbatch: int | None) -> None:
        """One call."""
        site = self.sites.ops[place]
        if site.word == "W" and microbatch is None:
            # A bare `W` is of any stage of the rank, the oldest that is owed.
            named = self.held if site.is_bare else [self.stage(stage)]
            op = next((op for op in self.owed if op[0] in named), None)
            if op is None:
                raise KeyError("nothing-next")
            self.add(place, *op)
            return
        self.add(place, self.stage(stage), microbatch)

    def stage(self, stage: int | None) -> int:
        """The stage that is meant."""
        if stage is None:
            if len(self.held) != 1:
                raise KeyError("which-stage")
            return self.held[0]
        if not 0 <= stage < len(self.layout.placement):
            raise KeyError("no-such-stage")
        if stage not in self.held:
            raise KeyError("not-on-this-rank")
        return stage

    def add(self, place: int, stage: int, microbatch: int | None) -> None:
        """One op of a stage."""
        site = self.sites.ops[place]
        word = "B" if site.word in ("B", "BW") else site.word
        units = self.layout.units(stage)
        done = self.done.setdefault((word, stage), set())
        if site.word == "U":
            self.rows.append((place, stage, -1))
            return
        if microbatch is None:
            # `next` is the first number that is not done, which may lie before others that are.
            microbatch = next(
                number for number in range(len(done) + 1) if number not in done
            )
            if microbatch >= units:
                raise KeyError("nothing-next")
        if not 0 <= microbatch < units:
            raise KeyError("no-such-microbatch")
        if site.batch and site.word in ("offload", "reload"):
            raise KeyError("overlap")
        done.add(microbatch)
        kind = self.sites.kinds[place]
        if kind == Kind.I:
            self.owed.setdefault((stage, microbatch))
        elif kind == Kind.W:
            self.owed.pop((stage, microbatch), None)
        self.rows.append((place, stage, microbatch))


@pytest.mark.slow
def test_at_once_as_one_by_one() -> None:
    verdicts: Counter[str] = Counter()
    for source in short_programs():
        declared = declare(load(source)[1], {})
        layout = declared.layout()
        for rank in range(2):
            calls: list[int | None] = []
            declared.begin(rank, layout)
            declared.names["program"](rank, calls.extend, *declared.stages_of_rank())
            one_by_one = OneByOne(layout, declared.sites, layout.stages_of(rank))
            wrong = ""
            for index in range(0, len(calls), 3):
                try:
                    one_by_one.take(*calls[index : index + 3])  # type: ignore[arg-type]
                except KeyError as error:
                    wrong = error.args[0]
                    break
            order = record(rank, layout, declared.sites, calls)
            assert (order.fault.code if order.fault else "") == wrong, source.text
            actions = order.actions()
            rows = zip(actions.source, actions.stage, actions.microbatch, strict=True)
            assert list(rows) == one_by_one.rows, source.text
            assert list(actions.kind) == [
                declared.sites.kinds[each] for each in actions.source
            ]
            verdicts[wrong] += 1
    # Right ones, and six codes of mistakes.
    assert len(verdicts) == 7, verdicts
    assert min(verdicts.values()) > 5, verdicts


def order(body: str, head: str = "") -> str:
    """The ops of a rank in torch's spelling, batches included."""
    text = f"schedule s {{ param ranks = 1 param microbatches = 2 {head} rank r {{ {body} }} }}"
    return expand(*load(Source("s.sched", text)), {}).ranks[0].text()


def test_what_is_owed_in_the_order_of_its_stage_or_of_all() -> None:
    two = "stage s in 0 .. 2 on 0"
    ops = "F(0, next) F(1, next) I(1, next) I(0, next) F(0, next) F(1, next) {} I(1, next) I(0, next) {} {} {}"
    bare = ops.format("W", "W", "W", "W")
    assert order(bare, two) == "0F0 1F0 1I0 0I0 0F1 1F1 1W0 1I1 0I1 0W0 1W1 0W1"
    named = ops.format("W(0, next)", "W(0, next)", "W(1, next)", "W(1, next)")
    assert order(named, two) == "0F0 1F0 1I0 0I0 0F1 1F1 0W0 1I1 0I1 0W1 1W0 1W1"


def test_every_round_of_a_loop_has_batches_of_its_own() -> None:
    together = "(0F0;0B0)OVERLAP_F_B (0F1;0B1)OVERLAP_F_B"
    assert order("repeat 2 { overlap { F(next) B(next) } }") == together
    updates = "(0U;1U)OVERLAP_F_B (0U;1U)OVERLAP_F_B"
    assert order("repeat 2 { overlap { U } }", "stage s in 0 .. 2 on 0") == updates


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("for m in 0 .. 2 { F(m + m / (1 - m)) } F(9)", "division-by-zero"),
        ("F(9) for m in 0 .. 2 { F(m + m / (1 - m)) }", "no-such-microbatch"),
        ("repeat 3 { F(next) } F(next) W", "nothing-next"),
        ("for m in 0 .. 1 { W(next) } F(9)", "nothing-next"),
        (
            "warmup { F(2147483648) } steady { for m in 0 .. 2 { F(m + 1) B(m) } U }",
            "too-large",
        ),
    ],
)
def test_the_first_mistake_of_a_rank_is_told(body: str, code: str) -> None:
    with pytest.raises(CompileError) as caught:
        order(body)
    assert [each.code for each in caught.value.diagnostics] == [code]


def test_a_mistake_is_told_with_the_values_in_scope_there() -> None:
    with pytest.raises(CompileError) as caught:
        order(
            "let a = 1 for m in 0 .. 2 { let b = m + a F(b) } for k in 0 .. 9 { F(k) }"
        )
    assert caught.value.diagnostics[0].notes == (
        "here with r = 0, a = 1, m = 1, b = 2",
    )
