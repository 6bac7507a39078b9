"""Microbatches and slices of unequal lengths and shapes, on real processes: losses, gradients and
weights are those of one process, which weighs each microbatch by what it counts.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from attrs import frozen
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss, added_losses, end_component
from schedlang.runtime.messages import ActivationSend, Channel
from schedlang.runtime.tags import Tags
from schedlang.runtime.values import ValueSpec
from tests.support.mesh import mesh, on, place
from tests.support.models import (
    OPTIMIZERS,
    WIDTH,
    Versions,
    alone,
    difference,
    normed,
    one_model,
    pipeline,
    program,
    replicated,
)
from tests.support.ranks import Run
from tests.support.sizes import STEPS as OF_TRAININGS
from tests.support.sizes import examples

pytestmark = pytest.mark.processes

#: Rows and length of a microbatch.
Shape = tuple[int, int]

#: By schedule, its sizes on two ranks: whole, split and recomputed backwards, V and interleaved
#: stages, two pipelines, skips, copies to the host, slices.
PLANS: dict[str, dict[str, int]] = {
    "1f1b": {"microbatches": 4},
    "zb_h1": {"microbatches": 4},
    "zb_v": {"microbatches": 4},
    "interleaved_1f1b": {"microbatches": 4},
    "1f1b_recompute": {"microbatches": 4},
    "gems": {"microbatches": 4},
    "dualpipe": {"microbatches": 4},
    "unet_1f1b": {"microbatches": 4},
    "pipe_offload": {"microbatches": 4},
    "frozen_1f1b": {"microbatches": 4},
    "seq1f1b": {"microbatches": 4, "slices": 2},
    "terapipe": {"microbatches": 4, "slices": 3},
}


class Pools(nn.Module):
    """A stage whose output is shorter than its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, ::2])


class Packs(nn.Module):
    """A stage that hands on its output in a dictionary, beside how long each row is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.inner(x), "lengths": torch.full([len(x)], x.shape[1])}


class Unpacks(nn.Module):
    """The stage behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.inner(given["x"]) * given["lengths"].view(-1, 1, 1)


@frozen
class Case:
    """Steps of a schedule, of microbatches of these shapes."""

    name: str
    steps: tuple[tuple[Shape, ...], ...]
    wraps: bool = True

    @property
    def plan(self) -> Plan:
        return program(self.name, ranks=2, **PLANS[self.name])


def model_of(plan: Plan, wraps: bool, count: int = 1) -> list[nn.Module]:
    """The stages of so many pipelines. Where nothing else passes between them, they pool, or pass
    dictionaries.
    """
    layout = plan.layout
    found: list[nn.Module] = []
    for _ in range(count):
        stages = one_model(layout)
        for stage in layout.frozen:
            stages[stage].requires_grad_(False)
        if wraps and layout.slices == 1 and not layout.skips:
            stages[-1] = Unpacks(Pools(stages[-1]).double())
            stages[-2] = Packs(stages[-2])
        found += stages
    return found


def through(model: list[nn.Module], x: Any) -> Tensor:
    """The output of the whole model."""
    if isinstance(model[-1], Unpacks):
        for stage in model:
            x = stage(x)
        return x
    return alone(model, x)


