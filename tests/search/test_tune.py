"""The search for a program and its parameters: what is tried, what is left out, what is printed."""

import json
import shlex
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang import Kind, compile, read_plan, simulate
from schedlang.extras.noise.noise import Noise
from schedlang.extras.noise.runs import simulate_runs
from schedlang.extras.search.partition.layer_costs import divided
from schedlang.extras.search.tune.candidates import Candidate, Training, candidates
from schedlang.extras.search.tune.layer_sources import layers_of_costs
from schedlang.extras.search.tune.stage_costs import Experts, Layers
from schedlang.extras.search.tune.tried_programs import Program, read_programs, unlike
from schedlang.extras.search.tune.tuning import Tuning, tune
from schedlang.extras.search.tune.tuning_text import Units, tuning_text
from schedlang.files.programs import path_of
from schedlang.schedule.costs import Costs, read_costs
from tests.support.commands import schedc
from tests.support.paths import CASES, GALLERY, GOLDEN, PROGRAMS
from tests.support.tables import rows

pytestmark = pytest.mark.slow

#: Twelve layers on four ranks: what its parts take is measured in some unit.
MEASURED = {
    "forward_times": [3, 3, 3, 4],
    "input_times": [3, 4, 4, 4],
    "weight_times": [2, 3, 3, 3],
    "boundary_bytes": 1e6,
    "bandwidth_in_node": 1e7,
    "activation_bytes": [3e9, 3e9, 3e9, 4e9],
    "kept_bytes": [2e9, 2e9, 2e9, 3e9],
    "weights_bytes": [5e9, 4e9, 4e9, 5e9],
}
#: Some of each kind: with and without chunks, passes, limits of memory, overlaps, two pipelines.
FEW = [
    "1f1b",
    "interleaved_low_memory",
    "zb_1p",
    "zb_h2",
    "two_thirds_memory",
    "dualpipe",
]
#: All programs of the gallery.
ALL = [path.stem for path in GALLERY]
#: CONFIG of the command.
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
}


def programs(names: list[str]) -> list[Program]:
    return read_programs(str(path_of(name)) for name in names)


def training(
    costs: Costs, layers: int, ranks: int, batch: int, memory: float = inf
) -> Training:
    return Training(
        [layers_of_costs(costs, 1, [layers])], ranks, batch, memory, {}, "portable"
    )


def of_measured(
    memory: float = inf, ranks: int = 4, batch: int = 8, layers_of_stage: int = 3
) -> Training:
    costs = Costs(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in (MEASURED | {"boundary_bytes": [1e6]}).items()
        }
    )
    return training(costs, layers_of_stage, ranks, batch, memory)


@cache
def tuned(memory: float) -> Tuning:
    """The search among a few programs for what was measured, once for all who look at it."""
    return tune(programs(FEW), of_measured(memory))


def plan_of(candidate: Candidate) -> object:
    return compile(candidate.program.source, candidate.all_params, candidate.costs)


def fastest(tuning: Tuning, memory: float) -> float:
    fits = [result.time for result in tuning.results if result.bytes <= memory]
    return min(fits, default=inf)


def times_of_programs(tuning: Tuning) -> dict[str, float]:
    best = tuning.best_of_programs
    return {result.candidate.program.word: result.time for result in best}


numbers = st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])


@settings(max_examples=3)
@given(
    forward=st.lists(numbers, min_size=4, max_size=4),
    backward=st.lists(numbers, min_size=4, max_size=4),
    held=st.lists(numbers, min_size=4, max_size=4),
    transfer=st.sampled_from([0.0, 0.25]),
    memory=st.sampled_from([6.0, 10.0, 20.0]),
)
def test_what_is_left_out_is_no_better(
    forward: list[float],
    backward: list[float],
    held: list[float],
    transfer: float,
    memory: float,
) -> None:
    costs = Costs(
        forward_times=tuple(forward),
        backward_times=tuple(backward),
        activation_bytes=tuple(held),
        weights_bytes=(1.0,),
        p2p_time=transfer,
    )
    tried = programs(["1f1b", "gpipe", "zb_1p", "interleaved_low_memory", "dualpipe_v"])
    sought = training(costs, 2, 2, 4, memory)
    pruned = tune(tried, sought)
    whole = tune(tried, sought, prune=False)
    assert whole.left_out == 0
    assert len(whole.results) + whole.refused == whole.candidates == pruned.candidates
    assert len(pruned.results) + pruned.refused + pruned.left_out == pruned.candidates
    assert times_of_programs(pruned) == pytest.approx(times_of_programs(whole))
    # Also with less memory than the search was given: the frontier has those that then are the
    # fastest.
    for share in range(1, 9):
        level = memory * share / 8
        assert fastest(pruned, level) == pytest.approx(fastest(whole, level))


