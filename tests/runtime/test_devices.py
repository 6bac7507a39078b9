"""On which devices ranks compute, as far as a machine without a GPU can say."""

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist

from schedlang import Plan, compile
from schedlang.runtime import PipelineError
from schedlang.runtime.checks import agree_on_device, check_transport
from schedlang.runtime.processes import processes_of
from schedlang.runtime.watchdog import Watchdog
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def agreed(plan: Plan, devices: list[torch.device | None]) -> str:
    """The device of a rank, or what is wrong with those of all."""
    processes = processes_of(None)
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
    check_transport(plan, world, CPU)
    return str(caught.value)


def test_gloo_is_refused_for_tensors_of_a_gpu(run_ranks: Run) -> None:
    plan = compile("1f1b", {"ranks": 1, "microbatches": 2})
    (told,) = run_ranks(of_gloo, 1, plan).results()
    assert "has `gloo` for tensors there" in told
    assert "init_process_group('cpu:gloo,cuda:nccl')" in told
