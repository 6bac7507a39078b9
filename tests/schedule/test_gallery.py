"""The shipped programs: golden plans, recorded cases, closed forms, and what they refuse."""

import json
import random
import re
from collections.abc import Callable
from itertools import product, takewhile
from pathlib import Path

import pytest

from schedlang import CompileError, Costs, Kind, Plan, compile, read_source, simulate
from schedlang.files.programs import families, names
from schedlang.report.views.terminal import draw
from tests.support.commands import schedc
from tests.support.paths import CASES, GALLERY, GOLDEN, PROGRAMS
from tests.support.sizes import sizes

# The recorded cases, from an independent simulator, by the name of their family.
FAMILIES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "eager-1f1b": "eager_1f1b",
    "interleaved": "interleaved_1f1b",
    "looped-bfs": "looped_bfs",
    "zb-h1": "zb_h1",
    "zb-h2": "zb_h2",
    "chimera": "chimera",
    "gems": "gems",
    "bitpipe": "bitpipe",
    "dualpipe": "dualpipe",
    "dualpipev": "dualpipe_v",
    "seq1f1b": "seq1f1b",
}
PARAMETERS = {
    "P": "ranks",
    "M": "microbatches",
    "v": "chunks",
    "N": "group",
    "k": "slices",
    "w": "waves",
}
RECORDED = json.loads((CASES / "schedules.json").read_text())


def program(name: str, forward_only: bool = False, **params: int) -> Plan:
    return compile(name, params, forward_only=forward_only)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_golden_plan(path: Path, golden: Callable[[str, Path], None]) -> None:
    plan = compile(read_source(path))
    execution = simulate(plan, Costs())
    text = "\n".join(
        [
            *(actions.text() for actions in plan.ranks),
            "",
            draw(execution.timeline, plan.names, 120),
            "",
            f"makespan {execution.timeline.makespan:g}, bubble over ideal {execution.timeline.bubble_over_ideal:.4f}",
            f"peak activations {' '.join(map(str, execution.peak_activations))}",
            "",
        ]
    )
    golden(text, GOLDEN / f"{path.stem}.txt")


def recorded(text: str, plan: Plan) -> str:
    """A recorded op, `Fp1s3m0+Bp0s1m2` or `Fp0s3m0k1`, as a plan has it: stages and slices are
    counted through.
    """
    words = []
    for op in text.split("+"):
        match = re.fullmatch(r"([A-Z])p(\d)s(\d+)m(\d+)(?:k(\d+))?", op)
        assert match
        stage = plan.layout.pipelines[int(match[2])].start + int(match[3])
        words.append(
            f"{stage}{match[1]}{int(match[4]) * plan.layout.slices + int(match[5] or 0)}"
        )
    return words[0] if len(words) == 1 else f"({';'.join(words)})OVERLAP_F_B"


def parameters(name: str) -> dict[str, int]:
    """The parameters in a recorded case's name."""
    return {
        PARAMETERS[letter]: int(value)
        for letter, value in re.findall(r" ([PMvNkw])(\d+)", name)
    }


@pytest.mark.parametrize(
    "name", [name for name in RECORDED if name.split()[0] in FAMILIES]
)
def test_recorded_case(name: str) -> None:
    case = RECORDED[name]
    latency = (
        json.loads(name[name.index("{") :]).get("lat", 0.0) if "{" in name else 0.0
    )
    plan = program(FAMILIES[name.split()[0]], **parameters(name))

    order = [" ".join(recorded(op, plan) for op in rank) for rank in case["order"]]
    assert [actions.compute().text() for actions in plan.ranks] == order
    execution = simulate(plan, Costs(p2p_time=latency))
    assert execution.timeline.makespan == pytest.approx(case["makespan"])
    assert execution.timeline.busy == pytest.approx(case["busy"])
    assert execution.timeline.bubble_over_ideal == pytest.approx(case["bubble_rate"])
    assert execution.timeline.bubble_over_makespan == pytest.approx(case["bubble_frac"])
    assert list(execution.peak_activations) == case["peak"]


