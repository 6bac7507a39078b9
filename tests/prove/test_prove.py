"""Programs proved for any number of microbatches, against the compiler at sizes."""

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest

from schedlang.compiler import check_program, compile
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.certificates import what_it_proves
from schedlang.extras.prove.check_orders import Wrong
from schedlang.extras.prove.pieces.expansion import Budget
from schedlang.extras.prove.pieces.linear import NeedsBase, number, settled
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.prove.result import Proof
from schedlang.files.sources import source_of
from schedlang.language.faults import Fault
from schedlang.proof.prove import ideal_execution
from tests.support.commands import exit_code, output
from tests.support.damaged_certificates import Place, changed, is_refused, places
from tests.support.damaged_programs import STREAMS, compare
from tests.support.paths import PROGRAMS, ROOT

pytestmark = pytest.mark.slow

#: Without passes, and in which numbers of microbatches they are right at 3 ranks, or at 4.
PROVED = {
    "1f1b": "microbatches >= 1",
    "dualpipe_v": "microbatches >= 6",
    "frozen_1f1b": "microbatches >= 1",
    "gpipe_groups": "microbatches >= 1",
    "hanayo": "microbatches >= 1",
    "looped_bfs_sharded": "microbatches >= 1",
    "interleaved_zb": "microbatches >= 3 and microbatches % 3 == 0",
    "seq1f1b": "microbatches >= 1",
    "stp": "microbatches >= 8",
    "two_encoders": "microbatches >= 1",
    "zb_h1": "microbatches >= 1",
    "zeropp": "microbatches >= 3 and microbatches % 3 == 0",
}

DEADLOCK = """
schedule each_waits {
    param ranks = 2
    param microbatches = 8
    rank r {
        let warmup = if microbatches > 5 then r else min(ranks - 1 - r, microbatches)
        for m in 0 .. warmup { F(m) }
        for m in warmup .. microbatches { F(m)  B(m - warmup) }
        for m in microbatches - warmup .. microbatches { B(m) }
    }
}
"""


def check_figures(
    proof: Proof, source: Path | str, params: dict[str, int], microbatches: int
) -> None:
    """That the formulas of a program are its figures at a size at which it is proved."""
    size = {"microbatches": microbatches}
    execution = ideal_execution(compile(source, {**params, **size}))
    assert execution
    line = execution.timeline
    figures = {
        "makespan": line.makespan,
        "work": max(line.busy),
        "bubble": line.makespan - max(line.busy),
        "span": line.span,
        "span_bubble": line.span - max(line.busy),
        **{f"peak({rank})": peak for rank, peak in enumerate(execution.peak_memory)},
    }
    laws = {law.figure: law.pieces for law in proof.laws}
    assert laws.keys() == figures.keys()
    for figure, value in figures.items():
        for where, expression in laws[figure]:
            if eval(where, {}, size):
                assert eval(expression, {}, size) == value, (figure, microbatches)


@pytest.mark.parametrize("name", PROVED)
def test_a_program_is_proved_and_its_figures_are_those_of_the_simulation(
    name: str,
) -> None:
    path = PROGRAMS / f"{name}.sched"
    proof = prove_for_all(path, {"ranks": 3})
    verdict = proof.verdicts["portable"]
    assert verdict.proved == PROVED[name]
    assert proof.holds
    rng = random.Random(name)
    for microbatches in rng.sample(range(1, 41), 6):
        if eval(verdict.proved, {}, {"microbatches": microbatches}):
            check_figures(proof, path, {"ranks": 3}, microbatches)


def test_the_sizes_at_which_ranks_wait_for_each_other_are_told_exactly() -> None:
    verdict = prove_for_all(DEADLOCK).verdicts["portable"]
    assert verdict.proved == "1 <= microbatches <= 5"
    assert verdict.wrong == "microbatches >= 6"
    assert verdict.smallest == {"microbatches": 6}
    assert verdict.diagnostics[0].code == "deadlock"


def test_a_number_in_the_text_counts_however_large_it_is() -> None:
    text = DEADLOCK.replace("microbatches > 5", "microbatches > 83")
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.proved == "1 <= microbatches <= 83"
    assert verdict.wrong == "microbatches >= 84"


