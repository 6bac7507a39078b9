"""Weights that several stages share: replicas of a stage in several pipelines of a plan, or stages
with tied weights.

All copies must be equal at first, also those in replicas of the whole pipeline;
`schedlang.runtime.parts.sums` sums their gradients.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.ranks.weight_homes import homes_of
from schedlang.runtime.equal_weights import bits_of
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import Processes
from schedlang.runtime.setup import Tied
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_after
from schedlang.runtime.torch_private.tensors import local_part
from schedlang.runtime.watchdog import Watchdog


@frozen(eq=False)
class SharedWeights:
    """Weights that some stages share: for each weight, its copies on this rank; the ranks of the
    plan with copies; and with several models, the models that have it. If they hop from rank to
    rank, one of these ranks is their `home`, and has all of their gradients after a step.
    """

    name: str
    weights: list[tuple[nn.Parameter, ...]]
    ranks: list[int]
    models: frozenset[str] = frozenset()
    are_tied: bool = False
    home: int | None = None

    @property
    def counts_on(self) -> int:
        """The rank on which their gradients count in norms."""
        return self.ranks[0] if self.home is None else self.home

    @property
    def are_shared(self) -> bool:
        """Whether one replica of the pipeline has several copies."""
        return len(self.ranks) > 1 or any(len(same) > 1 for same in self.weights)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All copies on this rank."""
        return [weight for same in self.weights for weight in same]

    def fingerprints(self) -> list[list[object]]:
        """For each copy on this rank, the shapes, the sums of bits, and whether weights are
        trained: these must be equal for all copies.
        """
        copies = zip(*self.weights, strict=True)
        return [
            [
                [list(weight.shape), bits_of(weight), weight.requires_grad]
                for weight in copy
            ]
            for copy in copies
        ]


def find_shared_weights(
    plan: Plan, modules: Mapping[int, nn.Module], tied: Tied
) -> list[SharedWeights]:
    """All weights of a rank's stages, grouped with their copies: tied weights one by one, and the
    others by stage.
    """
    found = [_tied(plan, modules, names) for names in tied]
    # In this order, so that no weight is in two groups:
    #
    #     tied weights          one by one, on all ranks that have one of its stages
    #     other weights         by stage of the first pipeline, with its replicas in the others
    taken = {id(weight) for each in found for weight in each.parameters}
    found += [
        _replicas(plan, modules, number, taken) for number in range(plan.layout.pieces)
    ]
    return [each for each in found if each.weights]


def _tied(
    plan: Plan, modules: Mapping[int, nn.Module], names: Mapping[int, str]
) -> SharedWeights:
    """A tied weight. `names` has stages of one pipeline; their replicas share the weight, too."""
    shown = " and ".join(f"`{name}` of stage {stage}" for stage, name in names.items())
    for stage in names:
        if stage not in range(len(plan.placement)):
            raise PipelineError(
                f"`tied` has {shown}, but the plan has {counted(len(plan.placement), 'stage')}"
            )
    by_piece = {plan.layout.piece(stage): name for stage, name in names.items()}
    here: dict[int, nn.Parameter] = {}
    for stage, module in modules.items():
        name = by_piece.get(plan.layout.piece(stage))
        if name is not None:
            weight = dict(module.named_parameters(remove_duplicate=False)).get(name)
            if weight is None:
                raise PipelineError(
                    f"`tied` has {shown}, but stage {stage} has no parameter `{name}`"
                )
            here[id(weight)] = weight
    return SharedWeights(
        f"the tied {shown}",
        [tuple(here.values())] if here else [],
        _ranks(plan, by_piece),
        _models(plan, by_piece),
        are_tied=True,
    )


def _replicas(
    plan: Plan, modules: Mapping[int, nn.Module], number: int, taken: Container[int]
) -> SharedWeights:
    """The weights of a stage of the first pipeline, and of its replicas in the others."""
    # A rank that has two replicas may have them in one module.
    mine = {
        id(module): module
        for stage, module in modules.items()
        if plan.layout.piece(stage) == number
    }
    copies = [
        [weight for weight in module.parameters() if id(weight) not in taken]
        for module in mine.values()
    ]
    if len({len(copy) for copy in copies}) > 1:
        raise PipelineError(
            f"the replicas of stage {number} on this rank have different weights"
        )
    return SharedWeights(
        f"the replicas of stage {number}",
        list(zip(*copies, strict=True)),
        _ranks(plan, [number]),
        _models(plan, [number]),
        home=_home(plan, modules, number),
    )


