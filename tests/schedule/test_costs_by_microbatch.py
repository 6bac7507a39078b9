"""Costs that differ by microbatch, by slice, and by the link that a transfer takes."""

import random

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    compile,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.cli.main import main
from schedlang.extras.noise.noise import Noise
from schedlang.extras.noise.runs import simulate_runs
from schedlang.schedule.costs import read_costs
from schedlang.schedule.layout import Layout
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.replay import Replay

NAMES = [path.stem for path in GALLERY]

ONE_F_ONE_B = """
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
    }
"""
SLICED = """
    param slices = 2
    rank r {
        for m in 0 .. microbatches { for k in 0 .. slices { F(m, k) } }
        for m in 0 .. microbatches { for k in 0 .. slices { B(m, slices - 1 - k) } }
    }
"""

#: The replay knows no copies to the host or another rank, and no hops.
NOT_REPLAYED = ("pipe_offload", "bpipe", "weipipe")


def compiled(items: str, order: str = ONE_F_ONE_B) -> Plan:
    return compile(
        f"schedule s {{ param ranks = 3  param microbatches = 4 {order} {items} }}"
    )


def random_costs(layout: Layout, rng: random.Random) -> Costs:
    """Costs of which no two sums are alike, by microbatch, slice and link."""

    def times() -> list[object]:
        values: list[object] = []
        for stage in range(len(layout.placement)):
            microbatches: list[object] = []
            for _ in range(layout.units_of_update(stage) // layout.slices):
                slices = [rng.uniform(1, 2) for _ in range(layout.slices)]
                microbatches.append(slices if rng.random() < 0.8 else slices[0])
            values.append(microbatches if rng.random() < 0.8 else rng.uniform(1, 2))
        return values

    ranks = range(max(layout.placement) + 1)
    return Costs(
        forward_times=times(),  # type: ignore[arg-type]
        input_times=times(),  # type: ignore[arg-type]
        weight_times=times(),  # type: ignore[arg-type]
        recompute_times=times(),  # type: ignore[arg-type]
        link_times=[[rng.uniform(0.1, 1) for _ in ranks] for _ in ranks],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_REPLAYED])
def test_times_are_those_of_an_independent_replay(name: str) -> None:
    """The replay goes over all actions again and again."""
    plan = compile(name)
    costs = random_costs(plan.layout, random.Random(name))
    for transport in ("gloo", "nccl", "buffered:2"):
        try:
            found = simulate(evolve(plan, transport=transport), costs).timeline.makespan
        except CompileError:
            continue
        expected = Replay(plan, transport, costs).makespan()
        assert found == pytest.approx(expected, rel=1e-12), transport


