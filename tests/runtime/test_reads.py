"""No step reads what a tensor holds: on a GPU, the host would wait for it."""

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from schedlang import Plan, compile
from schedlang.runtime import Pipeline
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

#: Functions of torch that give numbers of a tensor to Python.
READS = {
    "__bool__",
    "__complex__",
    "__float__",
    "__index__",
    "__int__",
    "allclose",
    "cpu",
    "equal",
    "is_nonzero",
    "item",
    "nonzero",
    "numpy",
    "tolist",
}

#: Functions of the runtime that read numbers which are on the host also where stages are on a GPU:
#: losses that were copied to it, the batch as the script gave it, and how much losses count.
OF_HOST = {"message", "bytes_of", "totals_of_replicas"}


class Reads(TorchFunctionMode):
    """Notes where the runtime reads numbers that a stage may have made. Integers are its own: shapes
    and forms, which are on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        if function.__name__ in READS and any(map(_may_be_made, tensors)):
            frames = [
                each
                for each in traceback.extract_stack()
                if "schedlang/runtime/" in each.filename
            ]
            if frames and frames[-1].name not in OF_HOST:
                self.found.add(f"{function.__name__} in {frames[-1].name}")
        return function(*args, **(kwargs or {}))


def _may_be_made(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.bool


#: The first step that is not watched.
UNWATCHED = 5


def reads_of_a_step(plan: Plan, replicas: int, steps: int = UNWATCHED) -> set[str]:
    """What the last one of some steps reads, with clipping behind it."""
    mesh = None
    rank = dist.get_rank()
    if replicas > 1:
        shape = replicas, len(plan.ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
        rank = mesh.get_local_rank("pp")
    torch.manual_seed(0)
    pieces = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in plan.placement]
    stages = {stage: pieces[stage] for stage in plan.stages_of(rank)}
    pipeline = Pipeline(plan, stages, nn.functional.mse_loss, mesh=mesh)
    x = torch.rand(2 * plan.microbatches, 8)
    with Reads() as reads:
        for _ in range(steps):
            reads.found.clear()
            pipeline.step(x, x)
            pipeline.clip_grad_norm_(1.0)
    return reads.found


CASES: dict[str, tuple[str, dict[str, int], int]] = {
    "1f1b": ("1f1b", {"ranks": 2, "microbatches": 4}, 1),
    "interleaved": (
        "interleaved_1f1b",
        {"ranks": 2, "chunks": 2, "microbatches": 4},
        1,
    ),
    "zb_v": ("zb_v", {"ranks": 2, "microbatches": 4}, 1),
    "replicas": ("zb_v", {"ranks": 2, "microbatches": 4}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_no_step_reads_numbers(run_ranks: Run, name: str) -> None:
    program, sizes, replicas = CASES[name]
    plan = compile(program, sizes)
    ranks = len(plan.ranks) * replicas
    for found in run_ranks(reads_of_a_step, ranks, plan, replicas).results():
        assert found == set()


def a_read() -> set[str]:
    with Reads() as reads:
        # As the runtime would do it.
        exec(compile_as_runtime("float(tensor.sum())"), {"tensor": torch.ones(2)})
    return reads.found


def compile_as_runtime(text: str) -> Any:
    import builtins

    return builtins.compile(text, "schedlang/runtime/anything.py", "eval")


def test_a_read_is_found() -> None:
    assert a_read() == {"__float__ in <module>"}


def reads_of_a_captured_step(plan: Plan) -> set[str]:
    """What step 4 reads if it is captured as a CUDA graph; another step 4 is watched."""
    with patch("schedlang.runtime.setup.is_captured", return_value=True):
        return reads_of_a_step(plan, replicas=1, steps=UNWATCHED - 1)


def test_a_captured_step_is_not_watched(run_ranks: Run) -> None:
    plan = compile("1f1b", {"ranks": 2, "microbatches": 4})
    watched = run_ranks(reads_of_a_step, 2, plan, 1, UNWATCHED - 1).results()
    assert watched == [{"__bool__ in are_same"}] * 2
    captured = run_ranks(reads_of_a_captured_step, 2, plan).results()
    assert captured == [set()] * 2
