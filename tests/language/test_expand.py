"""What a program means: expressions, scopes, `next`, the owed `W`, placements."""

import pickle

import pytest

from schedlang import CompileError, Source, compile
from schedlang.language.claims import check_claims
from schedlang.language.expand import expand
from schedlang.language.loading import load
from schedlang.proof.claim_figures import Figures
from schedlang.proof.prove import prove
from schedlang.schedule.schedule import Schedule


def schedule(body: str, head: str = "", **params: int) -> Schedule:
    text = f"schedule s {{ param ranks = 1  param microbatches = 4  {head}  rank r {{ {body} }} }}"
    source = Source("s.sched", text)
    return expand(*load(source), params)


def order(body: str, head: str = "", **params: int) -> str:
    return schedule(body, head, **params).ranks[0].text()


def value(expression: str, head: str = "") -> int:
    """The value of an expression, read off the microbatch of an op."""
    return schedule(f"F({expression})", head, microbatches=1000).ranks[0].microbatch[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 3 - 2", 5),
        ("7 / 2", 3),
        ("0 - 7 / 2 + 10", 7),
        # Rounded down, so to -4, and the remainder is never below 0.
        ("-7 / 2 + 10", 6),
        ("-7 % 4", 1),
        ("100 / 10 / 5", 2),
        ("2 * 7 % 4", 2),
        ("- -3", 3),
        ("min(5, 3, 4) + max(1, 2) + abs(-4)", 9),
        ("max(7)", 7),
        ("if 1 < 2 then 5 else 6", 5),
        ("if 0 then 5 else if 0 then 6 else 7", 7),
        ("1 + (if 2 <= 1 then 1 else 2)", 3),
        ("(1 == 1) + (1 != 1) + (2 > 1) + (2 >= 3)", 2),
        ("(3 and 5) + (0 or 7) + (not 4)", 2),
        ("(not 1 == 2) + (1 < 2 and 3 < 4 or 0)", 2),
        ("3 * ranks + microbatches / 500", 5),
        ("twice(twice(3)) + k", 19),
    ],
)
def test_expressions(expression: str, expected: int) -> None:
    assert value(expression, "let k = 7  fn twice(x) = x * 2") == expected


def test_functions_see_what_is_declared_above_them() -> None:
    assert (
        order("let k = 2  fn plus(i) = i + k  for m in 0 .. 2 { F(plus(m)) }")
        == "0F2 0F3"
    )


def test_functions_are_of_the_values_that_they_are_given() -> None:
    """Whether they are written out where they are called or not, also where names are the same."""
    head = "let k = 1  fn less(a, b) = a - b  fn back(a, b) = less(b, a)  fn both(a, b) = a and b"
    body = "let a = 2  let b = 7  F(back(a, b)) F(less(b + k, a)) F(both(a, b) + both(b, a))"
    assert order(body, head, microbatches=8) == "0F5 0F6 0F2"
    local = "for m in 0 .. 2 { let n = m + k  fn more(i) = i + n  F(more(m)) }"
    assert order(local, head) == "0F1 0F3"


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("first(a, b) = a", "first(1, 1 / k)"),
        ("unless(a) = if k then a else 0", "unless(1 / k)"),
        ("both(a) = k and a", "both(1 / k)"),
        ("either(a) = not k or a", "either(1 / k)"),
    ],
)
def test_arguments_are_worked_out_also_where_nothing_needs_them(
    function: str, call: str
) -> None:
    with pytest.raises(CompileError, match="division by zero"):
        value(call, f"let k = 0  fn {function}")


@pytest.mark.parametrize("parameters", ["x", "x, y"])
def test_functions_that_call_others_twice_take_no_time_of_their_product(
    parameters: str,
) -> None:
    calls = " ".join(
        f"fn f{each + 1}({parameters}) = (f{each}({parameters}) + f{each}({parameters})) % 1000"
        for each in range(60)
    )
    arguments = ", ".join("1" * len(parameters.split(",")))
    assert value(f"f60({arguments})", f"fn f0({parameters}) = x {calls}") == 976


