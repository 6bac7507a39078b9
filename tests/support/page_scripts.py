"""The rest of the scripts that the documentation shows parts of: the names that a part is given, and
what is done with those that it makes.

Each function is a script that stops where the part stands, on every rank, and then goes on with the
names of both.
"""

import builtins
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW

import schedlang.torch
from schedlang import compile, read_source
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, Standby, load_model, load_optimizers, split
from tests.support.models import program
from tests.support.pages import program_of
from tests.support.paths import PROGRAMS, ROOT

Names = dict[str, Any]
WIDTH = 8
ROWS = 32


def build(stage: int) -> nn.Module:
    """A stage, the same on all ranks."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.rand((2, ROWS, WIDTH), generator=generator)
    return inputs, targets


def common(plan: Plan) -> Names:
    """What all scripts have."""
    inputs, targets = batch_of(0)
    imported = (init_device_mesh, parallelize_module, ColwiseParallel, RowwiseParallel)
    imported += (
        Pipeline,
        AdamW,
        compile,
        read_source,
        split,
        load_model,
        load_optimizers,
    )
    return {
        **{each.__name__: each for each in imported},
        "torch": torch,
        "nn": nn,
        "F": F,
        "dist": dist,
        "plan": plan,
        "build": build,
        "batch_of": batch_of,
        "inputs": inputs,
        "targets": targets,
        "loss_fn": nn.functional.mse_loss,
    }


def script() -> Iterator[Names]:
    """A pipeline of two ranks."""
    plan = program("1f1b", ranks=2, microbatches=4)
    names = common(plan)
    stages = {stage: build(stage) for stage in plan.stages_of(dist.get_rank())}
    names["stages"] = stages
    names["optimizers"] = [AdamW(stage.parameters()) for stage in stages.values()]
    names["pipeline"] = Pipeline(plan, stages, names["loss_fn"])
    yield names


def masked() -> Iterator[Names]:
    """A mask for the rows of the batch."""
    names = common(program("1f1b", ranks=2, microbatches=4))
    yield names | {"mask": torch.arange(ROWS) % 2}


def of_torch() -> Iterator[Names]:
    """Stages of torch's own on two ranks: the inputs are for the first one, and targets for the
    last one.
    """
    names = common(program("1f1b", ranks=2, microbatches=4))
    rank = dist.get_rank()
    names |= {"schedlang": schedlang, "PipelineStage": PipelineStage, "rank": rank}
    names |= {
        "ScheduleInterleaved1F1B": ScheduleInterleaved1F1B,
        "device": torch.device("cpu"),
    }
    inputs, targets = batch_of(0)
    names["inputs"] = [] if rank else [inputs]
    names["targets"] = targets if rank else None
    yield names
    if "outputs" in names:
        assert len(names["outputs"]) == ROWS if rank else names["outputs"] is None


def classes() -> Iterator[Names]:
    """A loss that gives more than the loss."""
    plan = program("1f1b", ranks=2, microbatches=4)
    names = common(plan)
    yield names
    stages = {stage: build(stage) for stage in plan.stages_of(dist.get_rank())}
    pipeline = Pipeline(plan, stages, names["loss_fn"])
    losses = pipeline.step(names["inputs"], torch.arange(ROWS) % WIDTH)
    assert losses is None or sum(extras["right"] for extras in pipeline.extras) <= ROWS


def meshes() -> Iterator[Names]:
    """Pipelines of two ranks beside each other, which train."""
    names = common(program("1f1b", ranks=2, microbatches=4))
    yield names
    names["pipeline"].step(names["inputs"], names["targets"])


def exchanges() -> Iterator[Names]:
    """Processes in a mesh of two pipelines and two experts, which train."""
    from torch.distributed.nn.functional import all_to_all_single

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "pp"))
    names = common(program("1f1b", ranks=2, microbatches=4))
    names |= {"mesh": mesh, "group": mesh["experts"].get_group()}
    yield names | {"all_to_all_single": all_to_all_single}
    names["pipeline"].step(names["inputs"], names["targets"])


def sharded() -> Iterator[Names]:
    """The same, with stages that FSDP shards."""
    from torch.distributed.fsdp import fully_shard

    names = common(program("1f1b", ranks=2, microbatches=4)) | {
        "fully_shard": fully_shard
    }
    yield names
    names["pipeline"].step(names["inputs"], names["targets"])


def contexts() -> Iterator[Names]:
    """Packed rows, of which each process has a part: gradients are those of whole rows."""
    names = common(program("1f1b", ranks=2, microbatches=4))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((8, 12, WIDTH), generator=generator)
    targets = torch.randint(WIDTH, (8, 12), generator=generator)
    # The first places are the prompt, which does not count.
    targets[:, :5] = -100
    texts = (torch.rand((8, 12), generator=generator) < 0.3).cumsum(1)
    names |= {"inputs": inputs, "targets": targets, "texts": texts}
    names["loss_fn"] = lambda scores, wanted: F.cross_entropy(
        scores.flatten(0, 1), wanted.flatten()
    )
    yield names
    alone = [names["Attention"]() for _ in range(2)]
    names["Gather"].apply = nn.Identity()
    x = inputs
    for number, stage in enumerate(alone):
        torch.manual_seed(number)
        stage.project.reset_parameters()
        is_same = texts[:, :, None] == texts[:, None]
        x = stage(x, is_same & torch.ones(12, 12, dtype=torch.bool).tril())
    names["loss_fn"](x, targets).backward()
    for number, stage in names["stages"].items():
        for weight, other in zip(
            stage.parameters(), alone[number].parameters(), strict=True
        ):
            torch.testing.assert_close(weight.grad, other.grad)


def late() -> Iterator[Names]:
    """A plan that updates its stages itself."""
    plan = program("pipedream_2bw", ranks=2)
    names = common(plan)
    stages = {stage: build(stage) for stage in plan.stages_of(dist.get_rank())}
    optimizers = {stage: AdamW(module.parameters()) for stage, module in stages.items()}
    rows = plan.microbatches
    names |= {"inputs": torch.rand(rows, WIDTH), "targets": torch.rand(rows, WIDTH)}
    names |= {"stages": stages, "optimizers": optimizers}
    yield names
    pipeline = Pipeline(plan, stages, names["loss_fn"], optimizers=optimizers)
    pipeline.step(names["inputs"], names["targets"])


class Byte(nn.Module):
    """The first stage: bytes become vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.byte(given)
        return found


