"""The verdicts for each transport, against every interleaving, recorded cases, and known traps."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from explorer import Explorer
from strategies import make_schedule

from schedlang import Actions, CompileError, Kind, Schedule, compile, prove, read_source
from schedlang.actions import is_transfer
from schedlang.compiler import check_program
from schedlang.lints import lint
from schedlang.runtime.pipeline import unsupported
from schedlang.transports import NAMES, transports
from schedlang.verdicts import errors

TESTS = Path(__file__).parent
PROGRAMS = TESTS.parent / "programs"
#: Plain programs, one pipeline and no slices, and how many mutants of each size are explored: states multiply quickly.
PLAIN = {"1f1b": 20, "1f1b_explicit": 30, "gpipe": 20, "zb_h1": 12, "interleaved_1f1b": 2}
SIZES = [(2, 1), (2, 2), (3, 1)]
TRANSPORTS = ["blocking", "gloo", "nccl", "nccl-eager", "buffered:1", "buffered:2", "buffered"]


def verdict(schedule: Schedule, transport: str) -> bool:
    try:
        prove(evolve(schedule, transport=transport))
    except CompileError:
        return False
    return True


def damaged(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with one rank's transfers moved, or issued as other batches."""
    rank = rng.randrange(len(schedule.ranks))
    rows = [schedule.ranks[rank].row(index) for index in range(len(schedule.ranks[rank]))]
    transfers = [index for index, row in enumerate(rows) if is_transfer(row[0])]
    if not transfers:
        return schedule
    index = rng.choice(transfers)
    match rng.choice(["move", "swap", "group", "ungroup", "drop"]):
        case "move":
            rows.insert(max(0, index + rng.choice([-2, -1, 1, 2])), rows.pop(index))
        case "swap":
            other = rng.choice(transfers)
            rows[index], rows[other] = rows[other], rows[index]
        case "group":
            run = range(index, min(index + rng.choice([2, 3]), len(rows)))
            if all(is_transfer(rows[each][0]) for each in run):
                group = max(row[4] for row in rows) + 1
                for each in run:
                    rows[each] = (*rows[each][:4], group)
        case "ungroup":
            rows[index] = (*rows[index][:4], 0)
        case "drop":
            del rows[index]
    changed = Actions()
    for row in rows:
        changed.add(*row)
    return evolve(schedule, ranks=(*schedule.ranks[:rank], changed, *schedule.ranks[rank + 1 :]))


def mutants(name: str, sizes: list[tuple[int, int]], count: int) -> Iterator[Schedule]:
    """Plans of a program with up to four changes to their communication."""
    rng = random.Random(name)
    source = read_source(PROGRAMS / f"{name}.sched")
    for ranks, microbatches in sizes:
        try:
            plan = compile(source, {"ranks": ranks, "microbatches": microbatches})
        except CompileError:
            continue
        for _ in range(count):
            mutant: Schedule = plan
            for _ in range(rng.randrange(5)):
                mutant = damaged(mutant, rng)
            yield mutant


@pytest.mark.parametrize("name", PLAIN)
def test_verdicts_are_those_of_every_interleaving(name: str, times: int) -> None:
    verdicts = set()
    for mutant in mutants(name, SIZES, PLAIN[name] * times):
        for transport in [*TRANSPORTS, "portable"]:
            parts = ["atomic", "nccl-warm"] if transport == "portable" else [transport]
            right = all(Explorer(mutant, part).is_right() for part in parts)
            assert verdict(mutant, transport) == right, (transport, [each.text() for each in mutant.ranks])
            verdicts.add(right)
    assert verdicts == {False, True}


@pytest.mark.parametrize("name", ["1f1b_explicit", "zb_h1", "interleaved_1f1b", "v_half"])
def test_what_is_portable_is_right_everywhere_and_strict_transports_allow_less(name: str, times: int) -> None:
    """`nccl` itself asks for more than `portable`, the order of first uses."""
    weaker = {
        "portable": ["blocking", "gloo", "nccl-eager", "buffered:1", "buffered"],
        "blocking": ["nccl-eager", "buffered:1"], "nccl-eager": ["gloo"], "nccl": ["gloo"],
        "buffered:1": ["buffered:2"], "buffered:2": ["buffered"],
    }  # fmt: skip
    seen = set()
    for mutant in mutants(name, [(3, 4), (4, 4)], 60 * times):
        right = {transport: verdict(mutant, transport) for transport in [*TRANSPORTS, "portable"]}
        for transport, others in weaker.items():
            if right[transport]:
                assert all(right[other] for other in others), (transport, [each.text() for each in mutant.ranks])
        seen.add(tuple(right.values()))
    assert len(seen) > 2


