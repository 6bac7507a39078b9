"""The weights that a stage reads in schedules with late gradients: one of several versions
(PipeDream-2BW, arXiv 2006.09503), or always the newest ones (PipeMare, arXiv 1910.05124).

Version v is the weights after v updates. With a delay of d, the microbatches of update k read
version max(k - d, 0), and the update starts from version k; so d + 1 versions are held:

    delay(1)    update          0     1     2     3
                reads version   0     0     1     2
                makes version   1     2     3     4

The module's own parameters are the newest version, but no graph uses them. A forward runs with
leaves that share the memory of their version, and a backward adds to the gradients of these leaves.
So versions can move in memory without autograd's checks, which would not notice every change
between forward and backward anyway, such as one by a fused optimizer. If no version is kept, all
forwards share one set of leaves in the memory of the parameters: a backward reads the newest ones.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.shared_memory import copies_of, sharing
from schedlang.runtime.shared_weights import add_gradient
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.torch_private.leaf_hooks import has_hooks
from schedlang.runtime.torch_private.tensors import (
    changes_of,
    give_memory,
    local_part,
)
from schedlang.runtime.updates_elsewhere import UpdatesElsewhere
from schedlang.schedule.kinds import STEPS, Kind


class LateWeights(Part):
    """Replaces the parameters of a stage's module by the weights that its microbatches read."""

    #: A clause for error messages: what happens to weights between a forward and its backward.
    _what_happens: str

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._parameters = _trained(module)
        self._frozen = _frozen(module)
        #: Whether the next update has begun.
        self._has_begun = False
        #: The count of changes in place of each weight, before a forward.
        self._changes: list[int] = []

    def before_forward(self, run: Forward) -> None:
        """Substitute the weights that the microbatch must read; an evaluation reads the newest
        ones, which are the module's own.
        """
        if not run.is_evaluation:
            weights = self._read(run)
            for name, leaf in weights.items():
                parameter = self._parameters[name]
                if has_hooks(parameter) and not has_hooks(leaf):
                    # Hooks of the weight would not see the gradient of the leaf that replaces it.
                    hand_on = partial(_add_to, parameter)
                    leaf.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
            run.substitutes |= weights
            self._changes = [changes_of(leaf) for leaf in weights.values()]

    def after_forward(self, run: Forward) -> None:
        """PipelineError if the forward has changed, frozen or thawed a weight: other versions would
        not have the change.
        """
        if run.is_evaluation:
            return
        self._check_frozen(self._read(run))
        for (name, leaf), changes in zip(
            self._read(run).items(), self._changes, strict=True
        ):
            if changes_of(leaf) != changes:
                raise PipelineError(
                    f"the forward of stage {self._stage} changes its weight `{name}` in place, and "
                    f"{self._what_happens}: change weights after an "
                    "update, or take a schedule whose gradients are not late"
                )

    def before_backward(self, run: Backward) -> None:
        """Let a checkpoint that runs the forward again read the same weights."""
        run.substitutes |= self._read(run)

    def before_update(self) -> None:
        """Move the gradients of the update to the module's parameters. PipelineError if a hook of a
        backward has frozen a weight that the backward has read: no other version would be frozen.

        With replicas, this is called before the sum of gradients, and again before `U`.
        """
        if self._has_begun:
            return
        self._has_begun = True
        read = self._with_gradients()
        self._check_frozen(read)
        for name, leaf in read.items():
            if leaf.grad is not None:
                weight = self._parameters[name]
                weight.grad = add_gradient(weight.grad, leaf.grad)
                leaf.grad = None
        self._make_room()

    def after_update(self) -> None:
        """End the update. PipelineError if the optimizer's hooks have frozen or thawed a weight."""
        self._has_begun = False
        self._check_frozen(self._parameters)

    def _check_frozen(self, trained: Mapping[str, Tensor]) -> None:
        """PipelineError if a weight of these was frozen, or a frozen one thawed."""
        was_frozen = [name for name in trained if not trained[name].requires_grad]
        was_thawed = [name for name in self._frozen if self._frozen[name].requires_grad]
        for name in (*was_frozen, *was_thawed):
            raise PipelineError(
                f"the weight `{name}` of stage {self._stage} was "
                f"{'frozen' if name in trained else 'thawed'}, and {self._what_happens}: freeze or "
                "thaw weights before the pipeline is built, or build a new one then"
            )

    def _read(self, run: Forward | Backward) -> dict[str, Tensor]:
        """The weights that a microbatch reads."""
        raise NotImplementedError

    def _with_gradients(self) -> dict[str, Tensor]:
        """The weights that the microbatches of the current update have read."""
        raise NotImplementedError

    def _make_room(self) -> None:
        """Prepare the memory of the parameters for the update."""

    def _newest(self) -> dict[str, Tensor]:
        weights = {name: weight.data for name, weight in self._parameters.items()}
        return _leaves(weights, self._parameters)


