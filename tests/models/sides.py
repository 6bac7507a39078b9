"""The two sides of a comparison: a feature trained in a pipeline on real processes, and alone.

Alone means what a script without a pipeline does: each microbatch goes forward through all stages
and back, gradients add up in `.grad`, the optimizer makes its step. A schedule adds to that only
what it says by itself: how late weights are, which rows the second pipeline takes, where slices
begin, and where a model draws random numbers, which rank draws them. Both sides leave what can be
compared in `results`, by names.
"""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.ranks.weight_homes import homes_of
from schedlang.runtime import Pipeline, added_losses
from schedlang.runtime.batches import shares
from schedlang.runtime.values import Value, cut, size_along
from tests.models.model import Feature, Model, seed_all
from tests.models.schedules import Column, forwards, natural

#: What came out, by name: losses, gradients, weights, buffers, and what hooks have seen.
Results = dict[str, Tensor | None]

#: Of a feature on a device mesh: how many ranks there are along its other dimension.
REPLICAS = 2

#: Seconds after which a wait is taken for a hang.
PATIENCE = 30.0


class Sliced(nn.Module):
    """Gives a stage slices: what it makes depends on the slice before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, past: Tensor | None, **options: Any) -> Any:
        output = self.inner(x, **options)
        if past is not None:
            output = _with_past(output, past)
        return output, output if isinstance(output, dict) else output[:, -1:]


class Skipping(nn.Module):
    """Gives a stage skips: what earlier ones have made is added to its input."""

    def __init__(self, inner: nn.Module, later: list[int]) -> None:
        super().__init__()
        self.inner = inner
        self.later = later

    def forward(
        self, x: Tensor, skips: Mapping[int, Tensor] | None = None, **options: Any
    ) -> Any:
        for earlier in (skips or {}).values():
            x = _joined(x, earlier)
        output = self.inner(x, **options)
        return (output, dict.fromkeys(self.later, output)) if self.later else output


class Joining(nn.Module):
    """Gives a stage of a graph one input: the sum of what the stages before it have made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, *others: Tensor, **options: Any) -> Any:
        for other in others:
            x = _joined(x, other)
        return self.inner(x, **options)


def _with_past(output: Any, past: Any) -> Any:
    """What a slice makes of its output and of the one before; of dictionaries, something else with
    each tensor that requires a gradient.
    """
    if not isinstance(output, dict):
        return output + past
    wanting = sum(tensor.requires_grad for tensor in past.values())
    return output | {"x": output["x"] + past["x"] * (1 + wanting)}


def _joined(value: Any, other: Any) -> Any:
    """One value of two: the sum of tensors, and all that is in dictionaries."""
    if not isinstance(other, dict):
        return value + other
    given = value if isinstance(value, dict) else {"x": value}
    return given | {f"{name} of another": tensor for name, tensor in other.items()}


def build(feature: Feature, plan: Plan) -> list[Model]:
    """The model, once for each pipeline of the plan, all alike; with stages that take and return
    what the plan asks for, and are frozen where it says so.
    """
    layout = plan.layout
    models = [feature.model(layout.pieces) for _ in layout.pipelines]
    for model in models:
        for number in layout.frozen:
            model.stages[number].requires_grad_(False)
        if layout.slices > 1:
            model.stages = [Sliced(stage) for stage in model.stages]
        elif layout.edges:
            model.stages = [Joining(stage) for stage in model.stages]
        elif layout.skips:
            model.stages = [
                Skipping(
                    stage,
                    [later for earlier, later in layout.skips if earlier == number],
                )
                for number, stage in enumerate(model.stages)
            ]
        else:
            continue
        # The stage stands within a module that gives it what the plan asks for, so its weights are
        # called otherwise.
        model.tied = [
            {stage: f"inner.{name}" for stage, name in names.items()}
            for names in model.tied
        ]
    return models


