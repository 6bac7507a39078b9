"""The Trainer of transformers, with a pipeline under it: its arguments, collators, schedulers,
callbacks and logs, and its loop. docs/training.md says what it leaves out.

    trainer = PipelineTrainer(model, read_plan("plan.json"), arguments, train_dataset=rows)
    trainer.train()

It runs under torchrun, with as many processes as the plan has ranks. Its checkpoints are for any
plan and any number of ranks.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutput

from schedlang import Plan
from schedlang.runtime import Pipeline, load_model, load_optimizers, load_state, split

IGNORED = -100
Batch = dict[str, Tensor]


def loss_fn(output: CausalLMOutput, labels: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens of a microbatch, (rows, length)."""
    assert output.logits is not None
    following = labels[:, 1:].flatten()
    scores = output.logits[:, :-1].float().flatten(0, 1)
    total = cross_entropy(scores, following, ignore_index=IGNORED, reduction="sum")
    return total / (following != IGNORED).sum().clamp(min=1)


def first_row(dataset: Any, collate: Any = None) -> Batch:
    """A batch of the first row of a data set: what the model is given, with labels."""
    rows = list(islice(dataset, 1))
    if not rows:
        raise ValueError("`train_dataset` has no rows")
    batch: Batch = (collate or default_data_collator)(rows)
    if "labels" not in batch:
        raise ValueError(
            f"a batch has {', '.join(batch)} and no `labels`: take a collator that makes them, "
            "such as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    return batch


def _without_labels(batch: Batch) -> Batch:
    return {name: rows for name, rows in batch.items() if name != "labels"}


def cut(batch: Batch, microbatches: int) -> tuple[Batch, Tensor, list[int]]:
    """Inputs and labels, with rows that count for nothing until they divide into microbatches; and
    how many tokens of each microbatch count.
    """
    missing = -len(batch["labels"]) % microbatches
    whole = {
        name: torch.cat([rows, *[rows[:1]] * missing]) for name, rows in batch.items()
    }
    labels = whole["labels"]
    labels[len(labels) - missing :] = IGNORED
    parts = labels[:, 1:].chunk(microbatches)
    counts = [int((part != IGNORED).sum()) for part in parts]
    return _without_labels(whole), labels, counts


class PipelineTrainer(Trainer):
    """A Trainer of a causal language model, of which each process has the stages of its rank.

    `per_device_train_batch_size` are the rows of a step, which are cut into the plan's
    microbatches; so `gradient_accumulation_steps` stays 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        args: TrainingArguments,
        train_dataset: Any,
        **options: Any,
    ) -> None:
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}: the plan cuts "
                f"a step into {plan.microbatches} microbatches, so leave it at 1"
            )
        row = first_row(train_dataset, options.get("data_collator"))
        # The arguments have made the process group, if torchrun has started this process.
        if not dist.is_initialized():
            ranks = len(plan.ranks)
            raise ValueError(
                f"the plan is for {ranks} ranks, and this process has no rank: start the script "
                f"with `torchrun --nproc-per-node {ranks}`"
            )
        # Columns are those of the model's forward, and here the model is a list of stages.
        args.remove_unused_columns = False
        args.average_tokens_across_devices = False
        self.plan = plan
        self.config = model.config
        self.stages = split(model, plan, inputs=_without_labels(row))
        held = nn.ModuleList(self.stages.values())
        super().__init__(held, args, train_dataset=train_dataset, **options)
        self.pipeline = Pipeline(plan, self.stages, loss_fn)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """All ranks load the same rows, in the order of one process; accelerate would deal them out
        to the ranks.
        """
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size,
            sampler=sampler_fn(dataset) if sampler_fn else None,
            num_workers=self.args.dataloader_num_workers,
            collate_fn=self.data_collator,
        )
        loader = prepare_data_loader(
            loader,
            num_processes=1,
            process_index=0,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed,
        )
        return loader

    def _wrap_model(self, model: nn.Module, *given: Any, **options: Any) -> nn.Module:
        """Another module than the model is one that accelerate leaves alone."""
        return nn.ModuleList([model])

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Forwards and backwards of all microbatches of a batch; its loss, on all ranks."""
        model.train()
        inputs = {name: rows.to(self.args.device) for name, rows in inputs.items()}
        inputs, labels, counts = cut(inputs, self.plan.microbatches)
        with self.compute_loss_context_manager():
            losses = self.pipeline.step(inputs, labels, counts=counts)
        return self._mean(losses, counts)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The mean loss of the rows of a data set, as the Trainer has it: the mean over batches, by
        their rows.
        """
        for stage in self.stages.values():
            stage.eval()
        total = 0.0
        rows = 0
        for batch in self.get_eval_dataloader(eval_dataset):
            batch = {name: rows.to(self.args.device) for name, rows in batch.items()}
            inputs, labels, counts = cut(batch, self.plan.microbatches)
            with self.compute_loss_context_manager():
                losses = self.pipeline.evaluate(inputs, labels)
            total += len(batch["labels"]) * self._mean(losses, counts).item()
            rows += len(batch["labels"])
        metrics = {f"{metric_key_prefix}_loss": total / rows}
        self.log(metrics)
        call = self.callback_handler.on_evaluate
        self.control = call(self.args, self.state, self.control, metrics)
        return metrics

    def _mean(self, losses: Any, counts: list[int]) -> Tensor:
        """The mean over all tokens, on all ranks, of losses that the rank of the last stage has."""
        mean = torch.zeros((), device=self.args.device)
        if losses is not None:
            losses = torch.stack([*losses])
            weights = torch.tensor(counts, device=losses.device)
            mean += (losses * weights).sum() / weights.sum()
        dist.all_reduce(mean)
        return mean

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the model as `from_pretrained` reads it, and what the optimizer keeps."""
        folder = Path(output_dir or self.args.output_dir or ".")
        step = self.state.global_step
        self.pipeline.save_model(folder, step, self._optimizers(), self._state())
        if self.args.should_save:
            self.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """`save_model` has written them."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        load_model(resume_from_checkpoint, self.stages)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizers(checkpoint, self.stages, self._optimizers())
            load_state(checkpoint, self._state())

    def _optimizers(self) -> list[Optimizer]:
        """That of this rank, without what accelerate has put around it."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        return [optimizer] if optimizer else []

    def _state(self) -> dict[str, Any]:
        return {"scheduler": self.lr_scheduler} if self.lr_scheduler else {}