def test_loops_and_branches() -> None:
    assert (
        order(
            "for m in 0 .. 3 { if m == 0 { F(0) } else if m == 1 { B(0) } else { F(1) } }"
        )
        == "0F0 0B0 0F1"
    )
    assert order("for m in 3 .. 1 { F(m) } repeat 0 { F(9) } F(0)") == "0F0"
    assert (
        order("for m in 0 .. 2 { let k = 1 - m  F(k) } for m in 0 .. 1 { B(m) }")
        == "0F1 0F0 0B0"
    )


def test_else_if_chains_may_be_long() -> None:
    chain = (
        " else ".join(f"if r == {each} {{ F({each % 4}) }}" for each in range(1, 400))
        + " else { F(3) }"
    )
    assert order(chain) == "0F3"


def test_next_is_the_first_microbatch_not_done() -> None:
    assert (
        order("F(1) repeat 3 { F(next) } B(next) BW(next)") == "0F1 0F0 0F2 0F3 0B0 0B1"
    )


def test_bare_w_is_the_oldest_owed() -> None:
    two = "stage s in 0 .. 2 on 0"
    # Owed when each `W` comes: first stage 1's, which then is the oldest; `W(0, next)` is stage 0's
    # oldest; what is left is its second.
    body = "F(0, next) F(1, next) B(1, 0) B(0, 0) F(0, next) B(0, 1) W W(0, next) W"
    assert order(body, two) == "0F0 1F0 1I0 0I0 0F1 0I1 1W0 0W0 0W1"


def test_b_is_a_half_only_where_the_schedule_writes_w() -> None:
    assert order("F(0) B(0) F(1) BW(1)") == "0F0 0B0 0F1 0B1"
    assert order("F(0) B(0) W F(1) BW(1)") == "0F0 0I0 0W0 0F1 0B1"
    assert order("F(0) B(0) if r > 0 { W }") == "0F0 0I0"


def test_i_is_the_half_and_b_the_whole_backward_where_a_program_writes_i() -> None:
    assert order("F(0) I(0) W F(1) B(1) F(2) BW(2)") == "0F0 0I0 0W0 0F1 0B1 0F2 0B2"
    assert order("let I = 1 F(I) I(I) W") == "0F1 0I1 0W1"
    assert order("repeat 2 { F(next) } I(next) B(next) W") == "0F0 0F1 0I0 0B1 0W0"


def test_costs_of_halves_and_of_whole_backwards() -> None:
    head = "cost I = 3 cost B = 5 cost W = 1 memory I = -1"
    costs = schedule("F(0) I(0) W F(1) B(1)", head).costs
    assert (costs.input_times, costs.backward_times, costs.weight_times) == (
        (3.0,),
        (5.0,),
        (1.0,),
    )
    assert costs.input_memory == (-1.0,)


def test_stage_is_a_chunk_of_the_rank() -> None:
    v_shape = "stage s in 0 .. 4 on if s < 2 then s else 3 - s"
    found = schedule("for c in 0 .. 2 { F(stage(c), next) }", v_shape, ranks=2)
    assert [actions.text() for actions in found.ranks] == ["0F0 3F0", "1F0 2F0"]
    assert (
        order("fn far(c) = stage(1 - c) F(far(1), 0)", "stage s in 0 .. 2 on 0")
        == "0F0"
    )
    for number in ("2", "-1"):
        with pytest.raises(
            CompileError, match=rf"`stage\({number}\)` on rank 0, which holds 2"
        ):
            schedule(f"F(stage({number}), 0)", v_shape, ranks=2)
    with pytest.raises(CompileError, match="stands only within `rank`"):
        schedule("F(f(0), 0)", f"{v_shape} fn f(c) = stage(c)", ranks=2)


@pytest.mark.parametrize("line", ["stage s in 0 .. 2 on s", "link(r) = 0"])
def test_a_line_needs_the_parameters_above_it(line: str) -> None:
    source = Source(
        "s.sched",
        f"schedule s {{ {line} param ranks = 2 param microbatches = 4 rank r {{ }} }}",
    )
    with pytest.raises(CompileError, match="stands below this line"):
        compile(source)


