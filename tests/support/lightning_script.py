"""A training of Lightning's Trainer: by a plan, under torchrun, or in one process.

    lightning_script.py PLAN FOLDER STEPS [CHECKPOINT]

Without a plan (`-`) it has Lightning's own strategy. What it logs is `metrics.csv` in the folder.
"""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.lightning_strategy import PipelineStrategy
from schedlang import read_plan

WIDTH = 8


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean square."""
    return nn.functional.mse_loss(output, target)


class Module(LightningModule):
    """A stack of layers, trained alike with a plan and without."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
        self.model: nn.Module = nn.Sequential(*layers)

    def training_step(self, batch: Any, _: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        strategy = self.trainer.strategy
        if isinstance(strategy, PipelineStrategy):
            loss = strategy.step(inputs, targets)
        else:
            loss = loss_fn(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """Log the loss of a batch."""
        inputs, targets = batch
        strategy = self.trainer.strategy
        if isinstance(strategy, PipelineStrategy):
            loss = strategy.evaluate(inputs, targets)
        else:
            loss = loss_fn(self.model(inputs), targets)
        self.log("validation", loss)

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate falls."""
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the rate."""
        self.log("rate", optimizer.param_groups[0]["lr"])


def loader(rows: int, seed: int) -> DataLoader[Any]:
    """Batches of 8 rows, in one order."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.rand((2, rows, WIDTH), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), 8)


def main() -> None:
    """Train."""
    plan, folder, steps, *checkpoint = sys.argv[1:]
    torch.manual_seed(0)
    options: dict[str, Any] = {"devices": 1}
    if plan != "-":
        of_ranks = read_plan(plan)
        strategy = PipelineStrategy(of_ranks, loss_fn)
        options = {"devices": len(of_ranks.ranks), "strategy": strategy}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=int(steps),
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[ModelCheckpoint(f"{folder}/kept", "{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    resumed = checkpoint[0] if checkpoint else None
    trainer.fit(Module(), loader(48, 1), loader(24, 2), ckpt_path=resumed)


if __name__ == "__main__":
    main()
