"""The verdicts for each transport, against every interleaving, recorded cases, and known traps."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve
from damage import damaged_plans, gallery
from explorer import is_right
from strategies import make_schedule

from schedlang import Actions, CompileError, Kind, Schedule, prove, read_source
from schedlang.compiler import check_program
from schedlang.transports import NAMES, transports

TESTS = Path(__file__).parent
PROGRAMS = TESTS.parent / "programs"
TRANSPORTS = ["blocking", "gloo", "nccl", "nccl-eager", "buffered:1", "buffered:2", "buffered"]
#: Ranks and microbatches at which every interleaving of a program can be tried.
SMALL = ((2, 1), (2, 2), (2, 4), (3, 1), (3, 2))
#: Of each kind.
PROGRAMS_OF_A_BLOCK = 250


def verdict(schedule: Schedule, transport: str) -> bool:
    try:
        prove(evolve(schedule, transport=transport))
    except CompileError:
        return False
    return True


def as_case(schedule: Schedule) -> dict[str, object]:
    """A plan as cases/disagreements.json has it."""
    ranks = [actions.text() for actions in schedule.ranks]
    return {"placement": schedule.placement, "microbatches": schedule.microbatches, "ranks": ranks}


@pytest.mark.parametrize("kind", ["random", "gallery"])
def test_verdicts_are_those_of_every_interleaving(kind: str, block: int, tally: Counter[str]) -> None:
    plans = gallery(SMALL, slices=2) if kind == "gallery" else ()
    disagreements = []
    for plan in damaged_plans(plans, PROGRAMS_OF_A_BLOCK, random.Random(f"{kind} {block}")):
        tally[f"{kind} programs"] += 1
        for transport in [*TRANSPORTS, "portable"]:
            right = is_right(plan, transport)
            tally[f"{transport} {'right' if right else 'wrong'}"] += 1
            if verdict(plan, transport) != right:
                tally[f"{transport} disagreements"] += 1
                disagreements.append({transport: right} | as_case(plan))
    assert not disagreements, json.dumps(disagreements)
    assert all(tally[f"{transport} {word}"] for transport in TRANSPORTS for word in ("right", "wrong"))


def test_what_is_portable_is_right_everywhere_and_strict_transports_allow_less(block: int) -> None:
    """`nccl` itself asks for more than `portable`, the order of first uses."""
    weaker = {
        "portable": ["blocking", "gloo", "nccl-eager", "buffered:1", "buffered"],
        "blocking": ["nccl-eager", "buffered:1"], "nccl-eager": ["gloo"], "nccl": ["gloo"],
        "buffered:1": ["buffered:2"], "buffered:2": ["buffered"],
    }  # fmt: skip
    seen = set()
    for plan in damaged_plans(gallery(((3, 4), (4, 4))), 30, random.Random(block)):
        right = {transport: verdict(plan, transport) for transport in [*TRANSPORTS, "portable"]}
        for transport, others in weaker.items():
            if right[transport]:
                assert all(right[other] for other in others), as_case(plan)
        seen.add(tuple(right.values()))
    assert len(seen) > 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 2), (4, 2), (4, 3), (4, 4), (4, 8), (8, 7)])
def test_exchanges_hang_at_the_first_use_of_nccl(ranks: int, microbatches: int) -> None:
    """1F1B with exchanges: where 2 <= M < P, a rank without a steady state never makes a batch."""
    source, params = read_source(PROGRAMS / "1f1b_explicit.sched"), {"ranks": ranks, "microbatches": microbatches}
    found = check_program(source, params, NAMES)
    wrong = {name: diagnostics[0].code for name, diagnostics in found.items() if diagnostics}
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
CASES |= json.loads((TESTS / "cases" / "disagreements.json").read_text())
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
