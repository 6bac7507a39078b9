"""The door: what a plan, a module or a script may ask of the runtime beside plain forwards and
backwards, one row each.

A row says who asks for it, which file of `parts/` does it, and with what it does not go together,
and why. The file is imported where the row is asked for: so a pipeline pays for what it needs. A
file has one of two functions, or both:

    of_stages(site)     yields parts of this rank's stages, each with the number of its stage
    of_rank(rank)       yields parts of the whole rank; all ranks build theirs together, in order

The order of the rows is that of a stage's parts around its module, the innermost first:

    module │ repeats, losses, split, offload, weights, … │ audit │ versions, slices, edges, turns

The audit lies between, since it calls the module alone with what the outer parts give it, and hands
what it returns through them. A module that has slices and skips returns `(output, {stage: value}),
past`: so slices are further out than skips. Along edges goes the output, which is by itself when
skips have been taken from it.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from inspect import ismethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import nn

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.ranks.overlaps import overlapped_pairs
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.last_loss import Loss
from schedlang.runtime.part import Part
from schedlang.runtime.processes import Processes
from schedlang.runtime.results import Results
from schedlang.runtime.setup import Setup
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import Wire
from schedlang.schedule.kinds import AWAY, BETWEEN, OF_HOPS, REPEATS, Kind

if TYPE_CHECKING:
    from schedlang.runtime.shared_weights import SharedWeights, find_shared_weights
else:
    # For sums and norms.
    find_shared_weights = on_demand(
        "schedlang.runtime.shared_weights.find_shared_weights"
    )


@frozen(eq=False)
class Asked:
    """What a rank is asked for: by its plan, and by what its script gives."""

    plan: Plan
    processes: Processes
    setup: Setup
    #: Whether steps take other plans than the pipeline's own.
    has_others: bool = field(default=False, kw_only=True)

    def asks_for(self, feature: str) -> bool:
        """Whether a feature is asked for, by its name, for any stage of the rank."""
        is_asked = FEATURES[feature].is_asked
        return any(is_asked(self, stage) for stage in self.modules)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.processes.own

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank's stages, by number."""
        return self.setup.modules


@frozen(eq=False)
class Site(Asked):
    """Where parts of stages are built."""

    device: torch.device
    #: The parts of each stage so far, the innermost first: they are built from the outside inwards.
    parts: dict[int, list[Part]] = field(factory=dict)
    #: Each set of `followed`, and how it is found in a plan.
    _followed: list[tuple[set[int], Callable[[Plan], set[int]]]] = field(factory=list)

    def followed(self, find: Callable[[Plan], set[int]]) -> set[int]:
        """What is found in the plan of a step, such as the microbatches that a part is for: a set
        that changes when a step follows another plan.
        """
        found = {*find(self.plan)}
        self._followed.append((found, find))
        return found

    def microbatches_with(self, kinds: Container[int], stage: int) -> set[int]:
        """The microbatches of a stage that have an op of these kinds in the plan of a step."""
        return self.followed(lambda plan: plan.microbatches_with(kinds, stage))

    def follow(self, plan: Plan) -> None:
        """Bring all that was found up to date, for steps that follow this plan."""
        for found, find in self._followed:
            found.clear()
            found |= find(plan)

    @cached_property
    def shared(self) -> "list[SharedWeights]":
        """The weights of this rank's stages, with those that are the same."""
        return find_shared_weights(self.plan, self.modules, self.setup.tied)

    def loss_of(self, stage: int) -> Loss | None:
        """The loss of a stage, if it is a last one and has one."""
        function = self.setup.loss_of(self.plan.layout.model_of(stage))
        if function is None or not self.plan.layout.is_last(stage):
            return None
        return Loss(function)


@frozen(eq=False)
class Rank:
    """Where parts of a whole rank are built: its stages, and its ways to other ranks."""

    site: Site
    stages: Mapping[int, Stage]
    wire: Wire
    exchange: Exchange
    watchdog: Watchdog
    results: Results


