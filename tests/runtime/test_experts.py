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
        order, ours = by_expert(chosen)
        theirs = counts_from_others(ours, self.group)
        come = exchanged(x[order], ours, theirs, self.group)
        come, x, share = end_component((come, x, share))
        made, x, share = end_component((self.expert(come), x, share))
        back = exchanged(made, theirs, ours, self.group)
        # The order of an order is its inverse: each token is back at its own place.
        return x + share * back[order.argsort()]


def by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The order of tokens by their experts, since an exchange takes those of each process side by
    side; and how many go to each.
    """
    #    tokens    a b c d e     chosen    0 1 0 1 1
    #    sent      a c │ b d e   counts    2 │ 3
    return chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS)


def counts_from_others(ours: Tensor, group: dist.ProcessGroup) -> Tensor:
    """How many tokens come from each process, or nobody would know how much room they need."""
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    return theirs


def exchanged(
    tokens: Tensor, sent: Tensor, received: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """So many of the tokens go to each process of the group, so many come."""
    counts = received.tolist()
    into = tokens.new_empty(sum(counts), WIDTH)
    return all_to_all_single(into, tokens, counts, sent.tolist(), group=group)


class Attention(Router):
    """The first stage of a layer: it hands on the tokens in the order of their experts, and what
    the last stage needs.
    """

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict(), strict=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, share, chosen = self.routed(x)
        order, ours = by_expert(chosen)
        return x[order], x, share, order, ours


class Experts(nn.Module):
    """The second stage: the expert of this process. It takes the tokens of all processes."""

    def __init__(self, whole: Whole, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.expert = build_expert()
        self.expert.load_state_dict(whole.experts[dist.get_rank(group)].state_dict())
        self.group = group

    def exchange(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, *kept, ours = value
        theirs = counts_from_others(ours, self.group)
        return exchanged(tokens, ours, theirs, self.group), *kept, ours, theirs

    def forward(self, tokens: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return self.expert(tokens), *kept


class Sum(nn.Module):
    """The last stage: it adds what the experts gave to the tokens of this process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def exchange(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made, x, share, order, ours, theirs = value
        return exchanged(made, theirs, ours, self.group), x, share, order

    def forward(self, back: Tensor, x: Tensor, share: Tensor, order: Tensor) -> Tensor:
        return x + share * back[order.argsort()]


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


def layers_whole(
    plan: Plan, reference: list[Whole], stage: int, group: dist.ProcessGroup
) -> nn.Module:
    """A stage that is a layer."""
    return Part(reference[plan.layout.piece(stage)], group)


def layers_in_three(
    plan: Plan, reference: list[Whole], stage: int, group: dist.ProcessGroup
) -> nn.Module:
    """A stage that is a third of a layer."""
    whole = reference[stage // 3]
    return (Attention(whole), Experts(whole, group), Sum(group))[stage % 3]


#: Makes a stage of a plan, from the layers of one process.
Make = Callable[[Plan, list[Whole], int, dist.ProcessGroup], nn.Module]


def trained(make: Callable[[], Plan], build: Make, steps: int) -> tuple[float, bool]:
    """How far the weights of this process are from those of one process, after so many steps; and
    whether tokens went to other processes.
    """
    plan = make()
    stages_of_layer = 1 if build is layers_whole else 3
    mesh = init_device_mesh("cpu", (EXPERTS, PIPE), mesh_dim_names=("experts", "pp"))
    # A group of its own, so that no message of the pipeline is taken for one of these.
    group = mesh["experts"].get_group()
    torch.default_generator.manual_seed(0)
    layers = plan.layout.pieces // stages_of_layer
    reference = [Whole().double() for _ in range(layers)]
    stages = {
        stage: build(plan, reference, stage, group).double()
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
        layer = plan.layout.piece(number) // stages_of_layer
        whole = reference[layer].state_dict()
        expert = f"experts.{mesh.get_local_rank('experts')}."
        for name, weight in stage.state_dict().items():
            worst = max(
                worst, difference(weight, whole[name.replace("expert.", expert)])
            )
    _, _, chosen = reference[0].routed(batches[0][0])
    return worst, len(set(chosen.tolist())) == EXPERTS


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("interleaved_overlap", layers_whole),
        ("dualpipe_v", layers_whole),
        ("zb_h1", layers_whole),
        ("experts_1f1b", layers_in_three),
    ],
)
def test_experts_train_as_in_one_process(
    name: str, build: Make, steps: int, run_ranks: Run
) -> None:
    make = partial(program, name, ranks=PIPE, microbatches=4)
    for worst, are_exchanged in run_ranks(
        partial(trained, make, build, steps), EXPERTS * PIPE
    ).results():
        assert worst < 1e-11
        assert are_exchanged
