"""The verdicts for each transport, against every interleaving, recorded cases, and known traps."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import (
    Actions,
    CompileError,
    Costs,
    Schedule,
    compile,
    prove,
    read_source,
    simulate,
)
from schedlang.cli.verdicts import errors
from schedlang.compiler import check_program
from schedlang.diagnostics.source import Span
from schedlang.lowering.fusion import fuse
from schedlang.plan.text import parse_actions
from schedlang.proof.edges import ideal_events
from schedlang.proof.execution import Execution
from schedlang.proof.lints import lint
from schedlang.proof.message_edges import transport_events
from schedlang.proof.moments import follows_moments
from schedlang.proof.repetition import proofs
from schedlang.proof.running import run_on
from schedlang.schedule.transports import NAMES, NCCL_EDGE, transports
from tests.support.damage import (
    batched_plan,
    damaged_plans,
    gallery,
    handed_over_plan,
    one_of,
    random_plan,
    replicated_plan,
)
from tests.support.explorer import right_on
from tests.support.features import featured_plan
from tests.support.own_memory import most_held
from tests.support.paths import CASES, DIAGNOSTICS, GALLERY, PROGRAMS
from tests.support.strategies import make_schedule
from tests.support.transports import TRANSPORTS
from tests.support.travelling import travelling_plan

ALL = [*TRANSPORTS, "portable"]
#: Ranks and microbatches at which every interleaving of a program can be tried.
SMALL = ((2, 1), (2, 2), (2, 4), (3, 1), (3, 2))
#: Of each of its kinds.
PROGRAMS_OF_A_BLOCK = 250


def verdict(schedule: Schedule, transport: str) -> bool:
    try:
        prove(evolve(schedule, transport=transport))
    except CompileError:
        return False
    return True


def verdicts(schedule: Schedule) -> dict[str, bool]:
    """Those on all transports, as `schedc check` comes to them: what all have in common is proved
    once.
    """
    return are_proved(proofs(schedule, ALL))


def are_proved(found: dict[str, Execution | CompileError]) -> dict[str, bool]:
    """Of what `proofs` gives, whether it is a proof."""
    return {
        transport: not isinstance(found[transport], CompileError) for transport in ALL
    }


def stand_still(schedule: Schedule) -> list[str]:
    """The transports on which a plan stands still, by a walk over all of its events."""
    batches = schedule.columns.has_batches
    return [
        name
        for name in ALL
        for rules in transports(name, batches)
        if not transport_events(schedule, schedule.costs, rules).graph.is_whole
    ]


def as_case(schedule: Schedule) -> dict[str, object]:
    """A plan as cases/disagreements.json has it."""
    ranks = [actions.text() for actions in schedule.ranks]
    sizes = {
        "placement": schedule.placement,
        "microbatches": schedule.microbatches,
        "skips": schedule.layout.skips,
        "frozen": schedule.layout.frozen,
    }
    return sizes | {"ranks": ranks}


def actions_of(text: str) -> Actions:
    """Actions from their text, all from one place of a program."""
    return parse_actions(text, [0] * len(re.findall(r"\d+[A-Z]", text)))


#: The programs of a block: of each kind so many.
KINDS = {
    "random": random_plan,
    "batched": batched_plan,
    "replicated": replicated_plan,
    "featured": featured_plan,
    "travelling": travelling_plan,
    "handed over": handed_over_plan,
    "gallery": lambda rng: rng.choice(gallery(SMALL, slices=2)),
}


#: Weights that travel have shown most mistakes of the proof: these are always in the core.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.core) if kind == "travelling" else kind
        for kind in KINDS
    ],
)
@pytest.mark.blocks(2, large=True)
@pytest.mark.slow
def test_verdicts_are_those_of_every_interleaving(
    kind: str, block: int, tally: Counter[str]
) -> None:
    disagreements = []
    for plan in damaged_plans(
        KINDS[kind], PROGRAMS_OF_A_BLOCK, random.Random(f"{kind} {block}")
    ):
        tally[f"{kind} programs"] += 1
        outcomes = proofs(plan, ALL)
        found = are_proved(outcomes)
        held = most_held(plan)
        for outcome in outcomes.values():
            # What is told of a plan that stands still is worked out with its verdict.
            if isinstance(outcome, CompileError):
                assert str(outcome)
            elif held is not None:
                tally["peaks"] += 1
                assert list(outcome.peak_activations) == held, as_case(plan)
        for transport, right in right_on(plan, ALL).items():
            tally[f"{transport} {'right' if right else 'wrong'}"] += 1
            if found[transport] != right:
                tally[f"{transport} disagreements"] += 1
                disagreements.append({transport: right} | as_case(plan))
        if any(found.values()) and follows_moments(
            plan, ideal_events(plan, plan.costs)
        ):
            tally["in the order of their moments"] += 1
            standing = stand_still(plan)
            assert not standing, (standing, as_case(plan))
    assert not disagreements, json.dumps(disagreements)
    # Of those each rank batches its own way.
    assert tally["in the order of their moments"] or kind == "batched"
    assert tally["peaks"]
    assert all(
        tally[f"{transport} {word}"]
        for transport in TRANSPORTS
        for word in ("right", "wrong")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_schedule_is_proved_for_its_transport_as_for_many(kind: str) -> None:
    """Each plan for one transport, in turn."""
    seen = set()
    for number, plan in enumerate(damaged_plans(KINDS[kind], 300, random.Random(kind))):
        transport = ALL[number % len(ALL)]
        right = verdict(plan, transport)
        assert verdicts(plan)[transport] == right, (transport, as_case(plan))
        seen.add((transport, right))
    assert len(seen) == 2 * len(ALL)


def turned_round(schedule: Schedule) -> Schedule:
    """The same schedule, with its ranks numbered from the last one on."""
    last = len(schedule.ranks) - 1
    layout = schedule.layout
    turned = evolve(
        layout,
        placement=tuple(last - rank for rank in layout.placement),
        links=layout.links[::-1],
        keepers=tuple(last - rank for rank in layout.keepers[::-1]),
    )
    return evolve(schedule, layout=turned, ranks=schedule.ranks[::-1])


def makespan(schedule: Schedule, transport: str) -> float | None:
    try:
        prove(evolve(schedule, transport=transport))
    except CompileError:
        return None
    costs = Costs(p2p_time=0.5)
    return simulate(evolve(schedule, transport=transport), costs).timeline.makespan


@pytest.mark.parametrize("kind", ["random", "batched", "featured"])
def test_the_numbers_of_ranks_do_not_matter(kind: str) -> None:
    """So the first rank may have a transfer in front as well as an op."""
    for number, plan in enumerate(
        damaged_plans(KINDS[kind], 60, random.Random(f"{kind} turned"))
    ):
        transport = ALL[number % len(ALL)]
        assert makespan(plan, transport) == makespan(turned_round(plan), transport)


def test_what_is_portable_is_right_everywhere_and_strict_transports_allow_less(
    block: int,
) -> None:
    """`nccl` itself asks for more than `portable`, the order of first uses."""
    # What is right on the left is right on all on the right.
    weaker = {
        "portable": [
            "blocking",
            "gloo",
            "nccl-eager",
            "nccl-edge",
            "buffered:1",
            "buffered",
        ],
        "blocking": ["nccl-eager", "buffered:1"],
        "nccl-eager": ["nccl-edge"],
        "nccl-edge": ["gloo"],
        "nccl": ["gloo"],
        "buffered:1": ["buffered:2"],
        "buffered:2": ["buffered"],
        "buffered": ["nccl-edge"],
    }
    seen = set()
    for plan in damaged_plans(
        one_of(gallery(((3, 4), (4, 4)))), 30, random.Random(block)
    ):
        right = verdicts(plan)
        for transport, others in weaker.items():
            if right[transport]:
                assert all(right[other] for other in others), as_case(plan)
        seen.add(tuple(right.values()))
    assert len(seen) > 1


@pytest.mark.parametrize(
    "sizes", [((2, 2), (3, 6)), ((4, 4), (4, 8)), ((6, 12), (8, 8))]
)
@pytest.mark.slow
def test_portable_plans_run_on_every_edge(sizes: tuple[tuple[int, int], ...]) -> None:
    """By the whole event graph, which the quick proof of a plan leaves out: as they are, and with
    their exchanges fused.
    """
    plans = gallery(sizes, slices=2)
    assert len(plans) > 40
    for plan in plans:
        assert plan.transport == "portable"
        for each in (plan, fuse(plan)) if verdict(fuse(plan), "portable") else (plan,):
            assert run_on(each, each.costs, NCCL_EDGE).graph.is_whole


@pytest.mark.slow
def test_what_goes_one_after_the_other_takes_longer() -> None:
    """A lane for each direction, one for each two ranks, one for all: by the same plan, without
    batches, each takes as long as the one before or longer, and the ideal no longer than any.
    """
    # From the most lanes to the fewest.
    lanes = ("nccl-edge", "nccl", "nccl-eager")
    seen = []
    for plan in gallery(((3, 6), (4, 8)), slices=2):
        if plan.columns.has_batches or plan.stream:
            continue
        costs = Costs(p2p_time=0.7)
        plans = [evolve(plan, transport=name) for name in lanes]
        takes = [
            simulate(plan, costs, ideal=True),
            *(simulate(each, costs) for each in plans),
        ]
        makespans = [each.timeline.makespan for each in takes]
        assert makespans == sorted(makespans), plan.name
        seen.append(len(set(makespans)))
    # In some all three differ, and none of them is ideal.
    assert max(seen) == 4


@pytest.mark.slow
def test_warnings_are_of_what_other_transports_refuse() -> None:
    """Batches whose other side is none are not portable; receives in another order are right on
    gloo only.
    """
    seen = set()
    explicit = [
        plan
        for plan in gallery(((2, 2), (3, 4)))
        if plan.source.path.endswith("1f1b_explicit.sched")
    ]
    for mutant in damaged_plans(one_of(explicit), 300, random.Random("warnings")):
        right = {
            transport for transport, is_right in verdicts(mutant).items() if is_right
        }
        warned = {
            name: {each.code for each in lint(evolve(mutant, transport=name))}
            for name in right
        }
        asymmetric = [name for name in right if "asymmetric-batch" in warned[name]]
        assert not ("portable" in right and asymmetric)
        assert set(asymmetric) <= {"nccl", "nccl-eager"}
        if "gloo" in right and "needs-tags" in warned["gloo"]:
            assert right == {"gloo"}
        seen |= {(name, code) for name in right for code in warned[name]}
    assert seen == {
        ("nccl", "mixed-transfers"),
        ("nccl-eager", "asymmetric-batch"),
        ("gloo", "needs-tags"),
    }


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(2, 1), (3, 2), (4, 2), (4, 3), (4, 4), (4, 8), (8, 7)]
)
def test_exchanges_hang_at_the_first_use_of_nccl(ranks: int, microbatches: int) -> None:
    """1F1B with exchanges: where 2 <= M < P, a rank without a steady state never makes a batch."""
    source = read_source(PROGRAMS / "1f1b_explicit.sched")
    params = {"ranks": ranks, "microbatches": microbatches}
    found = check_program(source, params, NAMES)
    wrong = {
        name: errors(diagnostics)[0].code
        for name, diagnostics in found.items()
        if errors(diagnostics)
    }
    assert wrong == ({"nccl": "first-use"} if 2 <= microbatches < ranks else {})


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs_that_leave_communication_to_the_compiler_run_everywhere(
    path: Path,
) -> None:
    if path.stem != "1f1b_explicit":
        assert not any(check_program(read_source(path), {}, NAMES).values())


def test_transports_are_known_by_name() -> None:
    names = (
        "it is portable, blocking, gloo, nccl, nccl-eager, nccl-edge, buffered, buffered:1 or "
        "buffered:k"
    )
    for name in (
        "mpi",
        "buffered:",
        "buffered:0",
        "buffered:x",
        "buffered:1000000000",
        "gloo:1",
        "",
    ):
        with pytest.raises(
            ValueError, match=f"there is no transport `{name}`: {names}$"
        ):
            transports(name)
    assert [each.capacity for each in transports("buffered:999999999")] == [999999999]


@pytest.mark.parametrize("name", [*NAMES, "buffered:2"])
def test_an_execution_says_on_which_transport_its_times_are(name: str) -> None:
    plan = evolve(gallery(((2, 2),), slices=2)[0], transport=name)
    assert simulate(plan).transport == ("gloo" if name == "portable" else name)
    assert simulate(plan, ideal=True).transport == "ideal"


@pytest.mark.parametrize(
    ("first", "right"),
    [
        # Sends that cross: there must be room for one.
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            {"gloo", "nccl-edge", "buffered:1", "buffered:2", "buffered"},
        ),
        # The same in one batch; by `nccl` it takes another way than the other side, which is none.
        (
            "0F0 0SEND_F0 0F1 (0SEND_F1;0RECV_B0) 0B0 0RECV_B1 0B1",
            {*TRANSPORTS} - {"nccl"},
        ),
        # A receive before the send that it depends on.
        ("0F0 0RECV_B0 0SEND_F0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", {"gloo", "nccl-edge"}),
        # Sends in another order than their receives.
        ("0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1", {"gloo"}),
    ],
)
def test_transports_by_hand(first: str, right: set[str]) -> None:
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    schedule = make_schedule((0, 1), 2, (actions_of(first), actions_of(second)))
    assert {name for name in TRANSPORTS if verdict(schedule, name)} == right


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_some_transports_block_at_a_receive(transport: str) -> None:
    """The gradient is there at 4; others do the next forward in between."""
    first = "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1"
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    schedule = make_schedule((0, 1), 2, (actions_of(first), actions_of(second)))
    bars = simulate(evolve(schedule, transport=transport)).timeline.ranks[0]
    blocks = transport.startswith(("blocking", "buffered"))
    # F and B of microbatch 0 on rank 1 take 1 and 2, after rank 0's F of 1: the gradient is there
    # at 4.
    assert [(str(bar), bar.start) for bar in bars[:2]] == [
        ("0F0", 0),
        ("0F1", 4 if blocks else 1),
    ]


def test_a_skip_has_not_the_number_of_a_stage_behind_the_last() -> None:
    """Stage 3 is the last, and 4 the first skip: its backward waits for no gradient of that."""
    first = "0F0 (0SEND_F0;4SEND_F0;3RECV_F0) 4RECV_B0 3F0 3B0 3SEND_B0 0RECV_B0 0B0"
    second = "1RECV_F0 1F0 4RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 4SEND_B0 1I0 1SEND_B0 1W0"
    ranks = (actions_of(first), actions_of(second))
    schedule = make_schedule((0, 1, 1, 0), 1, ranks, ((0, 2), (0, 3)))
    assert verdict(schedule, "gloo")
    assert right_on(schedule, ["gloo"]) == {"gloo": True}


@pytest.mark.parametrize(
    ("transport", "start"), [("nccl-edge", 3), ("gloo", 3), ("nccl-eager", 12)]
)
def test_by_edges_an_op_waits_for_what_it_needs_of_a_batch(
    transport: str, start: float
) -> None:
    """Rank 1 receives F2 at 3, while what it sends in the same batch is received at 12."""
    texts = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 (1SEND_F1;1RECV_F2) 1F2 1SEND_F2",
        "2RECV_F0 2F0 2RECV_F1 2F1 2RECV_F2 2F2",
    )
    schedule = make_schedule((0, 1, 2), 3, tuple(map(actions_of, texts)))
    timeline = simulate(
        evolve(schedule, transport=transport), Costs(forward_times=(1, 1, 10))
    ).timeline
    assert timeline.ranks[1][2].start == start


PLACES = (Span(0, 1), Span(1, 2), Span(2, 3))


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("0F0 0B0 0SEND_B0", "unmatched-send", "0SEND_B0"),
        ("0F0 0RECV_F0 0B0", "unmatched-receive", "0RECV_F0"),
    ],
)
def test_a_transfer_must_have_another_end(text: str, code: str, word: str) -> None:
    with pytest.raises(CompileError) as caught:
        prove(
            evolve(
                make_schedule((0,), 1, (parse_actions(text, [0, 1, 2]),)), spans=PLACES
            )
        )
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (code, f"`{word}` has no other rank to reach")
    assert [label.span for label in found.labels] == [PLACES[text.split().index(word)]]


#: Ranks that stand at the first use of different communicators; and one that never comes to a
#: batch.
FIRST_USES = {
    "cycle": (
        (0, 1, 2, 0),
        1,
        [
            "3RECV_F0 0F0 0SEND_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
            "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
            "2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0",
        ],
    ),
    "never": (
        (0, 1, 2),
        2,
        [
            "0F0 0SEND_F0 0F1 (0SEND_F1;0RECV_B0) 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 (1SEND_B0;1RECV_F1) 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1",
            "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
        ],
    ),
    # Rank 1 would come to a batch later.
    "never_beside_a_cycle": (
        (1, 2, 3, 1, 0),
        2,
        [
            "(4RECV_F0;4RECV_F1) 4F0 4B0 4SEND_B0 4F1 4B1 4SEND_B1",
            "3RECV_F0 0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1 (3SEND_F0;3SEND_F1) 3RECV_B0 3B0 3SEND_B0 3RECV_B1 3B1 "
            "3SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
            "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1",
        ],
    ),
}


@pytest.mark.parametrize("name", FIRST_USES)
def test_messages_of_first_uses(name: str, golden: Callable[[str, Path], None]) -> None:
    placement, microbatches, texts = FIRST_USES[name]
    schedule = make_schedule(placement, microbatches, tuple(map(actions_of, texts)))
    assert verdict(schedule, "gloo")
    with pytest.raises(CompileError) as caught:
        prove(evolve(schedule, transport="nccl"))
    golden(f"{caught.value}\n", DIAGNOSTICS / f"first_use_{name}.txt")


RECORDED = json.loads((CASES / "deadlock.json").read_text())
RECORDED |= json.loads((CASES / "disagreements.json").read_text())
#: The recorded models' names; `pair_fifo` is `nccl` where every transfer is issued alone.
MODELS = {
    "blocking": "blocking",
    "pair_fifo": "nccl",
    "rank_fifo": "nccl-eager",
    "unordered": "gloo",
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_verdicts(name: str) -> None:
    """Plans with their verdicts from an independent checker, for each model of a transport."""
    case = RECORDED[name]
    batches = any("(" in text for text in case["ranks"])
    ranks = tuple(map(actions_of, case["ranks"]))
    schedule = make_schedule(tuple(case["placement"]), case["microbatches"], ranks)
    for model, recorded in case["verdicts"].items():
        if model != "pair_fifo" or not batches:
            assert verdict(schedule, MODELS.get(model, model)) == (recorded == "ok"), (
                model
            )


MANY = """schedule many {
    param ranks = 2
    param microbatches = 4
    rank r {
        if r == 0 { for m in 0 .. microbatches { F(m) } overlap { %s } }
        if r == 1 { overlap { %s } for m in 0 .. microbatches { F(m) } }
    }
}
"""


@pytest.mark.core
@pytest.mark.parametrize(
    ("transport", "most"),
    [
        ("portable", 256),
        ("nccl", 256),
        ("nccl-eager", 256),
        ("nccl-edge", inf),
        ("gloo", inf),
        ("blocking", inf),
    ],
)
def test_nccl_takes_so_many_transfers_as_one(transport: str, most: float) -> None:
    """Of more, it may put a send into another kernel than its receive."""
    for size in (256, 257):
        send, receive = (
            " ".join(f"{word} F({m})" for m in range(size)) for word in ("send", "recv")
        )
        program = MANY % (send, receive)
        params = {"microbatches": size}
        if size <= most:
            compile(program, params, forward_only=True, transport=transport)
            continue
        with pytest.raises(CompileError) as caught:
            compile(program, params, forward_only=True, transport=transport)
        wrong = caught.value.diagnostics
        assert [each.code for each in wrong] == ["batch-size", "batch-size"]
        assert "issues 257 transfers as one batch, from `0SEND_F0` on" in str(wrong[0])