class WeightVersions(LateWeights):
    """The weights of one stage, by version. An update has `per_update` microbatches."""

    _what_happens = "the plan keeps several versions of the weights"

    def __init__(
        self, stage: int, module: nn.Module, delay: int, per_update: int
    ) -> None:
        super().__init__(stage, module)
        self._check_memory()
        self._delay = delay
        self._per_update = per_update
        #: The number of updates so far, and before this step.
        self._updates = 0
        self._before = 0
        self._versions = {0: self._newest()}
        #: Whether some trained weights have shared memory so far.
        self._share_memory = bool(sharing(self._parameters))
        self._optimizer: Optimizer | None = None
        self._elsewhere = UpdatesElsewhere(
            str(stage), self._parameters, self._what_happens
        )

    def bind(self, stage: Any) -> None:
        """Keep the optimizer of the stage."""
        self._optimizer = stage.optimizer

    def begin_step(self) -> None:
        """Keep the number of updates, since each step counts its microbatches from 0; and read the
        newest version again, to which the script may have given other memory. PipelineError if a
        weight was frozen or unfrozen since the versions were made.
        """
        self._before = self._updates
        self._check_frozen(self._parameters)
        self._versions[self._updates] = self._newest()
        self._share_memory = self._share_memory or bool(sharing(self._parameters))

    def before_update(self) -> None:
        """Keep values that the update must change."""
        super().before_update()
        self._elsewhere.before_update()

    def after_update(self) -> None:
        """Add a new version. Warn if an optimizer changes other memory than that of the weights."""
        super().after_update()
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        if all(group.get("lr", 1) != 0 for group in groups):
            self._elsewhere.after_update()
        self._updates += 1
        self._versions[self._updates] = self._newest()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint besides the module's weights: the number of updates, and older
        versions.
        """
        older = [self._versions[version] for version in sorted(self._versions)[:-1]]
        copies = [
            {name: leaf.detach().clone() for name, leaf in version.items()}
            for version in older
        ]
        return {"updates": self._updates, "older": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint; the module has its weights already."""
        self._updates = state["updates"]
        older = state["older"]
        fits = all(weights.keys() == self._parameters.keys() for weights in older)
        if not fits or len(older) != min(self._delay, self._updates):
            raise PipelineError(
                "the checkpoint is not of a stage with such weights, or such a delay"
            )
        first = self._updates - len(older)
        self._versions = {
            version: _leaves(
                {name: weight.clone() for name, weight in weights.items()},
                self._parameters,
            )
            for version, weights in enumerate(older, first)
        }
        self._versions[self._updates] = self._newest()

    def _read(self, run: Forward | Backward) -> dict[str, Tensor]:
        # Microbatches are counted in each step, updates from the first step on.
        update = self._before + run.microbatch // self._per_update
        return self._versions[self._version_read(update)]

    def _with_gradients(self) -> dict[str, Tensor]:
        return self._versions[self._version_read(self._updates)]

    def _make_room(self) -> None:
        """Move the parameters to other memory, so that the newest version stays for its readers."""
        # The memory of versions, with a delay of 1, around the update that makes version 2:
        #
        #     memory A    version 0     │ has no readers any more  │ copy of 1, becomes version 2
        #     memory B    version 1     │ stays as it is           │ version 1
        #
        # The parameters move to A, so that the optimizer, which changes them in place, does not
        # change version 1. Parameters that share memory move together, to memory that is new.
        free = self._versions.pop(self._updates - self._delay, {})
        newest = {
            name: local_part(weight.data) for name, weight in self._parameters.items()
        }
        if self._share_memory:
            copies = copies_of(newest)
        else:
            copies = {
                name: _memory_for(weight, free.get(name)).copy_(weight)
                for name, weight in newest.items()
            }
        for name, copy in copies.items():
            give_memory(self._parameters[name], copy)

    def _check_memory(self) -> None:
        """PipelineError if something that is not trained shares memory with a trained weight, which
        moves to other memory.
        """
        tensors = dict(self._module.named_parameters()) | dict(
            self._module.named_buffers()
        )
        for group in sharing(tensors):
            trained = [name for name in group if name in self._parameters]
            others = [name for name in group if name not in self._parameters]
            if trained and others:
                raise PipelineError(
                    f"`{others[0]}` of stage {self._stage} shares memory with the weight "
                    f"`{trained[0]}` and is not trained, and {self._what_happens}, of which it "
                    "would follow none: give it memory of its own, train it too, or take a "
                    "schedule whose gradients are not late"
                )

    def _version_read(self, update: int) -> int:
        return max(update - self._delay, 0)


