"""Simulated runs of a schedule with noise: what its makespan may be, beside the one that its costs
say (docs/costs.md).
"""

from typing import Any

import numpy as np
from attrs import field, frozen

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.wrong_arguments import check_number, check_type, check_whole
from schedlang.extras.noise.noise import Draws, Noise, check_noise
from schedlang.extras.noise.samples import Samples
from schedlang.proof.edges import ideal_events, takes_turns
from schedlang.proof.events import Events
from schedlang.proof.graph import Graph
from schedlang.proof.message_edges import transport_events
from schedlang.proof.running import run_on
from schedlang.proof.structure import check_actions
from schedlang.schedule.arrays import Floats
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import timed

#: How many runs there are where nobody says so.
RUNS = 200
#: How many times are kept at once; of a large schedule, some runs are walked, then some more.
_MOST_TIMES = 1 << 24


@frozen
class Delays:
    """Why the mean of some runs is longer than the makespan at the costs.

    In each run, the chain of ops and waits that is its makespan was looked at: how much more than
    at the costs its ops and copies take, by `ranks`, and its `transfers`, sums and gathers; all are
    means over the runs. At the costs, that chain may be shorter than the makespan, by the `slack`.
    So the mean is longer by what ranks and transfers make, without the slack.
    """

    ranks: tuple[float, ...]
    transfers: float
    slack: float


@frozen
class Runs:
    """The makespans of some simulated runs, in the unit of the costs.

    `makespan` is that of the schedule where everything takes as long as the costs say, `makespans`
    has one for each run, and `transport` is the one that they are of, or `ideal`.
    """

    transport: str
    noise: Noise
    makespan: float
    makespans: tuple[float, ...] = field(repr=False)
    delays: Delays

    @property
    def mean(self) -> float:
        """The mean of the makespans."""
        return float(np.mean(self.makespans))

    @property
    def median(self) -> float:
        """The makespan that half of the runs stay below."""
        return self.percentile(50)

    @property
    def worst(self) -> float:
        """The longest makespan."""
        return max(self.makespans)

    def percentile(self, percent: float) -> float:
        """The makespan that so many per cent of the runs stay below, by linear interpolation
        between the two nearest runs. ValueError for a number that is not from 0 to 100.
        """
        check_number("percent", percent)
        if not 0 <= percent <= 100:
            raise ValueError(
                f"`percent` is {percent:g}: it must be a number from 0 to 100"
            )
        return float(np.percentile(self.makespans, percent))


def check_runs(noise: Any, runs: Any) -> None:
    """TypeError unless some noise is one, and some runs a number; ValueError for less than one."""
    check_type("noise", noise, Noise, "a Noise, such as Noise(jitter=0.1)")
    check_whole("runs", runs, least=1)


def simulate_runs(
    schedule: Schedule,
    noise: Noise,
    costs: Costs = UNIT,
    runs: int = RUNS,
    ideal: bool = False,
) -> Runs:
    """The makespans of a schedule in some runs with noise, on its transport or in the `ideal`
    execution; costs and errors are as of `schedlang.proof.prove.simulate`.

    The order of ops, and what waits for what, are the same in all runs. Where copies of several
    ranks take turns on a link to the host, they do so in each run in the order in which their ranks
    come to them. ValueError for noise that is of ranks or links that the schedule does not have, or
    of links whose transfers take no time.
    """
    check_runs(noise, runs)
    costs = costs.over(schedule.costs)
    costs.check(schedule.layout)
    check_actions(schedule)
    transport = timed(schedule.transport)

    def samples_of(factors: Floats) -> Samples:
        """The events of one run in which copies take turns in the order of its times."""

        def graph_of(events: Events) -> Graph:
            return Samples(events).graph_of(factors[:, 0])

        if ideal:
            return Samples(ideal_events(schedule, costs, graph_of))
        return Samples(transport_events(schedule, costs, transport, graph_of))

    # What does not run on its transport has no times, not even ideal ones.
    events = run_on(schedule, costs, transport)
    if ideal:
        events = ideal_events(schedule, costs)
    samples = Samples(events)
    check_noise(noise, schedule, samples.take_time)
    draws = Draws(schedule, noise, samples.take_time)
    # Where copies take turns, each run may have edges of its own.
    is_alike = not takes_turns(schedule, costs)
    at_once = max(1, _MOST_TIMES // len(samples.order)) if is_alike else 1
    makespans: list[Floats] = []
    longer: list[Floats] = []
    for run in range(0, runs, at_once):
        doing(f"simulating {schedule.name} with noise", run, runs)
        factors = draws.next(min(at_once, runs - run))
        if not is_alike:
            samples = samples_of(factors)
        times = samples.times(factors)
        makespans.append(samples.makespans(times, factors))
        longer.append(samples.longer(times, factors))
    all_makespans = np.concatenate(makespans)
    # `longer` has a row for each rank and a last one for transfers, and a column for each run.
    *ranks, transfers = np.concatenate(longer, axis=1).mean(axis=1).tolist()
    makespan = events.timeline().makespan
    # What the chains take longer is counted from what they take at the costs, which may be less
    # than the makespan. The difference is the slack: two chains of 98 and 100, of which noise makes
    # the first one 105, give 7 by ranks and transfers, 2 of slack, and a mean that is 5 above the
    # makespan.
    slack = sum(ranks) + transfers - (float(np.mean(all_makespans)) - makespan)
    return Runs(
        "ideal" if ideal else transport.name,
        noise,
        makespan,
        tuple(all_makespans.tolist()),
        Delays(tuple(ranks), transfers, slack),
    )