def test_a_claim_that_fails_from_a_size_on_is_wrong_there() -> None:
    text = (
        (PROGRAMS / "gpipe.sched")
        .read_text()
        .replace("assert bubble", "assert peak(0) <= 11\n    assert bubble")
    )
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.proved == "1 <= microbatches <= 11"
    assert verdict.wrong == "microbatches >= 12"


def test_orders_of_passes_are_proved_as_far_as_their_pattern_goes() -> None:
    proof = prove_for_all(PROGRAMS / "zb_1p.sched", {"ranks": 2})
    verdict = proof.verdicts["portable"]
    assert verdict.word == "followed"
    assert not proof.holds
    assert "seen to up to microbatches ==" in verdict.pattern


@pytest.mark.parametrize(("name", "ranks"), [("rlhf", 4), ("recycle", 2)])
def test_models_and_lanes_go_on_by_different_numbers_of_microbatches(
    name: str, ranks: int
) -> None:
    path = PROGRAMS / f"{name}.sched"
    params = {"ranks": ranks}
    proof = prove_for_all(path, params)
    verdict = proof.verdicts["portable"]
    assert verdict.word == "followed"
    first = next(
        n for n in range(1, 100) if eval(verdict.followed, {}, {"microbatches": n})
    )
    for microbatches in (first, first + 6, first + 30):
        check_figures(proof, path, params, microbatches)
    # What its passes do next, nobody can write down.
    with pytest.raises(ValueError, match="passes make its orders"):
        _ = proof.certificate


def test_the_least_size_is_found_at_once_from_which_all_answers_hold() -> None:
    n = number(0, 1)

    def asked() -> None:
        with settled():
            assert n >= 3
            assert n < 5 * n - 20
            assert min(7, n) == 7

    with pytest.raises(NeedsBase) as needs:
        asked()
    assert needs.value.least == 7
    with settled():
        assert n + 1 > n


def test_what_comes_of_an_answer_that_does_not_hold_for_all_is_not_believed() -> None:
    def asked() -> None:
        with settled():
            if number(0, 1) > 40:
                raise Fault("deadlock", "ranks wait for each other", 0)

    with pytest.raises(NeedsBase):
        asked()


WITHOUT_A_FLUSH = {
    "pipedream_2bw": "microbatches >= 2",
    "pipedream_replicated": "microbatches >= 2 and microbatches % 2 == 0",
    "pipemare": "microbatches >= 1",
    "wpipe": "microbatches >= 3 and microbatches % 3 == 0",
}


@pytest.mark.parametrize("name", WITHOUT_A_FLUSH)
def test_without_a_flush_any_number_of_microbatches_is_proved_for_an_update(
    name: str,
) -> None:
    verdict = prove_for_all(PROGRAMS / f"{name}.sched", {"ranks": 3}).verdicts[
        "portable"
    ]
    assert verdict.proved == WITHOUT_A_FLUSH[name]
    assert verdict.word == "proved"


def test_without_a_flush_a_warm_up_that_differs_is_not_proved() -> None:
    text = (PROGRAMS / "pipedream_2bw.sched").read_text()
    for old, new in (
        ("in 0 .. ahead { F(m) }", "in 0 .. ahead + 1 { F(m) }"),
        ("F(m + ahead)  B(m) }  U", "F(m + ahead)  B(m) }"),
        ("delay(1)", "delay(0)"),
        ("peak(r) <= ranks - r", "peak(r) < ranks - r"),
    ):
        assert old in text
        verdict = prove_for_all(text.replace(old, new), {"ranks": 3}).verdicts[
            "portable"
        ]
        assert not verdict.proved, new


def test_without_a_flush_claims_on_microbatches_are_for_all_of_them() -> None:
    text = (PROGRAMS / "pipedream_2bw.sched").read_text()
    text = text.replace(
        "assert peak(r) <= ranks - r", "assert peak(0) + 17 >= microbatches"
    )
    verdict = prove_for_all(text, {"ranks": 3}).verdicts["portable"]
    assert verdict.proved == "2 <= microbatches <= 20"
    assert verdict.wrong == "microbatches >= 21"


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_program_without_a_flush_gets_the_verdict_of_the_compiler(
    seed: int,
) -> None:
    _, wrong = compare(seed, 2, STREAMS)
    assert not wrong


