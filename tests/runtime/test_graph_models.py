"""Models whose stages are a graph, on real processes: losses, outputs and gradients are those of
the same model in one process.
"""

import copy
import random
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.paths import PROGRAMS
from tests.support.ranks import Run
from tests.support.sizes import shares

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import Source
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss, added_losses
from schedlang.schedule.layout import Layout
from tests.support.models import difference, program
from tests.support.plans import compiled

pytestmark = pytest.mark.processes

MICROBATCHES = 8
ROWS = 3
WIDTH = 6
Edges = Sequence[tuple[int, int]]


class Joint(nn.Module):
    """A stage that takes so many values: each goes through a layer of its own, and their sum
    through `tanh`.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(inputs)
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        assert len(inputs) == len(self.layers)
        through = [
            layer(value) for layer, value in zip(self.layers, inputs, strict=True)
        ]
        return torch.tanh(sum(through[1:], start=through[0]))


def plan_of(name: str, edges: Edges, lines: str = "", **params: int) -> Plan:
    """A program of the gallery over a graph of stages, without what it claims."""
    text = re.sub(
        r"^ *assert .*\n", "", (PROGRAMS / f"{name}.sched").read_text(), flags=re.M
    )
    place = text.index("\n", text.index("param microbatches")) + 1
    items = "\n".join(f"edge s in 0 .. 1 from {a} to {b}" for a, b in edges)
    text = text[:place] + items + "\n" + lines + text[place:]
    return compiled(
        Source(f"{name}.sched", text), {"microbatches": MICROBATCHES} | params
    )


def model_of(layout: Layout) -> list[nn.Module]:
    """The stages, of which those that are frozen in the plan are frozen."""
    torch.manual_seed(0)
    model = [Joint(max(len(layout.before[stage]), 1)) for stage in range(layout.pieces)]
    for stage in layout.frozen:
        model[stage].requires_grad_(False)
    return model


def batch(layout: Layout, seed: int) -> tuple[dict[int, Tensor], Tensor]:
    """Inputs of their own for each stage that takes some, and targets."""
    generator = torch.Generator().manual_seed(seed)
    # Of replicas, which have the same inputs, those of the first pipeline.
    firsts = [stage for stage in layout.firsts if stage < layout.pieces]
    shape = MICROBATCHES * ROWS, WIDTH
    values = torch.randn(
        len(firsts) + 1, *shape, generator=generator, dtype=torch.float64
    )
    return dict(zip(firsts, values[1:], strict=True)), values[0]


class Sliced(nn.Module):
    """A stage that takes slices, in which every position sees those before, and what skips bring;
    it gives its output to `later` stages by skips.
    """

    def __init__(self, inputs: int, later: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(inputs, dtype=torch.float64))
        self.later = later

    def forward(
        self,
        *inputs: Tensor,
        past: Tensor | None = None,
        skips: dict[int, Tensor] | None = None,
    ) -> Any:
        through = [
            weight * value for weight, value in zip(self.weights, inputs, strict=True)
        ]
        seen = sum([*through[1:], *(skips or {}).values()], start=through[0]).cumsum(
            dim=1
        )
        if past is not None:
            seen = seen + past
        output = seen.tanh()
        returned = (output, dict.fromkeys(self.later, output)) if self.later else output
        return returned, seen[:, -1:]


def run(
    model: Sequence[nn.Module],
    edges: Edges,
    inputs: dict[int, Tensor],
    skips: Edges = (),
) -> Tensor:
    """The whole model in one process."""
    outputs: list[Tensor] = []
    for stage, module in enumerate(model):
        # In the order in which a stage is given them: by the numbers of the stages that make them.
        before = [
            outputs[earlier] for earlier, later in sorted(edges) if later == stage
        ]
        values = before or [inputs[stage]]
        if isinstance(module, Sliced):
            by_skips = {
                earlier: outputs[earlier] for earlier, later in skips if later == stage
            }
            returned, _ = module(*values, skips=by_skips)
            outputs.append(returned[0] if module.later else returned)
        else:
            outputs.append(module(*values))
    return outputs[-1]


def compare(
    plan: Plan, edges: Edges, make: Callable[[Layout], list[nn.Module]] = model_of
) -> float:
    """How far losses, outputs and gradients are from those of one process, in two steps that add
    up.
    """
    layout = plan.layout
    mine = plan.stages_of(dist.get_rank())
    # A model for each pipeline, or replicas on one rank would share their gradients.
    models = {
        start: make(layout) for start in {layout.pipeline_of[s].start for s in mine}
    }
    stages = {s: models[layout.pipeline_of[s].start][layout.piece(s)] for s in mine}
    alone = make(layout)
    pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
    found = [0.0]
    for step in range(2):
        inputs, targets = batch(layout, step)
        given = inputs if len(inputs) > 1 else inputs[0]
        outputs = pipeline.evaluate(given)
        losses = pipeline.step(given, targets)
        named = pipeline.named_losses()
        parts = {stage: value.chunk(MICROBATCHES) for stage, value in inputs.items()}
        right = []
        heads = []
        for number, wanted in enumerate(targets.chunk(MICROBATCHES)):
            with added_losses() as added:
                values = {stage: value[number] for stage, value in parts.items()}
                output = run(alone, edges, values, layout.skips)
            loss = nn.functional.mse_loss(output, wanted)
            ((loss + added.total) / MICROBATCHES).backward()
            right.append(loss.detach())
            heads += [value.detach() for value in added.values()]
            if outputs is not None and len(layout.pipelines) == 1:
                found.append(difference(outputs[number], output.detach()))
        if losses is not None and len(layout.pipelines) == 1:
            found.append(difference(losses, torch.stack(right)))
        assert ("head" in named) == bool(heads)
        if heads:
            found.append(difference(named["head"], torch.stack(heads).mean()))
    for stage, module in stages.items():
        of_alone = alone[layout.piece(stage)].parameters()
        for weight, other in zip(module.parameters(), of_alone, strict=True):
            if layout.trains(stage):
                assert weight.grad is not None
                assert other.grad is not None
                found.append(difference(weight.grad, other.grad))
            assert (weight.grad is None) == (other.grad is None)
    return max(found)


#: Two encoders and a decoder of two stages; a fork and a join; a tower that three stages use.
GRAPHS: dict[str, Edges] = {
    "encoders": [(0, 2), (1, 2), (2, 3)],
    "diamond": [(0, 1), (0, 2), (1, 3), (2, 3)],
    "tower": [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)],
}


#: Whole, split and repeated backwards.
CASES = product(("gpipe", "1f1b", "zb_h1", "1f1b_recompute"), GRAPHS)


def of_gallery(cases: list[tuple[str, str]]) -> dict[str, float]:
    return {
        f"{name} {graph}": compare(plan_of(name, GRAPHS[graph], ranks=4), GRAPHS[graph])
        for name, graph in cases
    }


@pytest.mark.parametrize("cases", shares(CASES))
def test_graphs_under_schedules_of_many_kinds(
    run_ranks: Run, cases: list[tuple[str, str]]
) -> None:
    for found in run_ranks(of_gallery, 4, cases).results():
        assert len(found) == len(cases)
        assert max(found.values()) < 1e-12, found


def of_slices(layout: Layout) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        Sliced(
            max(sum(later == stage for _, later in layout.edges), 1),
            [later for earlier, later in layout.skips if earlier == stage],
        )
        for stage in range(layout.pieces)
    ]


def with_slices() -> dict[str, float]:
    """Graphs with slices, and with skips from stages that also hand on along far edges."""
    found = {}
    for name in ("terapipe", "seq1f1b"):
        for graph, edges in GRAPHS.items():
            others = [pair for pair in [(0, 3), (1, 3), (0, 2)] if pair not in edges]
            skips = "".join(f"skip s in 0 .. 1 from {a} to {b}\n" for a, b in others)
            for lines in ("", skips):
                plan = plan_of(name, edges, lines, ranks=4, slices=2)
                found[f"{name} {graph} {lines}"] = compare(plan, edges, of_slices)
    return found


def test_slices_and_skips_in_graphs(run_ranks: Run) -> None:
    for found in run_ranks(with_slices, 4).results():
        assert len(found) == 12
        assert max(found.values()) < 1e-12, found


def frozen() -> dict[str, float]:
    """An encoder that is frozen beside one that is trained; and stages with one way of two to a
    trained stage.
    """
    found = {}
    for name in ("1f1b", "zb_h1", "1f1b_recompute"):
        for lines, graph in (
            ("frozen 0 .. 1\n", "encoders"),
            ("frozen 1 .. 2\n", "diamond"),
            ("frozen 0 .. 2 frozen 3 .. 4\n", "tower"),
        ):
            plan = plan_of(name, GRAPHS[graph], lines, ranks=4)
            found[f"{name} {graph}"] = compare(plan, GRAPHS[graph])
    return found


def test_frozen_stages_in_a_graph(run_ranks: Run) -> None:
    for found in run_ranks(frozen, 4).results():
        assert len(found) == 9
        assert max(found.values()) < 1e-12, found


class Head(Joint):
    """A stage that hands on nothing: it has a loss of its own."""

    def forward(self, *inputs: Tensor) -> Tensor:
        output = super().forward(*inputs)
        add_loss("head", output.square().mean(), weight=0.5)
        return output


#: One encoder of two stages, whose output two decoders take; the first one has its own loss.
TWO_ENDS: Edges = [(0, 1), (1, 2), (1, 3)]


def with_a_head(layout: Layout) -> list[nn.Module]:
    model = model_of(layout)
    # The same weights, drawn in the same order: only what the stage does with its output differs.
    model[2].__class__ = Head
    return model


def of_two_ends() -> dict[str, float]:
    return {
        name: compare(plan_of(name, TWO_ENDS, ranks=4), TWO_ENDS, with_a_head)
        for name in ("1f1b", "zb_h1", "1f1b_recompute")
    }


def test_a_stage_that_hands_on_nothing_has_a_loss_of_its_own(run_ranks: Run) -> None:
    for found in run_ranks(of_two_ends, 4).results():
        assert len(found) == 3
        assert max(found.values()) < 1e-12, found


def an_end_without_a_loss() -> None:
    plan = plan_of("gpipe", TWO_ENDS, ranks=4)
    model = model_of(plan.layout)
    rank = dist.get_rank()
    inputs, targets = batch(plan.layout, 0)
    Pipeline(plan, {rank: model[rank]}, nn.functional.mse_loss).step(inputs[0], targets)


def test_a_stage_that_hands_on_nothing_must_add_a_loss(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(an_end_without_a_loss, 4).logs)
    assert "stage 2 hands on nothing, and adds no loss that requires grad" in said


def changed_by_one_of_two() -> None:
    """Alone, both stages of the fork would see what the first one makes of their input."""
    plan = plan_of("gpipe", GRAPHS["diamond"], ranks=4)
    model = model_of(plan.layout)
    model[1] = nn.Sequential(nn.ReLU(inplace=True), model[1])
    rank = dist.get_rank()
    inputs, targets = batch(plan.layout, 0)
    Pipeline(plan, {rank: model[rank]}, nn.functional.mse_loss).step(inputs[0], targets)


def test_no_stage_changes_what_others_are_given_too(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(changed_by_one_of_two, 4).logs)
    assert "stage 1 changes in place what stage 0 gives to the stages 1 and 2" in said


def inputs_for_no_stage() -> None:
    edges = GRAPHS["encoders"]
    plan = plan_of("gpipe", edges, ranks=4)
    model = model_of(plan.layout)
    rank = dist.get_rank()
    inputs, targets = batch(plan.layout, 0)
    inputs[3] = inputs[1]
    Pipeline(plan, {rank: model[rank]}, nn.functional.mse_loss).step(inputs, targets)


def test_inputs_of_stages_that_take_none_are_refused(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(inputs_for_no_stage, 4).logs)
    assert "the stages [0, 1] take inputs, so `inputs` must be a dictionary" in said
    assert "it has [0, 1, 3]" in said


def random_graph(stages: int, seed: int) -> Edges:
    """Edges by which every stage but the last hands on to some."""
    rng = random.Random(seed)
    edges = set()
    for stage in range(stages - 1):
        later = range(stage + 1, stages)
        edges |= {
            (stage, other)
            for other in rng.sample(later, rng.randint(1, min(3, len(later))))
        }
    return sorted(edges)


def of_chunks() -> dict[str, float]:
    """Random graphs of eight stages, several on each rank, also in a V, and in two pipelines that
    are replicas.
    """
    found = {}
    for seed, name in enumerate(("interleaved_1f1b", "zb_v", "looped_bfs", "dualpipe")):
        stages = 4 if name == "dualpipe" else 8
        edges = random_graph(stages, seed)
        params = {"chunks": 2} if name in ("interleaved_1f1b", "looped_bfs") else {}
        found[name] = compare(plan_of(name, edges, ranks=4, **params), edges)
    return found


def test_random_graphs_of_several_stages_on_a_rank(run_ranks: Run) -> None:
    for found in run_ranks(of_chunks, 4).results():
        assert len(found) == 4
        assert max(found.values()) < 1e-12, found


def without_a_dictionary() -> None:
    edges = GRAPHS["encoders"]
    plan = plan_of("gpipe", edges, ranks=4)
    model = model_of(plan.layout)
    stages = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    inputs, targets = batch(plan.layout, 0)
    Pipeline(plan, stages, nn.functional.mse_loss).step(inputs[0], targets)


def test_several_stages_with_inputs_ask_for_a_dictionary(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(without_a_dictionary, 4).logs)
    assert "the stages [0, 1] take inputs, so `inputs` must be a dictionary" in said


def unequal_rows() -> None:
    edges = GRAPHS["encoders"]
    plan = plan_of("gpipe", edges, ranks=4)
    model = model_of(plan.layout)
    stages = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    inputs, targets = batch(plan.layout, 0)
    inputs[1] = inputs[1][:MICROBATCHES]
    Pipeline(plan, stages, nn.functional.mse_loss).step(inputs, targets)


def test_inputs_of_all_stages_have_as_many_rows(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(unequal_rows, 4).logs)
    assert "all of them take the same batch" in said


#: Columns of the vocabulary in each shard.
SHARD = 5


class Shards(nn.Module):
    """The loss by token of an output layer cut along its vocabulary, of the scores of its shards."""

    def forward(self, *scores: Tensor) -> Tensor:
        # The logarithm of a sum of exponentials over all shards, of which the largest score is
        # taken out first, or the exponentials would overflow.
        largest = torch.stack([each.max(1).values for each in scores]).max(0).values
        sums = [(each - largest[:, None]).exp().sum(1) for each in scores]
        # The token to be found is the first of the vocabulary: here all shards say what theirs is.
        return largest + torch.stack(sums).sum(0).log() - scores[0][:, 0]


def of_vocabulary() -> dict[str, float]:
    """A cut output layer is the whole one: losses, and the gradients of all layers and shards."""
    plan = program("vocabulary_parallel", ranks=4, microbatches=MICROBATCHES)
    layers = 4
    torch.manual_seed(0)
    model = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers)]
    model += [
        nn.Linear(WIDTH, SHARD, bias=False, dtype=torch.float64) for _ in range(layers)
    ]
    alone = copy.deepcopy(model)
    stages = {
        stage: [*model, Shards()][stage] for stage in plan.stages_of(dist.get_rank())
    }
    pipeline = Pipeline(plan, stages, lambda output, _: output.mean())
    inputs, targets = batch(plan.layout, 0)
    losses = pipeline.step(inputs[0], targets)
    found = {}
    right = []
    # In one process the shards are one matrix, whose gradient is cut again below.
    whole = (
        torch.cat([shard.weight for shard in alone[layers:]]).detach().requires_grad_()
    )
    for rows in inputs[0].chunk(MICROBATCHES):
        scores = nn.Sequential(*alone[:layers])(rows) @ whole.T
        loss = nn.functional.cross_entropy(scores, torch.zeros(ROWS, dtype=torch.long))
        (loss / MICROBATCHES).backward()
        right.append(loss.detach())
    if losses is not None:
        found["losses"] = difference(losses, torch.stack(right))
    assert whole.grad is not None
    gradients = [layer.weight.grad for layer in alone[:layers]] + [
        *whole.grad.split(SHARD)
    ]
    for stage, module in stages.items():
        if stage < 2 * layers:
            weight = module.weight.grad
            found[f"stage {stage}"] = difference(weight, gradients[stage])
    return found


def test_an_output_layer_cut_along_its_vocabulary_is_the_whole_one(
    run_ranks: Run,
) -> None:
    results = run_ranks(of_vocabulary, 4).results()
    assert {name for found in results for name in found} == {
        "losses",
        *(f"stage {stage}" for stage in range(8)),
    }
    assert max(max(found.values()) for found in results) < 1e-12, results


class Attention(nn.Module):
    """A layer before its experts: it sums what the expert ranks made of the layer before, and says
    by how much each token goes to each of them.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.router = nn.Linear(WIDTH, experts, dtype=torch.float64)

    def forward(self, *shares: Tensor) -> Tensor:
        tokens = self.layer(sum(shares[1:], start=shares[0])).tanh()
        return torch.cat([tokens, self.router(tokens).softmax(1)], 1)