class Scores(nn.Module):
    """The last stage: vectors become scores of bytes, by the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scores(given)
        return found


def tied() -> Iterator[Names]:
    """Four stages, of which the first and the last have a weight in common."""
    plan = program("interleaved_1f1b", ranks=2, microbatches=4)
    modules = [Byte(), build(1), build(2), Scores()]
    torch.manual_seed(0)
    weight = torch.rand(256, WIDTH)
    # Two parameters with one value, as two ranks have them: that they stay equal is what the page
    # shows.
    nn.init.zeros_(modules[0].byte.weight).data.add_(weight)
    nn.init.zeros_(modules[3].scores.weight).data.add_(weight)
    stages = {stage: modules[stage] for stage in plan.stages_of(dist.get_rank())}
    names = common(plan) | {"stages": stages, "loss_fn": nn.functional.cross_entropy}
    yield names
    given = torch.arange(ROWS)
    names["pipeline"].step(given, given)


def elastic() -> Iterator[Names]:
    """A model that was saved at step 100."""
    plan = program("1f1b", ranks=2, microbatches=4)
    stages = split(nn.Sequential(build(0), build(1)), plan)
    optimizers = [AdamW(stage.parameters()) for stage in stages.values()]
    pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
    pipeline.step(*batch_of(0))
    for optimizer in optimizers:
        optimizer.step()
    pipeline.save_model("kept", 100, optimizers)
    if dist.get_rank() == 0:
        Path("programs").symlink_to(PROGRAMS)
    dist.barrier()
    names = common(plan) | {"model": nn.Sequential(build(2), build(3))}
    yield names
    assert names["step"] == 100
    assert all(optimizer.state for optimizer in names["optimizers"])


def standby() -> Iterator[Names]:
    """Batches for all pipelines of a plan."""
    if dist.get_rank() == 0:
        Path("programs").symlink_to(PROGRAMS)
        source = program_of(ROOT / "docs" / "training.md", "replicated.sched")
        Path(source.path).write_text(source.text)
    dist.barrier()
    names = common(program("1f1b", ranks=2, microbatches=4))
    names |= {"Standby": Standby, "model": nn.Sequential(build(0), build(1))}
    # Here rank 0 has the store; none dies.
    with patch("schedlang.runtime.standby.is_of_torchrun", return_value=True):
        yield names | {"batches": [batch_of(0)]}


def checkpoint() -> Iterator[Names]:
    """A model that `split` has cut, after a step."""
    plan = program("1f1b", ranks=2, microbatches=4)
    stages = split(nn.Sequential(build(0), build(1)), plan)
    names = common(plan) | {"stages": stages}
    names["optimizers"] = [AdamW(stage.parameters()) for stage in stages.values()]
    Pipeline(plan, stages, nn.functional.mse_loss).step(*batch_of(0))
    names["optimizers"][0].step()
    yield names
    assert (Path("kept") / "step-12" / ".metadata").exists()


def skips() -> Iterator[Names]:
    """A U-Net on three ranks."""
    plan = program("unet_1f1b", ranks=3, microbatches=4)
    names = common(plan)
    yield names
    stages = [
        names["Down"](nn.Conv1d(1, 2, 3, padding=1), later=2),
        nn.Conv1d(2, 2, 3, padding=1),
        names["Up"](nn.Conv1d(4, 1, 3, padding=1), earlier=0),
    ]
    rank = dist.get_rank()
    inputs = torch.rand(ROWS, 1, WIDTH)
    Pipeline(plan, {rank: stages[rank]}, nn.functional.mse_loss).step(inputs, inputs)


class Encode(nn.Module):
    """What the encoder made goes along with what the decoder begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, passed: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"memory": self.layer(passed), "x": passed}


