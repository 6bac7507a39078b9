"""Verdicts against real processes: what is proved runs to its end with the right gradients, a
deadlock does hang.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count, product
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from schedlang import CompileError, Kind, Plan, Schedule, prove, read_plan, write_plan
from schedlang.plan.text import parse_actions
from schedlang.schedule import layout
from tests.support.damage import (
    batched_plan,
    damaged_plans,
    gallery,
    handed_over,
    one_of,
    random_plan,
)
from tests.support.own_order import is_in_order
from tests.support.ranks import Outcome, Run
from tests.support.travelling import travelling_plan
from tests.support.written import written

pytest.importorskip("torch", reason="real processes need torch", exc_type=ImportError)
import torch
import torch.distributed as dist

from schedlang.runtime import Pipeline, add_loss
from tests.support.skip_models import Skipping

pytestmark = pytest.mark.processes

SIZES = ((2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4))
TRANSPORTS = ("blocking", "gloo", "nccl-edge")
#: By whose rules processes run what is proved for a transport; schedlang's runtime, where it takes
#: the plan.
RUN_BY = {
    "blocking": ("blocking", "runtime"),
    "gloo": ("gloo", "runtime"),
    "nccl-edge": ("nccl-edge", "runtime"),
    "portable": ("blocking", "gloo", "nccl-edge", "runtime"),
}
#: Plans of one block, for each transport and number of ranks: so many that are proved.
PROVED = 5
#: In seconds, from when all ranks have started: for a plan that should hang, and for many that
#: should not.
HANGS = 1.0
RUNS = 30.0
#: What keeps ranks waiting; other mistakes compute something wrong.
WAITS = {"deadlock", "unmatched-send", "unmatched-receive"}

# What a rank does: an interpreter carries out its actions by the rules of a transport, apart from
# schedlang's runtime.

WIDTH = 3
Key = tuple[str, int, int]


def weights(stages: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.double)
        for _ in range(stages)
    ]


def inputs(plan: Any) -> dict[int, list[torch.Tensor]]:
    """For each stage that takes inputs, its microbatches."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for each in plan["pipelines"]:
        for stage in range(each["start"], each["stop"]):
            shape = each["microbatches"], 2, WIDTH
            values = torch.randn(*shape, generator=generator, dtype=torch.double)
            is_first = all(
                pipeline(plan, earlier) != each for earlier in before(plan, stage)
            )
            if is_first and stage not in taken_over(plan):
                found[stage] = list(values)
    return found


def pipeline(plan: Any, stage: int) -> Any:
    """The pipeline of a stage."""
    return next(each for each in plan["pipelines"] if stage < each["stop"])


def starts(plan: Any) -> list[int]:
    """The first stages of all replicas of what edges, skips and frozen stages are said of."""
    return [0] if plan["models"] else [each["start"] for each in plan["pipelines"]]


def handovers(plan: Any) -> list[tuple[int, int]]:
    """The edges between pipelines of one model. The earlier stage runs ahead: the later one takes
    its output, and has its gradients from its own pipeline.
    """
    return [
        (a, b)
        for a, b in plan["edges"]
        if not plan["models"] and pipeline(plan, a) != pipeline(plan, b)
    ]


def edges_of(plan: Any) -> list[tuple[int, int]]:
    """The other edges, of the first pipeline or between models."""
    others = handovers(plan)
    return [(a, b) for a, b in plan["edges"] if (a, b) not in others]


def taken_over(plan: Any) -> set[int]:
    """The stages that take the output of a stage that runs ahead."""
    return {later for _, later in handovers(plan)}


def ahead(plan: Any) -> set[int]:
    """The stages that run ahead: they have no backward."""
    return {
        stage
        for earlier, _ in handovers(plan)
        for stage in range(
            pipeline(plan, earlier)["start"], pipeline(plan, earlier)["stop"]
        )
    }


def skips(plan: Any) -> dict[int, tuple[int, int]]:
    """The earlier and the later stage of each skip, of each edge that is not between neighbours,
    and of each handover, by its number.
    """
    far = [
        (a, b) for a, b in edges_of(plan) if b > a + 1 or pipeline(plan, a)["stop"] == b
    ]
    pairs = [
        (start + a, start + b)
        for start in starts(plan)
        for a, b in [*far, *plan["skips"]]
    ]
    return dict(enumerate([*pairs, *handovers(plan)], len(plan["placement"])))


