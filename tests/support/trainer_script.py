"""A training of the Trainer of transformers: by a plan, under torchrun, or in one process.

    trainer_script.py PLAN FOLDER STEPS [CHECKPOINT]

Without a plan (`-`) it is the Trainer's own. What it logs is `trainer_state.json` in the folder.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from examples.trainer import IGNORED, PipelineTrainer
from schedlang import read_plan

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of unequal lengths, filled up with tokens that do not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(64, (16,), generator=generator)
        length = int(torch.randint(4, 16, (), generator=generator))
        is_there = torch.arange(16) < length
        found.append(
            {
                "input_ids": tokens,
                "attention_mask": is_there.long(),
                "labels": tokens.where(is_there, IGNORED),
            }
        )
    return found


def main() -> None:
    """Train."""
    plan, folder, steps, *checkpoint = sys.argv[1:]
    arguments = TrainingArguments(
        folder,
        max_steps=int(steps),
        per_device_train_batch_size=10,
        per_device_eval_batch_size=6,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    options: dict[str, Any] = {
        "train_dataset": rows(35, 1),
        "eval_dataset": rows(16, 2),
    }
    if plan == "-":
        trainer = Trainer(model, arguments, **options)
    else:
        trainer = PipelineTrainer(model, read_plan(plan), arguments, **options)
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(folder) / "trainer_state.json"))


if __name__ == "__main__":
    main()
