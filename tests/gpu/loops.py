"""Checks of training loops as people write them: each trains what one process trains."""

import copy
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from schedlang import compile, write_plan
from schedlang.runtime import Pipeline, PipelineError, measure, split
from tests.gpu.checks import (
    TOLERANCE,
    Said,
    batch,
    blocks,
    check,
    device,
    join,
    largest_difference,
    mse,
    on_gpu,
    rank,
    wait_for_device,
)
from tests.support.paths import ROOT

MICROBATCHES = 4
#: The blocks of a Llama of transformers, in the order of their calls.
LLAMA = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


def _add_gradients(
    modules: list[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Those of one process on a whole batch."""
    pairs = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    for x, target in pairs:
        for module in modules:
            x = module(x)
        loss = mse(x, target) / MICROBATCHES
        (loss if scaler is None else scaler.scale(loss)).backward()


def _difference(modules: list[nn.Module], others: list[nn.Module]) -> float:
    """How far the weights of two models are apart, at most."""
    return max(
        float((one - other).abs().max())
        for module, like in zip(modules, others, strict=True)
        for one, other in zip(module.parameters(), like.parameters(), strict=True)
    )


@check(ranks=2)
def scaled() -> Said:
    """float16 under autocast with a `GradScaler` whose first steps overflow: all ranks skip the
    same updates as one process.
    """
    join()
    plan = compile("1f1b", {"ranks": 2, "microbatches": MICROBATCHES})
    pieces = blocks(2)
    alone = copy.deepcopy(pieces)
    kind = device().type
    new: dict[str, Any] = {"init_scale": 2.0**40, "backoff_factor": 2.0**-12}
    scaler, scaler_alone = (torch.amp.GradScaler(kind, **new) for _ in range(2))
    own = {rank(): pieces[rank()]}
    pipeline = Pipeline(plan, own, mse, loss_scale=scaler)
    optimizer = torch.optim.SGD(pieces[rank()].parameters(), 1e-2, momentum=0.9)
    optimizer_alone = torch.optim.SGD(
        nn.ModuleList(alone).parameters(), 1e-2, momentum=0.9
    )
    inputs, targets = batch(8)
    scales = []
    for _ in range(6):
        with torch.autocast(kind, dtype=torch.float16):
            pipeline.step(inputs, targets)
            _add_gradients(alone, inputs, targets, scaler_alone)
        for scaled, of in ((scaler, optimizer), (scaler_alone, optimizer_alone)):
            scaled.step(of)
            scaled.update()
            of.zero_grad()
        scales.append((float(scaler.get_scale()), float(scaler_alone.get_scale())))
    assert all(one == other for one, other in scales), scales
    assert scales[0] != scales[-1], scales
    off = _difference([*own.values()], [alone[rank()]])
    assert off < 1e-2, off
    return {"off": off, "scales": [one for one, _ in scales]}


class BadBatch(Exception):
    """What a script raises."""


class Picky(nn.Module):
    """A block that takes no batch of zeros."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, is_bad: bool = False) -> Any:
        """Of the block's shape."""
        if is_bad:
            raise BadBatch
        return self.block(x)


@check(ranks=2)
def bad_batches() -> Said:
    """A batch that one rank cannot take is skipped on both."""
    join()
    plan = compile("1f1b", {"ranks": 2, "microbatches": MICROBATCHES})
    pieces: list[nn.Module] = [Picky(each) for each in blocks(2)]
    alone = copy.deepcopy(pieces)
    pipeline = Pipeline(plan, {rank(): pieces[rank()]}, mse, skip_if=BadBatch)
    optimizers = [
        torch.optim.SGD(nn.ModuleList(each).parameters(), 1e-2)
        for each in ([pieces[rank()]], alone)
    ]
    inputs, targets = batch(8)
    skipped = []
    for step in range(4):
        options = [
            {"is_bad": step in (0, 2) and rank() == 1 and microbatch == 2}
            for microbatch in range(MICROBATCHES)
        ]
        pipeline.step(inputs, targets, options)
        skipped.append(pipeline.skipped)
        if not skipped[-1]:
            _add_gradients(alone, inputs, targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert skipped == [True, False, True, False], skipped
    off = _difference([pieces[rank()]], [alone[rank()]])
    assert off < 1e-6, off
    return {"off": off}


@check(ranks=2, seconds=150)
def transformers_model() -> Said:
    """A Llama of transformers, cut by `split`: with and without checkpoints, in both halves of a
    backward.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, tokens: Tensor) -> Any:
            return super().forward(tokens, use_cache=False).logits

    join()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    plan = compile("zb_v", {"ranks": 2, "microbatches": MICROBATCHES})
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(256, (8, 32), generator=generator).to(device())
    labels = tokens.roll(-1, 1)

    def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    said: Said = {}
    for way, checkpoints, cuda_graphs in (
        ("off", False, False),
        ("with checkpoints", True, False),
        ("as a graph", False, True),
    ):
        torch.manual_seed(0)
        model = Llama(config).to(device())
        if checkpoints:
            model.gradient_checkpointing_enable()
        alone = copy.deepcopy(model)
        stages = split(model, plan, LLAMA)
        pipeline = Pipeline(plan, stages, loss_fn, cuda_graphs=cuda_graphs)
        pairs = zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        for x, target in pairs:
            (loss_fn(alone(x), target) / MICROBATCHES).backward()
        for _ in range(5):
            for module in stages.values():
                module.zero_grad()
            pipeline.step(tokens, labels)
        expected = dict(alone.named_parameters())
        worst = 0.0
        for module in stages.values():
            for name, weight in module.named_parameters():
                right = expected[name].grad
                assert weight.grad is not None
                assert right is not None
                difference = (weight.grad - right).abs().max() / right.abs().max()
                worst = max(worst, float(difference))
        assert worst < TOLERANCE, (way, worst)
        said[way] = worst
    return said


@check(seconds=200, needs_gpu=True)
def compiled() -> Said:
    """Blocks in `torch.compile`, whole and with the backend that splits their backwards."""
    from schedlang.runtime.parts.compiled import backend

    join()
    said: Said = {}
    for program, options in (("1f1b", {}), ("zb_v", {"backend": backend})):
        plan = compile(program, {"ranks": 1, "microbatches": MICROBATCHES})
        pieces = blocks(len(plan.placement))
        alone = copy.deepcopy(pieces)
        for piece in pieces:
            piece.compile(**options)
        pipeline = Pipeline(plan, dict(enumerate(pieces)), mse)
        inputs, targets = batch(8)
        _add_gradients(alone, inputs, targets)
        for _ in range(2):
            for piece in pieces:
                piece.zero_grad()
            pipeline.step(inputs, targets)
        said[program] = largest_difference(pieces, alone)
    # Kernels that are fused round otherwise.
    assert max(said.values()) < 5e-3, said
    return said


class _Float8(torch.autograd.Function):
    """x @ w.T in float8, each tensor with a scale of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(x, weight)
        return _product(x, weight.t(), torch.float8_e4m3fn)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = context.saved_tensors
        of_input = _product(gradient, weight, torch.float8_e5m2)
        of_weight = _product(gradient.t(), x, torch.float8_e5m2)
        return of_input, of_weight


def _product(one: Tensor, other: Tensor, type: torch.dtype) -> Tensor:
    """A product of two matrices that are rounded to float8, the second one to e4m3."""
    scales = []
    rounded = []
    for each, to in ((one, type), (other, torch.float8_e4m3fn)):
        scale = each.abs().max().float().clamp(min=1e-12) / torch.finfo(to).max
        scales.append(scale)
        rounded.append((each.float() / scale).to(to))
    left, right = rounded[0].contiguous(), rounded[1].t().contiguous().t()
    return torch._scaled_mm(left, right, *scales, out_dtype=one.dtype)


class Float8Linear(nn.Linear):
    """A layer whose three products are in float8."""

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (..., out), for (..., in)."""
        flat: Tensor = _Float8.apply(x.flatten(0, -2), self.weight)
        return flat.unflatten(0, x.shape[:-1])


@check(needs_gpu=True)
def float8() -> Said:
    """Layers whose forwards and backwards are products in float8: bit by bit those of one process,
    also where a backward is split and a forward runs again.
    """
    join()
    said: Said = {}
    for program in ("1f1b", "zb_v", "1f1b_recompute"):
        plan = compile(program, {"ranks": 1, "microbatches": MICROBATCHES})
        torch.manual_seed(0)
        pieces: list[nn.Module] = [
            nn.Sequential(
                Float8Linear(64, 128, bias=False),
                nn.GELU(),
                Float8Linear(128, 64, bias=False),
            ).to(device(), torch.bfloat16)
            for _ in plan.placement
        ]
        alone = copy.deepcopy(pieces)
        inputs, targets = batch(8, dtype=torch.bfloat16)
        _add_gradients(alone, inputs, targets)
        pipeline = Pipeline(plan, dict(enumerate(pieces)), mse)
        pipeline.step(inputs, targets)
        said[program] = largest_difference(pieces, alone)
    assert not any(said.values()), said
    return said


@check(ranks=2)
def checkpoints() -> Said:
    """Training that is saved and goes on, with its random numbers, as if it had not ended."""
    join()
    plan = compile("1f1b", {"ranks": 2, "microbatches": MICROBATCHES})
    given = [tempfile.mkdtemp()] if rank() == 0 else [None]
    dist.broadcast_object_list(given, src=0)
    folder = Path(str(given[0]))
    inputs, targets = batch(8)

    def new() -> tuple[Pipeline, nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential(*blocks(2)[rank()], nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        return Pipeline(plan, {rank(): module}, mse), module, optimizer

    def steps(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            pipeline.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

    pipeline, module, optimizer = new()
    steps(pipeline, optimizer)
    pipeline.save(folder, 3, [optimizer])
    steps(pipeline, optimizer)
    other, again, optimizer = new()
    assert other.resume(folder, [optimizer]) == 3
    steps(other, optimizer)
    off = _difference([again], [module])
    assert off < 1e-6, off
    return {"off": off}


@check(ranks=2, seconds=150)
def train_script() -> Said:
    """`examples/train.py`, from its process group to its files."""
    plan = compile("zb_v", {"ranks": 2, "microbatches": 4})
    folder = Path(tempfile.gettempdir()) / f"trained-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    file = folder / f"plan{rank()}.json"
    write_plan(plan, file)
    words = ["train.py", str(file), "--folder", str(folder), "--steps", "8"]
    words += ["--bf16"] if on_gpu() else []
    with patch.object(sys, "argv", words):
        runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")
    log = (folder / "log.jsonl").read_text().splitlines() if rank() == 0 else []
    losses = [json.loads(line).get("loss") for line in log]
    assert rank() or losses[-2] < losses[0], losses
    return {"losses": losses}


@check()
def report() -> Said:
    """What `report` sums up of recorded steps, and what `measure` says of the same blocks."""
    join()
    width, tokens, dtype = (1024, 1024, torch.bfloat16) if on_gpu() else (64, 32, None)
    plan = compile("1f1b", {"ranks": 1, "microbatches": MICROBATCHES})
    pieces = blocks(1, width, each=4, dtype=dtype)
    pipeline = Pipeline(plan, {0: pieces[0]}, mse)
    inputs, targets = batch(4 * MICROBATCHES, tokens, width, dtype)
    for step in range(6):
        pipeline.record = step > 2
        pipeline.step(inputs, targets)
    wait_for_device()
    said: Said = dict(pipeline.report())
    model = pieces[0]
    assert isinstance(model, nn.Sequential)
    costs = measure(model, inputs[:4])
    said["measured_ms"] = sum(costs) * MICROBATCHES * 1e3
    if on_gpu():
        assert 0 < said["mfu"] < 1, said
    return said


#: The steps of a training that is captured, and those of them without an update, whose gradients
#: add up.
STEPS = 12
ADDS_UP = (1, 6)


def _train_captured(
    program: str,
    sizes: dict[str, int],
    mesh: Any = None,
    autocast: bool = False,
    **options: Any,
) -> Said:
    """Train with steps as CUDA graphs, and alone: other batches in each step, gradients of two
    steps, a weight that is frozen meanwhile, evaluations between steps, gradients that a script
    keeps.
    """
    plan = compile(program, sizes, **options)
    own = rank() if mesh is None else mesh.get_local_rank("pp")
    replica = 0 if mesh is None else mesh.get_local_rank("dp")
    pieces = blocks(plan.layout.pieces)
    alone = copy.deepcopy(pieces)
    stages = {
        stage: copy.deepcopy(pieces[plan.layout.piece(stage)])
        for stage in plan.stages_of(own)
    }
    sides = ([*stages.values()], [alone[plan.layout.piece(stage)] for stage in stages])
    pipeline = Pipeline(plan, stages, mse, mesh=mesh, cuda_graphs=True, timeout=20)
    ours, theirs = (
        torch.optim.SGD(nn.ModuleList(side).parameters(), 1e-2, momentum=0.9)
        for side in (sides[0], alone)
    )
    worst = 0.0
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = (16, 32, 64)
        inputs = torch.randn(shape, generator=generator).to(device())
        targets = inputs.flip(1).contiguous()
        if step == 8:
            for module in (*sides[0], *alone):
                next(module.parameters()).requires_grad_(False)
        mine = [
            each.chunk(1 if mesh is None else 2)[replica] for each in (inputs, targets)
        ]
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            pipeline.step(*mine)
            _add_gradients(alone, inputs, targets)
        worst = max(worst, largest_difference(*sides))
        if step == 5:
            pipeline.evaluate(*mine)
        if step not in ADDS_UP:
            for weight in sides[0][0].parameters():
                if weight.grad is not None:
                    held.append((weight.grad, weight.grad.clone()))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert worst < TOLERANCE, worst
    assert all(torch.equal(kept, copied) for kept, copied in held)
    has_graph = getattr(pipeline._captured, "_graph", None) is not None
    assert has_graph or not on_gpu()
    return {"off": worst, "captured": has_graph}


@check(seconds=120)
def graphs() -> Said:
    """Steps as CUDA graphs, of each kind of program."""
    join()
    sizes = {"ranks": 1, "microbatches": MICROBATCHES}
    programs = ("1f1b", "zb_v", "dualpipe_v", "1f1b_recompute")
    return {program: _train_captured(program, sizes) for program in programs}


class Drawing(nn.Module):
    """A block with dropout of its own, which keeps how much it has left of each microbatch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        """Of the block's shape."""
        mask = (torch.rand_like(x) < 0.8).to(x.dtype)
        self.kept.append(mask.sum().detach())
        return self.block(x) * mask


@check()
def graphs_that_draw() -> Said:
    """Steps as CUDA graphs draw other random numbers each time, and a forward that is run again
    those of its first run.
    """
    join()
    plan = compile("1f1b_recompute", {"ranks": 1, "microbatches": MICROBATCHES})
    (block,) = blocks(1)
    module = Drawing(block)
    options: dict[str, Any] = {"verify": "never", "cuda_graphs": True}
    pipeline = Pipeline(plan, {0: module}, mse, **options)
    inputs, targets = batch(8)
    losses = []
    for _ in range(7):
        losses.append(float(pipeline.step(inputs, targets)[0]))  # type: ignore[index]
        # Two runs of each microbatch, of the last step that Python has run.
        last = sorted(float(each) for each in module.kept[-2 * MICROBATCHES :])
        assert last[::2] == last[1::2], last
        assert len(set(last)) > 1, last
    assert len(set(losses)) == len(losses), losses
    return {"losses": losses}


@check()
def graphs_of_autocast() -> Said:
    """Steps as CUDA graphs whose forwards run under autocast."""
    join()
    sizes = {"ranks": 1, "microbatches": MICROBATCHES}
    return _train_captured("1f1b", sizes, autocast=True)


@check(ranks=2, seconds=100, breaks=True)
def graphs_of_two() -> Said:
    """Steps as CUDA graphs whose messages go by NCCL."""
    join()
    sizes = {"ranks": 2, "microbatches": MICROBATCHES}
    return {
        "1f1b": _train_captured("1f1b", sizes),
        "zb_v": _train_captured("zb_v", sizes, transport="nccl"),
        "zb_h1": _train_captured("zb_h1", sizes, transport="nccl-edge"),
        # Each stage is on both ranks, which sum its gradients.
        "dualpipe": _train_captured("dualpipe", sizes),
    }


@check(ranks=4, seconds=100, breaks=True)
def graphs_of_replicas() -> Said:
    """Steps as CUDA graphs that sum gradients over replicas."""
    join()
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "pp"))
    return _train_captured("1f1b", {"ranks": 2, "microbatches": 2}, mesh)


@check(needs_gpu=True)
def no_graph() -> Said:
    """A step that cannot be captured says by what."""
    join()
    plan = compile("1f1b", {"ranks": 1, "microbatches": MICROBATCHES})
    pieces = blocks(1)
    pieces[0].register_forward_hook(lambda *given: float(given[-1].sum()) and None)
    pipeline = Pipeline(plan, {0: pieces[0]}, mse, cuda_graphs=True)
    inputs, targets = batch(8)
    for _ in range(3):
        pipeline.step(inputs, targets)
    with pytest.raises(PipelineError, match="cannot be captured") as caught:
        pipeline.step(inputs, targets)
    first, *_ = str(caught.value).splitlines()
    return {"told": first.replace(f"{ROOT}/", "")}