@pytest.mark.parametrize(
    "name", [name for name in RECORDED if name.startswith("hanayo")]
)
def test_hanayo_is_no_worse_than_the_recorded_order(name: str) -> None:
    """The recorded orders come from a greedy search: the same work in the same places, at most as
    long and as large.
    """
    case = RECORDED[name]
    plan = program("hanayo", **parameters(name))
    execution = simulate(plan, Costs())
    assert [sorted(actions.compute().text().split()) for actions in plan.ranks] == [
        sorted(recorded(op, plan) for op in rank) for rank in case["order"]
    ]
    assert execution.timeline.makespan <= case["makespan"]
    assert all(
        ours <= theirs
        for ours, theirs in zip(execution.peak_activations, case["peak"], strict=True)
    )


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_in_waves(waves: int) -> None:
    """Whole units idle for 4 (ranks - 1), whatever the waves; no size needs more memory than 1F1B."""
    for ranks in range(1, 7):
        for microbatches in range(1, 3 * ranks + 1):
            execution = simulate(
                program("hanayo", ranks=ranks, microbatches=microbatches, waves=waves),
                Costs(),
            )
            assert max(execution.peak_activations) <= 2 * waves * ranks
            if microbatches % ranks == 0:
                assert execution.timeline.makespan == 6 * waves * microbatches + 4 * (
                    ranks - 1
                )
    assert refusal("hanayo", waves=0) == ["require"]


