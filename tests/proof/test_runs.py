"""Runs with noise: each column of the one walk against a simulation of its own."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from schedlang import CompileError, Costs, Kind, Plan, compile, read_source, simulate
from schedlang.extras.noise import runs as of_runs
from schedlang.extras.noise.noise import Draws, Noise
from schedlang.extras.noise.runs import simulate_runs
from schedlang.extras.noise.samples import Samples
from schedlang.proof.edges import ideal_events, takes_turns
from schedlang.proof.events import Events
from schedlang.proof.graph import Graph
from schedlang.proof.message_edges import transport_events
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.arrays import Floats
from schedlang.schedule.costs import UNIT
from schedlang.schedule.fixed_point import ANY
from schedlang.schedule.transports import timed
from tests.support.paths import GALLERY
from tests.support.replay import Place, Replay, _Ops, _Transfers

#: Two that go by lanes, one that blocks, one with buffers; portable plans are timed on gloo.
TRANSPORTS = ["portable", "nccl", "nccl-edge", "blocking", "buffered:1"]
#: With those of all transports, more than 70 for each program.
RUNS = 12
COSTS = Costs(p2p_time=0.25, update_times=(0.5,))
NOISE = Noise(jitter=0.3, slow_ranks={1: 1.5}, seed=7)


def factors_of(plan: Plan, costs: Costs, noise: Noise, runs: int) -> Floats:
    """What the runs of a plan draw."""
    events = transport_events(plan, costs.over(plan.costs), timed(plan.transport))
    return Draws(plan, noise, Samples(events).take_time).next(runs)


def slowed(events: Events, factors: Floats) -> Events:
    """The events with the durations of one run: of ops and copies, and of the messages that edges
    are the way of.
    """
    graph = events.graph
    columns = events.schedule.columns
    # Ops that overlap run as one, with the factor of the first.
    heads = np.flatnonzero(
        ~columns.is_transfer & (columns.batch == np.arange(len(columns)))
    )
    takes = graph.takes.copy()
    takes[graph.over[events.item[heads]]] *= factors[heads]
    ways = np.flatnonzero(graph.delay)
    delay = graph.delay.copy()
    delay[ways] *= factors[events.receive[graph.edge[ways]]]
    after = events.after * factors[columns.batch]
    return evolve(events, graph=evolve(graph, takes=takes, delay=delay), after=after)


def graph_of_one(events: Events, factors: Floats) -> Graph:
    """The graph with the durations of one run."""
    return slowed(events, factors).graph


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_each_run_is_a_simulation_of_its_own(path: Path) -> None:
    """To the last bit."""
    plan = compile(read_source(path))
    costs = COSTS.over(plan.costs)
    for transport in (*TRANSPORTS, "ideal"):
        is_ideal = transport == "ideal"
        if not is_ideal:
            plan = evolve(plan, transport=transport)
        factors = factors_of(plan, costs, NOISE, RUNS)
        events = events_of(plan, costs, is_ideal, factors[:, 0])
        makespans = []
        for of_run in factors.T:
            # Only turns follow from durations.
            if takes_turns(plan, costs):
                events = events_of(plan, costs, is_ideal, of_run)
            # What is multiplied by a factor is no number of the costs' fixed point.
            timeline = slowed(events, of_run).timeline()
            makespans.append(evolve(timeline, fixed=ANY).makespan)
        runs = simulate_runs(plan, NOISE, COSTS, RUNS, is_ideal)
        assert list(runs.makespans) == makespans
        assert runs.makespan == simulate(plan, COSTS, is_ideal).timeline.makespan
        # Runs differ: all alike would mean that no factor was used.
        assert len(set(makespans)) > RUNS / 2


def events_of(plan: Plan, costs: Costs, is_ideal: bool, factors: Floats) -> Events:
    """The events of one run, at the given durations."""
    graph_of = partial(graph_of_one, factors=factors)
    if is_ideal:
        return ideal_events(plan, costs, graph_of)
    return transport_events(plan, costs, timed(plan.transport), graph_of)


class NoisyReplay(Replay):
    """The oracle of makespans, which knows nothing of events, with the durations of one run."""

    def __init__(
        self, plan: Plan, transport: str, costs: Costs, factors: Floats
    ) -> None:
        super().__init__(plan, transport, costs)
        self.factors = factors
        self.usual_p2p = self.p2p

    def factor(self, place: Place) -> float:
        rank, index = place
        return float(self.factors[self.schedule.columns.first[rank] + index])

    def steps(self, rank: int) -> Iterator[_Ops | _Transfers]:
        actions = self.schedule.ranks[rank]
        heads = (
            batch.start
            for batch in actions.batches()
            if not is_transfer(actions.kind[batch.start])
        )
        for step in super().steps(rank):
            if isinstance(step, _Ops):
                yield evolve(step, takes=step.takes * self.factor((rank, next(heads))))
            else:
                yield step

    def transfer(self, place: Place, sends: bool, start: float) -> float:
        # A message has one factor, at its receive, whichever end asks.
        self.p2p = self.usual_p2p * self.factor(self.partner[place] if sends else place)
        return super().transfer(place, sends, start)


@pytest.mark.parametrize(
    "transport", ["gloo", *TRANSPORTS[1:], "nccl-eager", "buffered"]
)
@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_zb", "dualpipe", "seq1f1b", "unet_1f1b"]
)
def test_runs_are_what_the_rules_of_the_transport_say(
    name: str, transport: str
) -> None:
    plan = evolve(compile(name), transport=transport)
    factors = factors_of(plan, COSTS, NOISE, 3)
    expected = [
        NoisyReplay(plan, transport, COSTS, factors[:, run]).makespan()
        for run in range(3)
    ]
    assert simulate_runs(plan, NOISE, COSTS, 3).makespans == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_runs_are_simulations_at_costs_by_microbatch(name: str, transport: str) -> None:
    """What a user would have to write to simulate one run."""
    plan = evolve(compile(name), transport=transport)
    noise = Noise(jitter=0.3, slow_ranks={1: 1.5})
    factors = factors_of(plan, UNIT, noise, 5)
    columns = plan.columns
    kinds = {Kind.F: "forward_times", Kind.I: "input_times", Kind.W: "weight_times"}
    # Costs have whole backwards or halves, as the program has.
    kinds |= {} if len(columns.where(Kind.I)) else {Kind.B: "backward_times"}
    usual = UNIT.over(plan.costs).durations(plan.layout)
    makespans = []
    for run in range(5):
        times: dict[str, Any] = {}
        for kind, cost in kinds.items():
            table = np.ones((len(plan.placement), plan.microbatches))
            for row in columns.where(kind):
                stage = columns.stage[row]
                microbatch = columns.microbatch[row]
                time = usual.time(kind, stage, microbatch)
                table[stage, microbatch] = time * factors[row, run]
            times[cost] = table.tolist()
        makespans.append(simulate(plan, Costs(**times)).timeline.makespan)
    assert simulate_runs(plan, noise, runs=5).makespans == pytest.approx(
        makespans, rel=1e-12
    )


def test_turns_on_a_link_are_those_of_each_run() -> None:
    """In each, copies go in the order in which their ranks come to them; and these orders differ."""
    plan = compile("pipe_offload")
    costs = COSTS.over(plan.costs)
    assert takes_turns(plan, costs)
    copies = np.flatnonzero(plan.columns.is_copy)
    link = np.array(plan.layout.links)[plan.columns.rank[copies]]
    orders = set()
    for factors in factors_of(plan, COSTS, NOISE, 10).T:
        by_run = events_of(plan, costs, False, factors)
        graph = graph_of_one(by_run, factors)
        come = graph.times_of(by_run.come(copies))
        starts = graph.starts[by_run.item[copies]]
        orders.add(tuple(np.argsort(starts, kind="stable").tolist()))
        for each in np.unique(link):
            here = np.flatnonzero(link == each)
            in_turn = here[np.argsort(starts[here], kind="stable")]
            assert (np.diff(come[in_turn]) >= 0).all()
    assert len(orders) > 5


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_a_slow_rank_is_one_whose_costs_are_higher(path: Path) -> None:
    """Where each rank has stages of its own."""
    plan = compile(read_source(path))
    factor = [1.5 if rank == 1 else 1.0 for rank in plan.placement]
    durations = COSTS.over(plan.costs).every_duration(len(factor))
    # Copies are the host's work, and exchanges the network's: they take as long on a slow rank.
    is_beside = ("offload", "reload", "exchange", "exchange_back")
    slow = evolve(
        COSTS,
        **{
            f"{name}_times": [
                time * (1.0 if name in is_beside else more)
                for time, more in zip(times, factor, strict=True)
            ]
            for name, times in durations.items()
        },
    )
    runs = simulate_runs(plan, Noise(slow_ranks={1: 1.5}), COSTS, runs=1)
    assert runs.worst == pytest.approx(
        simulate(plan, slow).timeline.makespan, rel=1e-12
    )
    assert runs.worst > runs.makespan
    assert runs.makespan == simulate(plan, COSTS).timeline.makespan


def test_a_slow_link_is_one_whose_transfers_take_longer() -> None:
    plan = compile("1f1b", {"ranks": 2})
    runs = simulate_runs(
        plan, Noise(slow_links={(1, 0): 3.0}), Costs(p2p_time=0.5), runs=2
    )
    assert (
        runs.makespans == (simulate(plan, Costs(p2p_time=1.5)).timeline.makespan,) * 2
    )
    # Of more ranks only the transfers between these two.
    plan = compile("1f1b")
    slow = [
        simulate_runs(plan, Noise(slow_links={link: 3.0}), Costs(p2p_time=0.5)).worst
        for link in ((0, 1), (1, 2), (2, 3))
    ]
    usual, all_slow = (
        simulate(plan, Costs(p2p_time=time)).timeline.makespan for time in (0.5, 1.5)
    )
    assert all(usual < makespan < all_slow for makespan in slow)


def test_factors_are_lognormal_of_mean_1() -> None:
    plan = compile("1f1b", {"ranks": 4, "microbatches": 32})
    factors = factors_of(plan, COSTS, Noise(jitter=0.2), 400)
    assert (factors[-1] == 1).all()
    for kind in (Kind.F, Kind.B, Kind.RECV_F, Kind.RECV_B):
        drawn = factors[plan.columns.where(kind)]
        count = drawn.size
        # Five standard errors.
        assert drawn.mean() == pytest.approx(1, abs=5 * 0.2 / count**0.5)
        assert drawn.std() == pytest.approx(0.2, rel=0.02)
        # The logarithm is symmetric about its mean, a half of the variance below 0.
        logs = np.log(drawn)
        # 1.04 is 1 + 0.2², from which the variance of the logarithm follows.
        assert logs.mean() == pytest.approx(-np.log(1.04) / 2, abs=5 * 0.2 / count**0.5)
        assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.05
        # One op says nothing of another one, nor one run of the next.
        assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03
        assert (
            abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.03
        )
    forwards, backwards = (
        factors[plan.columns.where(kind)] for kind in (Kind.F, Kind.B)
    )
    assert abs(np.corrcoef(forwards.ravel(), backwards.ravel())[0, 1]) < 0.03


def test_one_op_has_one_factor_in_every_schedule_and_on_every_transport() -> None:
    noise = Noise(jitter=0.2, seed=3)
    drawn = []
    for name in ("1f1b", "gpipe", "zb_h1"):
        for transport in TRANSPORTS:
            plan = evolve(compile(name), transport=transport)
            factors = factors_of(plan, COSTS, noise, 4)
            rows = plan.columns.where(Kind.F, Kind.RECV_F, Kind.RECV_B)
            columns = plan.columns
            keys = zip(
                columns.kind[rows],
                columns.stage[rows],
                columns.microbatch[rows],
                strict=True,
            )
            drawn.append(dict(zip(keys, map(tuple, factors[rows]), strict=True)))
    assert all(each == drawn[0] for each in drawn)
    other = factors_of(compile("1f1b"), COSTS, evolve(noise, seed=4), 4)
    assert (
        not (other[:-1] == factors_of(compile("1f1b"), COSTS, noise, 4)[:-1])
        .all(axis=1)[compile("1f1b").columns.where(Kind.F)]
        .any()
    )


def test_the_first_runs_do_not_depend_on_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = compile("zb_h1")
    runs = simulate_runs(plan, NOISE, COSTS, runs=50)
    assert simulate_runs(plan, NOISE, COSTS, runs=20).makespans == runs.makespans[:20]
    # Nor on how many are walked at once.
    monkeypatch.setattr(of_runs, "_MOST_TIMES", 1000)
    again = simulate_runs(plan, NOISE, COSTS, runs=50)
    assert again.makespans == runs.makespans
    assert again.delays.ranks == pytest.approx(runs.delays.ranks)


def test_figures_of_runs() -> None:
    runs = simulate_runs(compile("1f1b"), Noise(jitter=0.2), COSTS, runs=101)
    in_order = sorted(runs.makespans)
    assert runs.mean == pytest.approx(sum(in_order) / 101)
    assert (runs.median, runs.percentile(95), runs.worst) == (
        in_order[50],
        in_order[95],
        in_order[100],
    )
    assert runs.percentile(0) == in_order[0]
    for percent in (-1, 101, float("nan")):
        with pytest.raises(ValueError, match="`percent` is"):
            runs.percentile(percent)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_delays_are_what_the_mean_is_longer_by(transport: str) -> None:
    plan = evolve(compile("interleaved_1f1b"), transport=transport)
    for noise in (
        Noise(jitter=0.2),
        Noise(jitter=0.1, slow_ranks={2: 1.5}, slow_links={(0, 1): 3}),
    ):
        runs = simulate_runs(plan, noise, COSTS)
        delays = runs.delays
        total = sum(delays.ranks) + delays.transfers - delays.slack
        assert total == pytest.approx(runs.mean - runs.makespan)
        # A chain is never longer than the makespan at the costs.
        assert delays.slack > -1e-9
    # The rank that is slow is what it is due to.
    runs = simulate_runs(plan, Noise(jitter=0.1, slow_ranks={2: 1.5}), COSTS)
    delays = runs.delays
    assert delays.ranks.index(max(delays.ranks)) == 2
    assert delays.ranks[2] > 0.8 * (runs.mean - runs.makespan)
    # Without any noise there is none.
    still = simulate_runs(plan, Noise(), COSTS, runs=2)
    assert still.makespans == (still.makespan,) * 2
    assert (*still.delays.ranks, still.delays.transfers, still.delays.slack) == (0,) * 6


def test_a_slow_link_is_what_a_delay_is_due_to() -> None:
    """By a whole chain of messages: each is longer by as much as its way."""
    plan = compile("gpipe", {"ranks": 2, "microbatches": 1})
    runs = simulate_runs(
        plan, Noise(slow_links={(0, 1): 3}), Costs(p2p_time=0.5), runs=1
    )
    # Two messages, one there and one back, each of which takes 1.5 in place of 0.5.
    assert runs.delays.transfers == pytest.approx(2.0)
    assert runs.mean - runs.makespan == pytest.approx(2.0)
    assert runs.delays.ranks == (0, 0)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (
            {"jitter": 10},
            "`jitter` is 10: it is a part of each duration from 0 to 1, as 0.1",
        ),
        ({"jitter": "0.1"}, "`jitter` is '0.1': it must be a finite number"),
        ({"seed": -1}, "`seed` is -1: it must be a whole number from 0"),
        (
            {"slow_ranks": {1: 0}},
            r"`slow_ranks\[1\]` is 0: it must be a finite number above 0",
        ),
        ({"slow_ranks": [1]}, r"`slow_ranks` is \[1\]: it must be a mapping"),
        (
            {"slow_links": {1: 2.0}},
            r"`slow_links` has 1: a link is a pair of two ranks",
        ),
        ({"slow_links": {(1, 1): 2.0}}, r"`slow_links` has \(1, 1\): a link is a pair"),
        ({"slow_links": {(0, 1): 2.0, (1, 0): 2.0}}, r"has the link \(0, 1\) twice"),
    ],
)
def test_wrong_noise_is_refused(noise: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Noise(**noise)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (Noise(slow_ranks={4: 2.0}), "there is no rank 4: there are 4, from 0 on"),
        (Noise(slow_links={(0, 4): 2.0}), "there is no rank 4: there are 4, from 0 on"),
        (
            Noise(slow_links={(0, 2): 2.0}),
            "ranks 0 and 2 exchange nothing.* 0-1, 1-2, 2-3",
        ),
        (
            Noise(slow_links={(0, 1): 2.0}),
            "transfers between ranks 0 and 1 take no time",
        ),
    ],
)
def test_noise_that_a_schedule_does_not_have_is_refused(
    noise: Noise, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_runs(compile("1f1b"), noise)


def test_what_does_not_run_has_no_runs() -> None:
    plan = evolve(compile("1f1b"), transport="nccl")
    with pytest.raises(ValueError, match="`runs` is 0"):
        simulate_runs(plan, NOISE, runs=0)
    with pytest.raises(TypeError, match=r"`noise` is 0\.1"):
        simulate_runs(plan, 0.1)  # type: ignore[arg-type]
    ranks = [rank.compute() for rank in plan.ranks]
    with pytest.raises(CompileError):
        simulate_runs(evolve(plan, ranks=ranks), NOISE)