def is_near(plan: Any, stage: int) -> bool:
    """Whether a stage hands on to the next one."""
    return is_chained(plan, stage) and stage + 1 not in taken_over(plan)


def is_chained(plan: Any, stage: int) -> bool:
    """Whether a stage has its gradients from the next one."""
    if stage < 0 or stage + 1 == pipeline(plan, stage)["stop"]:
        return False
    edges = [
        [start + a, start + b] for start in starts(plan) for a, b in edges_of(plan)
    ]
    # A model without edges of its own is a chain.
    own = pipeline(plan, stage)
    edges = [[a, b] for a, b in edges if pipeline(plan, a) == pipeline(plan, b) == own]
    return not edges or [stage, stage + 1] in edges


def before(plan: Any, stage: int) -> list[int]:
    """The stages whose outputs a stage takes."""
    near = [stage - 1] if is_near(plan, stage - 1) else []
    return near + [earlier for earlier, later in skips(plan).values() if later == stage]


def ends(plan: Any) -> set[int]:
    """The stages that hand on nothing: each has a loss."""
    stages = range(len(plan["placement"]))
    others = {earlier for stage in stages for earlier in before(plan, stage)}
    return {
        stage for stage in stages if stage not in others and not is_chained(plan, stage)
    }


def loss(output: torch.Tensor, target: object = None) -> torch.Tensor:
    return (output**2).sum() / 2


def alone(plan: Any) -> list[torch.Tensor]:
    """The gradients of all stages, by autograd on one process; zeros of frozen ones."""
    values = weights(len(plan["placement"]))
    is_trained = [stage not in frozen_stages(plan) for stage in range(len(values))]
    parameters = [
        each.requires_grad_(trained)
        for each, trained in zip(values, is_trained, strict=True)
    ]
    given = inputs(plan)
    for microbatch in range(max(each["microbatches"] for each in plan["pipelines"])):
        outputs: dict[int, torch.Tensor] = {}
        # Stages that run ahead are numbered behind those that take over.
        for stage in sorted(range(len(parameters)), key=lambda s: s not in ahead(plan)):
            if microbatch < pipeline(plan, stage)["microbatches"]:
                # What a stage takes from several is added up, and the module is a matrix.
                values = [outputs[earlier] for earlier in before(plan, stage)]
                values += [given[stage][microbatch]] if stage in given else []
                if stage in taken_over(plan):
                    own = outputs[stage - 1]
                    values = [values[0].detach() + own - own.detach()]
                outputs[stage] = sum(values[1:], start=values[0]) @ parameters[stage]
        total = sum(loss(outputs[stage]) for stage in ends(plan) & outputs.keys())
        if total.requires_grad:
            total.backward()
    return [
        torch.zeros_like(each) if each.grad is None else each.grad
        for each in parameters
    ]


def frozen_stages(plan: Any) -> set[int]:
    """The frozen stages of all pipelines."""
    return {start + piece for start in starts(plan) for piece in plan["frozen"]}