#: Bubble and peak activations at unit costs, of 2 microbatches or more per rank (zero-bubble
#: papers, see the programs).
CLOSED_FORMS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "gpipe": lambda p, m: (3 * (p - 1), m),
    "1f1b": lambda p, m: (3 * (p - 1), p),
    "eager_1f1b": lambda p, m: (3 * (p - 1), 2 * p - 1),
    "interleaved_1f1b": lambda p, m: (3 * (p - 1), 3 * p - 1),
    "interleaved_low_memory": lambda p, m: (p - 1, 2 * p),
    "seq1f1b": lambda p, m: (3 * (p - 1), p + 1),
    "zb_h1": lambda p, m: (p - 1, p),
    "zb_h2": lambda p, m: (p - 1, 2 * p - 1),
    "zb_1p": lambda p, m: (p - 1, p),
    "zb_v": lambda p, m: (p - 1, 2 * p),
    "v_zb": lambda p, m: (p - 1, 2 * p),
    "v_half": lambda p, m: (max(3 * p - (4 if p % 2 else 7), 1), 2 * ((p + 2) // 2)),
    "v_min": lambda p, m: (max(4 * p - (7, 5, 9)[p % 3], 1), 2 * ((p + 4) // 3)),
}


@pytest.mark.parametrize("ranks", sizes(range(2, 17), lambda ranks: ranks > 9))
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form_at_unit_costs(name: str, ranks: int) -> None:
    """The flush's bubble in slots, and the highest peak; by span, ZB-H2, ZB-2p and ZB-V have no
    bubble at all.
    """
    microbatches = 2 * ranks
    execution = simulate(program(name, ranks=ranks, microbatches=microbatches))
    timeline = execution.timeline
    found = timeline.makespan - max(timeline.busy), max(execution.peak_activations)
    assert found == CLOSED_FORMS[name](ranks, microbatches)


@pytest.mark.parametrize("ranks", sizes(range(2, 17), lambda ranks: ranks > 9))
@pytest.mark.parametrize("name", ["zb_h2", "zb_2p", "zb_v"])
def test_no_bubble_by_span(name: str, ranks: int) -> None:
    timeline = simulate(program(name, ranks=ranks, microbatches=2 * ranks)).timeline
    assert timeline.span == max(timeline.busy)
    assert timeline.makespan == timeline.span + ranks - 1


@pytest.mark.parametrize("ranks", sizes(range(2, 33), lambda ranks: ranks > 12))
def test_two_thirds_of_1f1bs_memory(ranks: int) -> None:
    """A peak of two thirds at every number of ranks, rounded up to whole microbatches, or one
    microbatch more.
    """
    claim = "assert peak() <= (2 * ranks + 1) / 3 + 1"
    assert claim in (PROGRAMS / "two_thirds_memory.sched").read_text()
    execution = simulate(
        program("two_thirds_memory", ranks=ranks, microbatches=2 * ranks)
    )
    timeline = execution.timeline
    assert max(execution.peak_activations) == (2 * ranks + 1) // 3 + 1
    assert timeline.makespan - max(timeline.busy) <= max(2 * ranks - 3, 1)


@pytest.mark.parametrize("ranks", sizes(range(3, 17), lambda ranks: ranks > 8))
def test_zb_v_with_few_microbatches(ranks: int) -> None:
    """With two microbatches as the published generator: the second one is two slots behind the
    first, and its weight gradient comes last. More of them never take less time.
    """
    makespans = [
        simulate(
            program("zb_v", ranks=ranks, microbatches=microbatches)
        ).timeline.makespan
        for microbatches in range(1, 2 * ranks)
    ]
    assert makespans[1] == 4 * ranks + (4 if ranks == 3 else 3)
    assert makespans == sorted(makespans)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16])
def test_closed_forms(ranks: int, microbatches: int) -> None:
    """(M + P - 1)(F + B) for GPipe and 1F1B; M(F + B + W) + (P - 1)(F + B - W) for ZB-H1 where M >=
    P.
    """
    costs = Costs(
        forward_times=(3,), backward_times=(5,), input_times=(3,), weight_times=(2,)
    )
    for name in ("gpipe", "1f1b", "1f1b_explicit", "eager_1f1b"):
        execution = simulate(
            program(name, ranks=ranks, microbatches=microbatches), costs
        )
        assert execution.timeline.makespan == (microbatches + ranks - 1) * 8
    one_f_one_b = simulate(
        program("1f1b", ranks=ranks, microbatches=microbatches), costs
    )
    assert list(one_f_one_b.peak_activations) == [
        min(ranks - rank, microbatches) for rank in range(ranks)
    ]
    if microbatches >= ranks:
        zero_bubble = simulate(
            program("zb_h1", ranks=ranks, microbatches=microbatches), Costs()
        )
        assert zero_bubble.timeline.makespan == 3 * microbatches + ranks - 1
        assert max(zero_bubble.peak_activations) == ranks


def refusal(name: str, **params: int) -> list[str]:
    """The codes with which a program is refused, or none."""
    try:
        program(name, **params)
    except CompileError as error:
        return [each.code for each in error.diagnostics]
    return []


# Where a program runs; everywhere else it refuses with its own reason.
LEGAL = {
    "1f1b_uneven": lambda ranks, microbatches: ranks == 4,
    "interleaved_1f1b": lambda ranks, microbatches: (
        microbatches >= ranks and microbatches % ranks == 0
    ),
    "interleaved_overlap": lambda ranks, microbatches: (
        microbatches >= ranks and microbatches % ranks == 0
    ),
    "interleaved_low_memory": lambda ranks, microbatches: microbatches % ranks == 0,
    "pipe_offload": lambda ranks, microbatches: microbatches % ranks == 0,
    "af_pipe": lambda ranks, microbatches: (
        ranks > 1 and microbatches % (2 * (ranks // 2)) == 0
    ),
    "bigmac": lambda ranks, microbatches: microbatches % ranks == 0,
    "chimera": lambda ranks, microbatches: ranks % 2 == 0 and microbatches % ranks == 0,
    "bitpipe": lambda ranks, microbatches: ranks % 2 == 0 and microbatches % ranks == 0,
    "gems": lambda ranks, microbatches: microbatches % 2 == 0,
    "dualpipe": lambda ranks, microbatches: (
        ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks
    ),
    "dualpipe_v": lambda ranks, microbatches: microbatches >= 2 * ranks,
    "pipedream": lambda ranks, microbatches: microbatches == 1,
    "pipedream_vertical": lambda ranks, microbatches: microbatches == 1,
    "pipedream_2bw": lambda ranks, microbatches: microbatches >= ranks - 1,
    "pipedream_replicated": lambda ranks, microbatches: (
        ranks > 1 and microbatches % (ranks - 1) == 0
    ),
    "helixpipe": lambda ranks, microbatches: (
        ranks > 1 and microbatches % (2 * ranks) == 0
    ),
    "interleaved_zb": lambda ranks, microbatches: microbatches % ranks == 0,
    "weipipe": lambda ranks, microbatches: ranks > 1 and microbatches % ranks == 0,
    "roundpipe": lambda ranks, microbatches: microbatches % ranks == 0,
    "recycle": lambda ranks, microbatches: (
        (ranks + 1) % 3 == 0 and microbatches % 6 == 0
    ),
    "stp": lambda ranks, microbatches: microbatches >= 3 * ranks - 1,
    "wpipe": lambda ranks, microbatches: microbatches % ranks == 0,
    "zeropp": lambda ranks, microbatches: microbatches % ranks == 0,
}


def legal(name: str, ranks: int, microbatches: int) -> bool:
    return name not in LEGAL or LEGAL[name](ranks, microbatches)


@pytest.mark.parametrize("ranks", sizes(range(1, 8), lambda ranks: ranks > 4))
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_size_compiles_or_is_refused_with_its_reason(
    path: Path, ranks: int
) -> None:
    for microbatches in range(1, 4 * ranks + 1):
        codes = refusal(path.stem, ranks=ranks, microbatches=microbatches)
        is_legal = legal(path.stem, ranks, microbatches)
        assert codes == ([] if is_legal else ["require"]), microbatches


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 3), (2, 5), (4, 3), (4, 8), (5, 20)]
)
def test_eager_1f1b_is_the_adaptive_schedule_of_dynapipe(
    ranks: int, microbatches: int
) -> None:
    """In each cycle a rank runs a backward and a forward of those that had come by its begin."""
    orders: list[list[str]] = [[] for _ in range(ranks)]
    come = {("F", 0): list(range(microbatches))}
    while any(come.values()):
        begin = {place: list(waiting) for place, waiting in come.items()}
        for rank in range(ranks):
            for kind, following in (("B", rank - 1), ("F", rank + 1)):
                if not begin.get((kind, rank)):
                    continue
                microbatch = begin[kind, rank][0]
                come[kind, rank].remove(microbatch)
                orders[rank].append(f"{rank}{kind}{microbatch}")
                turns = kind == "F" and following == ranks
                target = ("B", rank) if turns else (kind, following)
                if following >= 0:
                    come.setdefault(target, []).append(microbatch)
    plan = compile("eager_1f1b", {"ranks": ranks, "microbatches": microbatches})
    assert [actions.compute().text().split() for actions in plan.ranks] == orders