def test_no_result_is_better_than_its_bounds() -> None:
    tuning = tune(
        programs(ALL), of_measured(ranks=2, batch=4, layers_of_stage=1), prune=False
    )
    words = {result.candidate.program.word for result in tuning.results}
    alike = {program.word for program in programs(ALL) if not unlike(program, {})}
    assert words == alike
    for result in tuning.results:
        bounds = result.candidate.bounds
        assert bounds.time <= result.time * (1 + 1e-9), result.candidate
        assert bounds.bytes <= result.bytes, result.candidate


def test_some_bounds_are_reached() -> None:
    """Of one rank nothing waits; so its work is its time."""
    tuning = tune(programs(["1f1b"]), of_measured(ranks=1), prune=False)
    (result,) = tuning.results
    assert result.time == pytest.approx(result.candidate.bounds.time)


def test_the_figures_are_those_of_the_compiled_plan_and_fit() -> None:
    best = tuned(24e9).best_of_programs
    assert len(best) > 4
    for result in best:
        plan = plan_of(result.candidate)
        execution = simulate(plan, result.candidate.costs)
        assert execution.timeline.makespan == result.makespan
        assert execution.peak_bytes == result.held
        assert max(execution.peak_bytes) <= 24e9


def test_less_memory_is_never_faster() -> None:
    times = []
    for memory in (12e9, 24e9, inf):
        times.append(fastest(tuned(memory), memory))
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_the_same_inputs_give_the_same_answer() -> None:
    def order(tuning: Tuning) -> list[tuple[str, dict[str, int], float]]:
        return [
            (result.candidate.program.word, result.candidate.all_params, result.time)
            for result in tuning.results
        ]

    again = tune(programs(FEW), of_measured(memory=24e9))
    assert order(again) == order(tuned(24e9))


def test_the_frontier_has_no_better_result_beside_it() -> None:
    tuning = tuned(inf)
    frontier = tuning.frontier
    assert frontier[0] is tuning.results[0]
    assert len(frontier) > 2

    figures = [(result.shown_time, result.bytes) for result in frontier]
    for result in tuning.results:
        time, held = result.shown_time, result.bytes
        better = [
            point
            for point in figures
            if point != (time, held) and point[0] <= time and point[1] <= held
        ]
        # A point of the frontier has none beside it, everything else has one or is as good.
        assert not better if result in frontier else better or (time, held) in figures


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs_that_train_otherwise_are_told_apart(path: Path) -> None:
    (program,) = read_programs([str(path)])
    plan = compile(path)
    others = (
        plan.is_forward_only
        or plan.kernels
        or plan.layout.skips
        or plan.layout.slices > 1
    )
    others = others or plan.layout.frozen or plan.layout.edges
    # A rank does not hold the weights of all of its stages.
    others = others or len(plan.columns.where(Kind.SEND_WEIGHTS))
    # Its stages are parts of a model that are not alike.
    others = others or len(set(plan.costs.forward_times or ())) > 1
    assert (unlike(program, {}) is not None) == bool(others)


def test_every_size_and_kind_of_parameter_is_tried() -> None:
    (program,) = programs(["pipe_offload"])
    tried = candidates(program, of_measured(ranks=8, batch=16))
    sizes = {
        (each.size.replicas, each.size.ranks, each.size.microbatches) for each in tried
    }
    # Replicas times ranks is 8 processes, and replicas times microbatches a batch of 16.
    assert sizes == {(8, 1, 2), (4, 2, 4), (2, 4, 8), (1, 8, 16)}
    values: dict[str, set[int]] = {}
    for each in tried:
        for name, value in each.params.items():
            values.setdefault(name, set()).add(value)
    assert values.keys() == {"chunks", "offloaded", "early", "least", "group"}
    # Twelve layers: so many chunks of one rank at most.
    assert values["chunks"] == {1, 3, 4, 8}
    assert len({each.bounds.time for each in tried}) > 4
    assert [each.bounds.time for each in tried] == sorted(
        each.bounds.time for each in tried
    )


