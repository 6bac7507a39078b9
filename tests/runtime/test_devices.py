"""On which devices ranks compute, as far as a machine without a GPU can say."""

from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist

from schedlang import Plan, compile
from schedlang.runtime import PipelineError
from schedlang.runtime.checks import agree_on_device
from schedlang.runtime.communicators import check_transport
from schedlang.runtime.processes import all_processes
from schedlang.runtime.watchdog import Watchdog
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def agreed(plan: Plan, devices: list[torch.device | None]) -> str:
    """The device of a rank, or what is wrong with those of all."""
    processes = all_processes()
    watchdog = Watchdog(plan, processes, 0, 20.0)
    try:
        return str(agree_on_device(devices[dist.get_rank()], processes, watchdog))
    except PipelineError as error:
        return str(error)
    finally:
        watchdog.close()


def test_a_rank_without_weights_computes_where_the_others_do(run_ranks: Run) -> None:
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    assert run_ranks(agreed, 2, plan, [CPU, None]).results() == ["cpu", "cpu"]


def test_ranks_on_other_types_of_device_are_refused(run_ranks: Run) -> None:
    plan = compile("1f1b", {"ranks": 2, "microbatches": 2})
    for told in run_ranks(agreed, 2, plan, [GPU, CPU]).results():
        assert "rank 0 has its stages on the device `cuda`, and rank 1 on `cpu`" in told


def of_gloo(plan: Plan) -> str:
    """What is said of tensors of a GPU that would go by gloo."""
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(PipelineError) as caught:
        check_transport(plan, world, GPU)
    return str(caught.value)


def test_gloo_is_refused_for_tensors_of_a_gpu(run_ranks: Run) -> None:
    plan = compile("1f1b", {"ranks": 1, "microbatches": 2})
    (told,) = run_ranks(of_gloo, 1, plan).results()
    assert "has `gloo` for tensors there" in told
    assert "init_process_group('cpu:gloo,cuda:nccl')" in told


def of_nccl_lazy(plans: dict[str, Plan]) -> dict[str, str | None]:
    """What is said of plans for tensors of a GPU, by the transport that each is proved for, where
    a group has the backend `nccl-lazy`: here gloo under that name, since nothing is sent.
    """

    def make(
        store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("nccl-lazy", make, devices=["cuda"])
    group = dist.new_group(backend="cpu:gloo,cuda:nccl-lazy")
    told: dict[str, str | None] = dict.fromkeys(plans)
    for name, plan in plans.items():
        try:
            check_transport(plan, group, GPU)
        except PipelineError as error:
            told[name] = str(error)
    return told


def test_nccl_lazy_is_the_transport_nccl(run_ranks: Run) -> None:
    """It sends a transfer that is issued alone by a communicator of its two ranks, a batch by the
    group's.
    """
    names = ("nccl", "portable", "nccl-eager")
    size = {"ranks": 1, "microbatches": 2}
    plans = {name: compile("1f1b", size, transport=name) for name in names}
    (told,) = run_ranks(of_nccl_lazy, 1, plans).results()
    assert told["nccl"] is None
    assert told["portable"] is None
    assert (
        "proved for `nccl-eager` alone, and its tensors go by `nccl`"
        in told["nccl-eager"]
    )