def _home(plan: Plan, modules: Mapping[int, nn.Module], number: int) -> int | None:
    """The home of a stage's weights, as a rank; None if they do not hop."""
    own = [stage for stage in modules if plan.layout.piece(stage) == number]
    homes = homes_of(plan, own)
    return next((plan.placement[home] for home in homes.values()), None)


def _ranks(plan: Plan, pieces: Iterable[int]) -> list[int]:
    return sorted(
        {
            plan.placement[stage]
            for piece in pieces
            for stage in plan.layout.replicas(piece)
        }
    )


def _models(plan: Plan, pieces: Iterable[int]) -> frozenset[str]:
    return frozenset(plan.layout.model_of(piece) for piece in pieces)


def ids_of_tied(shared: Iterable[SharedWeights]) -> set[int]:
    """The ids of a rank's tied weights."""
    tied = (each for each in shared if each.are_tied)
    return {id(weight) for each in tied for weight in each.parameters}


def check_shared_weights(
    shared: Sequence[SharedWeights], processes: Processes, watchdog: Watchdog
) -> None:
    """Compare all copies of weights on all ranks; PipelineError if some differ."""
    check_hooks(shared)
    own = fingerprints_of(shared, processes)
    unlike = unlike_copies(watchdog.gather(own, "compared no weights"), processes)
    if unlike is not None:
        raise PipelineError(f"{unlike} differ: they must begin with the same weights")


def fingerprints_of(shared: Sequence[SharedWeights], processes: Processes) -> str:
    """The fingerprints of all weights on this rank that have copies."""
    several = [
        each for each in shared if each.are_shared or processes.replicas.are_several
    ]
    return json.dumps({each.name: each.fingerprints() for each in several})


def unlike_copies(found: Mapping[int, str], processes: Processes) -> str | None:
    """The first copies whose fingerprints differ, in words, and where they are. `found` has the
    fingerprints of all ranks.
    """
    first: dict[str, tuple[int, object]] = {}
    for rank, theirs in found.items():
        for name, fingerprint in (
            (name, copy)
            for name, copies in json.loads(theirs).items()
            for copy in copies
        ):
            other, expected = first.setdefault(name, (rank, fingerprint))
            if fingerprint != expected:
                names = [processes.name(other), processes.name(rank)]
                return f"{name} on {' and on '.join(dict.fromkeys(names))}"
    return None


def check_hooks(shared: Iterable[SharedWeights]) -> None:
    """PipelineError if a weight with copies has a hook that sees the sum of its gradients."""
    for weights in shared:
        if weights.are_shared and any(map(has_hooks_after, weights.parameters)):
            raise PipelineError(
                f"a hook of the weight sees only its own part of the sum, and {weights.name} have "
                "the others (`register_post_accumulate_grad_hook`): use a hook of the gradient "
                "(`register_hook`) or of the optimizer"
            )


def gradient_of(weight: Tensor) -> Tensor | None:
    """The gradient of a weight, if it has one; PipelineError if it adds up in `main_grad`."""
    if hasattr(weight, "main_grad"):
        raise PipelineError(
            f"the gradients of a weight {list(weight.shape)} add up in its `main_grad`, as by "
            "Megatron's `gradient_accumulation_fusion`, and the pipeline sums and clips those in "
            "`.grad`: train without the fusion"
        )
    return weight.grad


def type_of_gradient(weight: Tensor) -> torch.dtype:
    """The type in which a weight's gradients add up: its own, unless a script says otherwise."""
    return weight.grad_dtype or weight.dtype


def add_gradient(earlier: Tensor | None, gradient: Tensor) -> Tensor:
    """The sum of an earlier gradient of a weight and another one, in the memory of the earlier one,
    as autograd adds them up: a script may have views of it.
    """
    if earlier is None:
        return gradient
    return earlier + gradient if earlier.is_sparse else earlier.add_(gradient)


def put_gradient(weight: Tensor, total: Tensor) -> None:
    """Set the gradient of a weight to a sum, in the memory of the gradient that is there, of which
    a script may have views; a sparse gradient stays sparse.
    """
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=type_of_gradient(weight))
    if weight.grad.is_sparse:
        weight.grad = total.to_sparse(weight.grad.sparse_dim())
    else:
        local_part(weight.grad).copy_(total)
