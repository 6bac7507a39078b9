"""Costs from a measured run."""

from collections.abc import Sequence
from itertools import chain
from math import fsum
from typing import Any

from schedlang.schedule.actions import counterpart, is_send, is_transfer
from schedlang.schedule.costs.model import Costs
from schedlang.schedule.costs.traces import Traced, ops_with_sends
from schedlang.schedule.kinds import OPS
from schedlang.schedule.timeline import Bar


def measured_costs(*traces: Sequence[Traced]) -> Costs:
    """The costs that the actions of a run show, in order of time and in its unit: means, since a
    step is a sum. Of several traces, such as one of each rank, each has its own clock.

    A duration is that of a kind of op on a stage, with the sends that follow it (`ops_with_sends`);
    a kind that did not run at all is left open, and where one ran on some stages only, its duration
    on the others is 0. The time of a transfer is over all of them, see `latencies`.
    """
    # By kind and stage, one entry for each time that it ran.
    durations: dict[tuple[int, int], list[float]] = {}
    for _, bar in chain.from_iterable(map(ops_with_sends, traces)):
        durations.setdefault((bar.kind, bar.stage), []).append(bar.end - bar.start)
    stages = range(1 + max((stage for _, stage in durations), default=-1))
    ran = {kind for kind, _ in durations}
    means: dict[str, Any] = {
        f"{op.cost}_times": tuple(
            _mean(durations.get((kind, stage), [0.0])) for stage in stages
        )
        for kind, op in OPS.items()
        if kind in ran and not op.is_collective
    }
    times = list(chain.from_iterable(map(latencies, traces)))
    p2p_time = _mean(times) if times else None
    return Costs(**means, p2p_time=p2p_time, measured_stages=len(stages))


def _mean(times: list[float]) -> float:
    """To as many digits as differences of times have."""
    return float(f"{fsum(times) / len(times):.9g}")


def latencies(actions: Sequence[Traced]) -> list[float]:
    """How long transfers took: from where a send had begun to the end of the wait for what it
    sends, or 0.

    Only those count whose receiver waited from before the send; others may have been there for
    long. Every send has its receive, in each step of the run.
    """
    # By kind, number and microbatch, one bar for each step of the run: the n-th send of a message
    # belongs to the n-th receive of it.
    bars: dict[tuple[int, int, int], list[Bar]] = {}
    stages = 1 + max(
        (bar.stage for _, bar in actions if not is_transfer(bar.kind)), default=-1
    )
    for _, bar in actions:
        bars.setdefault((bar.kind, bar.stage, bar.microbatch), []).append(bar)
    # How long a transfer took shows only where its receiver was there first:
    #
    #     sender      ── F3 ──┤send├─────
    #     receiver    ────┤   wait    ├──    this counts, from the end of the send
    #     receiver    ──────────── F2 ┤w├    it may have been there for long: this does not
    times = []
    for (kind, number, microbatch), sends in bars.items():
        if is_send(kind):
            receives = bars.get((*counterpart(kind, number, stages), microbatch), ())
            for sent, received in zip(sends, receives, strict=False):
                if received.start <= sent.start <= received.end:
                    times.append(max(received.end - sent.end, 0.0))
    return times
