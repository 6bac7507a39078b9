"""What the runtime does without the private parts of torch that it uses: the same, and it says so."""

import builtins
import sys
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
import torch.overrides
import torch.utils._pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from tests.support.paths import ROOT
from tests.support.ranks import Run

# Nothing of the runtime is imported here: the ranks import it when a part of torch is gone.

WIDTH = 8
RANKS = 2
MICROBATCHES = 4
ROWS = 3
#: Split backwards; forwards that are run again.
PROGRAMS = ("zb_h1", "1f1b_recompute")


class Block(nn.Module):
    """Layers of many kinds, and values in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)
        )
        self.read_by_a_view = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.register_hook(lambda gradient: 2 * gradient)
        self.counts = nn.BatchNorm1d(WIDTH)

    def forward(self, given: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        x, y = (given, given) if isinstance(given, Tensor) else (given["x"], given["y"])
        attended, _ = self.attention(x, x, y)  # of rows that are not in a batch
        x = x + checkpoint(self.checkpointed, attended, use_reentrant=False)
        return {
            "x": self.counts(x) * self.scale,
            "y": torch.matmul(y, self.read_by_a_view.T),
        }

    def checkpointed(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["x"] + output["y"], target)


def raises(_: object) -> None:
    raise AttributeError("it is gone")


def without_import(name: str) -> None:
    """Let schedlang not import a module."""
    real = builtins.__import__

    def import_(wanted: str, names: Any = None, *rest: Any) -> Any:
        # Torch itself goes on importing it.
        if wanted == name and names["__name__"].startswith("schedlang"):
            raise ImportError(f"there is no {name}")
        return real(wanted, names, *rest)

    builtins.__import__ = import_


def not_by_mode(owner: Any, name: str) -> None:
    """Let a function hand its calls to modes in another function."""
    real = getattr(owner, name)

    @wraps(real)
    def hands_on(*given: Any, **options: Any) -> Any:
        return real(*given, **options)

    setattr(owner, name, hands_on)


#: By the name that the warning says: how torch is without the part.
PARTS: dict[str, Callable[[], object]] = {
    "torch.utils._pytree": partial(without_import, "torch.utils._pytree"),
    "multi_head_attention_forward.__code__": partial(
        not_by_mode, F, "multi_head_attention_forward"
    ),
    "backward.__code__": partial(not_by_mode, torch.autograd, "backward"),
    "grad.__code__": partial(not_by_mode, torch.autograd, "grad"),
    "Variable._execution_engine": partial(setattr, torch.autograd, "Variable", object),
    "AccumulateGrad.variable": partial(
        setattr, torch.utils.checkpoint, "CheckpointFunction", object
    ),
    "Tensor._base": partial(setattr, Tensor, "_base", property(raises)),
    "Tensor._version": partial(setattr, Tensor, "_version", property(raises)),
}
#: Parts that are there and do something else.
OTHERS: dict[str, Callable[[], object]] = {
    "Variable._execution_engine": partial(
        setattr,
        torch.autograd,
        "Variable",
        SimpleNamespace(
            _execution_engine=SimpleNamespace(run_backward=lambda *_: (None,))
        ),
    ),
    "torch.overrides._get_current_function_mode_stack": partial(
        setattr, torch.overrides, "_get_current_function_mode_stack", list
    ),
    "Tensor._base": partial(setattr, Tensor, "_base", None),
    "Tensor._version": partial(setattr, Tensor, "_version", 0),
}


def without_the_runtime() -> None:
    """Let the next import of the runtime be the first one."""
    for name in [name for name in sys.modules if name.startswith("schedlang.runtime")]:
        del sys.modules[name]


def compiled(program: str, ranks: int) -> Plan:
    path = ROOT / "programs" / f"{program}.sched"
    return compile(
        Source(path.name, path.read_text()),
        {"ranks": ranks, "microbatches": MICROBATCHES},
    )


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block().double() for _ in range(RANKS)])


def worst_difference(program: str) -> float:
    """How far gradients and buffers of this rank's stage are from those of one process."""
    from schedlang.runtime import Pipeline

    plan = compiled(program, RANKS)
    rank = dist.get_rank()
    model = blocks()
    reference = blocks()
    given, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    pipeline = Pipeline(plan, {rank: model[rank]}, loss_of)
    with torch.device("cpu"):
        pipeline.step(given, target)
    for x, y in zip(given.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (loss_of(reference(x), y) / MICROBATCHES).backward()
    pairs = [
        (mine.grad, other.grad)
        for mine, other in zip(
            model[rank].parameters(), reference[rank].parameters(), strict=True
        )
    ]
    pairs += zip(model[rank].buffers(), reference[rank].buffers(), strict=True)
    return max(float((mine - other).abs().max()) for mine, other in pairs)


def train(part: str, is_gone: bool) -> tuple[float, list[str]]:
    """The largest difference without a part, or with another one in its place; and all warnings."""
    (PARTS if is_gone else OTHERS)[part]()
    return train_anew()


def train_anew() -> tuple[float, list[str]]:
    without_the_runtime()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worst = max(map(worst_difference, PROGRAMS))
    return worst, [str(each.message) for each in caught]


@pytest.mark.slow
def test_a_torch_that_is_known_trains_without_a_word(run_ranks: Run) -> None:
    for worst, said in run_ranks(train_anew, RANKS).results():
        assert worst < 1e-12
        assert not said


CASES = [(part, True) for part in PARTS] + [(part, False) for part in OTHERS]


@pytest.mark.parametrize(
    ("part", "is_gone"),
    CASES,
    ids=[f"{part}-{'gone' if gone else 'other'}" for part, gone in CASES],
)
def test_without_a_private_part_gradients_are_the_same(
    part: str, is_gone: bool, run_ranks: Run
) -> None:
    for worst, said in run_ranks(train, RANKS, part, is_gone).results():
        assert worst < 1e-12
        (once,) = [each for each in said if "schedlang.runtime takes it for" in each]
        assert f"torch {torch.__version__} has no `{part}`" in once


#: Private parts of FSDP2, for which there is no other way.
OF_FSDP = ("_get_fsdp_state", "_is_root", "_root_post_backward_final_callback")


def build_sharded(part: str) -> str:
    """What a pipeline with a sharded stage says without a private part of FSDP2."""
    without_the_runtime()
    from schedlang.runtime import Pipeline, PipelineError

    plan = compiled("zb_h1", 1)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fully_shard(stage, mesh=dist.init_device_mesh("cpu", (1,)))
    state = stage._get_fsdp_state()
    # A state that has all other parts.
    kept = {name: getattr(state, name) for name in OF_FSDP[1:] if name != part}
    other = SimpleNamespace(**kept)
    if part == OF_FSDP[0]:
        del FSDPModule._get_fsdp_state
    else:
        FSDPModule._get_fsdp_state = lambda _: other
    with pytest.raises(PipelineError) as caught:
        Pipeline(plan, {0: stage}, F.mse_loss)
    return str(caught.value)


@pytest.mark.parametrize("part", OF_FSDP)
def test_sharded_stages_are_refused_where_fsdp_ends_no_backward_as_known(
    part: str, run_ranks: Run
) -> None:
    (said,) = run_ranks(build_sharded, 1, part).results()
    assert part in said
    assert torch.__version__ in said


Named = namedtuple("Named", ["one", "other"])


def held(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from("abcd")
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Named, inner, inner)
    )


NESTED = st.recursive(st.integers() | st.none(), held, max_leaves=8)


@given(NESTED, NESTED)
def test_containers_are_taken_apart_as_torch_does(value: Any, other: Any) -> None:
    from schedlang.runtime import containers

    leaves, tree = containers.tree_flatten(value)
    its_leaves, its_tree = torch.utils._pytree.tree_flatten(value)
    assert leaves == its_leaves
    again = containers.tree_unflatten(leaves, tree)
    assert again == value
    assert type(again) is type(value)
    _, of_other = containers.tree_flatten(other)
    _, its_other = torch.utils._pytree.tree_flatten(other)
    assert (tree == of_other) == (its_tree == its_other)