@frozen(eq=False)
class Feature:
    """A row: what is asked for, in words; whether it is, for a stage of a rank; the file of
    `parts/` that does it, if it is a part; and for each other feature with which it does not go
    together, by its name, the error that says why.
    """

    words: str
    is_asked: Callable[[Asked, int], bool]
    file: str | None = None
    not_with: Mapping[str, str] = MappingProxyType({})


def _always(asked: Asked, stage: int) -> bool:
    return True


def _trains(asked: Asked, stage: int) -> bool:
    return not asked.plan.is_forward_only


def _is_clipped_by_script(asked: Asked, stage: int) -> bool:
    """Whether a script that clips has to clip all ranks alike. Where the plan makes the updates, it
    may clip each stage by itself.
    """
    return (
        _trains(asked, stage)
        and len(asked.plan.ranks) > 1
        and not asked.plan.has_updates
        and not asked.setup.ends_with_update(asked.plan)
    )


def _has_replicas(asked: Asked, stage: int) -> bool:
    return asked.processes.replicas.are_several


def _has_copies(asked: Asked, stage: int) -> bool:
    """Whether gradients of a weight may have to be summed."""
    pipelines = asked.plan.layout.pipelines
    return bool(asked.setup.tied or _has_replicas(asked, stage) or len(pipelines) > 1)


def _reads_late_weights(asked: Asked, stage: int) -> bool:
    if not asked.plan.has_updates:
        return False
    delays: Mapping[int, int] = load("versions").delays(asked.plan, asked.rank)
    return delays[stage] > 0


def _overlaps(asked: Asked, stage: int) -> bool:
    """Whether a forward of a stage overlaps a backward."""
    actions = asked.plan.ranks[asked.rank]
    return any(actions.stage[index] == stage for index in overlapped_pairs(actions))


def _is_cut_over_a_mesh(asked: Asked, stage: int) -> bool:
    weights = asked.modules[stage].parameters()
    return any(hasattr(weight, "to_local") for weight in weights)


def _are_away(weights: Sequence[nn.Parameter]) -> bool:
    return bool(weights) and not any(weight.numel() for weight in weights)


def _computes_weight_gradients(asked: Asked, stage: int) -> bool:
    """Whether a stage, or a layer in it, computes the gradients of its weights by itself."""
    module = asked.modules[stage]
    return _trains(asked, stage) and (
        callable(getattr(module, "dw_builder", None))
        or any(
            callable(getattr(part, "backward_dw", None)) for part in module.modules()
        )
    )


def _travels(asked: Asked, stage: int) -> bool:
    return bool(OF_HOPS & {*asked.plan.ranks[asked.rank].kind})


def _updates_replicas(asked: Asked, stage: int) -> bool:
    layout = asked.plan.layout
    are_several = len(layout.pipelines) > 1 and not layout.models
    return are_several and asked.plan.has_updates


_TRAVEL_ALONE = (
    "the plan passes the weights of its stages on from rank to rank: with {other} it cannot do so "
    "yet"
)
_DONE_AGAIN = (
    "with `survives_loss` the others do a step again in which a rank is lost, so it does not go "
    "together with {other}"
)
_CAPTURED = (
    "with `cuda_graphs` the host does nothing in a step, so it does not go together "
    "with {other}"
)
_SCALED = (
    "makes the updates, so gradients would still be scaled: take a plan without `U`, and in the "
    "script `scaler.unscale_`, `clip_grad_norm_` and `scaler.step` after each step; or a fixed "
    "`loss_scale`"
)

_OWN_GRADIENTS = (
    "stage {stage} computes weight gradients when it is told to (`backward_dw`, `dw_builder`), "
    "which cannot be with {other} yet"
)

_NO_OTHER = "give `step` no other `plan`, or build a pipeline for that plan"

_SKIPPED = (
    "`skip_if` skips a batch after the last of its ops, and {why}: take a plan without `U`, and no "
    "`max_norm`, and let the script make the updates"
)