class Interpreter:
    """Carries out one rank's actions over gloo, as a transport has it; the stages are matrices."""

    def __init__(self, plan: Any, rank: int, transport: str) -> None:
        self.plan = plan
        self.rank = rank
        self.blocks = transport == "blocking"
        #: Without tags, messages from one rank to another meet in order.
        self.has_tags = transport == "gloo"
        self.weights = weights(len(plan["placement"]))
        self.gradients = [
            torch.zeros(WIDTH, WIDTH, dtype=torch.double) for _ in self.weights
        ]
        self.ends = ends(plan)
        self.inputs = inputs(plan)
        self.skips = skips(plan)
        #: Outputs F of stages, and gradients B of their inputs; and the receives that bring them.
        self.held: dict[Key, torch.Tensor] = {}
        self.coming: dict[Key, dist.Work] = {}
        self.sends: list[dist.Work] = []

    def run(self) -> list[torch.Tensor]:
        for batch in self.batches():
            for action in batch:
                self.act(*action)
            if self.blocks:
                self.finish()
        self.finish()
        return self.gradients

    def finish(self) -> None:
        """Wait for all that is under way; gloo wants one wait for each."""
        for work in [*self.sends, *self.coming.values()]:
            work.wait()
        self.sends = []
        self.coming = {}

    def batches(self) -> Iterator[list[tuple[str, int, int]]]:
        for token in self.plan["actions"][self.rank].split():
            words = [
                re.fullmatch(r"(\d+)([A-Z_]+?)(\d+)", each)
                for each in re.findall(r"\d+[A-Z_]+?\d+", token)
            ]
            yield [(word[2], int(word[1]), int(word[3])) for word in words if word]

    def act(self, word: str, stage: int, microbatch: int) -> None:
        if word == "F":
            self.held["F", stage, microbatch] = (
                self.input(stage, microbatch) @ self.weights[stage]
            )
        if word in ("B", "I"):
            self.held["B", stage, microbatch] = (
                self.output_gradient(stage, microbatch) @ self.weights[stage].T
            )
        # For y = x W, the gradient of x is that of y times Wᵀ, and that of W is xᵀ times that of y.
        if word in ("B", "W"):
            gradient = self.output_gradient(stage, microbatch)
            self.gradients[stage] += self.input(stage, microbatch).T @ gradient
        if "_" in word:
            self.transfer(word, stage, microbatch)

    def input(self, stage: int, microbatch: int) -> torch.Tensor:
        value = torch.zeros(2, WIDTH, dtype=torch.double)
        if stage in self.inputs:
            value = self.inputs[stage][microbatch]
        elif is_near(self.plan, stage - 1):
            value = self.value("F", stage - 1, microbatch)
        for number, (earlier, later) in self.skips.items():
            if later == stage:
                value = value + self.by_skip("F", number, earlier, microbatch)
        return value

    def output_gradient(self, stage: int, microbatch: int) -> torch.Tensor:
        value = torch.zeros(2, WIDTH, dtype=torch.double)
        if stage in self.ends:
            value = self.value("F", stage, microbatch)
        elif is_chained(self.plan, stage):
            value = self.value("B", stage + 1, microbatch)
        for number, (earlier, later) in self.skips.items():
            if earlier == stage:
                value = value + self.by_skip("B", number, later, microbatch)
        return value

    def by_skip(
        self, what: str, number: int, stage: int, microbatch: int
    ) -> torch.Tensor:
        """What a skip brings: received under its number, or from a stage of this rank."""
        here = self.plan["placement"][stage] == self.rank
        return self.value(what, stage if here else number, microbatch)

    def value(self, *key: Any) -> torch.Tensor:
        if key in self.coming:
            self.coming.pop(key).wait()
        return self.held[key]

    def transfer(self, word: str, stage: int, microbatch: int) -> None:
        what = word[-1]
        step = 1 if word in ("SEND_F", "RECV_B") else -1
        sends = word.startswith("SEND")
        skips = stage in self.skips
        own, other = self.skips[stage][::step] if skips else (stage, stage + step)
        peer = self.plan["placement"][other]
        key = (what, stage if skips else own if sends else other, microbatch)
        # What goes by a skip has the skip's number on both ranks.
        if skips and sends:
            self.held[key] = self.held[what, own, microbatch]
        # Stage or skip, microbatch and direction as one number: no two messages share it.
        tag = (
            1 + ((key[1] << 8) + microbatch) * 2 + (what == "B") if self.has_tags else 0
        )
        if word.startswith("SEND"):
            self.sends.append(dist.isend(self.held[key], peer, tag=tag))
        else:
            # What is read before it has come would be seen in the gradients.
            self.held[key] = torch.full((2, WIDTH), torch.nan, dtype=torch.double)
            self.coming[key] = dist.irecv(self.held[key], peer, tag=tag)


class Joint(Skipping):
    """A stage of a graph: what the stages before it make is added up. One that `is_end` adds its
    loss itself.
    """

    def __init__(self, module: torch.nn.Module, later: list[int], is_end: bool) -> None:
        super().__init__(module, later=later)
        self.is_end = is_end

    def forward(
        self, *values: torch.Tensor, skips: dict[int, torch.Tensor] | None = None
    ) -> Any:
        first, *others = [*values, *(skips or {}).values()]
        returned = super().forward(sum(others, start=first))
        if self.is_end:
            add_loss("end", loss(returned))
        return returned


