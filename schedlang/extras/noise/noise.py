"""What is not as the costs say: ops and transfers take longer in one run than in another, and some
ranks and links are slow in all (docs/costs.md).
"""

from collections.abc import Mapping
from math import log1p, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np
from attrs import field, frozen

from schedlang.diagnostics.wrong_arguments import (
    check_number,
    check_type,
    check_whole,
    shown,
)
from schedlang.proof.channels import peers
from schedlang.schedule.arrays import Flags, Floats, Ints
from schedlang.schedule.kinds import OPS, RECEIVES, Kind
from schedlang.schedule.schedule import Schedule

#: What random factors follow from where nobody says so.
SEED = 0

_NONE: Mapping[Any, float] = MappingProxyType({})


def _by_ends(links: Any) -> Any:
    """Links by their two ranks, the lower one first; what are no links is left for the checks."""
    if not isinstance(links, Mapping):
        return links
    by_ends = {}
    for link, factor in links.items():
        ends = (
            tuple(sorted(link)) if isinstance(link, tuple) and len(link) == 2 else link
        )
        if ends in by_ends:
            raise ValueError(f"`slow_links` has the link {shown(ends)} twice")
        by_ends[ends] = factor
    return by_ends


@frozen
class Noise:
    """How much longer or shorter than its costs say everything takes.

    In each run, each op, each copy to or from the host, and each transfer, sum or gather takes its
    duration times a random factor of its own. Factors are lognormal, of mean 1 and standard
    deviation `jitter`: the mean stays as given, none is below 0, and more are far above it than far
    below, as is customary for how long tasks take (Trietsch et al., "Modeling activity times by the
    Parkinson distribution with a lognormal core", EJOR 216, 2012). Ops that overlap run as one,
    with one factor.

    `slow_ranks` has, for some ranks, how many times as long all their ops take; `slow_links`, for
    some pairs of ranks, all transfers between the two, both ways.

    What is drawn follows from `seed`, and from what an op is: the forward of a microbatch on a
    stage has the same factors on every transport, and in every schedule of as many stages and
    microbatches.

    TypeError for what is no such number; ValueError for a jitter that is not from 0 to 1, a factor
    that is not above 0, a rank or a seed below 0, and a link that does not have two ranks.
    """

    jitter: float = 0.0
    slow_ranks: Mapping[int, float] = _NONE
    slow_links: Mapping[tuple[int, int], float] = field(
        default=_NONE, converter=_by_ends
    )
    seed: int = SEED

    def __attrs_post_init__(self) -> None:
        check_number("jitter", self.jitter)
        if not 0 <= self.jitter <= 1:
            raise ValueError(
                f"`jitter` is {self.jitter:g}: it is a part of each duration from 0 to 1, as 0.1"
            )
        check_whole("seed", self.seed, least=0)
        check_type(
            "slow_ranks", self.slow_ranks, Mapping, "a mapping, such as {3: 1.3}"
        )
        check_type(
            "slow_links", self.slow_links, Mapping, "a mapping, such as {(0, 1): 2.0}"
        )
        for rank, factor in self.slow_ranks.items():
            check_whole("a rank of slow_ranks", rank, least=0)
            check_number(f"slow_ranks[{rank}]", factor, above=0)
        for link, factor in self.slow_links.items():
            if not isinstance(link, tuple) or len(set(link)) != 2:
                raise ValueError(
                    f"`slow_links` has {shown(link)}: a link is a pair of two ranks, as (0, 1)"
                )
            for rank in link:
                check_whole("a rank of slow_links", rank, least=0)
            check_number(f"slow_links[{link}]", factor, above=0)


def check_noise(noise: Noise, schedule: Schedule, take_time: Flags) -> None:
    """ValueError for a rank that a schedule does not have, and for a link whose ranks exchange
    nothing, or whose transfers take no time: `take_time` says which receives take any.
    """
    ranks = len(schedule.ranks)
    named = [*noise.slow_ranks, *(rank for link in noise.slow_links for rank in link)]
    for rank in named:
        if rank >= ranks:
            raise ValueError(f"there is no rank {rank}: there are {ranks}, from 0 on")
    receives, ends = _links(schedule)
    links = set(map(tuple, ends.tolist()))
    links_with_times = set(map(tuple, ends[take_time[receives]].tolist()))
    for low, high in noise.slow_links:
        if (low, high) not in links:
            there_are = (
                ", ".join(f"{low}-{high}" for low, high in sorted(links)) or "none"
            )
            raise ValueError(
                f"ranks {low} and {high} exchange nothing, so they have no link: links are "
                f"{there_are}"
            )
        if (low, high) not in links_with_times:
            raise ValueError(
                f"transfers between ranks {low} and {high} take no time, however slow: costs give "
                "them one, as `p2p_time` does"
            )


def _slow(noise: Noise, schedule: Schedule) -> Floats:
    """The factor of each action that is the same in all runs: that of its rank, or its link."""
    columns = schedule.columns
    factors = np.ones(len(columns))
    for rank, factor in noise.slow_ranks.items():
        factors[(columns.rank == rank) & columns.is_computed] = factor
    receives, ends = _links(schedule)
    for link, factor in noise.slow_links.items():
        factors[receives[(ends == link).all(axis=1)]] = factor
    return factors


def _links(schedule: Schedule) -> tuple[Ints, Ints]:
    """The receives of a schedule, and of each the two ranks of its link, the lower one first."""
    columns = schedule.columns
    receives = columns.where(*RECEIVES.values())
    ends = np.column_stack([columns.rank[receives], peers(schedule, receives)])
    return receives, np.sort(ends, axis=1)


class Draws:
    """The random factors of a schedule's actions, for one run after the other.

    Those of ops, copies and receives; that of a receive is that of its message; and behind all
    actions, those of sums and gathers. `take_time` says which of all these take any.
    """

    def __init__(self, schedule: Schedule, noise: Noise, take_time: Flags) -> None:
        columns = schedule.columns
        # Sums and gathers are no actions of the schedule; they are numbered behind those.
        beside = np.arange(len(columns), len(take_time))
        self.slow = np.append(_slow(noise, schedule), np.ones(len(beside)))[
            :, np.newaxis
        ]
        # A lognormal variable with this variance of its logarithm has the coefficient of variation
        # `jitter`, and with a mean of the logarithm of minus half of it the mean 1.
        variance = log1p(noise.jitter**2)
        self.deviation = sqrt(variance)
        self.mean = -variance / 2
        #: Of each kind that is there, its actions, and what draws for them.
        self.kinds = []
        if noise.jitter:
            for kind in (*map(Kind, OPS), *RECEIVES.values()):
                rows = columns.where(kind)
                # What takes no time in any run needs no factor.
                if not take_time[rows].any():
                    continue
                # By stage and microbatch, not as they stand in the schedule: so the n-th number
                # that is drawn is for the same op, in whatever order a schedule runs them.
                in_order = rows[
                    np.lexsort((columns.microbatch[rows], columns.stage[rows]))
                ]
                self.kinds.append(
                    (in_order, np.random.default_rng([noise.seed, int(kind)]))
                )
            self.kinds.append((beside, np.random.default_rng([noise.seed, 0])))

    def next(self, runs: int) -> Floats:
        """The factors of the next runs: a row for each, and one more, of ones."""
        factors = np.ones((len(self.slow) + 1, runs))
        for rows, random in self.kinds:
            # Run by run, so that the first runs are the same, however many follow.
            normal = random.standard_normal((runs, len(rows)))
            factors[rows] = np.exp(normal * self.deviation + self.mean).T
        factors[:-1] *= self.slow
        return factors
