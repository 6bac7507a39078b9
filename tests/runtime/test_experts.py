"""Layers of experts on several processes, which exchange tokens while forwards and backwards take
turns: they train as in one process.
"""

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss, added_losses, end_component
from tests.support.models import WIDTH, batch, difference, program
from tests.support.ranks import Run
from tests.support.sizes import STEPS

pytestmark = pytest.mark.processes

#: Ranks of a pipeline, and processes that share the experts of each.
PIPE = 2
EXPERTS = 2


class Router(nn.Module):
    """What all processes have of a layer: attention, and which expert a token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.norm = nn.LayerNorm(WIDTH)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, the share of each one's expert, and which expert that is."""
        x = x + self.attention(x).tanh()
        shares = self.router(self.norm(x)).softmax(-1)
        add_loss("balance", EXPERTS * shares.mean(0).square().sum(), weight=0.1)
        share, expert = shares.max(-1, keepdim=True)
        return x, share, expert[:, 0]


def build_expert() -> nn.Module:
    """An expert."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    )


class Whole(Router):
    """A layer with all experts, in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(build_expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x, share, chosen = self.routed(x)
        made = torch.stack([expert(x) for expert in self.experts])
        return x + share * made[chosen, torch.arange(len(x))]


class Part(Router):
    """A layer with one expert, in a group of processes: tokens go to the process of theirs, and
    come back.
    """

    def __init__(self, whole: Whole, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict(), strict=False)
        self.expert = build_expert()
        self.expert.load_state_dict(whole.experts[dist.get_rank(group)].state_dict())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x, share, chosen = end_component(self.routed(x))
        # Tokens by their experts, since an exchange takes those of each process side by side:
        #
        #    tokens    a b c d e     chosen    0 1 0 1 1
        #    sent      a c │ b d e   counts    2 │ 3
        order = chosen.argsort(stable=True)
        ours = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(ours)
        # First how many come from whom, or nobody would know how much room they need.
        dist.all_to_all_single(theirs, ours, group=self.group)
        come = self.exchanged(x[order], ours, theirs)
        come, x, share = end_component((come, x, share))
        made, x, share = end_component((self.expert(come), x, share))
        back = self.exchanged(made, theirs, ours)
        # The order of an order is its inverse: each token is back at its own place.
        return x + share * back[order.argsort()]

    def exchanged(self, tokens: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """So many of the tokens go to each process of the group, so many come."""
        counts = received.tolist()
        into = tokens.new_empty(sum(counts), WIDTH)
        return all_to_all_single(into, tokens, counts, sent.tolist(), group=self.group)


def step_alone(
    plan: Plan, model: list[nn.Module], batches: list[tuple[Tensor, Tensor]]
) -> None:
    """The gradients of all batches, in one process."""
    for inputs, targets in batches:
        parts = zip(
            inputs.chunk(plan.microbatches),
            targets.chunk(plan.microbatches),
            strict=True,
        )
        for x, y in parts:
            with added_losses() as added:
                for layer in model:
                    x = layer(x)
            loss = nn.functional.mse_loss(x, y) + added.total
            (loss / (plan.microbatches * len(batches))).backward()


def trained(make: Callable[[], Plan], steps: int) -> tuple[float, bool]:
    """How far the weights of this process are from those of one process, after so many steps; and
    whether tokens went to other processes.
    """
    plan = make()
    mesh = init_device_mesh("cpu", (EXPERTS, PIPE), mesh_dim_names=("experts", "pp"))
    # A group of its own, so that no message of the pipeline is taken for one of these.
    group = mesh["experts"].get_group()
    torch.default_generator.manual_seed(0)
    reference = [Whole().double() for _ in range(plan.layout.pieces)]
    stages = {
        stage: Part(reference[plan.layout.piece(stage)], group).double()
        for stage in plan.stages_of(mesh.get_local_rank("pp"))
    }
    own = [weight for stage in stages.values() for weight in stage.parameters()]
    others = [weight for layer in reference for weight in layer.parameters()]
    optimizer = torch.optim.SGD([*own, *others], 0.05, momentum=0.9)
    # A mean over the microbatches of all pipelines, whose gradients are summed below.
    scale = 1 / (plan.microbatches * EXPERTS)
    ours = Pipeline(
        plan, stages, nn.functional.mse_loss, mesh=mesh["pp"], loss_scale=scale
    )
    for step in range(steps):
        batches = [batch(plan, EXPERTS * step + number) for number in range(EXPERTS)]
        ours.step(*batches[mesh.get_local_rank("experts")])
        # An expert has the tokens of all processes; of the rest, each has those of its own.
        for stage in stages.values():
            for name, weight in stage.named_parameters():
                if not name.startswith("expert"):
                    dist.all_reduce(weight.grad, group=group)
        step_alone(plan, reference, batches)
        optimizer.step()
        optimizer.zero_grad()
    worst = 0.0
    for number, stage in stages.items():
        whole = reference[plan.layout.piece(number)].state_dict()
        expert = f"experts.{mesh.get_local_rank('experts')}."
        for name, weight in stage.state_dict().items():
            worst = max(
                worst, difference(weight, whole[name.replace("expert.", expert)])
            )
    _, _, chosen = reference[0].routed(batches[0][0])
    return worst, len(set(chosen.tolist())) == EXPERTS


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "make",
    [
        partial(program, "interleaved_overlap", ranks=PIPE, microbatches=4),
        partial(program, "dualpipe_v", ranks=PIPE, microbatches=4),
        partial(program, "zb_h1", ranks=PIPE, microbatches=4),
    ],
    ids=["interleaved_overlap", "dualpipe_v", "zb_h1"],
)
def test_experts_train_as_in_one_process(
    make: Callable[[], Plan], steps: int, run_ranks: Run
) -> None:
    for worst, are_exchanged in run_ranks(
        partial(trained, make, steps), EXPERTS * PIPE
    ).results():
        assert worst < 1e-11
        assert are_exchanged