def by_runtime(file: str, plan: Any, rank: int) -> list[torch.Tensor]:
    """The gradients that schedlang's own runtime computes."""
    mine = {}
    for stage, value in enumerate(weights(len(plan["placement"]))):
        mine[stage] = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.double)
        # A linear layer multiplies with its weight transposed.
        mine[stage].weight = torch.nn.Parameter(value.T.contiguous())
        mine[stage].requires_grad_(stage not in frozen_stages(plan))
    own = {
        stage: module
        for stage, module in mine.items()
        if plan["placement"][stage] == rank
    }
    later = {stage: [b for a, b in plan["skips"] if a == stage] for stage in own}
    if plan["edges"]:
        last = len(plan["placement"]) - 1
        alone_ends = ends(plan) - {last}
        own = {s: Joint(module, later[s], s in alone_ends) for s, module in own.items()}
    elif plan["skips"]:
        own = {
            stage: Skipping(module, later=later[stage]) for stage, module in own.items()
        }
    batches = {stage: torch.cat(values) for stage, values in inputs(plan).items()}
    given = batches if len(batches) > 1 else batches[0]
    Pipeline(read_plan(file), own, loss, loss_scale=1.0).step(given, batches[0])
    return [
        module.weight.grad.T if module.weight.grad is not None else value
        for module in mine.values()
    ]


def difference(how: str, file: str, rank: int) -> float:
    """The largest difference of a gradient of this rank's stages from that of one process; or
    nothing was run.
    """
    plan = json.loads(Path(file).read_text())
    ours = (
        by_runtime(file, plan, rank)
        if how == "runtime"
        else Interpreter(plan, rank, how).run()
    )
    right = alone(plan)
    mine = [stage for stage, holder in enumerate(plan["placement"]) if holder == rank]
    frozen = frozen_stages(plan)
    if how == "runtime":
        # Of those the runtime has no gradients.
        mine = [stage for stage in mine if stage not in frozen]
    without = frozen | ahead(plan)
    largest = [max(float(right[s].abs().max()), s in without) for s in mine]
    pairs = zip(mine, largest, strict=True)
    # In parts of the largest entry. Stages without gradients are compared with 1 instead of 0.
    found = [float((ours[s] - right[s]).abs().max() / most) for s, most in pairs]
    # NaN is equal to nothing, not even itself: it counts as infinitely wrong.
    return max([0.0, *(each if each == each else torch.inf for each in found)])


def run_plans(how: str, files: list[str], folder: Path) -> None:
    """Run plans one after the other, and leave after each the differences so far."""
    rank = dist.get_rank()
    found = []
    for file in files:
        found.append(difference(how, file, rank))
        if len(files) > 1:
            dist.barrier()
        (folder / f"differences{rank}").write_text(json.dumps(found))


@frozen
class Launch:
    """What became of plans that were run one after the other, on all ranks."""

    outcome: Outcome
    #: Of each rank, for each plan that it has finished, the largest difference of a gradient from
    #: that of one process.
    differences: list[list[float]]


Launcher = Callable[[str, list[Schedule], float], Launch]


@pytest.fixture
def launch(run_ranks: Run, tmp_path: Path) -> Launcher:
    """Run plans one after the other on fresh processes.

    `how` is a transport, whose rules the interpreter follows, or `runtime` for schedlang's.
    """
    numbers = count()

    def launch(how: str, plans: list[Schedule], seconds: float) -> Launch:
        folder = tmp_path / f"{next(numbers)}"
        folder.mkdir()
        files = [str(folder / f"{number}.json") for number in range(len(plans))]
        for plan, file in zip(plans, files, strict=True):
            write_plan(as_plan(plan), file)
        ranks = len(plans[0].ranks)
        outcome = run_ranks(run_plans, ranks, how, files, folder, seconds=seconds)
        found = [folder / f"differences{rank}" for rank in range(ranks)]
        return Launch(
            outcome,
            [json.loads(each.read_text()) if each.exists() else [] for each in found],
        )

    return launch


def as_plan(schedule: Schedule) -> Plan:
    if isinstance(schedule, Plan):
        return schedule
    return Plan.of(schedule)


def can_run(plan: Schedule) -> bool:
    """Whether the interpreter knows all that is in a plan, and does not fail before it
    communicates.
    """
    kinds = set(chain.from_iterable(actions.kind for actions in plan.ranks))
    plain = plan.layout.slices == plan.layout.updates == 1 and not plan.is_forward_only
    return (
        plain
        and kinds.isdisjoint((Kind.U, Kind.EXCHANGE_F, Kind.EXCHANGE_B))
        and any(kind >= Kind.SEND_F for kind in kinds)
        and is_in_order(plan)
    )


