"""What in a program leaves ops out: warnings beside a verdict."""

import pytest

from schedlang import Plan, Source, compile
from schedlang.compiler import check_program

HEAD = "schedule s { param ranks = 2 param microbatches = 4 "


def warned(order: str, **params: int) -> list[str]:
    plan = compile(Source("s.sched", f"{HEAD} {order} }}"), params)
    return [each.code for each in plan.warnings]


@pytest.mark.parametrize(
    ("backwards", "codes"),
    [
        ("for m in 0 .. microbatches { B(m) }", []),
        ("for m in microbatches .. 0 { B(m) }", ["empty-range", "forward-only"]),
        ("for m in 0 .. microbatches { if m > 9 { B(m) } }", ["forward-only"]),
        ("repeat 0 { B(next) }", ["forward-only"]),
        ("for m in 0 .. 0 { B(m) }", ["forward-only"]),
        ("", []),
        (
            "for m in 3 .. r { B(m) }  for m in 0 .. microbatches { B(m) }",
            ["empty-range"],
        ),
        # On rank 1 it counts.
        ("for m in 1 .. r { B(m) }  for m in 0 .. microbatches { B(m) }", []),
    ],
)
def test_ops_that_never_run(backwards: str, codes: list[str]) -> None:
    assert (
        warned(f"rank r {{ for m in 0 .. microbatches {{ F(m) }} {backwards} }}")
        == codes
    )


def test_a_block_without_backwards() -> None:
    block = "block m every 3 {{ stage s in 0 .. ranks {{ F(s, m) at s }} {} }}"
    assert warned(block.format("")) == []
    backwards = "stage s in ranks .. 0 { B(s, m) at 9 }"
    assert warned(block.format(backwards)) == ["empty-range", "forward-only"]


def test_a_range_is_named_with_its_bounds_and_the_verdicts_have_it() -> None:
    order = "rank r { for m in 0 .. microbatches { F(m) } for m in microbatches - 1 .. 0 { B(m) } }"
    source = Source("s.sched", f"{HEAD} {order} }}")
    verdicts = check_program(source, {"microbatches": 7}, ["portable", "gloo"])
    for diagnostics in verdicts.values():
        assert [each.severity for each in diagnostics] == ["warning", "warning"]
        assert (
            diagnostics[0].message
            == "the range `6 .. 0` is empty, here and wherever it is met"
        )


def test_an_inference_that_is_asked_for_has_no_warning() -> None:
    order = "rank r { for m in 0 .. microbatches { F(m) B(m) } }"
    plan: Plan = compile(Source("s.sched", f"{HEAD} {order} }}"), forward_only=True)
    assert plan.is_forward_only
    assert plan.warnings == ()