def test_warnings_are_of_what_other_transports_refuse(times: int) -> None:
    """Batches whose other side is none are not portable; receives in another order are right on gloo only."""
    seen = set()
    for mutant in mutants("1f1b_explicit", [(2, 2), (3, 4)], 150 * times):
        right = {transport for transport in [*TRANSPORTS, "portable"] if verdict(mutant, transport)}
        warned = {name: {each.code for each in lint(evolve(mutant, transport=name))} for name in right}
        asymmetric = [name for name in right if "asymmetric-batch" in warned[name]]
        assert not ("portable" in right and asymmetric)
        assert set(asymmetric) <= {"nccl", "nccl-eager"}
        if "gloo" in right and "needs-tags" in warned["gloo"]:
            assert right == {"gloo"}
        seen |= {(name, code) for name in right for code in warned[name]}
    assert seen == {("nccl", "mixed-transfers"), ("nccl-eager", "asymmetric-batch"), ("gloo", "needs-tags")}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 2), (4, 2), (4, 3), (4, 4), (4, 8), (8, 7)])
def test_exchanges_hang_at_the_first_use_of_nccl(ranks: int, microbatches: int) -> None:
    """1F1B with exchanges: where 2 <= M < P, a rank without a steady state never makes a batch."""
    source, params = read_source(PROGRAMS / "1f1b_explicit.sched"), {"ranks": ranks, "microbatches": microbatches}
    found = check_program(source, params, NAMES)
    wrong = {name: errors(diagnostics)[0].code for name, diagnostics in found.items() if errors(diagnostics)}
    assert wrong == ({"nccl": "first-use"} if 2 <= microbatches < ranks else {})


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.sched")), ids=lambda path: path.stem)
def test_programs_that_leave_communication_to_the_compiler_run_everywhere(path: Path) -> None:
    if path.stem != "1f1b_explicit":
        assert not any(check_program(read_source(path), {}, NAMES).values())


def test_transports_are_known_by_name() -> None:
    for name in ("mpi", "buffered:", "buffered:0", "buffered:x", "gloo:1", ""):
        with pytest.raises(ValueError, match="there is no transport"):
            transports(name)


CASES = json.loads((TESTS / "cases" / "deadlock.json").read_text())
#: The recorded models' names; `pair_fifo` is `nccl` where every transfer is issued alone.
MODELS = {"blocking": "blocking", "pair_fifo": "nccl", "rank_fifo": "nccl-eager", "unordered": "gloo"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_verdicts(name: str) -> None:
    """Plans with their verdicts from an independent checker, for each model of a transport."""
    case = CASES[name]
    ranks, batches = [], False
    for text in case["ranks"]:
        actions = Actions()
        for group, token in enumerate(text.split(), start=1):
            words = token.strip("()").split(";")
            batches = batches or len(words) > 1
            for word in words:
                match = re.fullmatch(r"(\d+)([A-Z_]+?)(\d+)", word)
                assert match
                actions.add(Kind[match[2]], int(match[1]), int(match[3]), 0, group if len(words) > 1 else 0)
        ranks.append(actions)
    schedule = make_schedule(tuple(case["placement"]), case["microbatches"], tuple(ranks))
    for model, recorded in case["verdicts"].items():
        if model != "pair_fifo" or not batches:
            assert verdict(schedule, MODELS.get(model, model)) == (recorded == "ok"), model


def test_the_runtime_runs_what_is_proved_where_ranks_block() -> None:
    source = read_source(PROGRAMS / "1f1b.sched")
    for name in NAMES:
        refused = unsupported(compile(source, transport=name))
        assert (refused is None) == (name in ("portable", "blocking")), refused
