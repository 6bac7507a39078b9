"""The loop of examples/reinforce.py on real processes: its texts, rewards and weights are those of the
same loop in one process, though each of its steps has another number of microbatches.
"""

from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import nn

from examples.reinforce import (
    LENGTH,
    TEXTS,
    Training,
    build,
    choose,
    loss_fn,
    rewards_of,
    worth_training,
)
from tests.support.models import difference
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

STEPS = 6


def in_one_process() -> tuple[list[float], list[int], nn.Sequential]:
    """The rewards and numbers of microbatches of each step, and the model."""
    model = build(blocks=6).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    counts = []
    for _ in range(STEPS):
        texts = torch.zeros(TEXTS, 1, dtype=torch.long)
        for _ in range(LENGTH):
            with torch.no_grad():
                following = choose(model(texts), generator)
            texts = torch.cat([texts, following[:, None]], dim=1)
        of_texts = rewards_of(texts)
        microbatches = [*worth_training(texts, of_texts)]
        total = sum(inputs.numel() for inputs, _ in microbatches)
        for inputs, target in microbatches:
            (loss_fn(model(inputs), target) * inputs.numel() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(of_texts.mean().item())
        counts.append(len(microbatches))
    return rewards, counts, model


def trains(program: str) -> float:
    """The largest difference of a weight of this rank."""
    rewards, counts, alone = in_one_process()
    training = Training(str(PROGRAMS / f"{program}.sched"), build(blocks=6).double())
    assert [training.step() for _ in range(STEPS)] == rewards
    assert len({*counts}) > 1
    whole = dict(alone.named_parameters())
    stages = training.pipeline._stages.values()
    return max(
        difference(weight, whole[name])
        for stage in stages
        for name, weight in stage.module.named_parameters()
    )


@pytest.mark.parametrize(("program", "ranks"), [("zb_h1", 2), ("zb_v", 2), ("1f1b", 4)])
def test_a_loop_of_reinforcement_learning(
    program: str, ranks: int, run_ranks: Run
) -> None:
    assert max(run_ranks(partial(trains, program), ranks).results()) < 1e-9