class Training:
    """What both sides share: stages with their optimizers, and what is recorded of them."""

    def __init__(self, feature: Feature, column: Column, numbers: list[int]) -> None:
        self.plan = column.plan
        layout = self.plan.layout
        models = build(feature, self.plan)
        self.model = models[0]
        of_stage = {
            pipeline.start + piece: stage
            for pipeline, model in zip(layout.pipelines, models, strict=True)
            for piece, stage in enumerate(model.stages)
        }
        self.stages = {number: of_stage[number] for number in numbers}
        #: Of the replica whose last stage this is.
        self.losses = {
            pipeline.stop - 1: model.loss
            for pipeline, model in zip(layout.pipelines, models, strict=True)
            if pipeline.stop - 1 in numbers
        }
        #: The stages of which weights are compared: of those that travel, the ones at home.
        homes = homes_of(self.plan, numbers)
        self.at_home = {
            number: stage
            for number, stage in self.stages.items()
            if homes.get(number, number) == number
        }
        self.modules = self.modules_of_script()
        self.spread()
        self.scaler = None if self.model.scaler is None else self.model.scaler()
        self.optimizers = [self.model.optimizer(module) for module in self.modules]
        _share_out(self.optimizers)
        self.results: Results = {}

    def run(self) -> Results:
        """Train as the model's script does."""
        self.model.script(self)
        self.record_end()
        return self.results

    def modules_of_script(self) -> list[nn.Module]:
        """The stages whose weights the script trains."""
        return list(self.stages.values())

    def spread(self) -> None:
        """Let torch cut the stages, if it is to."""

    def batch(self, step: int) -> tuple[Value, Value]:
        return self.model.batch(step, self.plan.microbatches)

    def set_training(self, is_training: bool) -> None:
        for stage in self.stages.values():
            stage.train(is_training)

    def scaled(self) -> list[Optimizer]:
        """The optimizers whose gradients the scaler looks at."""
        raise NotImplementedError

    def unscale(self) -> None:
        """Gradients without the scale of the losses, as one clips them."""
        if self.scaler is not None:
            for optimizer in self.scaled():
                self.scaler.unscale_(optimizer)

    def step_optimizers(self) -> None:
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            for optimizer in self.scaled():
                self.scaler.step(optimizer)
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def record_losses(self, what: str, losses: Mapping[int, Tensor]) -> None:
        for microbatch, loss in losses.items():
            self.results[f"{what} of microbatch {microbatch}"] = loss.detach()

    def record_gradients(self, step: int) -> None:
        for number, stage in self.at_home.items():
            for name, weight in stage.named_parameters():
                gradient = weight.grad
                if gradient is not None:
                    gradient = _whole(gradient)
                self.results[f"step {step}: gradient of `{name}` of stage {number}"] = (
                    gradient
                )

    def record_end(self) -> None:
        for number, stage in self.at_home.items():
            for name, value in [*stage.named_parameters(), *stage.named_buffers()]:
                self.results[f"`{name}` of stage {number} in the end"] = _whole(value)
            for name, module in stage.named_modules():
                if hasattr(module, "seen"):
                    seen = torch.tensor(module.seen, dtype=torch.float64)
                    self.results[f"what `{name}` of stage {number} has seen"] = seen


def trained_weights(stage: nn.Module) -> list[nn.Parameter]:
    """Those that have versions; frozen ones are as they are."""
    return [weight for weight in stage.parameters() if weight.requires_grad]


def _name_of_replica(number: int) -> str:
    return f", replica {number}"


def _whole(tensor: Tensor) -> Tensor:
    """A copy, of all parts of a tensor that is cut over a mesh."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor.detach().clone()


def _share_out(optimizers: list[Optimizer]) -> None:
    """A weight that several stages of a process have is moved by the first one's optimizer."""
    taken: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                each for each in group["params"] if id(each) not in taken
            ]
            taken |= {id(each) for each in group["params"]}


#: How torch's scaler finds an optimizer that looks at scale and overflows by itself, and how it tells
#: these.
_BY_ITSELF = "_step_supports_amp_scaling"
_TOLD = ("grad_scale", "found_inf")


