"""A strategy of Lightning by which its Trainer trains with a plan: its loops, schedulers, clipping,
accumulation, callbacks, loggers and checkpoints. docs/training.md says what it asks for.

    strategy = PipelineStrategy(read_plan("plan.json"), loss_fn)
    Trainer(strategy=strategy, accelerator="cpu", devices=2, use_distributed_sampler=False)

The LightningModule has the whole model as `model`. In its `training_step` it returns
`self.trainer.strategy.step(inputs, targets)`, in its `validation_step` it logs
`self.trainer.strategy.evaluate(inputs, targets)`. Checkpoints are folders, for any plan and any
number of ranks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang import Plan
from schedlang.examples.step_loss import step_loss
from schedlang.runtime import Pipeline, load_model, load_optimizers, load_state, split

#: The file of a checkpoint's folder that has what the Trainer keeps: loops, callbacks, schedulers.
_TRAINER = "trainer.pt"


class PipelineStrategy(DDPStrategy):
    """Each process has the stages of its rank, and all of them load the same batches; `inputs` are
    those of a microbatch, if `split` needs them.
    """

    def __init__(
        self,
        plan: Plan,
        loss_fn: Callable[[Any, Any], Tensor],
        inputs: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.plan = plan
        self._loss_fn = loss_fn
        self._inputs = inputs
        self.stages: Mapping[int, nn.Module] = {}
        self.pipeline: Pipeline | None = None

    def setup(self, trainer: Trainer) -> None:
        """Cut the model, if that is not done yet; the module keeps the stages of this rank."""
        self.accelerator.setup(trainer)
        if self.pipeline is None:
            module = self.lightning_module
            self.stages = split(module.model, self.plan, inputs=self._inputs)
            module.model = nn.ModuleList(self.stages.values())
            self.model_to_device()
            self.pipeline = Pipeline(self.plan, self.stages, self._loss_fn)
            # Lightning would clip the stages of each rank by a norm of their own.
            self.precision_plugin.clip_grad_by_norm = self._clip
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def step(self, *batch: Any, **options: Any) -> Tensor:
        """A step of the pipeline: the mean loss, on all ranks, whose backward gives this rank's
        stages their gradients.
        """
        return step_loss(self.pipeline, *batch, **options).to(self.root_device)

    def evaluate(self, *batch: Any, **options: Any) -> float:
        """The mean of the losses of a batch, on all ranks."""
        self.pipeline.evaluate(*batch, **options)
        return self.pipeline.named_losses()["loss"]

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        self.pipeline.clip_grad_norm_(clip_val)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read into the stages, which `setup` makes."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing for Lightning's own file."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing for Lightning's own file."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder: the model and what optimizers keep, by all ranks, and the rest."""
        folder = Path(self.broadcast(filepath))
        step = checkpoint["global_step"]
        self.pipeline.save_model(folder, step, self.optimizers, self._schedulers())
        if self.is_global_zero:
            torch.save(checkpoint, folder / _TRAINER)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder that `save_checkpoint` has written, under any plan."""
        folder = Path(checkpoint_path)
        load_model(folder, self.stages)
        if self.optimizers:
            load_optimizers(folder, self.stages, self.optimizers)
            load_state(folder, self._schedulers())
        checkpoint: dict[str, Any] = torch.load(folder / _TRAINER, weights_only=False)
        return checkpoint

    def _schedulers(self) -> dict[str, Any]:
        configs = enumerate(self.lr_scheduler_configs)
        return {str(number): config.scheduler for number, config in configs}

    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        """`load_checkpoint` has done it."""
