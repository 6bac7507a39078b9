"""What passes between ranks, on real processes: tensors of fewer bits, and of changing shapes."""

import re
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn

from schedlang import Kind
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, PipelineError
from schedlang.runtime.message_batches import post_as_one
from schedlang.runtime.precision import Rounding
from tests.support.mesh import SCHEDULES, weights
from tests.support.models import (
    WIDTH,
    alone,
    batch,
    difference,
    loss_difference,
    modules,
    pipeline,
    program,
    replicated,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


#: The names of types in programs.
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Counts:
    """The bytes of tensors of floating point numbers that a rank sends."""

    def __init__(self, ours: Pipeline) -> None:
        self.bytes = self.tensors = 0
        self.wire = ours._exchange._wire
        self.send = self.wire._send
        self.wire._send = self.count

    def count(self, tensors: list[torch.Tensor], *where: int) -> dist.Work:
        self.bytes += sum(each.nbytes for each in tensors if each.is_floating_point())
        self.tensors += sum(each.is_floating_point() for each in tensors)
        return self.send(tensors, *where)


def rounded() -> dict[str, list[float]]:
    """For each schedule, type and scale of the loss: differences of gradients, and bytes sent in a
    step. The plan names the type of one schedule, and the script that of the others.

    The differences are from one process that rounds as the messages do, and from one that does not.
    """
    found = {}
    for name, scale in product(("1f1b", "zb_v", "dualpipe"), (1.0, 1e-9)):
        plan = program(name, ranks=2, microbatches=4)
        for type in (None, torch.bfloat16, torch.float16):
            found[f"{name} {scale:g} {type}"] = rounding_errors(plan, type, scale)
    return found


def rounding_errors(plan: Plan, type: torch.dtype | None, scale: float) -> list[float]:
    model = replicated(plan, torch.float32)
    pieces = plan.layout.pieces
    if plan.name == "zb_v" and type is not None:
        plan = evolve(plan, message_type=NAMES[type])
        ours = pipeline(plan, model, loss_scale=scale)
    else:
        ours = pipeline(plan, model, transfer_dtype=type, loss_scale=scale)
    gradients = []
    for rounding in (type, None):
        reference = modules(pieces, torch.float32)
        parts = [
            data.chunk(plan.microbatches) for data in batch(plan, 0, torch.float32)
        ]
        for start, x, y in zip(starts_of(plan), *parts, strict=True):
            (
                nn.functional.mse_loss(
                    rounding_as(plan, start, reference, x, rounding), y
                )
                * scale
            ).backward()
        gradients.append(reference)
    ours.step(*batch(plan, 0, torch.float32))
    for weight in (weight for stage in model for weight in stage.parameters()):
        weight.grad = None
    counts = Counts(ours)
    ours.step(*batch(plan, 0, torch.float32))
    worst = [
        max(
            difference(a.grad, b.grad)
            for a, b in weights(model, each * 2, plan.stages_of(dist.get_rank()))
        )
        for each in gradients
    ]
    return [*worst, counts.bytes, counts.tensors]


def rounding_as(
    plan: Plan,
    start: int,
    model: list[nn.Module],
    x: torch.Tensor,
    type: torch.dtype | None,
) -> torch.Tensor:
    """The output for a microbatch of a pipeline, of which what goes between ranks is rounded, if to
    a type.
    """
    for piece, stage in enumerate(model):
        x = alone([stage], x)
        if (
            type
            and piece + 1 < len(model)
            and plan.peer(Kind.SEND_F, start + piece) is not None
        ):
            x = Rounding(type).sent(x)
    return x


def starts_of(plan: Plan) -> list[int]:
    """For each microbatch the first stage that it comes to."""
    return [
        each.start for each in plan.layout.pipelines for _ in range(each.microbatches)
    ]


def test_messages_of_fewer_bits(run_ranks: Run) -> None:
    """Gradients are those of one process that rounds the same; they are near those of one that does
    not.
    """
    near = {"None": 1e-5, "torch.bfloat16": 5e-2, "torch.float16": 5e-3}
    for found in run_ranks(rounded, 2).results():
        assert len(found) == 18
        for name, (same, other, bytes, tensors) in found.items():
            schedule, scale, type = name.split()
            exact = found[f"{schedule} {scale} None"]
            assert same < 1e-5, name
            assert (0 if type == "None" else 1e-5) <= other < near[type], name
            assert tensors == exact[3] > 0
            # An exponent for each tensor.
            # Half the bytes of float32, and for float16 an exponent of two bytes with each tensor.
            assert bytes == exact[2] / (1 if type == "None" else 2) + (
                2 * tensors if "float16" in type.split(".") else 0
            )


#: Rows of a microbatch and its length, by step: shapes that were seen come again, after others.
SHAPES = [(3, 4), (1, 6), (3, 4), (5, 2), (1, 6)]


def reshapes() -> dict[str, float]:
    """For each schedule and type of messages, the largest difference from one process in steps of
    changing shapes.
    """
    cases = [(name, None) for name in SCHEDULES if name != "pipe_offload"]
    found = {}
    for name, type in (*cases, ("1f1b", torch.bfloat16), ("zb_v", torch.float16)):
        plan = program(name, ranks=2, microbatches=4)
        found[f"{name} {type}"] = reshaping_error(
            plan, type, torch.float32 if type else torch.float64
        )
    return found


class Halves(nn.Module):
    """A stage whose output is half as long as its input, where there are no slices."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, ::2] + x[:, 1::2])


def reshaping_error(plan: Plan, type: torch.dtype | None, dtype: torch.dtype) -> float:
    """Of losses, gradients that add up, and outputs of evaluations, which have the shape of the
    step before.
    """
    rank = dist.get_rank()
    pieces = plan.layout.pieces
    slices = plan.layout.slices
    model = replicated(plan, dtype)
    reference = modules(pieces, dtype, slices > 1)
    for stages, halves in (
        ((model, range(1, len(model), pieces)), (reference, [1])) if slices == 1 else ()
    ):
        for each in halves:
            stages[each] = Halves(stages[each])
    ours = pipeline(plan, model, transfer_dtype=type)
    worst = [0.0]
    generator = torch.Generator().manual_seed(0)
    other = torch.zeros(plan.microbatches, 2, WIDTH, dtype=dtype)
    for rows, length in SHAPES:
        shape = plan.microbatches * rows, length, WIDTH
        inputs = torch.randn(shape, generator=generator, dtype=dtype)
        shape = shape[0], length if slices > 1 else length // 2, WIDTH
        targets = torch.randn(shape, generator=generator, dtype=dtype)
        outputs = evaluated(plan, reference, other, type)
        worst.append(loss_difference(plan, joined(ours.evaluate(other)), outputs, rank))
        losses = []
        for start, x, y in zip(
            starts_of(plan),
            *(each.chunk(plan.microbatches) for each in (inputs, targets)),
            strict=True,
        ):
            losses.append(
                nn.functional.mse_loss(rounding_as(plan, start, reference, x, type), y)
            )
            (losses[-1] / plan.microbatches).backward()
        worst.append(
            loss_difference(
                plan,
                ours.step(inputs, targets),
                [each.detach() for each in losses],
                rank,
            )
        )
        other = inputs
    pairs = weights(model, reference * 2, plan.stages_of(rank))
    return max(*worst, *(difference(a.grad, b.grad) for a, b in pairs))


def evaluated(
    plan: Plan, model: list[nn.Module], inputs: torch.Tensor, type: torch.dtype | None
) -> list[torch.Tensor]:
    with torch.no_grad():
        parts = zip(starts_of(plan), inputs.chunk(plan.microbatches), strict=True)
        return [rounding_as(plan, start, model, x, type) for start, x in parts]


def joined(outputs: list[torch.Tensor] | None) -> torch.Tensor | None:
    return None if outputs is None else torch.stack(outputs)


def test_shapes_change_from_step_to_step(run_ranks: Run) -> None:
    """Rows and length of microbatches: losses, outputs and gradients are those of one process."""
    for found in run_ranks(reshapes, 2).results():
        assert len(found) == 8
        for name, worst in found.items():
            assert worst < (1e-5 if "float16" in name else 1e-12), name


def other_type() -> None:
    types = [torch.float16, None, None, None]
    pipeline(
        program("1f1b", ranks=4), modules(4), transfer_dtype=types[dist.get_rank()]
    )


def eight_bits() -> None:
    pipeline(program("1f1b", ranks=4), modules(4), transfer_dtype=torch.float8_e5m2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            other_type,
            r"rank \d failed: rank \d has another `transfer_dtype`: all ranks must be given the same",
        ),
        (
            eight_bits,
            r"rank \d failed: `transfer_dtype` is torch.float8_e5m2, it must be torch.bfloat16 or torch.float16",
        ),
    ],
)
def test_types_of_messages_that_are_refused(
    run_ranks: Run, build: Callable[[], None], message: str
) -> None:
    outcome = run_ranks(build, 4)
    assert outcome.codes == [1] * 4
    for log in outcome.logs:
        assert re.search(rf"(stopped|Error): {message}$", log, re.M), outcome.logs


def kept_formats() -> list[bool]:
    """Whether messages of gradients say what is in them, after a first step and after a second."""
    plan = program("1f1b", ranks=2, microbatches=4)
    ours = pipeline(plan, modules(2))
    found = []
    for step in range(2):
        ours.step(*batch(plan, step))
        found += [
            channel.messages[0].form.gradients.is_first
            for channel in ours._exchange._channels.values()
        ]
    return found


def test_only_a_first_step_says_which_gradients_there_are(run_ranks: Run) -> None:
    for found in run_ranks(kept_formats, 2).results():
        assert found == [False, False]


class Stub:
    """A receive of so many tensors."""

    def __init__(self, tensors: int) -> None:
        self.form = SimpleNamespace(new=False)
        self.wire = self
        self.peer = 0
        self.number = tensors

    def tensors(self) -> list[torch.Tensor]:
        return [torch.zeros(())] * self.number

    def operation(self, *operation: Any) -> tuple[Any, ...]:
        return operation

    def as_one(self, operations: list[Any]) -> list[Any]:
        return operations


def test_nccl_is_given_no_more_tensors_at_once_than_it_takes() -> None:
    """A message may have several tensors, of which the proof does not know."""
    post_as_one([Stub(128), Stub(128)])
    with pytest.raises(PipelineError, match="2 messages of a batch have 257 tensors"):
        post_as_one([Stub(128), Stub(129)])