def experts() -> Iterator[Names]:
    """Stages that add losses."""
    names = common(program("1f1b", ranks=2, microbatches=4))
    yield names
    found = names["pipeline"].named_losses()
    assert found.keys() == {"balance", "loss"}
    assert 3 <= found["balance"] < 6


def components() -> Iterator[Names]:
    """Stages whose forwards and backwards take turns."""
    from schedlang.runtime import end_component

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.router, self.experts = (
                nn.Linear(8, 8) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = end_component(x + self.attention(x))
            return x + self.router(x).softmax(-1) * self.experts(x)

    names = common(program("interleaved_overlap", ranks=2, microbatches=4))
    names |= {"Layer": Layer, "end_component": end_component}
    yield names
    assert (names["losses"] is None) == (dist.get_rank() != 1)


class TowerAndHead(nn.Module):
    """A tower, some layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all."""
        x = self.tower(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def frozen() -> Iterator[Names]:
    """A model whose first part is not trained."""
    program_of_all = read_source(PROGRAMS / "frozen_1f1b.sched").text
    torch.manual_seed(0)
    names = common(program("frozen_1f1b", ranks=2, microbatches=4))
    names |= {"schedlang": schedlang, "model": TowerAndHead()}
    names["text"] = program_of_all.replace("param ranks = 4", "param ranks = 2")
    yield names
    assert bool(names["trained"]) == (dist.get_rank() == 1)
    assert all(weight.grad is not None for weight in names["trained"])


def decoder() -> Iterator[Names]:
    """An encoder, to which a decoder listens."""
    plan = program("gpipe", ranks=2, microbatches=4)
    names = common(plan) | {"encoder": [Encode()]}
    yield names
    given = torch.rand(4, 3, 16)
    pipeline = Pipeline(
        plan, names["stages"], lambda made, to: F.mse_loss(made["x"], to)
    )
    pipeline.step(given, given)


def of_tokens(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the tokens that follow."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def unequal() -> Iterator[Names]:
    """Texts of which a batch takes some rows and lengths."""
    plan = program("1f1b", ranks=2, microbatches=4)
    names = common(plan)
    model = [nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)]
    stages = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    generator = torch.Generator().manual_seed(0)
    names["texts"] = torch.randint(32, (20, 2048), generator=generator)
    names["following"] = torch.randint(32, (20, 2048), generator=generator)
    names["inputs"] = [*names["texts"].chunk(4)]
    names["targets"] = [*names["following"].chunk(4)]
    names["pipeline"] = Pipeline(plan, stages, of_tokens)
    yield names
    losses = names["losses"]
    assert losses is None or losses.isfinite().all()


def small_llama(positions: int) -> Any:
    """The configuration of a Llama of two layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )


def packed() -> Iterator[Names]:
    """A small Llama, and rows of several texts: what it makes of them is what it makes of each."""
    from transformers import LlamaForCausalLM

    plan = program("1f1b", ranks=2, microbatches=2)
    config = small_llama(16)
    generator = torch.Generator().manual_seed(0)
    documents, following = (
        [
            [torch.randint(32, [size], generator=generator) for size in row]
            for row in sizes
        ]
        for sizes in [[[3, 5, 2], [4, 1]]] * 2
    )
    torch.manual_seed(0)
    names = common(plan) | {
        "LlamaForCausalLM": LlamaForCausalLM,
        "config": config,
        "documents": documents,
        "following": following,
        "loss_fn": of_tokens,
    }
    yield names
    torch.manual_seed(0)
    alone = LlamaForCausalLM(config)
    total = torch.zeros(())
    for texts, wanted in zip(documents, following, strict=True):
        for text, to in zip(texts, wanted, strict=True):
            scores = alone(text[None], use_cache=False).logits
            # All texts together have 3 + 5 + 2 + 4 + 1 = 15 tokens, and the loss is the mean over
            # them.
            total = total + F.cross_entropy(scores[0], to, reduction="sum") / 15
    total.backward()
    expected = dict(alone.named_parameters())
    for stage in names["stages"].values():
        for name, weight in stage.named_parameters():
            torch.testing.assert_close(weight.grad, expected[name].grad)


class Sums(nn.Module):
    """Every token sees the sum of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Also gives the sum so far."""
        seen = self.layer(x).cumsum(1) + (0 if past is None else past)
        return seen, seen[:, -1:]


def slices() -> Iterator[Names]:
    """A program with slices."""
    plan = program("terapipe", ranks=2, microbatches=2, slices=3)
    names = common(plan)
    names["stages"] = {stage: Sums() for stage in plan.stages_of(dist.get_rank())}
    names["inputs"] = names["targets"] = torch.rand(4, 16, WIDTH)
    yield names
    names["pipeline"].step(names["inputs"], names["targets"])


def graph() -> Iterator[Names]:
    """Two encoders before a decoder."""
    plan = program("two_encoders", ranks=4, microbatches=4)
    names = common(plan) | {
        "read_source": lambda path: read_source(PROGRAMS / Path(path).name),
        "image_encoder": nn.Linear(6, 16),
        "text_encoder": nn.Linear(3, 16),
        "first_block": nn.Linear(32, 16),
        "last_block": nn.Linear(16, 2),
        "images": torch.rand(8, 6),
        "texts": torch.rand(8, 3),
        "targets": torch.rand(8, 2),
        "loss_fn": nn.functional.mse_loss,
    }
    yield names
    assert (names["losses"] is None) == (dist.get_rank() != 3)


class Joining(nn.Module):
    """A decoder that takes what two encoders make."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Concatenation()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 2)])

    def forward(
        self, image: torch.Tensor, text: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Join, then run all layers."""
        x = self.join(image, text)
        for layer in self.layers:
            x = layer(x)
        return x


class Concatenation(nn.Module):
    """A layer over two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 16)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Both in one."""
        return self.layer(torch.cat([one, other], dim=1))


def parts() -> Iterator[Names]:
    """Two encoders and a decoder, each cut by itself."""
    plan = program("two_encoders", ranks=4, microbatches=4)
    names = common(plan) | {
        "image_encoder": nn.Sequential(nn.Linear(6, 16)),
        "text_encoder": nn.Sequential(nn.Linear(3, 16)),
        "decoder": Joining(),
    }
    yield names
    inputs = {0: torch.rand(8, 6), 1: torch.rand(8, 3)}
    stages = names["stages"]
    losses = Pipeline(plan, stages, nn.functional.mse_loss).step(
        inputs, torch.rand(8, 2)
    )
    assert (losses is None) == (dist.get_rank() != 3)
    assert all(
        weight.grad is not None for weight in stages[dist.get_rank()].parameters()
    )


def teacher() -> Iterator[Names]:
    """Two small Llamas."""
    for names in llama():
        blocks = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
        names["config"].num_hidden_layers = 4

        class Teacher(names["LlamaForCausalLM"]):  # type: ignore[misc]
            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return super().forward(tokens, use_cache=False).logits  # type: ignore[no-any-return]

        torch.manual_seed(1)
        names |= {
            "read_source": lambda path: read_source(PROGRAMS / Path(path).name),
            "teacher": Teacher(names["config"]),
            "blocks": blocks,
            "tokens": names["inputs"],
            "following": names["targets"],
        }
        yield names
        found = names["pipeline"].named_losses()
        assert found.keys() == {"student.loss", "student.distance"}


def llama() -> Iterator[Names]:
    """A small Llama in a folder of `save_pretrained`."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plan = program("1f1b", ranks=2, microbatches=2)
    config = small_llama(8)
    if dist.get_rank() == 0:
        LlamaForCausalLM(config).save_pretrained("llama")
    dist.barrier()
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    yield common(plan) | {
        "LlamaForCausalLM": LlamaForCausalLM,
        "LlamaRotaryEmbedding": LlamaRotaryEmbedding,
        "config": config,
        "rows": 2,
        "inputs": tokens,
        "targets": tokens,
        "loss_fn": lambda scores, to: F.cross_entropy(
            scores.flatten(0, 1), to.flatten()
        ),
    }


def translation() -> Iterator[Names]:
    """A small T5, and texts with their translations."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 32, (4, 8), generator=generator)
    mask = torch.ones_like(tokens)
    mask[2, 5:] = 0
    names = common(program("1f1b", ranks=2, microbatches=2)) | {
        "T5ForConditionalGeneration": T5ForConditionalGeneration,
        "config": config,
        "rows": 2,
        "batch": {"input_ids": tokens, "attention_mask": mask, "labels": tokens + 0},
    }
    torch.manual_seed(0)
    whole = T5ForConditionalGeneration(config)
    torch.manual_seed(0)
    yield names
    losses = [
        whole(
            **{
                name: tensor[begin : begin + 2]
                for name, tensor in names["batch"].items()
            }
        ).loss
        for begin in (0, 2)
    ]
    if names["losses"] is not None:
        assert torch.equal(names["losses"], torch.stack(losses).detach())


SCRIPTS: dict[str, Callable[[], Iterator[Names]]] = {
    each.__name__: each
    for each in (
        script,
        masked,
        of_torch,
        classes,
        meshes,
        sharded,
        contexts,
        late,
        tied,
        elastic,
        standby,
        checkpoint,
        skips,
        decoder,
        components,
        experts,
        frozen,
        graph,
        parts,
        teacher,
        unequal,
        slices,
        packed,
        llama,
        translation,
    )
}


def run_part(text: str, where: str, given: str, folder: Path) -> None:
    """Run a part of a script on this rank, between what stands before and behind it."""
    os.chdir(folder)
    for names in SCRIPTS[given]():
        exec(builtins.compile(text, where, "exec"), names)
