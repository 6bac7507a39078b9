"""Build the stages and the wire of a rank, from the plan and from the script's arguments."""

from functools import partial

from schedlang.runtime.door import Site, build_parts_of_stages, load
from schedlang.runtime.stage import Stage, StagePlan
from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import Wire
from schedlang.schedule.transports import NCCL_EDGE


def build_stages(site: Site) -> dict[int, Stage]:
    """Build the stages of a rank; neighbouring ones share the values between them."""
    plan = site.plan
    if not plan.is_forward_only:
        # Torch imports this in the first backward, which takes a second. Here all ranks import it
        # at the same time, instead of one by one as the first gradient comes.
        import torch.fx.experimental.symbolic_shapes  # noqa: F401
    parts = build_parts_of_stages(site)
    stages = dict[int, Stage]()
    for number, module in sorted(site.modules.items()):
        stages[number] = Stage(
            StagePlan.of(plan, number),
            module,
            site.device,
            loss=site.loss_of(number),
            scale=partial(_scale, site),
            optimizer=site.setup.optimizers.get(number),
            parts=parts[number],
        )
    for number, stage in stages.items():
        # Values between two stages of one rank are no messages: the stages share dictionaries. Some
        # have only gradients between them, since the next stage takes another pipeline's output.
        following = stages.get(number + 1)
        if following is None:
            continue
        if plan.layout.hands_on(number):
            load("schedlang.runtime.within_ranks").connect(stage, following)
        elif plan.layout.returns_gradients(number + 1):
            stage.gradients = following.input_gradients
    return stages


def build_wire(site: Site, timeout: float, watchdog: Watchdog) -> Wire:
    """Build the wire of a rank; for `nccl-edge` it has a process group for each edge."""
    if site.plan.transport != NCCL_EDGE.name:
        return Wire(site.processes, timeout, watchdog)
    wire: Wire = load("edge_wire").EdgeWire(
        site.plan, site.processes, site.device, timeout, watchdog
    )
    return wire


def _scale(site: Site, microbatches: int) -> float:
    """The factor of a slice's loss, in a step with so many microbatches."""
    layout = site.plan.layout
    scaler = site.setup.scaler
    if site.setup.fixed_scale is not None:
        of_unit = site.setup.fixed_scale / layout.slices
    else:
        # The gradients of an update are those of the mean over its microbatches in all replicas, so
        # each loss is divided by their number.
        replicas = len(site.processes.replicas.processes)
        of_unit = layout.updates / replicas / layout.slices / microbatches
    return of_unit if scaler is None else of_unit * scaler.get_scale()
