"""Reinforcement learning with a plan: generate by forwards, score, train on what is worth it, as
the loops of TRL and verl do. Each step has another number of microbatches.

    torchrun --nproc-per-node 2 examples/reinforce.py programs/zb_h1.sched

A small language model learns to write tokens in rising order, by REINFORCE: texts with a reward
above the mean become more likely, others less. Rank 0 prints the mean reward of each step.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from schedlang import compile
from schedlang.runtime import Pipeline, split

TOKENS = 16
LENGTH = 12
TEXTS = 32
#: Texts of a microbatch.
ROWS = 4
STEPS = 30


class Block(nn.Module):
    """Mixes each position with those before, by a running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """What each position has learned, (rows, length, width)."""
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        before = x.cumsum(dim=1) / counts
        learned: Tensor = self.inner(torch.cat([x, before], dim=-1))
        return x + learned


def build(blocks: int, width: int = 32) -> nn.Sequential:
    """The model: scores of the next token for each position, (rows, length, TOKENS)."""
    torch.manual_seed(0)
    layers = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(TOKENS, width), *layers, nn.Linear(width, TOKENS))


def loss_fn(scores: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over tokens of what makes texts with an advantage above 0 more likely."""
    following, advantages = target
    surprise = cross_entropy(
        scores.flatten(0, 1), following.flatten(), reduction="none"
    )
    return (surprise.view_as(following) * advantages[:, None]).mean()


def choose(scores: Tensor, generator: torch.Generator) -> Tensor:
    """The next token of each text, (rows,), drawn by the scores of its last position."""
    return torch.multinomial(scores[:, -1].softmax(-1), 1, generator=generator)[:, 0]


def rewards_of(texts: Tensor) -> Tensor:
    """For each text, the share of its tokens that are above the one before."""
    return (texts[:, 1:] > texts[:, :-1]).double().mean(dim=1)


def worth_training(
    texts: Tensor, rewards: Tensor
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Microbatches of inputs and targets: of the texts that are far from the mean reward."""
    advantages = rewards - rewards.mean()
    kept = advantages.abs() >= advantages.abs().mean()
    parts = torch.split(texts[kept], ROWS)
    of_parts = torch.split(advantages[kept], ROWS)
    for part, of_part in zip(parts, of_parts, strict=True):
        yield part[:, :-1], (part[:, 1:], of_part)


class Training:
    """A model that is trained with a plan, of which each process has the stages of its rank."""

    def __init__(self, program: str, model: nn.Sequential, rate: float = 0.01) -> None:
        ranks = dist.get_world_size()
        self.plan = compile(program, {"ranks": ranks})
        stages = split(model, self.plan)
        self.pipeline = Pipeline(self.plan, stages, loss_fn)
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), rate)
        self.last = self.plan.placement[-1]
        self.generator = torch.Generator().manual_seed(0)

    def generate(self) -> Tensor:
        """Texts, on all ranks: a forward for each token."""
        texts = torch.zeros(TEXTS, 1, dtype=torch.long)
        for _ in range(LENGTH):
            outputs = self.pipeline.evaluate(texts)
            following = torch.zeros(TEXTS, dtype=torch.long)
            if outputs is not None:
                following = choose(torch.cat(outputs), self.generator)
            dist.broadcast(following, self.last)
            texts = torch.cat([texts, following[:, None]], dim=1)
        return texts

    def step(self) -> float:
        """Generate, score and train; gives the mean reward."""
        texts = self.generate()
        rewards = rewards_of(texts)
        # All ranks have the texts, so they find the same microbatches, and the same plan.
        inputs, targets = map(list, zip(*worth_training(texts, rewards), strict=True))
        counts = [each.numel() for each in inputs]
        plan = self.plan.for_microbatches(len(inputs))
        self.pipeline.step(inputs, targets, counts=counts, plan=plan)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return rewards.mean().item()


def main() -> None:
    """Train, and print the rewards."""
    dist.init_process_group("gloo")
    training = Training(sys.argv[1], build(blocks=6))
    for step in range(STEPS):
        reward = training.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: mean reward {reward:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