def test_given_parameters_are_not_open() -> None:
    (program,) = programs(["interleaved_1f1b"])
    base = of_measured()
    fixed = Training(base.layers, 4, 8, inf, {"ranks": 2, "chunks": 3}, "portable")
    tried = candidates(program, fixed)
    assert {each.size.ranks for each in tried} == {2}
    assert {each.params["chunks"] for each in tried} == {3}
    assert len(tried) > 1


def test_costs_of_layers_add_up_to_those_of_their_stages() -> None:
    costs = Costs(
        forward_times=(2.0, 4.0),
        activation_bytes=(6.0, 8.0),
        boundary_bytes=(5.0, 5.0),
        message_memory=(3.0, 3.0),
        bandwidth_in_node=2.0,
        p2p_time=None,
    )
    layers = Layers(divided(costs, [2, 4]))
    assert layers.count == 6
    assert layers.costs.forward_times == (1, 1, 1, 1, 1, 1)
    assert layers.costs.boundary_bytes == (5,) * 6
    assert layers.costs.message_memory == (3,) * 6
    two = compile("1f1b", {"ranks": 2, "microbatches": 2}).layout
    assert layers.of_stages((2, 4), two) == costs
    replicated = compile("chimera", {"ranks": 2, "microbatches": 2}).layout
    assert layers.of_stages((2, 4), replicated).forward_times == (2, 4, 2, 4)


def test_costs_of_layers_in_decimals_add_up_exactly() -> None:
    """What is written for `--costs`; in floats, 0.1 + 0.2 is more than 0.3."""
    layout = compile("1f1b", {"ranks": 2}).layout
    layers = Layers(Costs(forward_times=(0.1, 0.2, 0.3, 0.1, 0.2, 0.1)))
    assert layers.of_stages([2, 4], layout).forward_times == (0.3, 0.7)
    whole = Layers(divided(Costs(backward_times=(0.3, 0.9)), [3]))
    assert whole.costs.backward_times == (0.1, 0.1, 0.1, 0.3, 0.3, 0.3)
    assert whole.of_stages([2, 4], layout).backward_times == (0.2, 1.0)


def test_replicas_take_time_to_sum_gradients() -> None:
    """A ring passes on 2 (n - 1) / n of the bytes; the slowest link is one between two nodes."""
    links = {
        "boundary_bytes": (0.0,),
        "ranks_per_node": 2,
        "bandwidth_in_node": 10.0,
        "bandwidth_between_nodes": 1.0,
    }
    layers = Layers(Costs(forward_times=(1.0, 1.0), **links), summed=(3.0, 4.0))

    def sums(name: str, ranks: int, all_ranks: int) -> float:
        (program,) = programs([name])
        sought = Training([layers], all_ranks, 4, inf, {"ranks": ranks}, "portable")
        return candidates(program, sought)[0].sums

    assert sums("1f1b", 2, 2) == 0
    # 7 bytes of gradients, those of both layers, where one rank has all of them; 4 are the larger
    # stage.
    assert sums("1f1b", 1, 2) == pytest.approx(2 * 1 / 2 * 7 / 10)
    assert sums("1f1b", 2, 4) == pytest.approx(2 * 1 / 2 * 4 / 1)
    assert sums("1f1b", 1, 4) == pytest.approx(2 * 3 / 4 * 7 / 1)
    # Two pipelines in one plan are replicas, too.
    assert sums("gems", 2, 2) == pytest.approx(2 * 1 / 2 * 7 / 10)


def of_experts(over: int, **links: float | int) -> Layers:
    """Two layers, the second one with experts, of which a replica sends 16 bytes to others."""
    return Layers(
        Costs(
            forward_times=(1.0, 1.0),
            backward_times=(2.0, 2.0),
            input_times=(1.0, 1.0),
            boundary_bytes=(0.0,),
            **links,
        ),
        summed=(3.0, 4.0 + 8.0 / over),
        experts=Experts(over, sent=(0.0, 16.0), gradients=(0.0, 8.0)),
    )


LINKS = {
    "ranks_per_node": 8,
    "bandwidth_in_node": 4.0,
    "bandwidth_between_nodes": 1.0,
}