def batch_of(shapes: Sequence[Shape], seed: int, model: list[nn.Module]) -> Any:
    """Inputs and targets by microbatch; there are as many numbers in a target as the model makes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    with torch.no_grad():
        outputs = [through(model, x) for x in inputs]
    targets = [
        torch.randn(output.shape, generator=generator, dtype=torch.float64)
        for output in outputs
    ]
    return inputs, targets


def parts_of(length: int, slices: int) -> list[int]:
    """Lengths of slices that grow shorter."""
    found = []
    for rest in range(slices, 0, -1):
        # Two thirds of what is left, so that one position remains for each slice behind it.
        found.append(max(1, (length - rest + 1) * 2 // 3) if rest > 1 else length)
        length -= found[-1]
    return found


def compared(case: Case) -> float:
    """How far losses, outputs and gradients are from those of one process, which takes the mean
    over all numbers of all microbatches at once.
    """
    plan = case.plan
    layout = plan.layout
    options: dict[str, Any] = {}
    if layout.slices > 1:
        options["slice_lengths"] = partial(parts_of, slices=layout.slices)
    ours = pipeline(plan, model_of(plan, case.wraps, len(layout.pipelines)), **options)
    reference = model_of(plan, case.wraps)
    worst = [0.0]
    for step, shapes in enumerate(case.steps):
        inputs, targets = batch_of(shapes, step, reference)
        outputs = [through(reference, x) for x in inputs]
        # One mean over all numbers, whichever microbatch they are in: that is what unequal
        # microbatches must be weighed for.
        squares = [((a - b) ** 2).sum() for a, b in zip(outputs, targets, strict=True)]
        sizes = [target.numel() for target in targets]
        (sum(squares) / sum(sizes)).backward()
        counts = [size / WIDTH for size in sizes]
        losses = ours.step([*inputs], [*targets], counts=counts)
        named = ours.named_losses()
        worst.append(abs(float(named["loss"] - sum(squares) / sum(sizes))))
        # Two rounds of the plan: an evaluation may have more microbatches than a step.
        evaluated = ours.evaluate([*inputs, *inputs], [*targets, *targets])
        if losses is not None and len(layout.pipelines) == 1:
            expected = torch.stack(squares) / torch.tensor(sizes)
            worst.append(difference(losses, expected))
            worst.append(
                difference(torch.stack(evaluated), torch.cat([expected, expected]))
            )
    for stage, own in ours._stages.items():
        others = reference[layout.piece(stage)].parameters()
        for weight, other in zip(own.module.parameters(), others, strict=True):
            assert (weight.grad is None) == (other.grad is None)
            if weight.grad is not None and other.grad is not None:
                worst.append(difference(weight.grad, other.grad))
    return max(worst)


def all_compared(cases: Sequence[Case]) -> list[float]:
    return [compared(case) for case in cases]


#: Shapes that are new in a step, that come again in another order, and all alike.
STEPS: tuple[tuple[Shape, ...], ...] = (
    ((3, 6), (1, 9), (2, 3), (1, 9)),
    ((1, 9), (2, 3), (3, 6), (4, 4)),
    ((2, 5), (2, 5), (2, 5), (2, 5)),
    ((1, 3), (7, 8), (2, 5), (3, 6)),
)


@pytest.mark.parametrize("name", PLANS)
def test_microbatches_of_other_shapes(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(partial(compared, Case(name, STEPS)), 2).results()) < 1e-12


#: Random cases for which processes are started once.
AT_ONCE = 10
shapes = st.tuples(st.integers(1, 4), st.integers(3, 9))


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """A schedule, and up to four steps of microbatches of any shapes; those of one step may come
    again in another.
    """
    name = draw(st.sampled_from(list(PLANS)))
    of_step = st.tuples(*[shapes] * PLANS[name]["microbatches"])
    known = draw(st.lists(of_step, min_size=1, max_size=3))
    steps = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
    order = draw(st.randoms(use_true_random=False))
    mixed = [tuple(order.sample(step, len(step))) for step in steps]
    return Case(name, tuple(mixed), draw(st.booleans()))


@examples(30, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(random_cases(), min_size=AT_ONCE, max_size=AT_ONCE))
def test_random_shapes(run_ranks: Run, cases: list[Case]) -> None:
    for found in run_ranks(partial(all_compared, cases), 2).results():
        wrong = [
            case for case, worst in zip(cases, found, strict=True) if not worst < 1e-11
        ]
        assert wrong == []


def trained_to_the_bit(name: str, steps: int) -> list[bool]:
    """Steps with an optimizer, on 4 ranks: whether losses and weights are those of one process
    that adds up the same in the same order.
    """
    plan = program(name, ranks=4, microbatches=8)
    mine = plan.stages_of(dist.get_rank())
    model = one_model(plan.layout)
    reference = one_model(plan.layout)
    optimizers = [OPTIMIZERS["momentum"](model[stage].parameters()) for stage in mine]
    alone_optimizer = OPTIMIZERS["momentum"](
        [w for stage in reference for w in stage.parameters()]
    )
    ours = pipeline(plan, model)
    generator = random.Random(0)
    same = []
    for step in range(steps):
        of_step = [
            (generator.randint(1, 5), generator.randint(1, 12)) for _ in range(8)
        ]
        inputs, targets = batch_of(of_step, step, reference)
        counts = [rows * length for rows, length in of_step]
        losses = ours.step(inputs, targets, counts=counts)
        expected = []
        for x, y, count in zip(inputs, targets, counts, strict=True):
            loss = nn.functional.mse_loss(alone(reference, x), y)
            # Multiplied as the runtime does, in this order, or the last bit would differ.
            loss.backward(torch.full_like(loss, count * 8 / sum(counts) * (1 / 8)))
            expected.append(loss.detach())
        for optimizer in (*optimizers, alone_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        same.append(losses is None or torch.equal(losses, torch.stack(expected)))
    for stage in mine:
        pairs = zip(
            model[stage].parameters(), reference[stage].parameters(), strict=True
        )
        same += [torch.equal(weight, other) for weight, other in pairs]
    return same


@pytest.mark.parametrize("steps", OF_TRAININGS)
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_steps_to_the_bit(name: str, steps: int, run_ranks: Run) -> None:
    for found in run_ranks(partial(trained_to_the_bit, name, steps), 4).results():
        assert len(found) > steps
        assert all(found)


def updated() -> float:
    """A plan that updates its stages itself, with late weights: each update has its own mean."""
    plan = program("pipedream_2bw", ranks=2, microbatches=4).for_updates(5)
    stages = normed(2)
    mine = plan.stages_of(dist.get_rank())
    optimizers = {
        stage: OPTIMIZERS["sgd"](stages[stage].parameters()) for stage in mine
    }
    ours = pipeline(plan, stages, optimizers=optimizers)
    versions = Versions(normed(2))
    alone_optimizers = [
        OPTIMIZERS["sgd"](stage.parameters()) for stage in versions.stages
    ]
    generator = torch.Generator().manual_seed(0)
    sizes = [int(size) for size in torch.randint(1, 6, [20], generator=generator)]
    inputs = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    targets = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    ours.step(inputs, targets, counts=sizes)
    for begin in range(0, 20, 4):
        read = versions.read([1, 1])
        of_update = slice(begin, begin + 4)
        # All rows of an update at once: the mean over them is what its microbatches make together.
        output = read(torch.cat(inputs[of_update]))
        nn.functional.mse_loss(output, torch.cat(targets[of_update])).backward()
        versions.update(*alone_optimizers)
    return max(
        difference(weight, other)
        for stage in mine
        for weight, other in zip(
            stages[stage].parameters(), versions.stages[stage].parameters(), strict=True
        )
    )


def test_late_weights(run_ranks: Run) -> None:
    assert max(run_ranks(updated, 2).results()) < 1e-5


def in_replicas() -> list[float]:
    """Two replicas with other microbatches: the gradient is that of the mean over both."""
    of = mesh("dp", "pp")
    replica, rank = place(of)
    plan = program("zb_h1", ranks=2, microbatches=4)
    model = one_model(plan.layout)
    reference = one_model(plan.layout)
    ours = on(of, plan, model)
    batches = [batch_of(STEPS[number], number, reference) for number in range(2)]
    counts = [[rows * length for rows, length in STEPS[number]] for number in range(2)]
    inputs, targets = batches[replica]
    losses = ours.step(inputs, targets, counts=counts[replica])
    named = ours.named_losses()["loss"]
    whole = sum(map(sum, counts))
    total = torch.zeros(())
    for (xs, ys), of_replica in zip(batches, counts, strict=True):
        for x, y, count in zip(xs, ys, of_replica, strict=True):
            total = (
                total + nn.functional.mse_loss(alone(reference, x), y) * count / whole
            )
    total.backward()
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    assert (losses is None) == (rank == 0)
    return [abs(named - float(total)), *(difference(a.grad, b.grad) for a, b in pairs)]


def test_replicas_count_together(run_ranks: Run) -> None:
    for found in run_ranks(in_replicas, 4).results():
        assert len(found) == 3
        assert max(found) < 1e-12


def in_shards(shard: Callable[..., object]) -> float:
    """The same where FSDP has the replicas, and takes the mean of their gradients."""
    of = mesh("dp", "pp")
    replica, rank = place(of)
    plan = program("zb_h1", ranks=2, microbatches=4)
    model = one_model(plan.layout)
    reference = one_model(plan.layout)
    shard(model[rank], mesh=of["dp"])
    ours = on(of["pp"], plan, model)
    batches = [batch_of(STEPS[number], number, reference) for number in range(2)]
    counts = [[rows * length for rows, length in STEPS[number]] for number in range(2)]
    inputs, targets = batches[replica]
    ours.step(inputs, targets, counts=counts[replica])
    whole = sum(map(sum, counts))
    for (xs, ys), of_replica in zip(batches, counts, strict=True):
        for x, y, count in zip(xs, ys, of_replica, strict=True):
            (nn.functional.mse_loss(alone(reference, x), y) * count / whole).backward()
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    return max(difference(mine.grad.full_tensor(), other.grad) for mine, other in pairs)


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_replicas_of_fsdp_count_together(
    run_ranks: Run, shard: Callable[..., object]
) -> None:
    assert max(run_ranks(partial(in_shards, shard), 4).results()) < 1e-12


class Adds(nn.Module):
    """A stage with a loss of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(end_component(2 * x))
        add_loss("size", output.square().mean(), weight=0.5)
        return output


