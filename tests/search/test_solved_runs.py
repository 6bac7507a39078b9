"""What was found for unequal layers, on real processes: stages wherever, trained as in one
process.
"""

from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import nn

from schedlang import Costs, Source, compile
from schedlang.extras.search.partition import Layer, fit, solve
from schedlang.runtime import Pipeline, split
from tests.support.cut_models import ROWS, alone, gradients, sequence
from tests.support.models import difference
from tests.support.ranks import Run


def trained(program: str, layout: list[list[str]]) -> float:
    """How far losses and gradients of a step are from those of one process."""
    plan = compile(Source("found.sched", program))
    generator = torch.Generator().manual_seed(1)
    rows = plan.microbatches * ROWS
    inputs, targets = torch.randn(2, rows, 8, dtype=torch.float64, generator=generator)
    reference = sequence()
    stages = split(sequence(), plan, layout=layout)
    losses = Pipeline(plan, stages, nn.functional.mse_loss).step(inputs, targets)
    expected = alone(reference, nn.functional.mse_loss, inputs, targets)
    worst = [difference(*pair) for pair in gradients(stages, reference)]
    if losses is not None:
        worst.append(difference(losses, expected))
    return max(worst, default=0.0)


@pytest.mark.processes
def test_what_was_found_trains_as_one_process(run_ranks: Run) -> None:
    """Layers, placement and order as they were found, in the form that `split` takes."""
    layers = [Layer(1, 1, 1, name=name) for name, _ in sequence().named_children()]
    layers[-1] = Layer(6, 6, 6, name=layers[-1].name)
    links = Costs(p2p_time=0.25)
    size = {"ranks": 2, "microbatches": 8}
    solution = solve(layers, [fit(layers, "interleaved_zb", size, links)], links)
    task = partial(trained, solution.program(), solution.layout(layers))
    for worst in run_ranks(task, 2).results():
        assert worst < 1e-12