class Together:
    """The optimizers of all stages as one, which is what a scaler has in one process: where a gradient
    of any stage overflows, it skips them all.
    """

    def __init__(self, side: Training) -> None:
        self._side = side

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self._side.optimizers for group in each.param_groups]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the scaler leaves scale and overflows to the optimizers, as to fused ones."""
        return all(hasattr(each, _BY_ITSELF) for each in self._side.optimizers)

    def step(self) -> None:
        told = {name: value for name, value in vars(self).items() if name in _TOLD}
        for each in self._side.optimizers:
            vars(each).update(told)
            each.step()
            for name in told:
                delattr(each, name)


class InPipeline(Training):
    """One rank of a pipeline."""

    def __init__(self, feature: Feature, column: Column) -> None:
        plan = column.plan
        rank = dist.get_rank()
        self.mesh = None
        self.beside = feature.mesh
        if feature.mesh:
            shape = (REPLICAS, len(plan.ranks))
            self.mesh = init_device_mesh(
                "cpu", shape, mesh_dim_names=(feature.mesh, "pp")
            )
            rank = self.mesh.get_local_rank("pp")
        super().__init__(feature, column, plan.stages_of(rank))
        model = self.model
        of_plan = (
            dict(zip(self.stages, self.optimizers, strict=True))
            if plan.has_updates
            else {}
        )
        # A mean over the microbatches of an update, times the model's own factor.
        scale = model.loss_scale * plan.layout.updates / plan.microbatches
        self.pipeline = Pipeline(
            plan,
            self.stages,
            next(iter(self.losses.values()), None),
            tied=model.tied,
            loss_scale=self.scaler or (None if model.loss_scale == 1 else scale),
            max_norm=model.max_norm if plan.has_updates else None,
            mesh=self.mesh
            if model.spread is None or self.mesh is None
            else self.mesh["pp"],
            optimizers=of_plan,
            timeout=PATIENCE,
        )
        self.numbers = sorted(
            number
            for pipeline, numbers in zip(
                plan.layout.pipelines, shares(plan.layout), strict=True
            )
            if pipeline.stop - 1 in self.stages
            for number in numbers
        )
        # Each rank draws numbers of its own, as processes do; the training alone keeps the state of
        # each rank, and draws from that of the stage's.
        seed_all(100 + rank)

    def modules_of_script(self) -> list[nn.Module]:
        """Elsewhere than at home there is nothing to train."""
        return list(self.at_home.values())

    def spread(self) -> None:
        if self.mesh is not None and self.model.spread is not None:
            for module in self.modules:
                self.model.spread(module, self.mesh[self.beside])

    def batch(self, step: int) -> tuple[Value, Value]:
        """Of several replicas each has its own."""
        if self.mesh is not None and self.beside == "dp":
            step = REPLICAS * step + self.mesh.get_local_rank("dp")
        return super().batch(step)

    def _options(self) -> list[Mapping[str, Any]] | None:
        if self.model.options is None:
            return None
        return list(map(self.model.options, range(self.plan.microbatches)))

    def train(self, step: int) -> None:
        inputs, targets = self.batch(step)
        with self.model.around():
            losses = self.pipeline.step(inputs, targets, self._options())
        if losses is not None:
            by_number = dict(zip(self.numbers, losses, strict=True))
            self.record_losses(f"step {step}{self._replica()}: loss", by_number)
        if not self.plan.has_updates:
            self.record_gradients(step)

    def _replica(self) -> str:
        if self.mesh is None or self.beside != "dp":
            return ""
        return _name_of_replica(self.mesh.get_local_rank("dp"))

    def update(self) -> None:
        if self.plan.has_updates:
            return
        if self.model.max_norm is not None:
            self.unscale()
            self.pipeline.clip_grad_norm_(self.model.max_norm)
        self.step_optimizers()

    def scaled(self) -> list[Optimizer]:
        """A rank whose stages are frozen has none."""
        return [
            optimizer
            for module, optimizer in zip(self.modules, self.optimizers, strict=True)
            if trained_weights(module)
        ]

    def evaluate(self, step: int) -> None:
        self.set_training(False)
        with self.model.around():
            losses = self.pipeline.evaluate(*self.batch(step), self._options())
        if losses is not None:
            by_number = dict(zip(self.numbers, losses, strict=True))
            self.record_losses(f"evaluation {step}: loss", by_number)
        self.set_training(True)


class Alone(Training):
    """All stages in one process, without a pipeline."""

    def __init__(self, feature: Feature, column: Column) -> None:
        self.plan = column.plan
        layout = self.plan.layout
        super().__init__(feature, column, list(range(len(layout.placement))))
        self._together = Together(self)
        # Where numbers are drawn, the order of the forwards on a rank says which of them a forward
        # gets.
        order = forwards(self.plan) if feature.draws else natural(self.plan)
        updates = [layout.update_of(*op) for op in order]
        assert updates == sorted(updates)
        by_update = groupby(zip(updates, order, strict=True), lambda pair: pair[0])
        self.order = [[op for _, op in pairs] for _, pairs in by_update]
        self.replicas = REPLICAS if feature.mesh == "dp" else 1
        self.numbers = dict(zip(layout.pipelines, shares(layout), strict=True))
        self.delays = column.delays * len(layout.pipelines)
        self.keeps_none = self.plan.weights_of(0).keeps_none
        #: By microbatch, the losses that stages have added in its forwards.
        self.added: dict[int, Tensor | float] = {}
        #: The weights of each stage that were trained as the step began; forwards may freeze some.
        self.trained: list[list[nn.Parameter]] = []
        #: Of each update that is done, the weights before it, by stage.
        self.versions: list[list[dict[nn.Parameter, Tensor]]] = []
        self.random: dict[int, tuple[Any, ...]] = {}
        for rank in range(len(self.plan.ranks)):
            seed_all(100 + rank)
            self.random[rank] = random_state()

    @contextmanager
    def random_of(self, stage: int) -> Iterator[None]:
        """The random numbers of the rank that has a stage."""
        rank = self.plan.placement[stage]
        set_random_state(self.random[rank])
        yield
        self.random[rank] = random_state()

    def train(self, step: int) -> None:
        self.trained = [trained_weights(stage) for stage in self.modules]
        earlier = self._set_aside()
        replicas = range(self.replicas)
        names = [
            _name_of_replica(each) if self.replicas > 1 else "" for each in replicas
        ]
        batches = [self._cut(self.replicas * step + each) for each in replicas]
        for update in self.order:
            with self._late_weights():
                for name, batch in zip(names, batches, strict=True):
                    self.record_losses(
                        f"step {step}{name}: loss", self._train(update, *batch)
                    )
            if self.plan.has_updates:
                self._update_in_plan()
        self._sum_replicas(earlier)
        if not self.plan.has_updates:
            self.record_gradients(step)

    def update(self) -> None:
        if not self.plan.has_updates:
            self._clip()
            self.step_optimizers()

    def scaled(self) -> list[Optimizer]:
        return [cast(Optimizer, self._together)]

    def evaluate(self, step: int) -> None:
        self.set_training(False)
        inputs, targets = self._cut(step)
        with torch.no_grad():
            losses = {
                number: loss
                for update in self.order
                for number, loss in self._forward(update, inputs, targets)
            }
        self.record_losses(f"evaluation {step}: loss", losses)
        self.set_training(True)

    def _cut(self, step: int) -> list[list[Value]]:
        return [_parts(value, self.plan.microbatches, 0) for value in self.batch(step)]

    def _train(self, order: list[Any], inputs: Any, targets: Any) -> dict[int, Tensor]:
        scale = (
            self.model.loss_scale * self.plan.layout.updates / self.plan.microbatches
        )
        scale /= self.replicas
        losses = {}
        for number, loss in self._forward(order, inputs, targets):
            scaled = (loss + self.added[number]) * scale
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            scaled.backward()
            losses[number] = loss.detach()
        return losses

    def _forward(
        self, order: list[Any], inputs: Any, targets: Any
    ) -> Iterator[tuple[int, Tensor]]:
        """The loss of each microbatch, as soon as it is there."""
        layout = self.plan.layout
        slices = layout.slices
        values: dict[tuple[int, int], Any] = {}
        pasts: dict[tuple[int, int], Any] = {}
        given: dict[tuple[int, int], dict[int, Any]] = {}
        losses: dict[int, list[Tensor]] = {}
        self.added = {}
        for stage, unit in order:
            pipeline = layout.pipeline_of[stage]
            number = self.numbers[pipeline][unit // slices]
            options = dict(self.model.options(number)) if self.model.options else {}
            if layout.is_first(stage):
                value = _slice(inputs[number], unit % slices, slices)
            elif layout.edges:
                value = tuple(
                    values[earlier, unit] for earlier in sorted(layout.before[stage])
                )
            else:
                value = values.pop((stage - 1, unit))
            if slices > 1:
                options["past"] = pasts.pop((stage, unit), None)
            if any(stage == later for _, later in layout.skips):
                options["skips"] = given.pop((stage, unit))
            with self.random_of(stage), self.model.around(), self._older_memory(stage):
                arguments = value if isinstance(value, tuple) else (value,)
                with added_losses() as added:
                    output = self.stages[stage](*arguments, **options)
                self.added[number] = self.added.get(number, 0.0) + added.total / slices
                if slices > 1:
                    output, past = output
                    if (unit + 1) % slices:
                        pasts[stage, unit + 1] = past
                if any(stage == earlier for earlier, _ in layout.skips):
                    output, gives = output
                    for later, skipped in gives.items():
                        given.setdefault((later, unit), {})[stage] = skipped
                if not layout.is_last(stage):
                    values[stage, unit] = output
                    continue
                target = _slice(targets[number], unit % slices, slices)
                loss = self.losses[stage](output, target)
                losses.setdefault(number, []).append(
                    loss["loss"] if isinstance(loss, Mapping) else loss
                )
            if len(losses[number]) == slices:
                parts = losses[number]
                yield number, parts[0] if slices == 1 else torch.stack(parts).mean()

    @contextmanager
    def _late_weights(self) -> Iterator[None]:
        """The stages read their weights of so many updates before."""
        if self.keeps_none:
            yield
            return
        # By stage, the tensors themselves: they are put back behind the update, not copied.
        newest = [self._data(stage) for stage in self.stages]
        done = len(self.versions)
        for stage, delay in zip(self.stages, self.delays, strict=True):
            version = max(done - delay, 0)
            if version < done:
                self._put(stage, self.versions[version][stage])
        yield
        for stage, weights in zip(self.stages, newest, strict=True):
            self._put(stage, weights)

    @contextmanager
    def _older_memory(self, stage: int) -> Iterator[None]:
        """Where no version is kept, only the forward reads weights of so many updates before: by its
        backward the same memory has the newest ones.
        """
        done = len(self.versions)
        # A step begins when all updates of the one before are done.
        first = done - done % self.plan.layout.updates
        version = max(done - self.delays[stage], first)
        # An evaluation reads the newest ones.
        if not self.keeps_none or version == done or not torch.is_grad_enabled():
            yield
            return
        memory = self._data(stage)
        newest = {weight: each.clone() for weight, each in memory.items()}
        older = self.versions[version][stage]
        for weight, each in memory.items():
            each.copy_(older[weight])
        yield
        for weight, each in memory.items():
            each.copy_(newest[weight])

    def _data(self, stage: int) -> dict[nn.Parameter, Tensor]:
        return {weight: weight.data for weight in self.trained[stage]}

    def _put(self, stage: int, weights: Mapping[nn.Parameter, Tensor]) -> None:
        # A hook of an earlier step may have frozen some that the version has.
        for weight in self.trained[stage]:
            weight.data = weights[weight]

    def _update_in_plan(self) -> None:
        """Keep the weights as they are for later updates, and move new ones."""
        before = [self._data(stage) for stage in self.stages]
        if self.keeps_none:
            # Optimizers change the weights where they are.
            before = [
                {weight: each.clone() for weight, each in weights.items()}
                for weights in before
            ]
        self.versions.append(before)
        for stage in [] if self.keeps_none else self.stages:
            # The tensors that were kept stay as they are; the optimizer moves copies, which share
            # memory where they do.
            kept = before[stage]
            moved = copy.deepcopy([*kept.values()])
            self._put(stage, dict(zip(kept, moved, strict=True)))
        self._clip()
        self.step_optimizers()

    def _clip(self) -> None:
        """The norm is that of one replica: they have the same gradients."""
        if self.model.max_norm is not None:
            self.unscale()
            for replica in self._replicas():
                clip_grad_norm_(replica, self.model.max_norm)

    def _replicas(self) -> list[list[nn.Parameter]]:
        """The weights of each pipeline's replica, in the same order."""
        return [
            list(
                nn.ModuleList(self.modules[pipeline.start : pipeline.stop]).parameters()
            )
            for pipeline in self.plan.layout.pipelines
        ]

    def _set_aside(self) -> list[list[Tensor | None]]:
        """Where there are several replicas, the gradients of earlier steps, which are sums."""
        replicas = self._replicas()
        earlier = [[weight.grad for weight in replica] for replica in replicas]
        if len(replicas) > 1:
            for weight in (weight for replica in replicas for weight in replica):
                weight.grad = None
        return earlier

    def _sum_replicas(self, earlier: list[list[Tensor | None]]) -> None:
        replicas = self._replicas()
        if len(replicas) == 1:
            return
        for before, same in zip(
            zip(*earlier, strict=True), zip(*replicas, strict=True), strict=True
        ):
            # The gradients of all replicas are one sum, which each of them has, in the memory of its
            # earlier one, as autograd adds them up.
            parts = [
                each
                for each in (before[0], *(weight.grad for weight in same))
                if each is not None
            ]
            total = sum(parts[1:], start=parts[0].clone()) if parts else None
            for weight, own in zip(same, before, strict=True):
                weight.grad = None if total is None else total.clone()
                if total is not None and own is not None and not own.is_sparse:
                    weight.grad = own.copy_(total)


def _slice(value: Value, index: int, slices: int) -> Value:
    return value if slices == 1 else _parts(value, slices, 1)[index]


def _parts(value: Value, count: int, dim: int) -> list[Value]:
    """Parts of one size, along a dimension."""
    size, rest = divmod(size_along(dim, value, "the batch"), count)
    return cut(value, [size] * count + [rest] * (rest > 0), dim)


def random_state() -> tuple[Any, ...]:
    """Of torch, Python and numpy."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