class Expert(nn.Module):
    """The expert of a rank: it makes something of the tokens that go to it, and nothing of others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, routed: Tensor) -> Tensor:
        gates = routed[:, WIDTH:]
        here = gates.argmax(1) == self.number
        tokens = routed[here, :WIDTH]
        made = torch.zeros_like(routed[:, :WIDTH])
        made[here] = self.layer(tokens).tanh() * gates[here, self.number, None]
        return made


class Output(nn.Module):
    """The output layer, of what the expert ranks made of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, *shares: Tensor) -> Tensor:
        output: Tensor = self.layer(sum(shares[1:], start=shares[0]))
        return output


def model_of_experts(layout: Layout) -> list[nn.Module]:
    """A model whose layers have an expert for each expert rank."""
    torch.manual_seed(0)
    last = layout.pieces - 1
    experts = len(layout.before[last])
    model: list[nn.Module] = []
    for stage in range(last):
        number = stage % (experts + 1)
        model.append(Expert(number - 1) if number else Attention(experts))
    return [*model, Output()]


def with_experts_apart(ranks: int, groups: list[int]) -> dict[int, float]:
    """Attention on so many of the ranks, and experts on the others."""
    found = {}
    for attention in groups:
        plan = program(
            "af_pipe", ranks=ranks, microbatches=MICROBATCHES, attention=attention
        )
        layout = plan.layout
        edges = [(a, b) for b in range(layout.pieces) for a in layout.before[b]]
        found[attention] = compare(plan, edges, model_of_experts)
    return found


@pytest.mark.parametrize(
    ("ranks", "groups"),
    [pytest.param(4, [1, 2], marks=pytest.mark.core), (3, [2])],
)
def test_experts_on_ranks_of_their_own_are_those_of_one_process(
    run_ranks: Run, ranks: int, groups: list[int]
) -> None:
    for found in run_ranks(with_experts_apart, ranks, ranks, groups).results():
        assert len(found) == len(groups)
        assert max(found.values()) < 1e-12, found