@pytest.mark.parametrize(
    ("over", "ranks", "time"),
    [
        (1, 1, 0.0),
        # Three quarters of the bytes leave the rank, and stay on the node.
        (4, 2, 16 * 3 / 4 / 4),
        # Two replicas are on a node: half of the bytes go to the other two.
        (4, 4, 16 * 2 / 4 / 1),
        (4, 16, 16 * 3 / 4 / 1),
    ],
)
def test_tokens_go_to_experts_by_the_links_of_their_replicas(
    over: int, ranks: int, time: float
) -> None:
    """There and back, in the forward and in the backward."""
    costs = of_experts(over, **LINKS).with_exchanges(ranks).costs
    assert costs.forward_times == pytest.approx((1, 1 + 2 * time))
    assert costs.input_times == pytest.approx((1, 1 + 2 * time))
    assert costs.backward_times == pytest.approx((2, 2 + 2 * time))
    again = evolve(of_experts(over, **LINKS), checkpointed=True)
    assert again.with_exchanges(ranks).costs.input_times == pytest.approx(
        (1, 1 + 4 * time)
    )


def test_an_overlap_hides_the_exchange_of_tokens() -> None:
    """Of two ops, one computes while the tokens of the other are on their way."""
    layers = Layers(
        Costs(
            forward_times=(1.0,) * 4,
            backward_times=(2.0,) * 4,
            input_times=(1.0,) * 4,
            weight_times=(1.0,) * 4,
            boundary_bytes=(0.0,),
            **LINKS,
        ),
        summed=(0.0,) * 4,
        experts=Experts(2, sent=(4.0,) * 4, gradients=(0.0,) * 4),
    )
    sought = Training([layers], 4, 32, inf, {"ranks": 2}, "portable")
    tuning = tune(programs(["1f1b", "interleaved_overlap"]), sought, prune=False)
    best = times_of_programs(tuning)
    # Of a layer, a forward and a backward compute for 3 and exchange for 2; a rank has two layers.
    assert best["1f1b"] > 16 * 2 * (3 + 2)
    assert best["interleaved_overlap"] < 16 * 2 * (3 + 1)
    for result in tuning.results:
        assert result.candidate.bounds.time <= result.time * (1 + 1e-9)


def test_replicas_share_out_experts_and_sum_the_rest() -> None:
    (program,) = programs(["1f1b"])

    def tried(over: int) -> list[Candidate]:
        layers = of_experts(over, **LINKS)
        return candidates(program, Training([layers], 4, 4, inf, {}, "portable"))

    # As many replicas as there are shares, or a multiple.
    assert {each.size.replicas for each in tried(1)} == {2, 4}
    assert {each.size.replicas for each in tried(4)} == {4}
    sums = {
        over: next(c.sums for c in tried(over) if c.size.replicas == 4)
        for over in (1, 2, 4)
    }
    assert sums[1] == pytest.approx(2 * 3 / 4 * 15 / 4)
    assert sums[2] == pytest.approx((2 * 3 / 4 * 7 + 2 * 1 / 2 * 4) / 4)
    assert sums[4] == pytest.approx(2 * 3 / 4 * 7 / 4)


@pytest.mark.parametrize(
    ("per_node", "counted"),
    [
        pytest.param(2, 1, id="the second replica begins in the middle of a node"),
        pytest.param(3, 3, id="a node holds one replica"),
        pytest.param(8, 8, id="one node holds both replicas, with room to spare"),
    ],
)
def test_links_between_nodes_are_those_of_any_replica(
    per_node: int, counted: int
) -> None:
    """Two replicas of 3 ranks."""
    costs = Costs(
        forward_times=(1.0, 1.0, 1.0),
        boundary_bytes=(1.0,),
        ranks_per_node=per_node,
        bandwidth_in_node=10.0,
        bandwidth_between_nodes=1.0,
    )
    (program,) = programs(["1f1b"])
    sought = Training([Layers(costs)], 6, 4, inf, {"ranks": 3}, "portable")
    (candidate,) = candidates(program, sought)
    assert candidate.costs.ranks_per_node == counted


def test_robust_goes_by_what_few_runs_exceed() -> None:
    sought = evolve(of_measured(memory=30e9, layers_of_stage=1), jitter=0.3)
    tried = programs(["1f1b", "zb_h2", "interleaved_low_memory"])
    pruned = tune(tried, sought)
    whole = tune(tried, sought, prune=False)
    assert times_of_programs(pruned) == times_of_programs(whole)
    for result in pruned.best_of_programs:
        plan = plan_of(result.candidate)
        runs = simulate_runs(plan, Noise(jitter=0.3), result.candidate.costs)
        assert result.with_noise == runs.percentile(95) > result.makespan
    by_noise = [result.candidate.program.word for result in pruned.best_of_programs]
    times = [result.with_noise for result in pruned.best_of_programs]
    assert times == sorted(times)
    assert len(by_noise) == 3


