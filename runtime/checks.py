"""What must be right before a pipeline runs; PipelineError says what is not."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.stage import LossFn
from schedlang.runtime.watchdog import PipelineError, Watchdog
from schedlang.transports import NCCL, NCCL_EAGER, PORTABLE


def unsupported(plan: Plan) -> str | None:
    """What of a plan this runtime does not run yet."""
    if len(plan.layout.pipelines) > 1 and any(Kind.U in each.kind for each in plan.ranks):
        return "this runtime does not run plans with updates of replicas yet"
    return None


def wrong_number(plan: Plan, started: int) -> str | None:
    """What is wrong with the number of processes."""
    needed = len(plan.ranks)
    if needed == started:
        return None
    plural = "" if needed == 1 else "es"
    return f"the plan needs {needed} process{plural}, {started} {'was' if started == 1 else 'were'} started"


def check_stages(
    plan: Plan, stages: Mapping[int, nn.Module], optimizers: Mapping[int, Optimizer], loss_fn: LossFn | None
) -> None:
    """Whether this rank was given what the plan wants here."""
    wrong = unsupported(plan) or wrong_number(plan, dist.get_world_size())
    if wrong is not None:
        raise PipelineError(wrong)
    rank = dist.get_rank()
    held, actions = plan.stages_of(rank), plan.ranks[rank]
    if sorted(stages) != held:
        raise PipelineError(f"the plan gives this rank the stages {held}, `stages` has {sorted(stages)}")
    if loss_fn is None and not plan.is_forward_only and any(map(plan.layout.is_last, held)):
        raise PipelineError("the last stage is on this rank, so it needs a `loss_fn`")
    updated = sorted({stage for kind, stage in zip(actions.kind, actions.stage, strict=True) if kind == Kind.U})
    if sorted(optimizers) != updated:
        raise PipelineError(f"the plan updates the stages {updated}, `optimizers` has {sorted(optimizers)}")


def check_same_plan(plan: Plan, watchdog: Watchdog) -> None:
    """Compare plans among all ranks, which also waits for all of them."""
    own = plan.digest()
    for rank, digest in enumerate(watchdog.gather(own, "built no pipeline")):
        if digest != own:
            raise PipelineError(f"rank {rank} has another plan")


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where the modules live, which must be one device."""
    devices = {weight.device for stage in stages.values() for weight in stage.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise PipelineError(f"the stages of a rank must be on one device, not on {', '.join(map(str, devices))}")
    device = devices.pop()
    if device.type == "meta":
        raise PipelineError("the stages are on the meta device: give them their weights first, by `load_model`")
    return device


def check_transport(plan: Plan, device: torch.device) -> None:
    """Whether the plan is proved for what its tensors go by."""
    if "cpu:" not in dist.get_backend_config():
        raise PipelineError("the first messages go between CPUs: use init_process_group('cpu:gloo,cuda:nccl')")
    group = dist.group.WORLD
    assert group is not None
    used = NCCL if group.bound_device_id is None else NCCL_EAGER
    # gloo runs every plan: its ranks wait for nothing but what they need, and its messages meet by their tags.
    if device.type == "cuda" and plan.transport not in (PORTABLE, used.name):
        raise PipelineError(f"the plan is proved for `{plan.transport}` alone, and its tensors go by `{used.name}`")