#: By name, what may be asked for.
FEATURES: dict[str, Feature] = {
    # Around the module of a stage, from the inside out.
    "returned weights": Feature(
        "weights that a stage returns, and whose memory the plan frees",
        lambda asked, stage: _travels(asked, stage) or is_sharded(asked.modules[stage]),
        "returned_weights",
    ),
    "bad batches": Feature(
        "batches that are skipped (`skip_if`)",
        lambda asked, stage: asked.setup.skip_if is not None and _trains(asked, stage),
        "bad_batches",
        {
            "updates": _SKIPPED.format(why="the plan updates its stages before that"),
            "max_norm": _SKIPPED.format(why="the pipeline makes the updates"),
        },
    ),
    "exceptions": Feature(
        "exceptions that skip a batch",
        lambda asked, stage: bool(asked.setup.skipped_exceptions),
        None,
        {
            "sharded": "stage {stage} is sharded, so it cannot go on behind an exception of its "
            "forward: give `skip_if` a function of the losses",
        },
    ),
    "frozen": Feature(
        "frozen stages",
        lambda asked, stage: not asked.plan.layout.has_backward[stage],
        "without_graph",
    ),
    "repeats": Feature(
        "forwards that are run again (`R`)",
        lambda asked, stage: bool(asked.plan.microbatches_with(REPEATS, stage)),
        "repeats",
    ),
    "added losses": Feature("losses of the stages' own", _always, "added_losses"),
    "foreign weights": Feature(
        "weights that a stage or a loss has and no module", _trains, "foreign_weights"
    ),
    "split": Feature(
        "backwards in two halves (`I` and `W`)",
        lambda asked, stage: bool(asked.plan.microbatches_with([Kind.W], stage)),
        "split_backward",
    ),
    "own weight gradients": Feature(
        "weight gradients that a stage computes when it is told to (`backward_dw`, `dw_builder`)",
        _computes_weight_gradients,
        "own_weight_gradients",
        dict.fromkeys(("late weights", "audit", "sharded", "hops"), _OWN_GRADIENTS),
    ),
    "offload": Feature(
        "activations that are offloaded",
        lambda asked, stage: bool(asked.plan.microbatches_with(AWAY, stage)),
        "offload",
        {
            "mesh weights": "stage {stage} has weights that are cut over a mesh (DTensor), so its "
            "activations cannot be offloaded yet"
        },
    ),
    "buffers": Feature(
        "buffers",
        _always,
        "buffers",
    ),
    "weights": Feature("weights that stay the same in a step", _always, "weights"),
    "frozen weights": Feature(
        "weights that do not change",
        lambda asked, stage: bool(asked.plan.layout.frozen),
        "frozen_weights",
    ),
    "hooks": Feature("hooks of what passes between stages", _trains, "shared_hooks"),
    "draws": Feature("random numbers", _trains, "shared_draws"),
    "audit": Feature(
        "an audit of the stages", lambda asked, stage: asked.setup.audit, "audit"
    ),
    "late weights": Feature(
        "older versions of the weights", _reads_late_weights, "versions"
    ),
    "slices": Feature(
        "slices", lambda asked, stage: asked.plan.layout.slices > 1, "slices"
    ),
    "far edges": Feature(
        "edges to other stages than the next one, and skips",
        lambda asked, stage: bool(asked.plan.layout.graph or asked.plan.layout.skips),
        "far_edges",
    ),
    "handovers": Feature(
        "pipelines that run ahead of others",
        lambda asked, stage: bool(asked.plan.layout.handovers),
        "handovers",
    ),
    "turns": Feature("forwards that overlap backwards", _overlaps, "turns"),
    "exchanges": Feature(
        "exchanges between two stages of a rank (`exchange F` and `exchange B`)",
        lambda asked, stage: any(
            kind in actions.kind for actions in asked.plan.ranks for kind in BETWEEN
        ),
        "exchanges",
    ),
    # Around the walk of a rank.
    "keepers": Feature(
        "activations that another rank keeps",
        lambda asked, stage: bool(asked.plan.layout.keepers),
        "keepers",
    ),
    "max_norm": Feature(
        "`max_norm`, which the pipeline clips its updates to",
        lambda asked, stage: asked.setup.max_norm is not None,
    ),
    "clipping": Feature(
        "updates of the plan that are clipped (`U` and `max_norm`)",
        lambda asked, stage: (
            asked.setup.max_norm is not None and asked.plan.has_updates
        ),
        "clipping",
    ),
    "updates after steps": Feature(
        "an update after each step (`max_norm`, and a plan without `U`)",
        lambda asked, stage: asked.setup.ends_with_update(asked.plan),
        "post_validation",
        {
            "models": "the plan trains several models, of which each has a norm of its own, so "
            "`max_norm` cannot clip their updates: call `clip_grad_norm_` after each step"
        },
    ),
    "sums": Feature(
        "weights that are tied or replicated, whose gradients are summed",
        _has_copies,
        "sums",
    ),
    "copies": Feature("copies of weights that stay alike", _has_copies, "copies"),
    "updates of replicas": Feature(
        "several pipelines whose stages the plan updates (`U`)",
        _updates_replicas,
        "updates",
    ),
    "sharded": Feature(
        "sharded weights",
        lambda asked, stage: is_sharded(asked.modules[stage]),
        "shards",
        {
            "audit": "stage {stage} is sharded, so it cannot be audited",
            "late weights": "stage {stage} is sharded, so it cannot read older versions of its "
            "weights yet",
            "offload": "stage {stage} is sharded, so its activations cannot be offloaded yet",
            "overlapped": "stage {stage} is sharded, so its method `overlapped` cannot be called "
            "yet: its forwards and backwards run one after the other without it",
            "max_norm": "the stages are sharded, so `max_norm` cannot clip their updates yet",
            "updates of replicas": "a plan that updates replicas runs on all processes, and its "
            "stages are not sharded",
            "replicas": "stage {stage} is sharded, and the pipeline has replicas along another "
            "dimension of the mesh: leave both to FSDP, `fully_shard(stage, mesh=mesh["
            '"dp_replicate", "dp_shard"])`, or `mesh["dp_shard"]` if replicas are not wanted, and '
            'give the pipeline `mesh["pp"]`',
        },
    ),
    "hops": Feature(
        "weights that travel from rank to rank",
        _travels,
        "hops",
        dict.fromkeys(
            (
                "tied",
                "max_norm",
                "audit",
                "sharded",
                "mesh weights",
                "offload",
                "replicas",
            ),
            _TRAVEL_ALONE,
        )
        | {
            "away": "the weights of stage {name} have no elements: where another pipeline passes "
            "them on from rank to rank, they are elsewhere now. Keep that pipeline, or give this "
            "one modules of its own"
        },
    ),
    "survived losses": Feature(
        "losses of ranks that the others survive (`survives_loss`)",
        lambda asked, stage: asked.setup.survives_loss,
        None,
        dict.fromkeys(
            ("updates", "max_norm", "sharded", "mesh weights", "hops"), _DONE_AGAIN
        ),
    ),
    "cuda_graphs": Feature(
        "steps as CUDA graphs (`cuda_graphs`)",
        lambda asked, stage: asked.setup.cuda_graphs,
        None,
        dict.fromkeys(
            (
                "bad batches",
                "offload",
                "audit",
                "late weights",
                "keepers",
                "max_norm",
                "updates",
                "sharded",
                "hops",
                "survived losses",
                "scaler",
            ),
            _CAPTURED,
        ),
    ),
    "scaler": Feature(
        "a GradScaler",
        lambda asked, stage: asked.setup.scaler is not None,
        None,
        {
            "updates": f"`loss_scale` is a GradScaler, and the plan (`U`) {_SCALED}",
            "max_norm": f"`loss_scale` is a GradScaler, and the pipeline (`max_norm`) {_SCALED}",
        },
    ),
    "overflows": Feature(
        "gradients that are not finite, for a GradScaler",
        lambda asked, stage: _trains(asked, stage) and asked.setup.scaler is not None,
        "overflows",
    ),
    "unknown scalers": Feature(
        "GradScalers that the pipeline does not know",
        lambda asked, stage: _trains(asked, stage) and asked.setup.scaler is None,
        "unknown_scalers",
    ),
    "own norms": Feature(
        "norms that a script clips to", _is_clipped_by_script, "own_norms"
    ),
    # What no part does by itself.
    "overlapped": Feature(
        "a method `overlapped`",
        lambda asked, stage: (
            ismethod(getattr(asked.modules[stage], "overlapped", None))
            and _overlaps(asked, stage)
        ),
    ),
    "updates": Feature(
        "updates by the plan (`U`)", lambda asked, stage: asked.plan.has_updates
    ),
    "tied": Feature(
        "tied weights",
        lambda asked, stage: bool(asked.setup.tied),
        None,
        {
            "updates": "the plan updates its stages itself (`U`), so none of their weights can be "
            "tied"
        },
    ),
    "mesh weights": Feature(
        "weights that are cut over a mesh (DTensor)", _is_cut_over_a_mesh
    ),
    "away": Feature(
        "weights that another pipeline has passed on",
        lambda asked, stage: _are_away([*asked.modules[stage].parameters()]),
    ),
    "models": Feature(
        "several models", lambda asked, stage: bool(asked.plan.layout.models)
    ),
    "replicas": Feature(
        "replicas of the pipeline along another dimension of the mesh", _has_replicas
    ),
    "another plan": Feature(
        "steps with another plan (`step(…, plan=plan)`)",
        lambda asked, stage: asked.has_others,
        None,
        {
            "late weights": "stage {stage} reads older versions of its weights, in the order of "
            f"the pipeline's plan: {_NO_OTHER}",
            "hops": "the weights of stage {name} travel from rank to rank by the pipeline's plan: "
            f"{_NO_OTHER}",
            "audit": f"`audit` is of the first step of the pipeline's plan: {_NO_OTHER}",
            "clipping": "the updates of the pipeline's plan (`U`) are clipped to `max_norm` where "
            f"that plan has room for it: {_NO_OTHER}",
        },
    ),
}