def codes(plan: Schedule) -> set[str]:
    try:
        prove(plan)
    except CompileError as error:
        return {each.code for each in error.diagnostics}
    return set()


def samples(block: int, transport: str) -> Iterator[Schedule]:
    """Random and damaged plans for a transport that processes can run."""
    rng = random.Random(f"{transport} {block}")
    while True:
        draw = (
            one_of(gallery(SIZES))
            if rng.random() < 0.5
            else rng.choice([random_plan, batched_plan])
        )
        for plan in damaged_plans(draw, 1, rng):
            if can_run(plan):
                yield evolve(plan, transport=transport)


@pytest.mark.parametrize("transport", RUN_BY)
def test_what_is_proved_ends_with_the_right_gradients(
    launch: Launcher, transport: str, block: int, tally: Counter[str]
) -> None:
    found: dict[int, list[Schedule]] = {2: [], 3: []}
    candidates = (plan for plan in samples(block, transport) if not codes(plan))
    # So many for 2 ranks, and so many for 3, whichever come first.
    while min(map(len, found.values())) < PROVED:
        plan = next(candidates)
        if len(found[len(plan.ranks)]) < PROVED:
            found[len(plan.ranks)].append(plan)
    for how, plans in product(RUN_BY[transport], found.values()):
        runs = (
            plans
            if how != "runtime"
            else [plan for plan in plans if runtime_takes(plan)]
        )
        if runs:
            run_all(launch, how, runs, tally)


@pytest.mark.parametrize("size", [(2, 4), (3, 6)])
def test_the_interpreter_runs_the_whole_gallery(
    launch: Launcher, size: tuple[int, int]
) -> None:
    """What blocks draw from: so a program that the interpreter cannot run shows at once."""
    plans = [*gallery((size,)), *handed_over()]
    runs = [plan for plan in plans if len(plan.ranks) == size[0] and can_run(plan)]
    assert len(runs) > 30
    run_all(launch, "gloo", runs, Counter())


def runtime_takes(plan: Schedule) -> bool:
    """Whether schedlang's runtime runs a plan, and the worker knows how to give it its batch."""
    return len(plan.layout.pipelines) == 1


def run_all(
    launch: Launcher, how: str, plans: list[Schedule], tally: Counter[str]
) -> None:
    """Run plans that are proved; all must end, on all ranks, with the right gradients."""
    found = launch(how, plans, RUNS)
    texts = [[each.text() for each in plan.ranks] for plan in plans]
    tally[f"{how} proved"] += len(plans)
    # Ranks that hang have finished fewer plans than others; the plan after these is the one that
    # hangs.
    ended = min(map(len, found.differences))
    tally[f"{how} hangs"] += len(plans) - ended
    assert ended == len(plans), (found, texts[ended])
    for text, differences in zip(
        texts, zip(*found.differences, strict=True), strict=True
    ):
        tally[f"{how} wrong gradients"] += max(differences) > 1e-9
        assert max(differences) <= 1e-9, (differences, text)


@pytest.mark.blocks(4)
def test_what_deadlocks_hangs(
    launch: Launcher, block: int, tally: Counter[str]
) -> None:
    """One plan of each block, for the transports in turn: fresh processes for each, as a hang
    leaves its threads.
    """
    transport = TRANSPORTS[block % len(TRANSPORTS)]
    plan = next(
        each
        for each in samples(block, transport)
        if codes(each) and codes(each) <= WAITS
    )
    found = launch(transport, [plan], HANGS)
    tally[f"{transport} deadlocks"] += 1
    assert found.outcome.has_started()
    assert not any(found.outcome.codes), found.outcome.logs
    tally[f"{transport} ended after deadlock"] += all(found.differences)
    assert not all(found.differences), [each.text() for each in plan.ranks]


