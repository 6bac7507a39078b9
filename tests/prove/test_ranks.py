"""Programs proved for any number of ranks and microbatches, held against the compiler at many sizes."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import islpy as isl
import pytest
from attrs import evolve

from schedlang.compiler import NO_PARAMS, compile_tree, ops_of
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.extras.prove.certificates import what_it_proves
from schedlang.extras.prove.check_orders import Wrong
from schedlang.extras.prove.check_sets import NEEDS, faults_of
from schedlang.extras.prove.sets.closed_forms import forms_of
from schedlang.extras.prove.sets.numbers import Number, Unreadable, digits
from schedlang.extras.prove.sets.outcome import Outcome, contains, prove
from schedlang.extras.prove.sets.proofs import prove_for_all_ranks
from schedlang.extras.prove.sets.sets_certificate import certificate_of
from schedlang.extras.prove.sets.statements import UPDATES, with_digits
from schedlang.extras.prove.sets.wording import condition_text
from schedlang.files.sources import source_of
from schedlang.language import syntax
from schedlang.language.expand import check_text
from schedlang.language.loading import load
from schedlang.proof.execution import Execution
from schedlang.proof.memory import peaks
from schedlang.proof.prove import ideal_execution
from schedlang.schedule.kinds import Kind
from schedlang.schedule.needs import RULES
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.stream import unroll
from tests.support.mistakes import damaged
from tests.support.paths import PROGRAMS as GALLERY_FOLDER

pytestmark = pytest.mark.slow


TWO_DIRECTIONS = """
schedule two_directions {
    param ranks = 2
    param microbatches = 4
    pipeline down runs microbatches / 2 stage s in 0 .. ranks on s
    pipeline up   runs microbatches / 2 stage s in 0 .. ranks on ranks - 1 - s
    rank r {
        let s = ranks - 1 - r
        repeat microbatches / 2 { F(down(r), next)  F(up(s), next) }
        repeat microbatches / 2 { B(down(r), next)  B(up(s), next) }
    }
}
"""


def name_of(program: str) -> str:
    return program.split("{")[0].split()[-1]


#: Where each program is proved, and which figures have a closed form.
EVERYWHERE = "ranks >= 1 and microbatches >= 1"
TIMES = {"peak(r)", "makespan", "work", "bubble"}
PROGRAMS = {
    "gpipe": (EVERYWHERE, TIMES),
    "1f1b": (EVERYWHERE, TIMES),
    "eager_1f1b": (EVERYWHERE, TIMES),
    "1f1b_recompute": (EVERYWHERE, TIMES),
    "1f1b_uneven": ("ranks == 4", set()),
    "1f1b_explicit": (EVERYWHERE, TIMES),
    "zb_h1": (EVERYWHERE, TIMES),
    "zb_h2": (EVERYWHERE, TIMES),
    "looped_bfs": (EVERYWHERE, TIMES),
    "gpipe_groups": (EVERYWHERE, TIMES),
    "forward_only": (EVERYWHERE, TIMES),
    "unet_1f1b": (EVERYWHERE, TIMES),
    "terapipe": (f"{EVERYWHERE} and slices >= 1", TIMES),
    "pipedream_2bw": ("ranks <= 1 + microbatches", TIMES),
    "pipedream": ("microbatches == 1", TIMES),
    "pipedream_vertical": ("microbatches == 1", TIMES),
    "wpipe": ("microbatches % ranks == 0", set()),
    "two_encoders": (EVERYWHERE, TIMES),
    "vocabulary_parallel": (EVERYWHERE, set()),
    "gems": ("microbatches % 2 == 0", TIMES),
    TWO_DIRECTIONS: ("microbatches % 2 == 0", TIMES),
    "interleaved_1f1b": ("microbatches % ranks == 0", TIMES),
    "chimera": ("microbatches % ranks == 0 and ranks % 2 == 0", set()),
    "dualpipe": (
        "microbatches % 2 == 0 and ranks % 2 == 0 and 2 * ranks <= microbatches",
        TIMES,
    ),
    "dualpipe_v": ("2 * ranks <= microbatches", TIMES),
    "stp": ("3 * ranks <= 1 + microbatches", TIMES),
}


def loaded(text: str) -> tuple[Source, syntax.Schedule]:
    source, tree = load(source_of(text))
    return source, without_claims(tree)


def without_claims(tree: syntax.Schedule) -> syntax.Schedule:
    def kept(nodes: tuple[syntax.Node, ...]) -> tuple[syntax.Node, ...]:
        return tuple(node for node in nodes if not isinstance(node, syntax.Assert))

    items = [
        evolve(item, body=evolve(item.body, statements=kept(item.body.statements)))
        if isinstance(item, syntax.Rank)
        else item
        for item in kept(tree.items)
    ]
    return evolve(tree, items=tuple(items))


def compiled(
    source: Source,
    tree: syntax.Schedule,
    sizes: dict[str, int],
    transport: str = "portable",
) -> str:
    """What the compiler says at one size: "proved", "wrong" or "refused"."""
    try:
        compile_tree(source, tree, sizes, transport=transport)
    except CompileError as error:
        return (
            "refused"
            if [each.code for each in error.diagnostics] == ["require"]
            else "wrong"
        )
    return "proved"


def verdict(outcome: Outcome, sizes: dict[str, int]) -> str:
    """What the proof for all sizes says at one."""
    says = {
        "refused": not contains(outcome.domain, sizes),
        "proved": contains(outcome.proved, sizes),
        "wrong": contains(outcome.wrong, sizes),
        "unknown": contains(outcome.unknown, sizes),
    }
    (word,) = [word for word, holds in says.items() if holds]
    return word


def sizes_up_to(
    outcome: Outcome, ranks: int, microbatches: int
) -> Iterator[dict[str, int]]:
    values = [range(1, ranks + 1), range(1, microbatches + 1)]
    names = ["ranks", "microbatches"]
    if "slices" in outcome.reading.sizes:
        values.append(range(1, 4))
        names.append("slices")
    for each in itertools.product(*values):
        yield dict(zip(names, each, strict=True))


def disagreements(text: str, ranks: int, microbatches: int) -> list[Any]:
    """The same of a text that has yet to be proved; nothing where it cannot be read. CompileError
    for one that is no program at any size.
    """
    source, tree = loaded(text)
    check_text(source, tree, NO_PARAMS)
    try:
        outcome = prove(tree, {})
    except Unreadable:
        return []
    return disagreements_of(outcome, text, ranks, microbatches)


def disagreements_of(
    outcome: Outcome, text: str, ranks: int, microbatches: int
) -> list[Any]:
    """The sizes at which a proof and the compiler disagree, and what is wrong with the
    certificate.
    """
    source, tree = loaded(text)
    amiss: list[Any] = []
    # A few have stamps that cannot be written: then there is no certificate.
    with suppress(Unreadable):
        amiss += faults_of(certificate_of(outcome)) if outcome.cases else []
    for sizes in sizes_up_to(outcome, ranks, microbatches):
        says = compiled(source, tree, sizes), verdict(outcome, sizes)
        if says[1] not in ("unknown", says[0]):
            amiss.append((sizes, *says))
    return amiss


#: Those whose proofs take ten seconds and more.
SLOW = {"chimera", "dualpipe", "dualpipe_v", "interleaved_1f1b", "stp"}


def cases(programs: Iterable[str]) -> list[Any]:
    """A case for each program; `make large` has the slow ones."""
    return [
        pytest.param(
            program,
            id=name_of(program),
            marks=[pytest.mark.large] * (name_of(program) in SLOW),
        )
        for program in programs
    ]


@pytest.mark.parametrize("program", cases(PROGRAMS))
def test_a_program_is_proved_for_any_number_of_ranks(program: str) -> None:
    outcome, forms = proved(program)
    where, figures = PROGRAMS[program]
    assert condition_text(outcome.proved, outcome.reading.sizes) == where
    assert outcome.unknown.is_empty()
    assert set(forms) == figures
    assert disagreements_of(outcome, program, 4, 6) == []


@cache
def proved(program: str, **given: int) -> tuple[Outcome, dict[str, Number]]:
    """What is proved of a program, some sizes of which may be given, and its closed forms."""
    _, tree = loaded(program)
    outcome = prove(tree, given)
    return outcome, {form.figure: form.value for form in forms_of(outcome, tree)}


def value_at(function: Number, sizes: dict[str, int]) -> int | None:
    """A function of sizes at one; None where it has no value there."""
    low = digit_at(function.low, sizes)
    if low is None or function.high is None:
        return low
    high = digit_at(function.high, sizes)
    assert high is not None
    return high * sizes[function.base] + low


def digit_at(function: isl.PwAff, sizes: dict[str, int]) -> int | None:
    for name, size in with_digits(sizes).items():
        at = function.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            fixed = isl.Set(f"[{name}] -> {{ : {name} = {size} }}")
            function = function.intersect_params(fixed)
    if function.domain().is_empty():
        return None
    value = function.max_val()
    return value.to_python() if value.is_int() else None


def check_forms(
    program: str, ranks: int, microbatches: int, given: Mapping[str, int] = NO_PARAMS
) -> int:
    """The closed forms of a program against the simulation, at all sizes up to some; of those that
    are given at one.
    """
    source, tree = loaded(program)
    outcome, forms = proved(program, **given)
    compared = 0
    for each in sizes_up_to(outcome, ranks, microbatches):
        sizes = {**each, **given}
        if not contains(outcome.proved, sizes):
            continue
        for schedule in simulated(source, tree, sizes):
            at = {**sizes, UPDATES: schedule.layout.updates}
            compared += compared_at(forms, at, schedule)
    return compared


def simulated(
    source: Source, tree: syntax.Schedule, sizes: dict[str, int]
) -> Iterator[Schedule]:
    """What is compared at one size: of a stream its plan, which has some updates, and one alone."""
    yield compile_tree(source, tree, sizes)
    ops = ops_of(source, tree, sizes)
    if ops.stream:
        yield unroll(ops, 1)


def compared_at(
    forms: dict[str, Number], sizes: dict[str, int], schedule: Schedule
) -> int:
    """How many closed forms are compared with the simulation at one size."""
    compared = 0
    execution = ideal_execution(schedule)
    assert isinstance(execution, Execution)
    timeline = execution.timeline
    work = max(timeline.busy)
    figures = {
        "makespan": timeline.makespan,
        "work": work,
        "bubble": timeline.makespan - work,
    }
    for figure, value in figures.items():
        if figure in forms:
            formula = value_at(forms[figure], sizes)
            # A form may be for some of the sizes only; where it is, it is exact.
            if formula is not None:
                assert formula == value, (figure, sizes)
                compared += 1
    amounts = execution.costs.memory(len(schedule.placement))
    of_ranks = peaks(execution.schedule, timeline, amounts)
    for rank, peak in enumerate(of_ranks):
        if "peak(r)" in forms:
            assert value_at(forms["peak(r)"], {**sizes, "_r": rank}) == peak, (
                rank,
                sizes,
            )
            compared += 1
    return compared


@pytest.mark.parametrize(
    "program", cases(name for name in PROGRAMS if PROGRAMS[name][1])
)
def test_closed_forms_are_those_of_the_simulation(program: str) -> None:
    assert check_forms(program, 5, 8)


@pytest.mark.sizes
@pytest.mark.parametrize(
    "program",
    [name for name in PROGRAMS if PROGRAMS[name][1]],
    ids=name_of,
)
def test_closed_forms_are_those_of_the_simulation_at_many_sizes(program: str) -> None:
    assert check_forms(program, 12, 40)


@pytest.mark.parametrize(
    ("program", "size", "figures"),
    [
        ("terapipe", "slices", TIMES),
        ("terapipe", "microbatches", TIMES),
        ("terapipe", "ranks", TIMES),
        ("seq1f1b", "slices", {"peak(r)"}),
        ("pipedream_2bw", "microbatches", TIMES),
        ("pipemare", "microbatches", TIMES),
        ("two_encoders", "ranks", TIMES),
        ("two_encoders", "microbatches", TIMES),
    ],
)
def test_closed_forms_at_a_size_that_is_given(
    program: str, size: str, figures: set[str]
) -> None:
    assert set(proved(program, **{size: 3})[1]) == figures
    assert check_forms(program, 5, 5, {size: 3})


def test_a_warmup_the_wrong_way_round_is_refuted_exactly() -> None:
    text = source_of("1f1b").text.replace("min(ranks - 1 - r,", "min(r,")
    proof = prove_for_all_ranks(text)
    assert proof.certificate is not None
    assert faults_of(dict(proof.certificate)) == []
    portable = proof.verdicts["portable"]
    assert portable.wrong == "microbatches >= 2 and ranks >= 2"
    assert portable.smallest == {"ranks": 2, "microbatches": 2}
    assert [each.code for each in portable.diagnostics] == ["deadlock"]
    assert portable.proved == "microbatches == 1 or (ranks == 1 and microbatches >= 2)"


def test_where_a_first_use_waits_for_ranks_that_never_come() -> None:
    source, tree = loaded("1f1b_explicit")
    outcome = prove(tree, {})
    transport_verdicts = prove_for_all_ranks(
        "1f1b_explicit", {}, ("portable", "gloo", "nccl")
    ).verdicts
    assert transport_verdicts["portable"].holds
    assert transport_verdicts["gloo"].holds
    assert (
        transport_verdicts["nccl"].wrong == "microbatches >= 2 and ranks > microbatches"
    )
    proved_there, wrong, unknown, _ = outcome.on("nccl")
    assert unknown.is_empty()
    for sizes in sizes_up_to(outcome, 5, 6):
        says = compiled(source, tree, sizes, "nccl")
        assert says == ("proved" if contains(proved_there, sizes) else "wrong")
        assert contains(wrong, sizes) == (says == "wrong")


def test_a_number_of_ranks_that_is_given_is_that_of_first_uses() -> None:
    verdict = prove_for_all_ranks("1f1b_explicit", {"ranks": 3}, ("nccl",)).verdicts[
        "nccl"
    ]
    assert verdict.wrong == "microbatches == 2"


def test_transfers_out_of_order_are_refuted_where_ranks_block() -> None:
    text = source_of("1f1b_explicit").text
    text = text.replace(
        "overlap { send F(m)  recv B(m - warmup) }", "send F(m)  recv B(m - warmup)"
    )
    text = text.replace(
        "overlap { send B(m - warmup)  recv F(m + 1) }",
        "send B(m - warmup)  recv F(m + 1)",
    )
    assert disagreements(text, 4, 6) == []
    assert (
        prove_for_all_ranks(text).verdicts["portable"].wrong
        == "microbatches >= 2 and ranks >= 2"
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "interleaved_low_memory",
            "`fill W within (chunks - 1) * group + ranks`: a pass that searches",
        ),
        (
            "seq1f1b",
            "`microbatches * slices`: a product of two numbers that both depend on sizes",
        ),
        ("v_zb", "`fill W`: a pass that searches"),
        ("bitpipe", "`F(f(i), next)`: `next` cannot be counted through these loops"),
        ("frozen_1f1b", "`frozen` cannot be read"),
        ("pipemare", "a microbatch of an update that may be far on"),
    ],
)
def test_what_cannot_be_read_is_not_proved(program: str, reason: str) -> None:
    portable = prove_for_all_ranks(program).verdicts["portable"]
    assert not portable.proved
    assert not portable.wrong
    assert reason in portable.reason


#: Statements and expressions of each kind, with values that only some sizes have.
STATEMENTS = """
schedule statements {
    param ranks = 4
    param microbatches = 8
    let depths = [1, 2, ranks]
    let unused = ranks * microbatches * microbatches
    fn limited(n) = if n < microbatches then n else microbatches
    seq drain(n) {
        repeat n / 2 { B(next)  B(next) }
        for m in 0 .. n % 2 by -1 { B(next) }
    }
    rank r {
        let early = limited(ranks - 1 - r)
        if r == 0 and ranks > 1 {
            let all = depths[2] - 1
            for m in 0 .. min(all, microbatches) { F(m) }
        } else if not (r == ranks - 1) or ranks == 0 {
            for m in 0 .. early { F(m) }
        } else {
            for m in 0 .. depths[0] - 1 { F(m) }
        }
        for m in early .. microbatches { F(m) }
        run drain(microbatches)
        require abs(r - ranks) / max(ranks - r, 1) == 1
    }
}
"""


def test_all_statements_are_read_as_the_compiler_runs_them() -> None:
    verdict = prove_for_all_ranks(Source("statements", STATEMENTS)).verdicts["portable"]
    assert verdict.proved == EVERYWHERE


@pytest.mark.parametrize(
    ("bound", "wrong"),
    [("3.5", ""), ("2.5", "ranks >= 7")],
)
def test_claims_with_decimals_are_held_against_closed_forms(
    bound: str, wrong: str
) -> None:
    claim = f"    assert bubble <= {bound} * ranks for all\n}}"
    text = source_of("1f1b").text.rstrip().removesuffix("}") + claim
    verdict = prove_for_all_ranks(Source("claims", text)).verdicts["portable"]
    assert (verdict.wrong, verdict.unknown) == (wrong, "")


@pytest.mark.parametrize(
    ("rules", "where"),
    [
        ("weights latest", "ranks == 1"),
        (
            "weights stash",
            "(ranks == 1 and microbatches >= 2) or (microbatches == 1 and ranks <= 2)",
        ),
        ("weights unstashed", "ranks <= 1 + microbatches"),
        ("weights delay(2)", "ranks <= 1 + microbatches"),
        ("weights delay(ranks - 2)", "3 <= ranks <= 1 + microbatches"),
        ("weights delay(1) on 0 .. ranks - 1", "ranks <= 1 + microbatches"),
        ("weights delay(1) on 0 .. 2", "2 <= ranks <= 3 and ranks <= 1 + microbatches"),
        (
            "weights delay(1)\n weights stash on 0 .. ranks / 2",
            "ranks == 1 or (ranks == 1 + microbatches and microbatches <= 2)",
        ),
        ("", "ranks == 1"),
    ],
)
@pytest.mark.slow
def test_where_every_op_reads_the_weights_that_its_rule_says(
    rules: str, where: str
) -> None:
    text = source_of("pipedream_2bw").text.replace("weights delay(1)", rules)
    assert disagreements(text, 4, 5) == []
    assert prove_for_all_ranks(text).verdicts["portable"].proved == where


def test_a_recomputation_without_versions_stands_before_the_next_update() -> None:
    text = source_of("pipedream").text.replace("weights stash", "weights unstashed")
    text = text.replace("B(0)", "R(0)  B(0)")
    assert disagreements(text, 4, 2) == []
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert portable.wrong == "microbatches == 1 and ranks >= 2"


def test_a_stream_is_proved_for_any_number_of_updates_or_for_none() -> None:
    ahead = "if r == 3 then 1 else ranks - 1 - r"
    text = source_of("pipedream").text.replace(
        "ahead = ranks - 1 - r", f"ahead = {ahead}"
    )
    assert disagreements(text, 5, 2) == []
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert portable.unknown
    assert "updates" not in portable.proved


@pytest.mark.parametrize(
    ("cost", "where"),
    [
        ("cost F(s) = ranks - 3 + s", "ranks >= 3"),
        ("cost F(s) = if s > 1 then (s - 2) / 2.5 else s - 1", ""),
        ("cost F(s) = if s > 1 then (s - 2) / 2.5 else 0.5", EVERYWHERE),
        ("cost F(s) = ranks - 2.5 + s", "ranks >= 3"),
        ("cost F(s) = 2 * (s + 0.5) - 3 / 2", EVERYWHERE),
        ("cost F(s) = 2 * (s + 0.5) - 3.0 / 2", ""),
        ("memory F(s) = s - 1", EVERYWHERE),
        ("memory B = -1.5 / 2.0", EVERYWHERE),
    ],
)
def test_a_cost_that_is_computed_is_wrong_where_it_is_negative(
    cost: str, where: str
) -> None:
    text = source_of("1f1b").text.replace("rank r {", f"{cost}\n    rank r {{")
    assert disagreements(text, 5, 4) == []
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert portable.proved == where
    assert not portable.unknown


def test_a_part_that_is_there_twice_is_said_as_by_the_compiler() -> None:
    text = source_of("pipedream_2bw").text
    again = text.replace("steady {", "warmup { F(0) }\n        steady {", 1)
    portable = prove_for_all_ranks(again).verdicts["portable"]
    assert "a rank has one `warmup`" in portable.reason


@pytest.mark.parametrize("capacity", ["2", "ranks * microbatches"])
def test_with_a_capacity_nothing_is_proved(capacity: str) -> None:
    lines = f"memory F = 1\n    capacity = {capacity}\n    rank r {{"
    text = source_of("1f1b").text.replace("rank r {", lines)
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert (portable.proved, portable.unknown) == ("", EVERYWHERE)
    assert "it has a `capacity`" in portable.reason


def test_what_is_wrong_before_any_size_is_chosen_is_the_compilers_own_error() -> None:
    lines = "capacity = 3\n    capacity = 3\n    rank r {"
    text = source_of("1f1b").text.replace("rank r {", lines)
    with pytest.raises(CompileError, match="a schedule has one `capacity`"):
        prove_for_all_ranks(text)


@pytest.mark.parametrize("line", ["cost F = 1", "memory B = 2"])
def test_what_the_compiler_refuses_whatever_the_sizes_is_not_proved(line: str) -> None:
    text = source_of("1f1b").text.replace("rank r {", f"{line}\n{line}\n    rank r {{")
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert not portable.proved
    assert (
        f"the compiler says: `{line.split(' =')[0]}` is given already"
        in portable.reason
    )


@pytest.mark.parametrize(
    "twice", ["skip s in 0 .. 1 from s to 3", "skip s in 0 .. 2 from 0 to 3"]
)
def test_a_skip_that_is_there_twice_at_some_sizes_is_wrong_there(twice: str) -> None:
    text = source_of("unet_1f1b").text.replace("rank r {", f"{twice}\n    rank r {{")
    assert disagreements(text, 5, 4) == []
    assert prove_for_all_ranks(text).verdicts["portable"].wrong


@pytest.mark.parametrize(
    "line",
    [
        "edge s in 0 .. 1 from ranks - 2 to ranks - 1",
        "edge s in 0 .. 2 from s to s + 2",
        "edge s in 0 .. 1 from ranks to 4",
        "skip s in 0 .. 1 from 0 to ranks - 2",
    ],
)
def test_an_edge_is_wrong_where_it_is_there_twice_or_leads_nowhere(line: str) -> None:
    text = source_of("two_encoders").text.replace("rank r {", f"{line}\n    rank r {{")
    assert disagreements(text, 6, 3) == []
    portable = prove_for_all_ranks(text).verdicts["portable"]
    assert portable.wrong
    assert [each.code for each in portable.diagnostics] == [line.split()[0]]


#: Rank 1 runs its microbatches the other way round, which is right while its stage has no edges.
NO_CHAIN = """
schedule no_chain {
    param ranks = 4
    param microbatches = 4
    edge s in 2 .. ranks from 0 to s
    rank r {
        for m in 0 .. microbatches {
            if r == 1 { F(microbatches - 1 - m)  B(microbatches - 1 - m) }
            if r != 1 { F(m)  B(m) }
        }
    }
}
"""


def test_stages_without_an_edge_at_some_sizes_are_a_chain_there() -> None:
    assert disagreements(NO_CHAIN, 5, 3) == []
    assert prove_for_all_ranks(NO_CHAIN).verdicts["portable"].wrong == (
        "ranks == 2 and microbatches >= 2"
    )


#: Those that are damaged: not the ones whose proof takes longest.
DAMAGED = [
    name
    for name in PROGRAMS
    if name not in ("1f1b_explicit", "chimera", "dualpipe", "stp")
]


def a_damaged_program(seed: int) -> str:
    random = Random(seed)
    return damaged(source_of(random.choice(DAMAGED)).text, random)


def check_damaged(seed: int, ranks: int, microbatches: int) -> None:
    text = a_damaged_program(seed)
    try:
        amiss = disagreements(text, ranks, microbatches)
    except CompileError:
        # It is no program any more.
        return
    assert not amiss, f"{amiss[:3]}\n{text}"


@pytest.mark.large
def test_what_cannot_be_written_is_told_in_place_of_a_certificate() -> None:
    """Interleaved 1F1B with another warm-up, whose stamps are too many times the ranks."""
    text = (GALLERY_FOLDER / "interleaved_1f1b.sched").read_text(encoding="utf-8")
    depth = "min(2 * (ranks - 1 - r) + (chunks - 1) * group, all)"
    assert text.count(depth) == 1
    changed = text.replace(depth, f"min({depth} + 1, microbatches)")
    proof = prove_for_all_ranks(Source("changed.sched", changed))
    assert proof.verdicts["portable"].proved
    with pytest.raises(ValueError, match="the stamps of the proof cannot be written"):
        _ = proof.certificate


def test_a_number_without_a_place_has_digits_without_one() -> None:
    of_rank = Number(isl.PwAff("[ranks] -> { [r] -> [(r + 7)] }"))
    nowhere = isl.Set("[ranks] -> { [r] : r < 0 and r > 0 }")
    assert all(digit.domain().is_empty() for digit in digits(of_rank, nowhere))


@pytest.mark.blocks(4)
def test_damaged_programs(block: int) -> None:
    for seed in range(8 * block, 8 * (block + 1)):
        check_damaged(seed, 4, 6)


@pytest.mark.sizes
@pytest.mark.blocks(5000)
def test_a_damaged_program_at_many_sizes(block: int) -> None:
    check_damaged(block, 10, 30)


def without_a_statement(certificate: dict[str, Any], random: Random) -> None:
    del certificate["statements"][random.randrange(len(certificate["statements"]))]


def with_a_stamp_turned_round(certificate: dict[str, Any], random: Random) -> None:
    stamps = random.choice(certificate["cases"])["stamps"]
    for name, text in stamps.items():
        stamp = isl.PwMultiAff.from_map(isl.Map(text))
        stamps[name] = str(isl.Map.from_pw_multi_aff(stamp.neg()))


def with_another_place(certificate: dict[str, Any], random: Random) -> None:
    first = certificate["statements"][0]
    last = certificate["statements"][-1]
    name = last["name"]
    last["place"] = first["place"].replace(f"{first['name']}[", f"{name}[")


def with_more_sizes(certificate: dict[str, Any], random: Random) -> None:
    certificate["proved"] = "{ : }"


def with_an_op_of_another_kind(certificate: dict[str, Any], random: Random) -> None:
    certificate["statements"][0]["kind"] = "B"


def without_rules_for_weights(certificate: dict[str, Any], random: Random) -> None:
    certificate["weights"].clear()


def without_stamps(certificate: dict[str, Any], random: Random) -> None:
    random.choice(certificate["cases"])["stamps"].clear()


@pytest.mark.parametrize(
    "damage",
    [
        without_a_statement,
        with_a_stamp_turned_round,
        with_another_place,
        with_more_sizes,
        with_an_op_of_another_kind,
        without_rules_for_weights,
        without_stamps,
    ],
)
@pytest.mark.parametrize(
    "program",
    ["gpipe", "1f1b", "1f1b_explicit", "terapipe", "pipedream", "pipedream_2bw"],
)
def test_a_damaged_certificate_does_not_pass(
    program: str, damage: Callable[[dict[str, Any], Random], None]
) -> None:
    certificate = json.loads(json.dumps(certificate_of(proved(program)[0])))
    assert faults_of(certificate) == []
    damage(certificate, Random(1))
    assert faults_of(certificate)


def with_an_op_again(certificate: dict[str, Any], random: Random) -> None:
    first = certificate["statements"][0]
    name = first["name"]
    texts = {of: text.replace(f"{name}[", "again[") for of, text in first.items()}
    certificate["statements"].append({**texts, "name": "again"})
    for case in certificate["cases"]:
        case["stamps"]["again"] = case["stamps"][name].replace(f"{name}[", "again[")


def with_an_op_of_two_items(certificate: dict[str, Any], random: Random) -> None:
    first, second = certificate["statements"][:2]
    other = second["item"].replace(f"{second['name']}[", f"{first['name']}[")
    first["item"] = str(isl.Map(first["item"]).union(isl.Map(other)))


def with_stamps_of_no_op(certificate: dict[str, Any], random: Random) -> None:
    stamps = certificate["cases"][0]["stamps"]
    name = min(stamps)
    stamps[name] = str(isl.Map(stamps[name]).intersect_params(isl.Set("{ : 1 = 0 }")))


@pytest.mark.parametrize(
    "damage", [with_an_op_again, with_an_op_of_two_items, with_stamps_of_no_op]
)
def test_an_op_has_one_item_and_one_stamp(
    damage: Callable[[dict[str, Any], Random], None],
) -> None:
    certificate = json.loads(json.dumps(certificate_of(proved("1f1b")[0])))
    damage(certificate, Random(1))
    (fault, *_) = faults_of(certificate)
    assert "not a certificate" not in fault


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F(m)", "F(if microbatches > 100 then 0 else m)"),
        ("F(m)", "F(if ranks == 40 then 0 else m)"),
        ("B(m)", "B(microbatches - 1 - m)"),
        ("rank r {", "stage s in 0 .. ranks on ranks - 1 - s\n rank r {"),
        ("rank r {", "require microbatches != 77\n rank r {"),
        ("rank r {", "weights stash\n rank r {"),
        ("rank r {", "fill W\n rank r {"),
    ],
)
def test_a_certificate_of_another_text_does_not_pass(old: str, new: str) -> None:
    document = json.loads(json.dumps(prove_for_all_ranks("1f1b").certificate))
    assert "for ranks >= 1 and microbatches >= 1 on portable" in what_it_proves(
        document
    )
    text = document["program"].replace(old, new, 1)
    assert text != document["program"]
    with pytest.raises(Wrong):
        what_it_proves({**document, "program": text})


@pytest.mark.parametrize(
    "fields",
    [
        {"params": {"ranks": 4}},
        {"params": {"rank": 4}},
        {"program": "gpipe"},
        {"format": "schedlang certificate 4"},
        {"stream": True},
        {"depth": 0},
    ],
)
def test_a_certificate_with_other_fields_does_not_pass(fields: dict[str, Any]) -> None:
    document = json.loads(json.dumps(prove_for_all_ranks("1f1b").certificate))
    with pytest.raises(Wrong):
        what_it_proves({**document, **fields})


@pytest.mark.parametrize("rule", ["latest", "stash", "delay"])
def test_a_certificate_by_another_rule_for_weights_does_not_pass(rule: str) -> None:
    certificate = json.loads(json.dumps(certificate_of(proved("pipedream_2bw")[0])))
    certificate["weights"] = [[rule, "{ [s, u, g, m, k] -> [s, u - 1, 0, 0, 0] }"]]
    assert faults_of(certificate)


def test_the_checker_knows_what_the_compiler_says_that_ops_need() -> None:
    kinds = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.U}
    of_compiler = {
        (user.name, rule.made.name, rule.of, rule.slices)
        for rule in RULES
        for user in kinds.intersection(rule.users)
        if rule.made in kinds
    }
    slices = {"k]": 0, "k - 1]": -1, "k + 1]": 1, "k2]": 0}
    of_checker = {
        (user, made, of, slices[rest.split(", ")[-1]])
        for users, made, of, rest in NEEDS
        for user in users
    }
    assert of_checker == of_compiler


def with_claim(program: str, claim: str, before: str = "    rank r") -> Source:
    text = source_of(GALLERY_FOLDER / f"{program}.sched").text
    return Source(
        "claim.sched", text.replace(before, f"    assert {claim} for all\n{before}", 1)
    )


@pytest.mark.parametrize(
    ("program", "claim"),
    [
        ("gpipe", "bubble == 3 * (ranks - 1)"),
        (
            "1f1b",
            "makespan == 3 * (microbatches + ranks - 1) and peak() == min(ranks, microbatches)",
        ),
        ("1f1b", "peak(0) >= peak(ranks - 1)"),
        ("zb_h1", "microbatches < ranks or bubble == ranks - 1"),
        ("pipedream_2bw", "bubble == 3 * (ranks - 1) and peak() <= ranks"),
        ("terapipe", "bubble == 3 * (ranks - 1)"),
    ],
)
def test_a_claim_for_all_is_proved_from_the_closed_forms(
    program: str, claim: str
) -> None:
    proof = prove_for_all_ranks(with_claim(program, claim))
    assert proof.holds
    assert proof.claims == (claim,)


def test_a_claim_for_all_in_the_order_of_a_rank_is_proved() -> None:
    claim = "peak(r) <= warmup + 1"
    proof = prove_for_all_ranks(
        with_claim("1f1b", claim, "        for m in 0 .. warmup ")
    )
    assert proof.holds


def test_a_claim_for_all_that_fails_is_wrong_where_it_does() -> None:
    verdict = prove_for_all_ranks(with_claim("gpipe", "bubble == 3")).verdicts[
        "portable"
    ]
    assert verdict.proved == "ranks == 2"
    assert verdict.wrong == "ranks >= 3 or ranks == 1"
    assert verdict.smallest == {"ranks": 1, "microbatches": 1}
    assert [each.code for each in verdict.diagnostics] == ["assert"]


def test_a_claim_for_all_of_a_stream_is_one_for_any_number_of_updates() -> None:
    text = with_claim("pipedream_2bw", "makespan == 3 * microbatches + bubble")
    verdict = prove_for_all_ranks(text).verdicts["portable"]
    assert not verdict.proved
    assert not verdict.wrong
    assert "depends on how many updates there are" in verdict.reason


def test_a_claim_for_all_without_a_closed_form_is_not_proved() -> None:
    verdict = prove_for_all_ranks(with_claim("gpipe", "span <= makespan")).verdicts[
        "portable"
    ]
    assert not verdict.holds
    assert verdict.unknown == EVERYWHERE
    assert "there is no closed form of its span" in verdict.reason


@pytest.mark.parametrize(
    "params", [{"ranks": 0}, {"ranks": -1}, {"rnks": 4}, {"microbatches": 0}]
)
def test_a_wrong_parameter_is_said_as_by_compile(params: dict[str, int]) -> None:
    with pytest.raises(CompileError) as compiling:
        compile_tree(*load(source_of("gpipe")), params)
    with pytest.raises(CompileError) as proving:
        prove_for_all_ranks("gpipe", params)
    said = [str(each) for each in proving.value.diagnostics]
    assert said == [str(each) for each in compiling.value.diagnostics]