def test_the_time_limit_is_told(tmp_path: Path) -> None:
    tuning = tune(programs(FEW), of_measured(), seconds=0)
    assert tuning.is_cut_off
    assert 0 < len(tuning.results) + tuning.refused < tuning.candidates


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "costs.json").write_text(json.dumps(MEASURED))
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = (
    "tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3"
)
OF_MODEL = (
    "tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 4096"
)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("measured", f"{SMALL} --memory 24GB"),
        ("unlimited", f"{SMALL} -p ranks=4"),
        ("model", f"{OF_MODEL} --device H100"),
    ],
)
@pytest.mark.slow
def test_golden_tables(
    name: str, line: str, golden: Callable[[str, Path], None]
) -> None:
    code, text, errors = schedc(*line.split())
    assert (code, errors) == (0, "")
    golden(text, GOLDEN / "tune" / f"{name}.txt")


@pytest.mark.usefixtures("folder")
def test_a_trace_is_where_it_can_start() -> None:
    """Two stages were measured, on two ranks; as four layers, they are split for chunks, too."""
    line = "tune 1f1b interleaved_1f1b --ranks 2 --batch 4 --layers 2 -p ranks=2"
    code, text, _ = schedc(*line.split(), "--costs", str(CASES / "run.json"), "--json")
    document = json.loads(text)
    assert code == 0
    best = [document["results"][index] for index in document["programs"]]
    assert {row["program"]: sum(row["layers"]) for row in best} == {
        "1f1b": 4,
        "interleaved_1f1b": 4,
    }
    assert {len(row["layers"]) for row in best} == {2, 4}


@pytest.mark.usefixtures("folder")
def test_a_program_of_one_s_own(folder: Path) -> None:
    text = (PROGRAMS / "gpipe.sched").read_text()
    (folder / "own.sched").write_text(
        text.replace("param ranks = 4", "param ranks\n param x")
    )
    line = "tune own.sched --ranks 4 --batch 8 --costs costs.json"
    code, _, errors = schedc(*line.split())
    assert (code, errors) == (
        1,
        "error: no program can stand in for another one: each is for something else, as told above\n",
    )
    assert "`x` has no value: give one with -p x=4" in schedc(*line.split())[1]
    code, text, errors = schedc(*line.split(), "-p", "x=3", "-p", "ranks=4")
    assert (code, errors) == (0, "")
    assert (
        "the fastest: schedc compile own.sched -p ranks=4 -p microbatches=8 -p x=3"
        in text
    )
    (folder / "own.sched").write_text("schedule own { param ranks = 4 }")
    assert "missing-part" in schedc(*line.split())[2]


@pytest.mark.usefixtures("folder")
def test_most_candidates_are_left_out() -> None:
    document = json.loads(schedc(*f"{OF_MODEL} --device H100 --json".split())[1])
    assert document["left_out"] > document["simulated"]


@pytest.mark.usefixtures("folder")
def test_golden_document(golden: Callable[[str, Path], None]) -> None:
    code, text, errors = schedc(*f"{SMALL} --memory 24GB -p ranks=4 --json".split())
    assert (code, errors) == (0, "")
    document = json.loads(text)
    golden(json.dumps(document, indent=1) + "\n", GOLDEN / "tune" / "measured.json")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        f"{SMALL} --memory 20GB",
        f"{SMALL} --transport nccl -p ranks=2",
        f"tune {' '.join(FEW)} --ranks 2 --batch 8 --costs costs.json --layers 3,3,2,4",
        f"{OF_MODEL} --device A100",
        f"{OF_MODEL} --device H200 --microbatch 1 --robust 0.1",
    ],
)
def test_the_command_that_is_printed_compiles_to_what_the_table_says(line: str) -> None:
    code, text, _ = schedc(*line.split(), "--write-costs", "best.json", "--json")
    document = json.loads(text)
    assert code == 0
    best = document["results"][document["programs"][0]]
    _, *arguments = shlex.split(document["command"])
    assert schedc(*arguments)[0] == 0
    plan = read_plan("plan.json")
    execution = simulate(plan, read_costs("best.json"))
    assert execution.timeline.makespan == pytest.approx(best["makespan"], rel=1e-12)
    assert list(execution.peak_bytes or ()) == pytest.approx(best["peak_bytes"])
    assert max(best["peak_bytes"]) <= (document["memory"] or inf)
    assert best["fits"]
    assert plan.params.items() >= best["params"].items()
    if "percentile_95" not in best:
        assert best["step"] == pytest.approx(best["makespan"] + best["sums"])