def with_added_losses(name: str) -> float:
    """Under DualPipe, backwards go component by component."""
    plan = program(name, ranks=2, microbatches=8)
    shapes = STEPS[0] + STEPS[1]
    ours = pipeline(plan, [Adds(stage) for stage in replicated(plan)])
    reference = [Adds(stage) for stage in one_model(plan.layout)]
    inputs, targets = batch_of(shapes, 0, reference)
    counts = [rows * length for rows, length in shapes]
    ours.step(inputs, targets, counts=counts)
    named = ours.named_losses()
    size = 0.0
    for x, y, count in zip(inputs, targets, counts, strict=True):
        with added_losses() as added:
            loss = nn.functional.mse_loss(alone(reference, x), y)
        ((loss + added.total) * count / sum(counts)).backward()
        size += float(added["size"]) * count / sum(counts)
    worst = [abs(named["size"] - size)]
    for number, stage in ours._stages.items():
        right = reference[plan.layout.piece(number)]
        for weight, other in zip(
            stage.module.parameters(), right.parameters(), strict=True
        ):
            worst.append(difference(weight.grad, other.grad))
    return max(worst)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_added_losses_count_as_their_microbatch(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(partial(with_added_losses, name), 2).results()) < 1e-12


class Joins(nn.Module):
    """A decoder of what two encoders have made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.linear(torch.cat([image, text], dim=1))


def of_a_graph(equal_images: bool) -> float:
    """Two encoders with inputs of their own, of other lengths, also where those of one are alike."""
    plan = program("two_encoders", ranks=4, microbatches=4)
    rank = dist.get_rank()

    def model() -> list[nn.Module]:
        made = one_model(plan.layout)
        torch.manual_seed(0)
        made[2] = Joins()
        return made

    ours = pipeline(plan, model())
    reference = model()
    worst = [0.0]
    generator = torch.Generator().manual_seed(0)
    for of_step in STEPS:
        images = [(rows, 4 if equal_images else length) for rows, length in of_step]
        if equal_images:
            of_step = tuple((2, length) for _, length in of_step)
            images = [(2, 4)] * 4
        pairs = [
            [
                torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
                for shape in both
            ]
            for both in zip(images, of_step, strict=True)
        ]
        outputs = [
            reference[3](reference[2](reference[0](image), reference[1](text)))
            for image, text in pairs
        ]
        targets = [torch.randn_like(output) for output in outputs]
        # Targets are drawn by the shapes that rank 0 has computed, and must be the same on all.
        dist.broadcast_object_list(boxed := [targets], src=0)
        targets = boxed[0]
        counts = [target.numel() for target in targets]
        for output, target, count in zip(outputs, targets, counts, strict=True):
            (nn.functional.mse_loss(output, target) * count / sum(counts)).backward()
        inputs = {0: [image for image, _ in pairs], 1: [text for _, text in pairs]}
        ours.step(inputs, targets, counts=counts)
    for weight, other in zip(
        ours._stages[rank].module.parameters(),
        reference[rank].parameters(),
        strict=True,
    ):
        worst.append(difference(weight.grad, other.grad))
    return max(worst)


@pytest.mark.parametrize("equal_images", [False, True])
def test_a_graph_of_stages(equal_images: bool, run_ranks: Run) -> None:
    assert max(run_ranks(partial(of_a_graph, equal_images), 4).results()) < 1e-12


class Attention(nn.Module):
    """Attention within the documents of a packed row: those between two numbers of `cu_seqlens`."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens.diff().tolist()
        documents = [
            nn.functional.scaled_dot_product_attention(
                *part.chunk(3, -1), is_causal=True
            )
            for part in self.mix(x).split(lengths, dim=1)
        ]
        return x + torch.cat(documents, dim=1)


