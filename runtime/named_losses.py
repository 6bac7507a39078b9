"""Means of losses over all ranks, by the names of the losses."""

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.runtime.losses import LOSS
from schedlang.runtime.results import Results
from schedlang.runtime.stage import Stage
from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import Wire


def losses_of(
    results: Results, stages: Mapping[int, Stage], plan: Plan
) -> dict[str, Tensor]:
    """The losses of a rank's stages by name, as parts of the means over microbatches."""
    layout = plan.layout
    own: dict[str, Tensor] = {}
    for model, losses in results.parts.items():
        total = torch.cat(losses).sum().to(torch.float64)
        # In double precision, since ranks sum these.
        own[_named(model, LOSS)] = total / results.microbatches[model]
    for number, stage in stages.items():
        model = layout.model_of(number)
        for name, value in stage.added.items():
            of_stage = value / layout.slices / results.microbatches[model]
            name = _named(model, name)
            own[name] = own[name] + of_stage if name in own else of_stage
    return own


def _named(model: str, loss: str) -> str:
    """The name of a loss; with several models, it begins with the name of its model."""
    return f"{model}.{loss}" if model else loss


def means_of_losses(
    own: Mapping[str, Tensor],
    known: Sequence[str],
    wire: Wire,
    watchdog: Watchdog,
    device: torch.device,
) -> tuple[list[str], dict[str, float]]:
    """The names of all losses that any rank has had, and the means of the current ones. All ranks
    pass their `own` losses, and the names that are `known` from the last call.
    """
    # Ranks all-reduce one tensor, in an order of names that all of them know:
    #
    #     any new name? │ for each known name, is it here? │ for each known name, its value
    #
    # New names are exchanged through the store, which is slower, and then the sum is repeated. So
    # usually every step but the first is a single all-reduce.
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