def test_the_picture(folder: Path) -> None:
    code, text, _ = schedc(
        *SMALL.split(), "--memory", "24GB", "-o", "tune.svg", "--json"
    )
    assert code == 0
    document = json.loads(text)
    root = ElementTree.parse(folder / "tune.svg").getroot()
    circles = root.findall("{*}circle")
    large = [circle for circle in circles if circle.get("r") == "4"]
    assert len(large) == len(document["frontier"])
    assert "24.0 GB" in {text.text for text in root.findall("{*}text")}
    assert schedc(*SMALL.split(), "-o", "tune.html")[0] == 0
    assert "<svg" in (folder / "tune.html").read_text()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("code", "line", "message"),
    rows(
        """
2 | tune --ranks 4 --batch 8 | one of the arguments --model --costs is required
2 | tune --batch 8 --costs costs.json | required: --ranks
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 4096 | --model needs --device
2 | tune --ranks 4 --batch 8 --model llama.json --device H100 | needs --sequence
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 4096 --device H10 | there is no `H10`, there is `A100`
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 4096 --device H100 --layers 3 | --layers says what --costs has
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 4096 --device H100 --efficiency 1.5 | `1.5` is not a share
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model llama.json --sequence 40960000000 --device H100 | of 1 x 40,960,000,000 tokens are more than
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 --sequence 4096 | --sequence is for --model
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 --memory 20XB | `20XB` is not an amount of memory above 0, in bytes or with a unit
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 --for soon | `soon` is not a time above 0, such as 60s
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 -p chunk=2 | no program has a parameter `chunk`
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 -o tune.gif | `tune.gif` must end in .svg, .pdf, .png or .html
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3,3 | costs of 4 stages, and layers of 2
1 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 --memory 1GB | nothing fits into 1.0 GB: a rank holds at least
1 | tune --ranks 5 --batch 8 --costs costs.json -p ranks=5 | it does not divide
2 | tune --ranks 4 --batch 8 --costs one.json | do not say how many there are
2 | tune --ranks 2 --batch 8 --costs zero.json | nothing in the costs takes any time
2 | tune --ranks 4 --batch 8 --costs two.json | `forward_times` has 2 numbers
2 | tune --ranks 4 --batch 8 --costs three.json --memory 8GB | not how many are held
2 | tune --ranks 4 --batch 8 --costs three.json -o t.svg | of bytes, which the costs
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model moe.json --sequence 4096 --device H100 | it has no `num_experts_per_tok`
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model bad.json --sequence 4096 --device H100 | it has no `vocab_size`
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model text.json --sequence 4096 --device H100 | `hidden_size` is 'x'
2 | tune 1f1b zb_h2 dualpipe_v --ranks 8 --batch 16 --model none.json --sequence 4096 --device H100 | cannot read `none.json`
1 | tune bitpipe --ranks 3 --batch 8 --costs costs.json -p ranks=3 | takes a batch of 8 on 3 ranks
1 | tune never.sched --ranks 2 --batch 2 -p ranks=2 --costs costs.json | no candidate compiles
1 | tune forward_only --ranks 4 --batch 8 --costs costs.json | no program can stand
2 | tune llama.json --ranks 4 --batch 8 --costs costs.json | `llama.json` is no program
2 | tune 1f1b zb_h1 interleaved_1f1b --ranks 4 --batch 8 --costs costs.json --layers 3 --write-costs costs.json | `costs.json` is read, and would be replaced
"""
    ),
)
def test_mistakes(code: str, line: str, message: str, folder: Path) -> None:
    for name, text in {
        "one": {"forward_times": 1},
        "two": {"forward_times": [1, 2], "backward_times": [1, 2, 3]},
        "zero": {"forward_times": [0, 0], "backward_times": 0},
        "three": {"forward_times": [1, 2, 1, 2]},
        "moe": LLAMA | {"num_local_experts": 8},
        "bad": {key: value for key, value in LLAMA.items() if key != "vocab_size"},
        "text": LLAMA | {"hidden_size": "x"},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(text))
    order = "if r == 0 { F(0) B(0) F(1) B(1) } else { F(0) F(1) B(0) B(1) }"
    never = f"schedule never {{ param ranks = 2 param microbatches = 2 rank r {{ {order} }} }}"
    (folder / "never.sched").write_text(never)
    got, _, errors = schedc(line)
    assert message in errors
    assert got == int(code)
    assert len(errors.splitlines()) <= 5


