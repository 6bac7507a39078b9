"""Trains a Llama of transformers with a plan, and goes on from where a run under another plan
ended: `make example`.

torchrun --nproc-per-node 4 examples/llama.py PLAN FOLDER --steps 10 --check
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.logging import disable_progress_bar

from schedlang import read_plan
from schedlang.examples.demo.corpus import draw_batch, read_corpus
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, load_model, load_optimizers, measure, split

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
#: The blocks of the model, in the order in which it calls them.
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
#: Rows of a microbatch, and its bytes per row.
ROWS = 2
LENGTH = 64
EXAMPLE = torch.zeros(ROWS, LENGTH, dtype=torch.long)
#: The largest relative difference of a loss that another order of the same float32 additions
#: explains.
TOLERANCE = 1e-5


class Llama(LlamaForCausalLM):
    """The model as it is, but that it returns a tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) bytes to (rows, length, 256) scores of the next ones."""
        return super().forward(tokens, use_cache=False).logits


def empty_model() -> Llama:
    """The model without weights, which takes no memory: a rank loads its own."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    # The positions are no weights: they are in no file.
    model.model.rotary_emb = LlamaRotaryEmbedding(CONFIG)
    return model


def loss_fn(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of the bytes that follow."""
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def batches(plan: Plan, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
    """What each step trains on: Python's own library, as bytes."""
    corpus = read_corpus()
    return (
        draw_batch(corpus, plan.microbatches * ROWS, LENGTH, step) for step in steps
    )


def train(plan: Plan, begin: Path, folder: Path, steps: int) -> tuple[int, list[float]]:
    """Go on from one folder to another: the step at which this began, and the losses."""
    model = empty_model()
    stages = split(model, plan, BLOCKS, measure(model, EXAMPLE, BLOCKS))
    stages_alone = imbalance(model, plan, stages.partition.costs)
    first = load_model(begin, stages)
    optimizers = [AdamW(stage.parameters(), lr=1e-3) for stage in stages.values()]
    if first:
        load_optimizers(begin, stages, optimizers)
    if dist.get_rank() == 0:
        print(f"{plan.name}, from step {first}\n{stages}")
        print(
            f"measured stage by stage, the slowest has {stages_alone:.1%} more than an even share",
            flush=True,
        )
    pipeline = Pipeline(plan, stages, loss_fn)
    found = []
    for inputs, targets in batches(plan, range(first, steps)):
        losses = pipeline.step(inputs, targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # They are on the ranks of last stages.
        loss = torch.zeros(()) if losses is None else losses.sum() / plan.microbatches
        dist.all_reduce(loss)
        found.append(float(loss))
        if dist.get_rank() == 0:
            print(f"step {first + len(found):>3}  loss {found[-1]:.6f}", flush=True)
    pipeline.save_model(folder / f"step-{steps}", steps, optimizers)
    return first, found


def imbalance(model: Llama, plan: Plan, costs: Sequence[float]) -> float:
    """By how much the slowest stage takes more than an even share, each measured alone; its cuts
    are by `costs`.
    """
    placed = enumerate(plan.placement[: plan.layout.pieces])
    pieces = [
        split(model, plan, BLOCKS, costs, rank=rank)[stage] for stage, rank in placed
    ]
    seconds = measure(nn.Sequential(*pieces), EXAMPLE)
    return max(seconds) * len(seconds) / sum(seconds) - 1


def train_alone(plan: Plan, begin: Path, steps: int) -> list[float]:
    """The same training in one process, without plan and stages: the losses."""
    model = empty_model()
    found = []
    load_model(begin, {0: model})
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in batches(plan, range(steps)):
        losses = []
        for x, y in zip(
            inputs.chunk(plan.microbatches),
            targets.chunk(plan.microbatches),
            strict=True,
        ):
            loss = loss_fn(model(x), y)
            (loss / plan.microbatches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(torch.stack(losses).mean()))
    return found


def check(plan: Plan, begin: Path, first: int, losses: list[float]) -> None:
    """Compare with the training in one process, from its first step on."""
    alone = train_alone(plan, begin, first + len(losses))[first:]
    worst = max(
        abs(ours - other) / other for ours, other in zip(losses, alone, strict=True)
    )
    print(
        f"largest difference of a loss from one process, over {len(losses)} steps: {worst:.1e}",
        flush=True,
    )
    if worst > TOLERANCE:
        raise SystemExit("these are not the same training")


def main() -> None:
    """One rank of a run."""
    parser = argparse.ArgumentParser(description="Train a Llama with a plan.")
    parser.add_argument("plan", type=Path, help="a plan file, from `schedc compile -o`")
    parser.add_argument(
        "folder", type=Path, help="has a folder `step-N` for each model that is saved"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="how many updates, with those of before (default: 20)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the same training in one process",
    )
    options = parser.parse_args()
    disable_progress_bar()
    dist.init_process_group("gloo")
    start = options.folder / "step-0"
    if dist.get_rank() == 0 and not start.exists():
        torch.manual_seed(0)
        Llama(CONFIG).save_pretrained(start)
    dist.barrier()
    newest = max(
        options.folder.glob("step-*[0-9]"),
        key=lambda each: int(each.name.removeprefix("step-")),
    )
    plan = read_plan(options.plan)
    first, losses = train(plan, newest, options.folder, options.steps)
    if dist.get_rank() == 0:
        # With this, `from_pretrained` reads it.
        CONFIG.save_pretrained(options.folder / f"step-{options.steps}")
        if options.check:
            check(plan, start, first, losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