class UnstashedWeights(LateWeights):
    """The weights of a stage that keeps no versions: each op reads the newest weights, so a
    backward may read other weights than its forward has, as in PipeMare.

    If a forward computes values from weights alone, such as a cast, its backward would read the old
    values. Such stages are refused if they can be detected.
    """

    _what_happens = "the plan updates weights between a forward and its backward"

    def __init__(self, stage: int, module: nn.Module) -> None:
        super().__init__(stage, module)
        for name, part in module.named_modules():
            if is_parametrized(part):
                raise PipelineError(
                    f"`{name or type(part).__name__}` of stage {stage} computes its weights from "
                    "others (torch.nn.utils.parametrize), and its backward is to read the newest "
                    f"ones: {_KEEP}"
                )
        self._all = self._newest()

    def begin_step(self) -> None:
        """Read the parameters again, which the script may have frozen, unfrozen or replaced."""
        self._parameters = _trained(self._module)
        self._frozen = _frozen(self._module)
        self._all = self._newest()

    def before_forward(self, run: Forward) -> None:
        """PipelineError inside `torch.autocast`."""
        device = next((weight.device.type for weight in self._all.values()), "cpu")
        if not run.is_evaluation and torch.is_autocast_enabled(device):
            raise PipelineError(
                f"the forward of stage {self._stage} casts its weights (torch.autocast), and its "
                f"backward is to read the newest ones, not these casts: {_KEEP}"
            )
        super().before_forward(run)

    def before_backward(self, run: Backward) -> None:
        """Make checkpoints fail that would run the forward again with other weights."""
        run.substitutes |= dict.fromkeys(self._all, _ABSENT)

    def after_update(self) -> None:
        """PipelineError if the optimizer has not changed the weights in place: the following
        backwards would read the old values.
        """
        super().after_update()
        for name, leaf in self._all.items():
            if leaf.data_ptr() != self._parameters[name].data_ptr():
                raise PipelineError(
                    f"the optimizer gives the weight `{name}` of stage {self._stage} other memory, "
                    f"in which its backwards do not read it: {_KEEP}"
                )

    def _read(self, run: Forward | Backward) -> dict[str, Tensor]:
        return self._all

    def _with_gradients(self) -> dict[str, Tensor]:
        return self._all


class _Absent(Tensor):
    """Stands in for a weight while no op may read it."""

    # A module checks these two attributes before it accepts a tensor as a parameter.
    _is_param = True
    grad_fn = None

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise PipelineError(
            "a checkpoint that runs its forward again in the backward, or a hook, reads weights "
            f"there, which are others than in the forward: do without it, or {_KEEP}"
        )