def load(file: str) -> Any:
    """A file of `parts/`, or a module by its whole name, imported as in a process that does nothing
    else.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return import_module(file if "." in file else f"schedlang.runtime.parts.{file}")


def check_together(asked: Asked) -> None:
    """PipelineError where a rank is asked for two things that do not go together."""
    for feature in FEATURES.values():
        for stage in asked.modules if feature.not_with else ():
            if not feature.is_asked(asked, stage):
                continue
            for name, why in feature.not_with.items():
                other = FEATURES[name]
                if other.is_asked(asked, stage):
                    raise PipelineError(
                        why.format(
                            stage=stage,
                            name=asked.plan.names.stage(stage),
                            other=other.words,
                        )
                    )


def _files(site: Site) -> list[Any]:
    """The files of parts that this rank needs."""
    return [
        load(feature.file)
        for name, feature in FEATURES.items()
        if feature.file is not None and site.asks_for(name)
    ]


def build_parts_of_stages(site: Site) -> dict[int, list[Part]]:
    """The parts around the module of each stage of a rank, the innermost first."""
    site.parts.update((stage, []) for stage in site.modules)
    for file in reversed(_files(site)):
        own: dict[int, list[Part]] = {}
        for stage, part in file.of_stages(site) if hasattr(file, "of_stages") else ():
            own.setdefault(stage, []).append(part)
        for stage, parts in own.items():
            site.parts[stage][:0] = parts
    return site.parts


def build_parts_of_rank(rank: Rank) -> list[Part]:
    """The parts that are not of one stage alone."""
    parts: list[Part] = []
    for file in _files(rank.site):
        if hasattr(file, "of_rank"):
            parts += file.of_rank(rank)
    return parts