@pytest.mark.parametrize(
    ("ops", "interval", "message"),
    [
        ("F(s, 10^18 * 10^18) at 0", 3, ""),
        ("F(s, -(10^18 * 10^18)) at 0", 3, "`F` of microbatch -1" + 36 * "0"),
        ("F(10^18 * 10^18, m) at 0", 3, "`F` of stage 1" + 36 * "0"),
        ("F(s, m) at 10^18 * 10^18", 3, "a slot beyond 10^18"),
        ("F(s, m) at 0", "10^18 * 10^18", "a slot beyond 10^18"),
        # What comes first is said, not what a later repeat ends with.
        ("F(s, m) at -m  B(s, m / (2 - m)) at 9", 3, "`F` at slot -1"),
        ("F(s, m) at 0  B(s, m / (1 - m)) at 9", 3, "division by zero"),
    ],
)
def test_a_block_of_large_numbers_or_wrong_ones(
    ops: str, interval: int | str, message: str
) -> None:
    text = (
        "schedule s { param ranks = 1 param microbatches = 4 "
        f"block m every {interval} {{ stage s in 0 .. 1 {{ {ops} }} }} }}"
    ).replace("10^18", "1000000000000000000")
    source = Source("s.sched", text)
    if message:
        with pytest.raises(CompileError) as error:
            expand(*load(source), {})
        assert message in str(error.value)
    else:
        # As microbatches behind the last one are, it is left out.
        assert not expand(*load(source), {}).ranks[0].text()


def test_an_op_of_a_block_names_its_microbatch() -> None:
    block = "block m every 9 { stage s in 0 .. 1 { F(s, next) at 0 } }"
    source = Source(
        "s.sched", f"schedule s {{ param ranks = 1 param microbatches = 4 {block} }}"
    )
    with pytest.raises(CompileError) as caught:
        compile(source)
    assert [each.code for each in caught.value.diagnostics] == ["next"]


def test_u_steps_one_stage_or_all() -> None:
    assert order("U(1) U", "stage s in 0 .. 2 on 0") == "1U 0U 1U"


def test_batches_and_their_order() -> None:
    text = "overlap { send F(0) recv B(1) } recv F(0) overlap { send B(0) }"
    assert (
        order(text, "stage s in 0 .. 1 on 0") == "(0SEND_F0;0RECV_B1) 0RECV_F0 0SEND_B0"
    )


def test_placement() -> None:
    v_shape = "stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s"
    assert schedule("", v_shape, ranks=3).placement == (0, 1, 2, 2, 1, 0)
    assert schedule("", ranks=3).placement == (0, 1, 2)


def test_pipelines_with_numbers() -> None:
    """Stages are numbered through them; past the last stage or pipeline there is none."""
    head = "param n = 3  pipeline p(i) in 0 .. n runs microbatches / n stage s in 0 .. 2 on (i + s) % 2"
    found = schedule(
        "for i in 0 .. n { F(p(i, (r + i) % 2), 0) }", head, ranks=2, microbatches=3
    )
    assert [
        (each.name, each.start, each.stop, each.microbatches)
        for each in found.layout.pipelines
    ] == [("p(0)", 0, 2, 1), ("p(1)", 2, 4, 1), ("p(2)", 4, 6, 1)]
    assert found.placement == (0, 1, 1, 0, 0, 1)
    assert [actions.text() for actions in found.ranks] == ["0F0 3F0 4F0", "1F0 2F0 5F0"]
    assert found.layout.replicas(3) == [1, 3, 5]
    for wrong in ("p(3, 0)", "p(-1, 0)", "p(0, 2)"):
        with pytest.raises(
            CompileError, match="of a stage that there is not: there are `p"
        ):
            schedule(f"F({wrong}, 0)", head, ranks=2, microbatches=3)


def test_parameters_may_depend_on_parameters() -> None:
    assert schedule("", "param group = 2 * ranks", ranks=3).params == {
        "ranks": 3,
        "microbatches": 4,
        "group": 6,
    }
    assert schedule("", "param group = 2 * ranks", group=1).params["group"] == 1


def test_python_words_are_ordinary_names() -> None:
    assert (
        order(
            "let lambda = 1  let op = 2  for print in 0 .. 1 { F(lambda + op + print) }"
        )
        == "0F3"
    )