class Through(Attention):
    """The same, where `cu_seqlens` goes along from stage to stage."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:
        return super().forward(x, cu_seqlens), cu_seqlens


def attention_of(kind: type[Attention]) -> list[Attention]:
    torch.manual_seed(0)
    return [kind() for _ in range(2)]


def first_of(output: Any, target: Tensor) -> Tensor:
    value = output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(value, target)


def packed(goes_along: bool) -> float:
    """Documents packed into one row for each microbatch, against each document alone."""
    plan = program("1f1b", ranks=2, microbatches=3)
    rank = dist.get_rank()
    model = attention_of(Through if goes_along else Attention)
    ours = Pipeline(plan, {rank: model[rank]}, first_of)
    reference = attention_of(Attention)
    documents = [[3, 5, 2], [7], [1, 4]]
    # As FlashAttention takes it: where each document of a row begins, and where the last one ends,
    # as `[0, 3, 8, 10]`.
    cut = [torch.tensor([0, *lengths]).cumsum(0) for lengths in documents]
    generator = torch.Generator().manual_seed(0)
    sizes = [sum(lengths) for lengths in documents]
    inputs, targets = (
        [
            torch.randn(1, size, WIDTH, generator=generator, dtype=torch.float64)
            for size in sizes
        ]
        for _ in range(2)
    )
    if goes_along:
        ours.step([*zip(inputs, cut, strict=True)], targets, counts=sizes)
    else:
        ours.step(inputs, targets, [{"cu_seqlens": each} for each in cut], counts=sizes)
    for row, target, lengths in zip(inputs, targets, documents, strict=True):
        parts = zip(row.split(lengths, 1), target.split(lengths, 1), strict=True)
        for x, y in parts:
            whole = torch.tensor([0, x.shape[1]])
            output = reference[1](reference[0](x, whole), whole)
            (nn.functional.mse_loss(output, y) * x.shape[1] / sum(sizes)).backward()
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    return max(difference(weight.grad, other.grad) for weight, other in pairs)


@pytest.mark.parametrize("goes_along", [False, True])
def test_packed_sequences(goes_along: bool, run_ranks: Run) -> None:
    assert max(run_ranks(partial(packed, goes_along), 2).results()) < 1e-12


def slices_of_given_lengths() -> float:
    """Always the same lengths, of one batch in a tensor."""
    plan = program("terapipe", ranks=2, microbatches=2, slices=3)
    model = one_model(plan.layout)
    reference = one_model(plan.layout)
    ours = pipeline(plan, model, slice_lengths=[5, 3, 1])
    inputs, targets = (torch.randn(4, 9, WIDTH, dtype=torch.float64) for _ in range(2))
    dist.broadcast_object_list(boxed := [inputs, targets], src=0)
    inputs, targets = boxed
    losses, outputs = ours.step(inputs, targets, return_outputs=True)
    output = alone(reference, inputs)
    nn.functional.mse_loss(output, targets).backward()
    rank = dist.get_rank()
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    worst = [difference(a.grad, b.grad) for a, b in pairs]
    if losses is not None:
        of_halves = zip(output.chunk(2), targets.chunk(2), strict=True)
        expected = torch.stack([nn.functional.mse_loss(*pair) for pair in of_halves])
        worst += [difference(losses, expected), difference(torch.cat(outputs), output)]
    return max(worst)


def test_slices_of_given_lengths(run_ranks: Run) -> None:
    assert max(run_ranks(slices_of_given_lengths, 2).results()) < 1e-12


def goes_wrong(what: str) -> None:
    sliced = what.startswith("slices")
    name, sizes = ("terapipe", {"slices": 2}) if sliced else ("1f1b", {})
    plan = program(name, ranks=2, microbatches=2, **sizes)
    model = one_model(plan.layout)
    x = torch.randn(2, 4, WIDTH).double()
    y = torch.randn(1, 6, WIDTH).double()
    makes: dict[str, Callable[[], object]] = {
        "few": lambda: pipeline(plan, model).step([x], [x], counts=[1]),
        "empty": lambda: pipeline(plan, model).step(
            [x, y[:0]], [x, y[:0]], counts=[2, 1]
        ),
        "type": lambda: pipeline(plan, model).step(
            [x, y.float()], [x, y], counts=[2, 1]
        ),
        "container": lambda: pipeline(plan, model).step(
            [x, (y,)], [x, y], counts=[2, 1]
        ),
        "no tensor": lambda: pipeline(plan, model).step(
            [x, "y"], [x, y], counts=[2, 1]
        ),
        "targets": lambda: pipeline(plan, model).step([x, x], [x, x, x]),
        "one list": lambda: pipeline(plan, model).step([x, x], x),
        "other list": lambda: pipeline(plan, model).step(x, [x, x]),
        "no counts": lambda: pipeline(plan, model).step([x, y], [x, y]),
        "few counts": lambda: pipeline(plan, model).step([x, y], [x, y], counts=[1]),
        "negative": lambda: pipeline(plan, model).step([x, y], [x, y], counts=[1, -1]),
        "one count": lambda: pipeline(plan, model).step([x, y], [x, y], counts=5),
        "no number": lambda: pipeline(plan, model).step(
            [x, y], [x, y], counts=[1, "two"]
        ),
        "zeros": lambda: pipeline(plan, model).step([x, y], [x, y], counts=[0, 0]),
        "scale": lambda: pipeline(plan, model, loss_scale=2.0).step(
            [x, y], [x, y], counts=[1, 2]
        ),
        "rows": lambda: pipeline(plan, model).evaluate([x, y], rows=1),
        "slices few": lambda: pipeline(plan, model, slice_lengths=[4]),
        "slices sum": lambda: pipeline(plan, model, slice_lengths=[4, 1]).step(x, x),
        "slices function": lambda: pipeline(
            plan, model, slice_lengths=lambda length: [length]
        ).step(x, x),
        "slices words": lambda: pipeline(
            plan, model, slice_lengths=lambda _: ["two", "two"]
        ).step(x, x),
        "slices number": lambda: pipeline(plan, model, slice_lengths=lambda _: 2).step(
            x, x
        ),
        "none": lambda: pipeline(plan, model, slice_lengths=[4, 2]),
    }
    makes[what]()


MESSAGES = {
    "few": "`inputs` are a list of 1 microbatches, and the plan has 2: give the step on all ranks "
    "a plan for as many, such as `plan=plan.for_microbatches(1)`",
    "empty": "`inputs[1]` is float64 [0, 6, 8]: a microbatch must have a row",
    "type": "`inputs[1]` is float32 [1, 6, 8], and `inputs[0]` float64 [2, 4, 8]: microbatches may "
    "differ in shape alone",
    "container": "`inputs[1]` has its tensors in other containers than `inputs[0]`",
    "no tensor": "`inputs[1]` is a str: it must be a tensor, or tensors in tuples",
    "targets": "`targets` are a list of 3 microbatches, and the plan has 2",
    "one list": "`inputs` are a list, which is one of microbatches, and `targets` are a whole batch",
    "other list": "`targets` are a list, which is one of microbatches, and `inputs` are a whole",
    "no counts": "`inputs[1]` is float64 [1, 6, 8], and `inputs[0]` float64 [2, 4, 8], so it must "
    "be said how much the loss of each counts",
    "few counts": "`counts` are 1, one for each microbatch, and the plan has 2",
    "negative": "`counts[1]` is -1: it must be a number of rows or tokens, 0 or more",
    "one count": "`counts` is 5: it must be a list of numbers of rows or tokens, one for each",
    "no number": "`counts[1]` is 'two': it must be a number of rows or tokens, 0 or more",
    "zeros": "`counts` are 0 for all microbatches of an update",
    "scale": "`loss_scale` says what every loss is multiplied by, and `counts` say it, too",
    "rows": "`inputs` are a list of microbatches, so `rows` cuts nothing",
    "slices few": "`slice_lengths` has 1 length, and a microbatch of the plan has 2 slices",
    "slices sum": "`inputs` have the size 4 along dimension 1, and `slice_lengths` [4, 1] make 5; "
    "for other lengths, give a function of the length",
    "slices function": "`slice_lengths` gives [4] for a length of 4: it must be 2 lengths of 1 or",
    "slices words": "`slice_lengths` gives ['two', 'two'] for a length of 4: it must be 2 lengths",
    "slices number": "`slice_lengths` gives 2 for a length of 4: it must be 2 lengths of 1 or more",
    "none": "the plan has no slices, so it has no use for `slice_lengths`",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_cannot_be_is_refused(what: str, run_ranks: Run) -> None:
    run = run_ranks(partial(goes_wrong, what), 2)
    assert any(MESSAGES[what] in log for log in run.logs), run.logs
    assert run.codes == [1, 1]


class Silent:
    """A wire by which nothing goes."""

    def send_object(self, *_: object) -> list[Any]:
        return []

    def wait(self, *_: object) -> None:
        pass


def which_are_new(channel: Channel, inputs: tuple[int, ...]) -> list[bool]:
    """For each message of a step whether it is of a form that is new."""
    channel.begin(inputs)
    found = [message.form.new for message in channel.messages]
    for message in channel.messages:
        if message.form.spec is None:
            channel.announce(message.form, ValueSpec.of([torch.zeros(2)], None))
    channel.end()
    return found


@pytest.mark.parametrize("are_batched", [False, True])
def test_a_batch_of_nccl_has_no_form_of_an_earlier_step_beside_a_new_one(
    are_batched: bool,
) -> None:
    device = torch.device("cpu")
    tags = Tags(channels=1, ranks=2, units=4)
    channel = Channel(Silent(), 0, 0, "", 1, tags, None, device, are_batched)
    for microbatch in range(4):
        ActivationSend(channel, microbatch, {})
    # A form is announced with its first message. In a batch, all messages of one group are
    # announced or none, since NCCL issues them together.
    assert which_are_new(channel, (0,)) == [True] * 4
    assert which_are_new(channel, (0,)) == [False] * 4
    gradients = channel.messages[0].form.gradients
    assert which_are_new(channel, (1, 0, 0, 2)) == [
        True,
        are_batched,
        are_batched,
        True,
    ]
    assert channel.messages[1].form.gradients is gradients
    headers = tags.headers(0)
    assert [message.form.tag for message in channel.messages[::3]] == [
        headers[0],
        headers[2 if are_batched else 1],
    ]
    assert which_are_new(channel, (2, 1, 0, 0)) == [False] * 4


def other_counts_in_replicas() -> None:
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=2, microbatches=4)
    model = one_model(plan.layout)
    inputs, targets = batch_of(STEPS[2], 0, model)
    on(of, plan, model).step(inputs, targets, counts=[None, [1, 2, 3, 4]][place(of)[0]])


def test_counts_for_some_replicas_are_refused(run_ranks: Run) -> None:
    run = run_ranks(other_counts_in_replicas, 4)
    assert run.codes == [1] * 4
    assert all(
        "`counts` were given to some replicas of the pipeline" in log
        for log in run.logs
    )


def other_counts_in_pipelines() -> None:
    plan = program("gems", ranks=2, microbatches=4)
    inputs, targets = batch_of(STEPS[2], 0, one_model(plan.layout))
    counts = [None, [1, 2, 3, 4]][dist.get_rank()]
    pipeline(plan, replicated(plan)).step(inputs, targets, counts=counts)


def test_counts_for_some_first_stages_are_refused(run_ranks: Run) -> None:
    run = run_ranks(other_counts_in_pipelines, 2)
    assert run.codes == [1, 1]
    assert any("has other `counts` than rank" in log for log in run.logs), run.logs