_ABSENT = torch.empty(0, device="cpu").as_subclass(_Absent)
#: Advice for stages whose backward cannot read the newest weights.
_KEEP = "take a schedule that keeps versions of them, such as `weights stash`"


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that require a gradient, by name."""
    return {
        name: weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that require no gradient, by name."""
    return {
        name: weight
        for name, weight in module.named_parameters()
        if not weight.requires_grad
    }


def _memory_for(weight: Tensor, free: Tensor | None) -> Tensor:
    """Memory for a copy of a weight: the free memory, unless the weight was cast or moved."""
    memory = None if free is None else local_part(free.data)
    if memory is None or _kind_of(memory) != _kind_of(weight):
        return torch.empty_like(weight)
    return memory


def _kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _add_to(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Pass a leaf's gradient on to a parameter at once, so that the parameter's hooks see it."""
    gradient = leaf.grad
    # Autograd also calls this without a gradient, as for a weight of a checkpoint that is left to
    # W.
    if gradient is None:
        return
    leaf.grad = None
    changes = changes_of(parameter)
    run_backward([parameter], [gradient], [parameter])
    if changes_of(parameter) != changes:
        raise PipelineError(
            "a hook changes weights when their gradient is there, and the plan updates them by "
            "`U`: leave that to it"
        )


def _leaves(
    tensors: Mapping[str, Tensor], like: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Leaves that share the memory of these tensors, with gradients of the type that the
    parameters have (`like`).
    """
    # `data` has its own count of changes. Leaves are parameters, or their backward is not split.
    leaves: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        leaves[name] = nn.Parameter(tensor.data)
        if like[name].grad_dtype != tensor.dtype:
            leaves[name].grad_dtype = like[name].grad_dtype
    return leaves


def of_stages(site: Site) -> Iterator[tuple[int, LateWeights]]:
    """Make the part for stages that read late weights; replicas that are one module share it."""
    layout = site.plan.layout
    behind = delays(site.plan, site.rank)
    first: dict[int, tuple[int, bool, int, int]] = {}
    made: dict[int, LateWeights] = {}
    for number, module in site.modules.items():
        keeps_none = site.plan.weights_of(number).keeps_none
        delay = behind[number]
        # The number of microbatches of an update does not matter without a delay.
        per_update = layout.units(number) // layout.updates if delay else 0
        known = first.setdefault(id(module), (number, keeps_none, delay, per_update))
        if known[1:] != (keeps_none, delay, per_update):
            raise PipelineError(
                f"stages {known[0]} and {number} are one module, but read other versions of its "
                "weights"
            )
        if not delay:
            continue
        if id(module) not in made:
            made[id(module)] = (
                UnstashedWeights(number, module)
                if keeps_none
                else WeightVersions(number, module, delay, per_update)
            )
        yield number, made[id(module)]


def delays(plan: Plan, rank: int) -> dict[int, int]:
    """For each stage of a rank, the largest number of updates that the weights of its forwards
    lack.

    PipelineError unless all updates have the same delay, except for the first ones, which read the
    first version. Stages that always read the newest weights may have several delays.
    """
    by_stage: dict[int, int] = dict.fromkeys(plan.stages_of(rank), 0)
    reads: set[tuple[int, int, int]] = set()
    done = dict.fromkeys(by_stage, 0)
    actions = plan.ranks[rank]
    ops = zip(actions.kind, actions.stage, actions.microbatch, strict=True)
    for kind, stage, microbatch in ops:
        if kind in STEPS:
            done[stage] += 1
        elif kind == Kind.F and plan.layout.trains(stage):
            rule = plan.weights_of(stage)
            update = plan.layout.update_of(stage, microbatch)
            version = plan.version_read(stage, microbatch, done[stage])
            if not rule.keeps_none:
                reads.add((stage, update, version))
            by_stage[stage] = max(by_stage[stage], rule.delay, update - version)
    for stage, update, version in sorted(reads):
        if version != max(update - by_stage[stage], 0):
            raise PipelineError(
                f"update {update} of stage {stage} reads version {version} of the weights, "
                f"others are {by_stage[stage]} updates behind"
            )
    return by_stage
