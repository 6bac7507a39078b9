"""Train a Llama of transformers under any plan. docs/train.md explains this script part by part.

    schedc compile programs/zb_v.sched -p ranks=4 -p microbatches=8 -o plan.json
    torchrun --nproc-per-node 4 examples/train.py plan.json --folder run --steps 100

Started again, it goes on from the newest checkpoint in the folder.
"""

import argparse
import json
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from schedlang import open_plan, read_plan
from schedlang.runtime import Pipeline, load_model, load_optimizers, load_state, split

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=14,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
#: The parts of the model that `split` may put on different ranks, in the order in which they run.
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


class Llama(LlamaForCausalLM):
    """The model as it is, except that its forward returns a tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next tokens, (rows, length, vocabulary), for tokens (rows, length)."""
        return super().forward(tokens, use_cache=False).logits


def loss_fn(scores: Tensor, following: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens."""
    return cross_entropy(scores.float().flatten(0, 1), following.flatten())


class Batches:
    """Random pieces of the source of Python's standard library; a token is a byte.

    It keeps its place in a state, as torchdata's `StatefulDataLoader` does.
    """

    def __init__(self, rows: int, length: int, seed: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text[:4_000_000]), dtype=torch.uint8)
        self.shape = rows, length
        self.random = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows, length = self.shape
        while True:
            most = len(self.text) - length
            starts = torch.randint(most, (rows, 1), generator=self.random)
            places = starts + torch.arange(length + 1)
            tokens = self.text[places].long()
            yield tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the generator that draws the next piece."""
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the piece that comes after this state."""
        self.random.set_state(state["random"])


def device_of_process() -> torch.device:
    """Join the other processes; return the GPU of this one, or the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def decayed_and_not(pipeline: Pipeline, decay: float) -> list[dict[str, object]]:
    """Two groups of weights: matrices decay, norms and biases do not.

    Every rank has both groups, also where one of them is empty.
    """
    weights = list(pipeline.parameters())
    matrices = [weight for weight in weights if weight.ndim > 1]
    others = [weight for weight in weights if weight.ndim < 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


def train(options: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning."""
    device = device_of_process()
    folder = options.folder
    # Rank 0 proves the plan again; the others read only their own part of it.
    plan = (open_plan if dist.get_rank() else read_plan)(options.plan)
    # All ranks make the same weights, and keep those of their own stages.
    torch.manual_seed(options.seed)
    model = Llama(CONFIG)
    stages = split(model, plan, BLOCKS)
    first = load_model(folder, stages)
    if not first and options.pretrained:
        load_model(options.pretrained, stages)
    for stage in stages.values():
        stage.to(device)
    # From here on, dropout draws other numbers on each rank, and after each start.
    torch.manual_seed(options.seed + 1000 * first + dist.get_rank() + 1)

    pipeline = Pipeline(plan, stages, loss_fn)
    optimizer = AdamW(decayed_and_not(pipeline, decay=0.1), lr=options.lr)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    rows = plan.microbatches * options.rows
    batches = Batches(rows, options.length, options.seed)
    held_out = next(iter(Batches(rows, options.length, options.seed + 1)))
    state = {"warm-up": warm_up, "batches": batches}
    load_optimizers(folder, stages, [optimizer])
    load_state(folder, state)

    log = Log(folder / "log.jsonl")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)
    for step, batch in zip(range(first, options.steps), batches, strict=False):
        inputs, targets = (each.to(device) for each in batch)
        with autocast:
            pipeline.step(inputs, targets)
        norm = pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        done = step + 1
        is_last = done == options.steps
        if done % options.log_every == 0 or is_last:
            log.write(step=done, norm=float(norm), **pipeline.named_losses())
        if done % options.evaluate_every == 0 or is_last:
            with autocast:
                pipeline.evaluate(*(each.to(device) for each in held_out))
            log.write(step=done, held_out=pipeline.named_losses()["loss"])
        if done % options.save_every == 0 or is_last:
            save(pipeline, folder, done, optimizer, state)
    dist.destroy_process_group()


def save(
    pipeline: Pipeline, folder: Path, step: int, optimizer: AdamW, state: dict
) -> None:
    """Write a checkpoint, and keep the one before it."""
    new = folder / f"step-{step}"
    pipeline.save_model(new, step, [optimizer], state)
    if dist.get_rank() == 0:
        CONFIG.save_pretrained(new)
        there = {int(path.name[5:]): path for path in folder.glob("step-*[0-9]")}
        for old in sorted(there)[:-2]:
            shutil.rmtree(there[old])


class Log:
    """A line of JSON for each event, on the terminal and in a file, from rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = time.time()

    def write(self, **values: float) -> None:
        """Write one line."""
        if dist.get_rank() != 0:
            return
        line = json.dumps({**values, "seconds": round(time.time() - self.begin, 2)})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    """Train on one rank of a run."""
    parser = argparse.ArgumentParser(description="Train a Llama with a plan.")
    parser.add_argument("plan", type=Path, help="a plan file, of `schedc compile -o`")
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--pretrained", type=Path, help="weights to begin with")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--evaluate-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