@pytest.mark.parametrize("room", [1, 2, 4, 7, 8])
def test_dynapipe_takes_no_longer_than_orders_for_all_batches(room: int) -> None:
    """In the room that it is given, however long the microbatches of a batch are."""
    rng = random.Random(room)
    size = {"ranks": 4, "microbatches": 12}
    for _ in range(8):
        lengths = [rng.lognormvariate(0.0, 0.7) for _ in range(12)]
        costs = Costs(
            forward_times=(lengths,),
            backward_times=([2 * length for length in lengths],),
        )
        plan = compile("dynapipe", size | {"room": room}, costs)
        execution = simulate(plan, costs)
        assert max(execution.peak_activations) <= room
        in_same_room = {4: "1f1b", 7: "eager_1f1b", 8: "eager_1f1b"}
        if room in in_same_room:
            other = simulate(compile(in_same_room[room], size, costs), costs)
            assert execution.timeline.makespan <= other.timeline.makespan


@pytest.mark.parametrize(
    ("layers", "layer", "loss", "transfer", "slots", "makespan"),
    [
        (28, (7.429, 15.831), (22.0655, 43.707), 1.6, (4, 10), 2286.0170),
        (32, (18.50370313, 41.20659375), (37.2255, 74.501), 3.2, (6, 16), 6100.5450),
        (94, (43.016, 58.376), (42.444, 43.294), 3.2, (47, 94), 28250.0320),
    ],
)
def test_roundpipe_takes_as_long_as_its_authors_have_simulated(
    layers: int,
    layer: tuple[float, float],
    loss: tuple[float, float],
    transfer: float,
    slots: tuple[int, int],
    makespan: float,
) -> None:
    """Models of 1.7, 8 and 235 billion weights; the file `log` of their simulator."""
    plan = program(
        "roundpipe",
        ranks=8,
        microbatches=16,
        layers=layers,
        forwards=slots[0],
        backwards=slots[1],
    )
    times = [
        [
            loss[kind] if piece == layers else layer[kind]
            for piece in plan.layout.piece_of
        ]
        for kind in range(2)
    ]
    costs = Costs(
        forward_times=tuple(times[0]),
        backward_times=tuple(times[1]),
        p2p_time=transfer,
    )
    found = simulate(plan, costs).timeline.makespan
    assert found == pytest.approx(makespan, abs=1e-4)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_forward_only(path: Path) -> None:
    """Every training program has an inference plan in it that proves: its forwards, in the same
    order.

    Of a schedule without a flush, they are those of one update.
    """
    sizes = [(1, 3), (2, 4), (3, 6), (3, 7), (4, 8)]
    for ranks, microbatches in [size for size in sizes if legal(path.stem, *size)]:
        training = program(path.stem, ranks=ranks, microbatches=microbatches)
        plan = program(
            path.stem, forward_only=True, ranks=ranks, microbatches=microbatches
        )
        for actions, inference in zip(training.ranks, plan.ranks, strict=True):
            forwards = [
                row
                for row in map(actions.row, range(len(actions)))
                if row[0] in (Kind.F, Kind.EXCHANGE_F)
            ]
            forwards = [
                row[:3] for row in forwards if row[2] < plan.layout.units(row[1])
            ]
            compute = inference.compute().without_collectives()
            assert [compute.row(index)[:3] for index in range(len(compute))] == forwards
        assert not {Kind.SEND_B, Kind.RECV_B} & {
            kind for actions in plan.ranks for kind in actions.kind
        }