@pytest.mark.parametrize(
    "text",
    [
        "let x = " + "(" * 3000 + "1" + ")" * 3000,
        "let x = " + "1 + " * 30_000 + "1",
        "let x = " + "- " * 5000 + "1",
        "if r { " * 150 + "}" * 150,
        "".join(f"for a{each} in 0 .. 1 {{ " for each in range(40)) + "}" * 40,
        "fn f0(x) = x "
        + " ".join(f"fn f{each + 1}(x) = f{each}(x)" for each in range(5000))
        + " F(f5000(0))",
    ],
)
def test_depth_is_answered_not_crashed_on(text: str) -> None:
    # Programs of people are never so deep: to refuse them is as good as to run them, and no
    # traceback is.
    assert refusal(text) in ([], ["nesting"])


def refusal(text: str) -> list[str]:
    """The codes with which a program is refused, or none."""
    try:
        schedule(text)
    except CompileError as error:
        return [each.code for each in error.diagnostics]
    return []


def test_numbers_do_not_grow_without_bound() -> None:
    squares = "let a0 = 99 " + " ".join(
        f"let a{each + 1} = a{each} * a{each}" for each in range(64)
    )
    with pytest.raises(CompileError, match="too-large"):
        schedule(squares)
    with pytest.raises(CompileError, match="too-large"):
        schedule("F(1" + "0" * 30 + ")")


@pytest.mark.slow
def test_the_limit_of_ops_counts_before_it_runs() -> None:
    for body in (
        "for a in 0 .. 1000000000000 { }",
        "for a in 0 .. 10000 { for b in 0 .. 10000 { F(0) } }",
        "repeat 2000000 { F(0) F(1) F(2) F(3) F(0) F(1) F(2) F(3) F(0) F(1) }",
    ):
        with pytest.raises(CompileError, match="too-many-ops"):
            schedule(body)
    with pytest.raises(CompileError, match="too-many-ops"):
        schedule("", "stage s in 0 .. 1000000000 on 0")
    with pytest.raises(CompileError, match="too-many-ops"):
        schedule("", ranks=1_000_000_000)


def test_compile_is_the_whole_line() -> None:
    text = "schedule s { param ranks = 2 param microbatches = 1 rank r { F(0) B(0) } }"
    plan = compile(Source("s.sched", text))
    assert [actions.text() for actions in plan.ranks] == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0",
    ]


@pytest.mark.parametrize(
    ("rank", "message"),
    [("bubble", r"`peak\(3\)`, there are ranks 0 to 1"), ("makespan / 9", None)],
)
def test_the_rank_of_a_figure_may_be_a_figure(rank: str, message: str | None) -> None:
    ops = "F(0) F(1) B(0) B(1)"
    text = f"schedule s {{ param ranks = 2 param microbatches = 2 rank r {{ {ops} }} assert peak({rank}) > 0 }}"
    if message is None:
        compile(Source("s.sched", text))
        return
    with pytest.raises(CompileError, match=message):
        compile(Source("s.sched", text))


def test_a_schedule_is_data_with_its_claims() -> None:
    """It goes through a file, functions that its claims call included."""
    head = "param n = 2 fn twice(x) = n * x pipeline p runs microbatches stage s in 0 .. 1 on s"
    body = "for m in 0 .. 4 { F(m) B(m) } assert twice(peak(r)) > p(0) + r"
    found = schedule(body, head)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.claims == found.claims
    check_claims(again, Figures(prove(again)))
    with pytest.raises(
        CompileError, match=r"`twice\(peak\(r\)\) > 2` is 2 > 2, on rank 0"
    ):
        compile(
            Source(
                "s.sched",
                f"schedule s {{ param ranks = 1 param microbatches = 4 {head} rank r {{ {body.replace('p(0) + r', '2')} }} }}",
            )
        )


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("rank r { F(0) BW(0) F(1) B(1) W }", "rank r { F(0) B(0) F(1) I(1) W }"),
        (
            "rank r { repeat 2 { F(next) } repeat 2 { B(next) } } fill W cost B = 2",
            "rank r { repeat 2 { F(next) } repeat 2 { I(next) } } fill W cost I = 2",
        ),
    ],
)
def test_without_an_i_the_b_beside_a_w_is_the_half(short: str, long: str) -> None:
    def ranks(body: str) -> list[str]:
        head = "param ranks = 1 param microbatches = 2"
        plan = compile(Source("s.sched", f"schedule s {{ {head} {body} }}"))
        return [actions.text() for actions in plan.ranks]

    assert ranks(short) == ranks(long)