def test_a_program_or_a_parameter_that_is_wrong_is_told_as_by_the_compiler() -> None:
    with pytest.raises(CompileError, match="rnaks"):
        prove_for_all(PROGRAMS / "1f1b.sched", {"rnaks": 3})
    with pytest.raises(CompileError, match="nothing"):
        prove_for_all(CLAIMS.replace("peak(r)", "nothing"))
    with pytest.raises(ValueError, match="`microbatches` is any"):
        prove_for_all(PROGRAMS / "1f1b.sched", {"microbatches": 3})


def test_without_a_flush_what_is_for_one_microbatch_an_update_is_proved() -> None:
    verdict = prove_for_all(PROGRAMS / "pipedream.sched").verdicts["portable"]
    assert (verdict.proved, verdict.refused) == (
        "microbatches == 1",
        "microbatches >= 2",
    )


def test_what_would_take_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "MOST", 20_000)
    verdict = prove_for_all(PROGRAMS / "1f1b.sched", {"ranks": 300}).verdicts[
        "portable"
    ]
    assert verdict.unknown == "microbatches >= 1"
    assert "it takes more than 20,000 ops" in verdict.reason
    assert "--for ranks=any" in verdict.reason


def test_where_nothing_is_known_of_all_sizes_the_first_ones_are_compiled() -> None:
    verdict = prove_for_all(PROGRAMS / "pipe_offload.sched", {"ranks": 2}).verdicts[
        "portable"
    ]
    assert verdict.proved == "microbatches == 2 or microbatches == 4"
    assert verdict.refused == "microbatches >= 1 and microbatches % 2 == 1"
    assert verdict.unknown == "microbatches >= 6 and microbatches % 2 == 0"


def test_what_cannot_be_proved_says_where() -> None:
    text = CLAIMS.replace("F(m)", "for k in 0 .. m / 1000 { }  F(m)")
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.word == "not proved"


def test_what_cannot_be_proved_says_why() -> None:
    verdict = prove_for_all(PROGRAMS / "pipe_offload.sched").verdicts["portable"]
    assert verdict.word == "not proved"
    assert (
        "when a copy ends, and so what its ranks hold, follows from turns"
        in verdict.reason
    )


@pytest.mark.parametrize(
    "passes", [["gather"], ["gather within 1"], ["reorder", "gather"]]
)
def test_what_a_pass_gathers_is_proved_as_far_as_its_pattern_goes(
    passes: list[str],
) -> None:
    lines = "\n    ".join([*passes, "memory gather = 2", "rank r {"])
    text = source_of("1f1b").text.replace("rank r {", lines, 1)
    text = text.replace("assert peak(r) <=", "assert peak(r) - 2 <=")
    proof = prove_for_all(text, {"ranks": 2})
    verdict = proof.verdicts["portable"]
    assert verdict.word == "followed"
    for microbatches in (9, 14):
        assert eval(verdict.followed, {}, {"microbatches": microbatches})
        check_figures(proof, text, {"ranks": 2}, microbatches)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_program_gets_the_verdict_of_the_compiler(seed: int) -> None:
    _, wrong = compare(seed, 6)
    assert not wrong


SENDS = """
schedule blocking_1f1b {
    param ranks = 3
    param microbatches = 8
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        for m in 0 .. warmup { recv F(m)  F(m)  send F(m) }
        for m in warmup .. microbatches {
            recv F(m)  F(m)  send F(m)
            recv B(m - warmup)  B(m - warmup)  send B(m - warmup)
        }
        for m in microbatches - warmup .. microbatches { recv B(m)  B(m)  send B(m) }
    }
}
"""


def test_transfers_of_a_program_are_proved_on_each_transport() -> None:
    proof = prove_for_all(SENDS, {}, ("gloo", "nccl-eager", "buffered:1"))
    assert proof.verdicts["gloo"].proved == "microbatches >= 1"
    assert proof.verdicts["nccl-eager"].proved == "microbatches == 1"
    assert proof.verdicts["nccl-eager"].wrong == "microbatches >= 2"
    for transport, verdict in proof.verdicts.items():
        for microbatches in (1, 2, 3, 5, 9, 14):
            size = {"microbatches": microbatches}
            (said,) = check_program(source_of(SENDS), size, [transport]).values()
            is_wrong = any(each.severity == "error" for each in said)
            for word, value in (("proved", False), ("wrong", True)):
                where = getattr(verdict, word)
                assert not where or not eval(where, {}, size) or is_wrong == value