@pytest.mark.core
@pytest.mark.parametrize("name", ["forward_only", "decoding"])
def test_claims_of_a_program_without_backwards_are_judged(name: str) -> None:
    """Also where it is said that an inference is meant; those of a training program are not."""
    text = (
        (PROGRAMS / f"{name}.sched").read_text().replace("bubble ==", "bubble == 1 +")
    )
    with pytest.raises(CompileError) as caught:
        compile(text, forward_only=True)
    assert [each.code for each in caught.value.diagnostics] == ["assert"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b_explicit"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (4, 1), (4, 8), (7, 16)])
def test_forward_only_takes_a_forward_per_microbatch_and_rank(
    name: str, ranks: int, microbatches: int
) -> None:
    plan = program(name, forward_only=True, ranks=ranks, microbatches=microbatches)
    assert simulate(plan, Costs()).timeline.makespan == microbatches + ranks - 1


@pytest.mark.core
def test_a_round_of_decoding_takes_as_long_as_its_groups_or_its_ranks() -> None:
    """Whichever is more; and the claims hold whatever the prompts take."""
    for ranks, microbatches, rounds in product((1, 2, 4), (1, 2, 3, 6), (1, 2, 5)):
        sizes = {"ranks": ranks, "microbatches": microbatches, "rounds": rounds}
        timeline = simulate(program("decoding", prefill=1, **sizes)).timeline
        of_a_round = max(ranks, microbatches)
        last = microbatches + ranks - 1
        assert timeline.makespan == (rounds - 1) * of_a_round + last
        assert refusal("decoding", prefill=7, **sizes) == []


def test_interleaved_groups() -> None:
    """Megatron's rule: a group of ranks..microbatches, and a last group of at least `ranks`."""
    for group in range(1, 12):
        for microbatches in range(1, 12):
            runs = 3 <= group <= microbatches and not 0 < microbatches % group < 3
            codes = refusal(
                "interleaved_1f1b", ranks=3, microbatches=microbatches, group=group
            )
            assert codes == ([] if runs else ["require"])


def test_first_lines_say_what_and_where_from() -> None:
    for path in GALLERY:
        lines = path.read_text().splitlines()
        comment = " ".join(takewhile(lambda line: line.startswith("#"), lines))
        assert re.search(
            r"\(.*(arXiv|19|20|order of|GPipe|Alpa|visualizer).*\)|, as ", comment
        ), path
        assert ": " in comment, (
            f"{path}: the first clause of the comment is the program's row in the gallery's table"
        )
        assert len(lines) <= 60, path


def test_the_families_have_every_program_once() -> None:
    groups, starters = families()
    listed = [name for family in groups for name in family.programs]
    assert sorted(listed) == names() == [path.stem for path in GALLERY]
    assert len(starters) == 6
    assert set(starters) <= set(listed)
    assert all(use for family in groups for use in family.programs.values())


def test_the_gallery_is_listed_by_families() -> None:
    """By the command and by the page, with the same words; the first ones stand first."""
    page = (PROGRAMS / "README.md").read_text(encoding="utf-8")
    shown = schedc("gallery").stdout
    groups, starters = families()
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == starters
    assert re.findall(r"^- \[(\w+)\]", page, re.M) == starters
    assert re.findall(r"^## (.*)$", page, re.M)[1:-1] == [each.name for each in groups]
    sections = re.findall(
        r"^### (\w+)\n\n\*\*(.*?)\.\*\*.*\n\n```text\n(?:rank 0| *time)", page, re.M
    )
    for family in groups:
        assert f"\n{family.name}: {family.meaning}\n" in shown
        for name, use in family.programs.items():
            assert re.search(rf"^  {name} +{re.escape(use)}$", shown, re.M)
            assert (name, f"{use[0].upper()}{use[1:]}") in sections
    (entry,) = json.loads(schedc("gallery", "bpipe", "--json").stdout)
    assert entry["family"] == groups[0].name
    assert entry["use"] == groups[0].programs["bpipe"]
    # A colon in the title of a paper ends no clause.
    assert entry["summary"].endswith('Large Language Models")')


def test_the_table_has_all_programs() -> None:
    page = (PROGRAMS / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\]\(#\1\) \| (.*) \|$", page, re.M))
    assert sorted(rows) == [path.stem for path in GALLERY]
    assert rows["1f1b"] == "14 | 4 x 8 | 33 | 37.5% | 27.3% | 27.3% | 4 | 1"