def hop(plan: Plan) -> float:
    """Run a plan with hops by schedlang's runtime; the largest difference of a gradient of this rank's
    stages, if they are at home, from that of one process.
    """
    pieces = plan.layout.pieces
    matrices = weights(pieces)
    own: dict[int, torch.nn.Module] = {}
    for stage in plan.stages_of(dist.get_rank()):
        own[stage] = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.double)
        weight = matrices[stage % pieces].T.contiguous()
        own[stage].weight = torch.nn.Parameter(weight)
    generator = torch.Generator().manual_seed(1)
    shape = 2 * plan.microbatches, WIDTH
    batch = torch.randn(*shape, generator=generator, dtype=torch.double)
    Pipeline(plan, own, loss, loss_scale=1.0).step(batch, batch)
    values = batch
    for matrix in matrices:
        values = values @ matrix.requires_grad_()
    loss(values).backward()
    received = {
        actions.stage[index]
        for actions in plan.ranks
        for index, kind in enumerate(actions.kind)
        if kind == Kind.RECV_WEIGHTS
    }
    differences = [0.0]
    for stage in own.keys() - received:
        right = matrices[stage % pieces].grad
        found = (own[stage].weight.grad.T - right).abs().max() / right.abs().max()
        # NaN is no number, and counts as infinitely wrong.
        differences.append(float(found) if found == found else torch.inf)
    return max(differences)


def hop_in_turn(files: list[str]) -> list[float]:
    """Run plans with hops one after the other."""
    found = []
    for file in files:
        found.append(hop(read_plan(file)))
        dist.barrier()
    return found


def test_weights_that_are_proved_to_come_home_do(
    run_ranks: Run, tmp_path: Path, block: int
) -> None:
    rng = random.Random(f"hops {block}")
    files: list[str] = []
    while len(files) < PROVED:
        (plan,) = damaged_plans(travelling_plan, 1, rng)
        plan = evolve(plan, transport="gloo")
        is_one_of_two = len(plan.ranks) == 2 and not plan.is_forward_only
        if is_one_of_two and not codes(plan):
            files.append(str(tmp_path / f"{len(files)}.json"))
            write_plan(as_plan(plan), files[-1])
    found = run_ranks(hop_in_turn, 2, files, seconds=RUNS).results()
    assert max(map(max, found)) <= 1e-9


#: Rank 0 sends a gradient behind the end of weights, at which it waits until the gradient of these is
#: received; rank 1 receives that behind the other one.
HELD = (
    "3RECV_WEIGHTS 3RECV_F0 3F0 3B0 3SEND_GRADIENTS 3RESHARD 3SEND_B0",
    "0F0 1SEND_WEIGHTS 2F0 2SEND_F0 1F0 1B0 0B0 2RECV_B0 2B0 1RECV_GRADIENTS",
)


def held(*ranks: str) -> Plan:
    """Such a plan, of two pipelines of two stages."""
    pipelines = (layout.Pipeline("a", 0, 2, 1), layout.Pipeline("b", 2, 4, 1))
    of_plan = layout.Layout((1, 1, 1, 0), pipelines)
    return as_plan(written(*ranks, layout=of_plan, transport="gloo"))


def hop_as_written(ranks: tuple[str, ...]) -> float:
    """Run such a plan, which nobody has proved."""
    return hop(held(*ranks))


def test_what_stands_behind_the_end_of_weights_hangs_with_it(run_ranks: Run) -> None:
    """Without the wait, it ends."""
    assert codes(held(*HELD)) == {"deadlock"}
    outcome = run_ranks(hop_as_written, 2, HELD, seconds=HANGS)
    assert outcome.has_started()
    assert outcome.codes == [None, None]
    right = (HELD[0].replace("3RESHARD 3SEND_B0", "3SEND_B0 3RESHARD"), HELD[1])
    assert not codes(held(*right))
    found = run_ranks(hop_as_written, 2, right, seconds=RUNS).results()
    assert max(found) <= 1e-9


def test_wrong_gradients_and_hangs_are_seen(launch: Launcher) -> None:
    """Microbatches received for one another: where messages come in order, that trains wrong; with
    tags it is right.
    """
    right = next(
        each for each in gallery(((2, 2),)) if Path(each.source.path).stem == "gpipe"
    )
    text = right.ranks[1].text()
    assert text.startswith("1RECV_F0 1F0 1RECV_F1 1F1")
    swapped = text.replace("1RECV_F0 1F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0")
    wrong = evolve(
        right,
        ranks=(right.ranks[0], parse_actions(swapped, list(right.ranks[1].source))),
    )
    assert max(map(max, launch("blocking", [right], RUNS).differences)) < 1e-9
    assert max(map(max, launch("blocking", [wrong], RUNS).differences)) > 0.01
    assert max(map(max, launch("gloo", [wrong], RUNS).differences)) < 1e-9
