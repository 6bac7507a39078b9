"""The stages that a rank has, and the parts that they and the walk need for a plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from attrs import evolve
from torch import nn

from schedlang.plan.plan import Plan
from schedlang.runtime.components import overlapped_of
from schedlang.runtime.entry import works_in_place
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.part import Part
from schedlang.runtime.parts.audit import Audit
from schedlang.runtime.parts.buffers import Buffers
from schedlang.runtime.parts.clipping import UpdateClip
from schedlang.runtime.parts.far_edges import Edges, FarEdge, Forks, Skips
from schedlang.runtime.parts.hops import Hops
from schedlang.runtime.parts.keepers import copies_between_ranks
from schedlang.runtime.parts.offload import Offload
from schedlang.runtime.parts.overflows import Overflows
from schedlang.runtime.parts.repeats import Repeats
from schedlang.runtime.parts.shards import Shards, is_sharded
from schedlang.runtime.parts.shared_draws import Draws, SharedDraws
from schedlang.runtime.parts.shared_hooks import BoundaryHooks, SharedHooks
from schedlang.runtime.parts.shared_weights import SharedWeights
from schedlang.runtime.parts.slices import Past
from schedlang.runtime.parts.sums import SharedSums, stage_sums
from schedlang.runtime.parts.turns import Turns
from schedlang.runtime.parts.updates import replica_updates
from schedlang.runtime.parts.versions import LateWeights, versions_of
from schedlang.runtime.parts.weights import SameWeights, Weights
from schedlang.runtime.processes import Processes
from schedlang.runtime.setup import Setup
from schedlang.runtime.stage import Loss, Stage, StagePlan
from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import Wire
from schedlang.schedule.kinds import OF_HOPS, Kind
from schedlang.schedule.layout import Layout

_Part = TypeVar("_Part", bound=Part)


def build_stages(
    plan: Plan, processes: Processes, setup: Setup, device: torch.device
) -> dict[int, Stage]:
    """The stages of a rank; those that follow one another share what passes between them."""
    if not plan.is_forward_only:
        # Torch imports this in the first backward, which takes a second: here all ranks do so at
        # once, and not one by one as the gradient comes down the pipeline.
        import torch.fx.experimental.symbolic_shapes  # noqa: F401
    layout = plan.layout
    versions = versions_of(plan, processes.own, setup.modules)
    edges = _far_edges(layout)
    stages = dict[int, Stage]()
    for number, module in sorted(setup.modules.items()):
        loss = None
        loss_fn = setup.loss_of(layout.model_of(number))
        if loss_fn is not None and layout.is_last(number):
            loss = Loss(loss_fn)
        outer = _parts_of_stage(plan, number, module, versions.get(number), edges)
        # From the module outwards:
        #
        #     module │ offload, buffers, repeats, weights, hooks │ audit │ versions, past, edges
        #
        # The audit lies between, since it calls the module alone with what the outer parts give it,
        # and hands what it returns through them.
        parts = _parts_of_module(plan, number, setup, device)
        if setup.audit:
            parts.append(_audit(plan, number, setup, device, loss, outer))
        parts += outer
        stage_plan = StagePlan.of(plan, number)
        if is_sharded(module):
            _check_sharded(number, parts)
            if stage_plan.overlaps:
                _check_turns(number, module)
            # FSDP ends a backward where autograd ends, and gathers weights for a forward at once.
            stage_plan = evolve(stage_plan, overlapped=(), takes_turns=False)
        elif any(isinstance(part, Offload) for part in parts):
            _check_cut(number, module)
        stages[number] = Stage(
            stage_plan,
            module,
            device,
            loss=loss,
            scale=_scale(plan, processes, setup, number),
            optimizer=setup.optimizers.get(number),
            parts=parts,
        )
    for number, stage in stages.items():
        # What passes between two stages of one rank is no message: they share the dictionaries.
        if number + 1 in stages and layout.hands_on(number):
            stage.pass_to(stages[number + 1])
    return stages


def _scale(
    plan: Plan, processes: Processes, setup: Setup, number: int
) -> Callable[[], float]:
    """What the loss of a slice is multiplied by in a step."""
    layout = plan.layout
    scaler = setup.scaler
    if setup.fixed_scale is not None:
        of_unit = setup.fixed_scale / layout.slices
    else:
        # The gradients of an update are those of the mean over its microbatches in all replicas:
        # each loss is multiplied by what it is a part of.
        of_unit = layout.updates / len(processes.replicas.processes) / layout.slices
        of_unit /= layout.microbatches_of(number)
    return lambda: of_unit if scaler is None else of_unit * scaler.get_scale()


def build_parts(
    plan: Plan,
    setup: Setup,
    stages: Mapping[int, Stage],
    shared: Sequence[SharedWeights],
    wire: Wire,
    exchange: Exchange,
    watchdog: Watchdog,
) -> list[Part]:
    """The parts that are not of one stage alone. All ranks build them together, in this order."""
    device = next(iter(stages.values())).device
    updates = replica_updates(plan, stages, wire)
    parts = copies_between_ranks(plan, stages, wire, exchange.tag_of_copies)
    if setup.max_norm is not None and plan.has_updates:
        parts.append(UpdateClip(plan, setup.max_norm, stages, wire))
    parts += stage_sums(stages, shared, wire)
    parts += updates
    # It says something, and one rank says it for all.
    if wire.processes.own == 0:
        parts.append(Turns(plan, stages))
    if any(map(is_sharded, setup.modules.values())):
        parts.append(Shards(setup.modules, setup.max_gathered))
    if OF_HOPS & {*plan.ranks[wire.processes.own].kind}:
        parts.append(Hops(plan, setup.modules, wire, exchange.tag_of_hops, device))
    # Replicas whose updates are in the plan have made their sums by the end of a step.
    parts.append(SharedSums([] if updates else shared, wire))
    parts.append(Overflows(setup.modules, setup.scaler, wire, watchdog))
    hooks = _of_type(BoundaryHooks, stages)
    if hooks:
        parts.append(SharedHooks(plan.layout, hooks, wire, device))
        parts.append(SharedDraws(plan.layout, _of_type(Draws, stages), wire, device))
    return parts


def _of_type(wanted: type[_Part], stages: Mapping[int, Stage]) -> dict[int, _Part]:
    """The part of a type that each stage has, by the number of the stage."""
    return {
        number: part
        for number, stage in stages.items()
        for part in stage.parts
        if isinstance(part, wanted)
    }


def _parts_of_stage(
    plan: Plan,
    number: int,
    module: nn.Module,
    versions: LateWeights | None,
    edges: Mapping[int, FarEdge],
) -> list[Part]:
    """A module that has slices and skips returns `(output, {stage: value}), past`: so slices come
    first. Along edges goes the output, which is by itself when skips have been taken from it.
    """
    layout = plan.layout
    parts: list[Part] = []
    if versions is not None:
        parts.append(versions)
    if layout.slices > 1:
        parts.append(Past(number, layout.slices, layout.has_backward[number]))
    forks = _forks(layout, number)
    if any(len(stages) > 2 for stages in forks):
        parts.append(Forks(number, forks))
    for is_skip in (True, False):
        # Skips lie further in: they are taken from what the module returns before the rest goes
        # along edges.
        ends = [
            item
            for item in layout.far_edges.items()
            if layout.is_skip(item[0]) == is_skip
        ]
        before = [edges[edge] for edge, (_, later) in ends if later == number]
        after = [edges[edge] for edge, (earlier, _) in ends if earlier == number]
        if not before and not after:
            continue
        has_backward = layout.has_backward[number]
        if is_skip:
            parts.append(Skips(number, before, after, has_backward))
        else:
            in_place = works_in_place(module)
            has_input = layout.is_first(number) or layout.follows(number)
            parts.append(
                Edges(number, before, after, has_backward, has_input, in_place)
            )
    return parts


def _parts_of_module(
    plan: Plan, number: int, setup: Setup, device: torch.device
) -> list[Part]:
    """The parts right around the module: they see all that it is given, and all that it returns."""
    parts: list[Part] = []
    module = setup.modules[number]
    offloaded = plan.microbatches_with(Kind.OFFLOAD, number)
    if offloaded:
        parts.append(Offload(number, module, device, offloaded))
    recomputed = plan.microbatches_with(Kind.R, number)
    if any(True for _ in module.buffers()):
        others = [
            stage
            for stage in plan.layout.replicas(number)
            if setup.modules.get(stage) is not module
        ]
        parts.append(Buffers(number, module, recomputed, others))
    if recomputed:
        parts.append(Repeats(number, module, recomputed, setup.verify))
    parts.append(SameWeights(number, module))
    if not is_sharded(module):
        parts.append(Weights(number, module, plan.has_updates))
    if not plan.is_forward_only:
        parts += [BoundaryHooks(), Draws(device)]
    return parts


def _audit(
    plan: Plan,
    number: int,
    setup: Setup,
    device: torch.device,
    loss: Loss | None,
    others: Sequence[Part],
) -> Audit:
    """What compares a stage with itself alone; `others` take from what its module returns."""
    module = setup.modules[number]
    elsewhere = {
        id(weight)
        for stage, other in setup.modules.items()
        for weight in other.parameters()
        if stage != number
    }
    shared = frozenset(elsewhere & set(map(id, module.parameters())))
    return Audit(plan, number, module, device, loss, others, shared)


def _forks(layout: Layout, number: int) -> list[list[int]]:
    """For each argument of a stage in a graph the stage that gives it, and all that it gives it
    to; inputs come from the stage itself.
    """
    if not layout.edges:
        return []
    model = layout.model_of(number)
    givers = [
        each for each in layout.before[number] if not _is_skip(layout, each, number)
    ]
    # In the order in which `Edges` gives them.
    givers.sort(key=lambda giver: (layout.model_of(giver) != model, giver))
    forks = [
        [
            giver,
            *(
                each
                for each in layout.after[giver]
                if not _is_skip(layout, giver, each)
            ),
        ]
        for giver in givers
    ]
    if layout.is_first(number):
        forks.insert(0, [number])
    return forks


def _is_skip(layout: Layout, earlier: int, later: int) -> bool:
    """Whether what goes from one stage to another goes by a skip."""
    return (layout.piece(earlier), layout.piece(later)) in layout.skips


def _far_edges(layout: Layout) -> dict[int, FarEdge]:
    """The far edges of a plan, by their numbers."""
    edges: dict[int, FarEdge] = {}
    for number, (earlier, later) in layout.far_edges.items():
        what = f"what stage {earlier} returns for stage {later}"
        is_two_way = layout.has_backward[earlier]
        ends = layout.piece(earlier), layout.piece(later)
        is_between = layout.model_of(earlier) != layout.model_of(later)
        edges[number] = FarEdge(number, *ends, what, is_between, is_two_way)
    return edges


def _check_sharded(number: int, parts: Sequence[Part]) -> None:
    """Whether the parts of a stage go together with sharded weights; PipelineError if not."""
    for part in parts:
        if isinstance(part, Audit):
            raise PipelineError(f"stage {number} is sharded, so it cannot be audited")
        if isinstance(part, LateWeights):
            raise PipelineError(
                f"stage {number} is sharded, so it cannot read older versions of its weights yet"
            )
        if isinstance(part, Offload):
            raise PipelineError(
                f"stage {number} is sharded, so its activations cannot be offloaded yet"
            )


def _check_turns(number: int, module: nn.Module) -> None:
    """PipelineError where the module of a sharded stage has a way to take turns."""
    if overlapped_of(module, number) is not None:
        raise PipelineError(
            f"stage {number} is sharded, so its method `overlapped` cannot be called yet: its "
            "forwards and backwards run one after the other without it"
        )


def _check_cut(number: int, module: nn.Module) -> None:
    """PipelineError where the layers of an offloaded stage are cut over a mesh: what they save for
    the backward is no memory by itself.
    """
    for name, weight in module.named_parameters():
        if hasattr(weight, "to_local"):
            raise PipelineError(
                f"the weight `{name}` of stage {number} is cut over a mesh (DTensor), so the "
                "stage's activations cannot be offloaded yet"
            )