def test_a_plainer_program_says_less() -> None:
    """The order of ties: kinds of ops beyond F and B, stages of a rank, bytes, directives, lines."""
    known = {program.word: program.simplicity for program in programs(ALL)}
    assert known["1f1b"].kinds == known["gpipe"].kinds == 0
    assert known["1f1b"].lines > known["gpipe"].lines
    assert known["1f1b_recompute"].kinds == 1
    # The passes write the weight gradients of the second one.
    assert known["zb_h1"].kinds == known["zb_1p"].kinds == 2
    assert known["zb_1p"].directives == 1
    assert known["1f1b_explicit"].directives > known["1f1b"].directives == 0
    assert known["pipe_offload"].kinds == 4


@pytest.mark.usefixtures("folder")
def test_the_gap_to_the_next_program_and_the_simplest_of_a_tie_are_told() -> None:
    """ZB-V is 1.1 % faster than ZB-H2 here, which is less than estimates can tell."""
    line = f"{OF_MODEL} --device H100"
    text = schedc(*line.split())[1]
    assert (
        "zb_h2 is 1.2% faster than dualpipe_v, a tie: the costs do not tell 5% apart"
        in text
    )
    document = json.loads(schedc(*line.split(), "--json")[1])
    assert document["margin"] == 0.05
    rows = [document["results"][index] for index in document["tied"]]
    assert {row["program"] for row in rows} == {"zb_h2", "dualpipe_v"}
    # With measured costs, a hundredth counts.
    text = schedc(*f"{SMALL} --memory 24GB".split())[1]
    assert "faster than" in text
    assert "a tie" not in text


@pytest.mark.usefixtures("folder")
def test_replicas_that_do_as_well_need_no_pipeline() -> None:
    """Sums of gradients make two replicas a little slower than a pipeline of both ranks."""
    costs = Costs(forward_times=(1.0, 1.0), backward_times=(2.0, 2.0))
    links = evolve(costs, boundary_bytes=(0.0,), bandwidth_in_node=10.0)
    layers = Layers(links, summed=(20.0, 20.0))
    close = Training([layers], 2, 64, inf, {}, "portable", margin=0.05)
    tuning = tune(programs(["1f1b", "gpipe"]), close)
    best = tuning.fitting[0]
    assert best.candidate.size.ranks == 2
    assert tuning.tied[0].candidate.size.ranks == 1
    text = tuning_text(tuning, Units(seconds=False))
    assert "within 5%, no pipeline is needed: 2 replicas of the whole model" in text
    surer = evolve(close, margin=0.001)
    text = tuning_text(tune(programs(["1f1b", "gpipe"]), surer), Units(seconds=False))
    assert "no pipeline" not in text


@pytest.mark.usefixtures("folder")
def test_of_results_that_are_equal_the_simplest_program_is_first_and_they_are_one_row() -> (
    None
):
    """On ranks that each have the whole model all programs are the same: no pipeline is needed."""
    Path("small.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    programs = "pipe_offload zb_h1 1f1b interleaved_1f1b"
    line = f"tune {programs} --ranks 2 --batch 4 --model small.json --sequence 1024"
    code, text, _ = schedc(*f"{line} --device H200 --microbatch 1".split())
    assert code == 0
    rows = [row for row in text.splitlines() if "2 x 1" in row]
    assert len(rows) == 1
    assert rows[0].startswith("1f1b ")
    (same,) = [row for row in text.splitlines() if row.startswith("as 1f1b: ")]
    assert all(name in same for name in ("pipe_offload", "zb_h1", "interleaved_1f1b"))
    assert "no pipeline is needed: 2 replicas of the whole model" in text
    assert "the fastest: schedc compile 1f1b -p ranks=1" in text
    code, text, _ = schedc(*f"{line} --device H200 --microbatch 1 -p ranks=2".split())
    assert "no pipeline is needed" not in text