CLAIMS = """
schedule claims {
    param ranks = 2
    param microbatches = 8
    rank r {
        for m in 0 .. microbatches { F(m) }
        for all in 0 .. microbatches { B(all) }
        assert peak(r) == microbatches for all
    }
    assert makespan == 3 * (microbatches + ranks - 1) for all, "as in the paper"
}
"""


def test_claims_for_all_are_proved() -> None:
    proof = prove_for_all(CLAIMS)
    assert proof.claims == (
        "peak(r) == microbatches",
        "makespan == 3 * (microbatches + ranks - 1)",
    )
    assert "proved for all: peak(r) == microbatches" in proof.text


def test_compiling_proves_claims_for_all_if_it_is_asked_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "claims.sched"
    file.write_text(CLAIMS)
    assert exit_code("compile", str(file), "--prove") == 0
    file.write_text(
        CLAIMS.replace("microbatches for all", "min(microbatches, 8) for all")
    )
    output("compile", str(file))
    assert exit_code("compile", str(file), "--prove") == 1
    assert "wrong for microbatches >= 9" in capsys.readouterr().err


# Gathers and sums


#: Gathered for all forwards, and again for each microbatch's backward.
SHARDED = """
schedule sharded {
    param ranks = 3
    param microbatches = 8
    memory gather = 2 * microbatches + 1
    memory F = 3
    rank r {
        unshard
        for m in 0 .. microbatches { F(m) }
        reshard
        for m in 0 .. microbatches { unshard  I(m)  W(m)  reduce  reshard }
    }
    assert peak(r) == 5 * microbatches + 1
}
"""
SHARDED = SHARDED.replace("    assert peak(r)", "    assert peak(0)")


def test_gathers_that_grow_with_the_microbatches_are_held_as_in_the_simulation() -> (
    None
):
    # What each round gathers and drops adds nothing, however much it is.
    proof = prove_for_all(SHARDED)
    assert proof.verdicts["portable"].proved == "microbatches >= 1"
    assert proof.certificate
    assert what_it_proves(proof.certificate)
    for microbatches in (1, 2, 5, 13):
        check_figures(proof, SHARDED, {}, microbatches)


@pytest.mark.parametrize(
    ("old", "new", "wrong", "code"),
    [
        # Of one round alone, only the rounds behind it are without weights.
        (
            "W(m)  reduce  reshard }",
            "W(m)  reduce }  reshard",
            "microbatches >= 2",
            "unshard",
        ),
        ("{ unshard  I(m)", "{ I(m)", "microbatches >= 1", "unshard"),
        (
            "W(m)  reduce",
            "W(m)  if m + 1 < microbatches { reduce }",
            "microbatches >= 2",
            "reduce-grad",
        ),
        ("reduce  reshard }", "reduce }", "microbatches >= 1", "unshard"),
        (
            "I(m)  W(m)  reduce",
            "I(m)  reduce  W(m)",
            "microbatches >= 1",
            "reduce-grad",
        ),
        ("unshard\n        for", "for", "microbatches >= 1", "unshard"),
    ],
)
def test_gathers_and_sums_out_of_place_are_wrong_as_the_compiler_says(
    old: str, new: str, wrong: str, code: str
) -> None:
    text = SHARDED.replace(old, new)
    assert text != SHARDED
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.wrong == wrong
    assert verdict.diagnostics[0].code == code
    for microbatches in range(1, 8):
        params = {"microbatches": microbatches}
        if eval(verdict.wrong, {}, params):
            with pytest.raises(CompileError):
                compile(text, params)
        else:
            compile(text, params)


