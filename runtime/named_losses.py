"""Means of losses over all ranks, by the names of the losses."""

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import Wire


def means_of_losses(
    own: Mapping[str, Tensor],
    known: Sequence[str],
    wire: Wire,
    watchdog: Watchdog,
    device: torch.device,
) -> tuple[list[str], dict[str, float]]:
    """All names of losses that any rank has had, and the means of those that there are now. All
    ranks give their `own`, and the names that are `known` since the last time.
    """
    # Ranks add up a tensor of numbers, in an order of names that all of them know:
    #
    #     any new name? │ of each known name, is it here? │ of each known name, its value
    #
    # A name that some rank has for the first time is told by the store, which is slower; then all
    # of them do it over. So every step but the first, as a rule, is a single sum.
    replicas = wire.processes.replicas
    while True:
        are_new = bool(own.keys() - set(known))
        there = [name in own for name in known]
        values = [float(own.get(name, 0.0)) for name in known]
        sums = torch.tensor([are_new, *there, *values], dtype=torch.float64)
        sums = sums.to(device)
        wire.reduce(sums, dist.ReduceOp.SUM)
        wire.end_sum(wire.begin_sum(sums, replicas), replicas)
        # No rank had a new name, so the sums are complete.
        if not sums[0]:
            break
        names = watchdog.gather(json.dumps(sorted(own)), "asked for its losses")
        of_ranks = (name for theirs in names.values() for name in json.loads(theirs))
        known = sorted({*of_ranks, *known})
    count = len(replicas.processes)
    _, *rest = sums.tolist()
    pairs = zip(rest, rest[len(known) :], strict=False)
    means = {
        name: total / count
        for name, (is_there, total) in zip(known, pairs, strict=False)
        if is_there
    }
    return [*known], means
