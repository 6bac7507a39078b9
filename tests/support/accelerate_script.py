"""A loop with accelerate: by a plan, under torchrun, or in one process.

    accelerate_script.py PLAN FOLDER STEPS [CHECKPOINT]

Without a plan (`-`) it is a loop as accelerate documents it. What it logs is `log.json` in the
folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.step_loss import step_loss
from schedlang import read_plan
from schedlang.runtime import Pipeline, load_model, load_optimizers, load_state, split

WIDTH = 8
#: Steps between two checkpoints, and batches of a step.
EVERY = 3
BATCHES = 2


class Lines(GeneralTracker):
    """A tracker of accelerate's that keeps what is logged."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    @property
    def tracker(self) -> list[dict[str, Any]]:
        """What was logged."""
        return self.lines

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """There is none."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Keep a line."""
        self.lines.append({"step": step} | values)


def main() -> None:
    """Train."""
    plan, folder, steps, *checkpoint = sys.argv[1:]
    tracker = Lines()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=BATCHES, log_with=tracker
    )
    accelerator.init_trackers("training")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    model: nn.Module = nn.Sequential(*layers)
    stages = None
    if plan != "-":
        stages = split(model, read_plan(plan))
        model = nn.ModuleList(stages.values())
        pipeline = Pipeline(read_plan(plan), stages, nn.functional.mse_loss)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    first = 0
    if checkpoint:
        first = load_model(checkpoint[0], stages)
        load_optimizers(checkpoint[0], stages, [optimizer.optimizer])
        load_state(checkpoint[0], {"scheduler": scheduler})
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.rand(
        (2, int(steps) * BATCHES * 8, WIDTH), generator=generator
    )
    begin = first * BATCHES * 8
    loader = DataLoader(TensorDataset(inputs[begin:], targets[begin:]), 8)
    # All ranks load the same rows.
    loader = prepare_data_loader(loader, num_processes=1, process_index=0)
    step = first
    for x, y in loader:
        with accelerator.accumulate():
            if stages is None:
                loss = nn.functional.mse_loss(model(x), y)
            else:
                loss = step_loss(pipeline, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                step += 1
                parameters = [*model.parameters()]
                norm = (
                    accelerator.clip_grad_norm_(parameters, 0.05)
                    if stages is None
                    else pipeline.clip_grad_norm_(0.05)
                )
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            rate = scheduler.get_last_lr()[0]
            values = {"loss": loss.item(), "norm": norm.item(), "rate": rate}
            accelerator.log(values, step)
            if stages is not None and step % EVERY == 0:
                kept = Path(folder) / f"step-{step}"
                state = {"scheduler": scheduler}
                pipeline.save_model(kept, step, [optimizer.optimizer], state)
    if stages is None:
        last = nn.functional.mse_loss(model(inputs), targets).item()
    else:
        pipeline.evaluate(inputs, targets)
        last = pipeline.named_losses()["loss"]
    accelerator.log({"evaluation": last}, step)
    if accelerator.is_main_process:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "log.json").write_text(json.dumps(tracker.lines))
    accelerator.end_training()


if __name__ == "__main__":
    main()