#: Two pipelines in opposite directions, whose ranks gather the weights of a stage together.
TOGETHER = """
schedule together {
    param ranks = 2
    param microbatches = 8
    require microbatches % 2 == 0, "each direction has as many"
    pipeline down runs microbatches / 2 stage s in 0 .. 2 on s
    pipeline up runs microbatches / 2 stage s in 0 .. 2 on 1 - s
    rank r {
        if r == 0 { unshard(down(0))  unshard(up(1)) } else { unshard(up(0))  unshard(down(1)) }
        for m in 0 .. microbatches / 2 { F(down(r), m)  F(up(1 - r), m) }
        for m in 0 .. microbatches / 2 { B(down(r), m)  B(up(1 - r), m) }
        reshard
    }
}
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            SHARDED.replace("memory F", "cost gather = 1  memory F"),
            "it has costs of `gather`",
        ),
        (TOGETHER, "it gathers or sums stages of which it has replicas"),
    ],
)
def test_gathers_that_ops_wait_for_are_not_proved(text: str, reason: str) -> None:
    verdict = prove_for_all(text).verdicts["portable"]
    assert verdict.word == "not proved"
    assert reason in verdict.reason


def test_a_stage_that_recomputes_some_microbatches_is_not_proved() -> None:
    verdict = prove_for_all(PROGRAMS / "infinipipe.sched", {"ranks": 3}).verdicts
    reason = "a recomputation of some microbatches of a stage, and not of others"
    assert reason in verdict["portable"].reason
    whole = prove_for_all(PROGRAMS / "infinipipe.sched", {"ranks": 3, "room": 1})
    assert whole.verdicts["portable"].word == "proved"


# Certificates


@pytest.fixture(scope="module", params=["unet_1f1b", "zeropp"])
def certificate(request: pytest.FixtureRequest) -> Any:
    proof = prove_for_all(PROGRAMS / f"{request.param}.sched", {"ranks": 3})
    return json.loads(json.dumps(proof.certificate))


@pytest.mark.parametrize(
    "name",
    [
        "1f1b_explicit",
        "1f1b_recompute",
        "bitpipe",
        "frozen_1f1b",
        "looped_bfs_sharded",
        "two_encoders",
        "zeropp",
    ],
)
def test_a_certificate_is_right(name: str) -> None:
    proof = prove_for_all(PROGRAMS / f"{name}.sched", {"ranks": 4})
    assert proof.certificate
    assert "ranks = 4 for microbatches >= " in what_it_proves(proof.certificate)


def test_a_certificate_without_an_edge_is_not_that_of_its_program() -> None:
    proof = prove_for_all(PROGRAMS / "two_encoders.sched", {"ranks": 4})
    document = json.loads(json.dumps(proof.certificate))
    (one,) = document["classes"]
    one["edges"].remove([1, 2])
    assert is_refused(document)


HANDED_OVER = """
schedule handed_over {
    param ranks = 2
    param microbatches = 4
    pipeline back  runs microbatches stage s in 0 .. 2 on 1 - s
    pipeline ahead runs microbatches stage s in 0 .. 1 on 0
    edge s in 1 .. 2 from ahead(s - 1) to back(s)
    rank r {
        for m in 0 .. microbatches {
            if r == 0 { F(ahead(0), m)  F(back(1), m)  B(back(1), m) }
            else { F(back(0), m)  B(back(0), m) }
        }
    }
}
"""


def test_gradients_of_a_handover_have_edges_of_their_own() -> None:
    document = json.loads(json.dumps(prove_for_all(HANDED_OVER).certificate))
    assert "proves handed_over for microbatches >= " in what_it_proves(document)
    (one,) = document["classes"]
    assert one["edges"] == [[2, 1]]
    assert one["gradients"] == [[0, 1]]
    one["gradients"] = []
    assert is_refused(document)


FROZEN = """
schedule frozen {
    param ranks = 4
    param microbatches = 8
    frozen 1 .. ranks - 1
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        for m in 0 .. warmup { F(m) }
        for m in warmup .. microbatches { F(m)  I(m - warmup)  W(m - warmup) }
        for m in microbatches - warmup .. microbatches { I(m)  W(m) }
    }
}
"""


def test_a_frozen_stage_behind_a_trained_one_has_half_a_backward() -> None:
    proof = prove_for_all(FROZEN)
    assert proof.verdicts["portable"].proved == "microbatches >= 1"
    for microbatches in (1, 2, 5, 11):
        check_figures(proof, FROZEN, {}, microbatches)


def test_a_damaged_certificate_is_refused(certificate: Any) -> None:
    rng = random.Random(0)
    kinds: dict[tuple[Any, ...], list[Place]] = {}
    for place in places(certificate):
        shape = (*(step for step in place if isinstance(step, str)), place[-1])
        kinds.setdefault(shape, []).append(place)
    for of_kind in kinds.values():
        for place in rng.sample(of_kind, min(len(of_kind), 2)):
            assert is_refused(changed(certificate, place)), place


@pytest.mark.parametrize("name", ["check_orders", "check_sets"])
def test_a_checker_is_short_and_shares_no_code_with_its_prover(name: str) -> None:
    text = (ROOT / "schedlang" / "extras" / "prove" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 200
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.ImportFrom) or "schedlang" not in (
            node.module or ""
        )
        assert not isinstance(node, ast.Import) or "schedlang" not in ast.unparse(node)
        # Nor is it short by what stands on one line.
        if isinstance(node, ast.Assign):
            is_packed = isinstance(node.targets[0], ast.Tuple) and isinstance(
                node.value, ast.Tuple
            )
            assert not is_packed, ast.unparse(node)
            assert len(node.targets) == 1, ast.unparse(node)


def test_how_long_messages_are_on_their_way_is_that_of_the_program() -> None:
    text = source_of("1f1b").text.replace(
        "rank r {", "cost send = 0.5\n    rank r {", 1
    )
    # What it claims is so without them.
    text = text.replace("assert bubble ==", "assert bubble >=")
    proof = prove_for_all(text, {"ranks": 2})
    document = json.loads(json.dumps(proof.certificate))
    assert what_it_proves(document)
    document["program"] = document["program"].replace("send = 0.5", "send = 0.25")
    with pytest.raises(Wrong, match="its `ways` are not those of the program"):
        what_it_proves(document)


def test_figures_at_decimals_are_exact_for_all() -> None:
    """Also at the small sizes, which are simulated, and with halves of which a backward is the
    sum; in floats, 0.1 + 0.2 + 0.4 is more than 0.7.
    """
    costs = "cost F = 0.1  cost I = 0.2  cost W = 0.4  cost send = 0.05  memory F = 0.3"
    text = f"""schedule decimals {{
        param ranks = 2  param microbatches = 4  {costs}
        rank r {{
            let warmup = min(ranks - 1 - r, microbatches)
            repeat warmup                {{ F(next) }}
            repeat microbatches - warmup {{ F(next)  I(next)  W }}
            repeat warmup                {{ I(next)  W }}
            assert peak(r) <= 0.3 * (ranks - r)
        }}
        assert makespan == 0.7 * microbatches + 0.4 for all
    }}"""
    proof = prove_for_all(text, {"ranks": 2})
    assert proof.verdicts["portable"].proved == "microbatches >= 1"
    laws = {law.figure: law.pieces for law in proof.laws}
    assert laws["makespan"] == (("microbatches >= 1", "(7 * microbatches + 4) / 10"),)
    document = json.loads(json.dumps(proof.certificate))
    assert "the certificate proves decimals, ranks = 2" in what_it_proves(document)


# The command


def test_the_command_prints_verdicts_and_formulas(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "certificate.json"
    command = ["prove", str(PROGRAMS / "1f1b.sched"), "-p ranks=2 -o", str(file)]
    assert exit_code(*command) == 0
    printed = capsys.readouterr().out
    assert "portable  proved for microbatches >= 1" in printed
    assert "makespan = 3 * microbatches + 3 for microbatches >= 1" in printed
    said = output("prove", str(file), "--check")
    assert "the certificate proves one_f_one_b, ranks = 2 for microbatches >= " in said
    document = json.loads(file.read_text())
    document["program"] = document["program"].replace("ranks - 1 - r", "ranks - r", 1)
    file.write_text(json.dumps(document))
    assert exit_code("prove", str(file), "--check") == 1
    printed = capsys.readouterr().out
    assert "does not hold: at 5 microbatches, on `portable`: a claim" in printed


def test_the_command_proves_for_any_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("islpy")
    file = tmp_path / "certificate.json"
    gpipe = str(PROGRAMS / "gpipe.sched")
    assert "any ranks and microbatches" in output(
        "prove", gpipe, "--any-ranks -o", str(file)
    )
    assert exit_code("prove", str(file), "--check") == 0


def test_the_command_fails_for_a_program_that_is_wrong_at_some_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.sched"
    file.write_text(DEADLOCK)
    assert exit_code("prove", str(file), "--json") == 1
    document = json.loads(capsys.readouterr().out)
    (verdict,) = document["verdicts"]
    assert (verdict["verdict"], verdict["smallest"]) == ("wrong", {"microbatches": 6})


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_wrong_parameter_is_said_as_by_compile(ranks: int) -> None:
    with pytest.raises(CompileError, match=f"`ranks` is {ranks}, it must be 1 or more"):
        prove_for_all(PROGRAMS / "1f1b.sched", {"ranks": ranks})