@pytest.mark.parametrize("name", NAMES)
def test_a_program_compiled_for_costs_by_microbatch_runs_as_it_is_simulated(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Passes see every time as it is: the plan is proved, and no worse than the one for means."""
    of_means = compile(name)
    costs = random_costs(of_means.layout, random.Random(name))
    plan = compile(name, costs=costs)
    assert simulate(plan).timeline.makespan == simulate(plan, costs).timeline.makespan
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).digest == plan.digest
    assert read_plan(path).costs == costs.over(of_means.costs)


@pytest.mark.parametrize("name", ["zb_1p", "v_zb", "interleaved_zb"])
def test_passes_look_at_the_whole_where_microbatches_differ(name: str) -> None:
    """What repeats itself with alike microbatches does not with others, however many there are."""
    params = {"ranks": 4, "microbatches": 40}
    alike = compile(name, params)
    layout = alike.layout
    stages = range(len(layout.placement))
    # The last microbatches take three times as long.
    late = [[1.0] * 36 + [3.0] * 4 for _ in stages]
    costs = Costs(forward_times=late, input_times=late, weight_times=late)  # type: ignore[arg-type]
    plan = compile(name, params, costs=costs)
    assert (
        simulate(plan).timeline.makespan
        <= simulate(alike, costs).timeline.makespan + 1e-9
    )


def test_equal_numbers_are_one_number() -> None:
    plan = compile("zb_v", {"ranks": 3, "microbatches": 5})
    stages = range(len(plan.placement))
    ranks = range(3)
    one = Costs(forward_times=(1.3,), backward_times=(2.1,), p2p_time=0.2)
    each = Costs(
        forward_times=[[1.3] * 5 for _ in stages],  # type: ignore[arg-type]
        backward_times=[[2.1] * 5],  # type: ignore[arg-type]
        link_times=[[0.2 for _ in ranks] for _ in ranks],  # type: ignore[arg-type]
    )
    assert simulate(plan, one).timeline == simulate(plan, each).timeline


def test_halves_follow_from_wholes_and_wholes_from_halves() -> None:
    layout = compiled("").layout
    costs = Costs(backward_times=[[2, 4, 6, 8]], forward_times=[1, 2, [3, 4, 5, 6]])  # type: ignore
    durations = costs.durations(layout)
    assert [durations.time(Kind.W, 1, m) for m in range(4)] == [1, 2, 3, 4]
    assert [durations.time(Kind.R, 2, m) for m in range(4)] == [3, 4, 5, 6]
    assert [durations.time(Kind.R, 1, m) for m in range(4)] == [2] * 4
    assert durations[Kind.B] == [5] * 3
    halves = Costs(input_times=[[1, 2, 3, 4]], weight_times=(1,)).durations(layout)  # type: ignore
    assert [halves.time(Kind.B, 0, m) for m in range(4)] == [2, 3, 4, 5]


def test_a_program_says_them() -> None:
    plan = compiled(
        "cost F(s, m) = 1 + 0.1 * s + 0.01 * m  cost send(r, q) = 0.1 * (r + q)  cost B(s) = 2 + s"
    )
    assert plan.costs == Costs(
        forward_times=[  # type: ignore[arg-type]
            [1.0, 1.01, 1.02, 1.03],
            [1.1, 1.11, 1.12, 1.13],
            [1.2, 1.21, 1.22, 1.23],
        ],
        backward_times=(2, 3, 4),
        link_times=[[0, 0.1, 0.2], [0.1, 0, 0.3], [0.2, 0.3, 0]],  # type: ignore[arg-type]
    )
    forwards = [bar for bar in simulate(plan).timeline.ranks[1] if bar.kind == Kind.F]
    assert [bar.end - bar.start for bar in forwards] == pytest.approx(
        [1.1, 1.11, 1.12, 1.13]
    )
    # From the end of the forward before, over the link.
    assert forwards[0].start == pytest.approx(1.0 + 0.1)


def test_slices_have_times_of_their_own() -> None:
    plan = compiled("cost F(s, m, k) = 1 + 2 * k  cost B(s, m) = 3 + m", SLICED)
    bars = simulate(plan).timeline.ranks[0]
    assert [bar.end - bar.start for bar in bars] == [1, 3] * 4 + [
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
    ]


def test_each_update_of_a_stream_takes_its_microbatches_times() -> None:
    plan = compile("pipedream_2bw", {"ranks": 2, "microbatches": 2})
    costs = Costs(forward_times=[[1, 3]])  # type: ignore[list-item]
    bars = simulate(plan.for_updates(5), costs).timeline.ranks[0]
    times = [bar.end - bar.start for bar in bars if bar.kind == Kind.F]
    assert times == [1, 3] * 5


def test_claims_are_about_them() -> None:
    compiled("cost F(s, m) = 0.1 * (1 + m)  cost B = 0.3  assert work == 2.2")
    with pytest.raises(CompileError, match=r"2\.2 == 2\.1"):
        compiled("cost F(s, m) = 0.1 * (1 + m)  cost B = 0.3  assert work == 2.1")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("cost F(s, m, k) = 1", "write `cost F` or `cost F(s)` or `cost F(s, m)`"),
        ("cost U(s, m) = 1", "write `cost U` or `cost U(s)`"),
        ("cost send(r) = 1", "write `cost send` or `cost send(r, q)`"),
        ("cost overlap(s, m) = 1", "`cost overlap` with 2 names"),
        ("cost F(s, s) = 1", "`s` is already declared"),
        ("cost F(s, m) = 2 - m", "a duration of -1, it must be 0 or more"),
        ("cost send(r, q) = r - q", "a duration of -1, it must be 0 or more"),
        ("cost send = 1  cost send(r, q) = 1", "`cost send` is given already"),
        ("cost F = 1  cost F(s, m) = 1", "`cost F` is given already"),
    ],
)
def test_what_a_program_cannot_say(items: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(items)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"forward_times": [[1, 2]]},
            "2 durations of `F` are given for the microbatches of stage",
        ),
        (
            {"forward_times": [[1] * 4] * 2},
            "2 durations of `F` are given, there are 3 stages",
        ),
        (
            {"forward_times": [[[1, 2]] * 4]},
            "2 durations of `F` are given for the slices of",
        ),
        ({"forward_times": [[]]}, "`forward_times` is ((),): it must be numbers"),
        ({"forward_times": [[1, -1, 1, 1]]}, "must be numbers from 0"),
        (
            {"update_times": [[1, 1, 1, 1]]},
            "`update_times` is ((1, 1, 1, 1),): it must be numbers",
        ),
        ({"link_times": [[0, 1], [1, 0]]}, "`link_times` are for 2 ranks, there are 3"),
        ({"link_times": [[0, 1], [1]]}, "must have a row for each rank"),
        ({"link_times": [0.1, 0.2]}, "must have a row for each rank"),
        ({"link_times": [[0] * 3] * 3, "p2p_time": 1}, "`p2p_time` says others"),
    ],
)
def test_what_costs_cannot_be(values: dict[str, object], message: str) -> None:
    plan = compiled("")
    with pytest.raises((TypeError, ValueError)) as caught:
        simulate(plan, Costs(**values))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_files_have_lists_in_lists(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path_factory.mktemp("costs") / "costs.yaml"
    path.write_text(
        "forward_times: [[1, 2, 1, 1.5], 1, 1, 1]\nlink_times: [[0, 1], [1, 0]]\n"
    )
    assert read_costs(path) == Costs(
        forward_times=[[1, 2, 1, 1.5], 1, 1, 1],  # type: ignore[list-item]
        link_times=[[0, 1], [1, 0]],  # type: ignore[arg-type]
    )
    path.write_text("forward_times: [[1, 2, 1, 1.5], 1, 1, 1]\n")
    program = str(PROGRAMS / "1f1b.sched")
    for command in ("simulate", "compile", "explain-bubble", "view"):
        assert (
            main([command, program, "-p", "microbatches=4", "--costs", str(path)]) == 0
        )
    capsys.readouterr()


def test_runs_with_noise_have_them_too() -> None:
    plan = compile("zb_h1")
    costs = random_costs(plan.layout, random.Random(0))
    runs = simulate_runs(plan, Noise(slow_ranks={0: 1.0}), costs, runs=1)
    assert runs.makespans == pytest.approx([simulate(plan, costs).timeline.makespan])
