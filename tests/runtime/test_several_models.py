"""Several models in one plan, on real processes: each is what it is when it is trained alone."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes import python
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import (
    Pipeline,
    add_loss,
    added_losses,
    load_model,
    load_optimizers,
    split,
)
from schedlang.schedule.layout import Layout
from tests.support.models import difference

pytestmark = pytest.mark.processes

ROWS = 2
WIDTH = 6
STEPS = 10
#: The models of a plan, each as its stages.
Models = dict[str, list[nn.Module]]
#: Runs all models on a microbatch of each, and gives their losses and other results.
Alone = Callable[
    [Models, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]
]


class Judged(nn.Module):
    """The last stage of a model that is kept near what another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), other


def near(output: Sequence[Tensor], target: Tensor) -> Tensor:
    own, other = output
    return nn.functional.mse_loss(own, target) + nn.functional.mse_loss(own, other)


def stages_of(plan: Plan, judged: str | None = None) -> Models:
    """The models of a plan, the same on all ranks, frozen where the plan has them so; one may be
    `judged` by another.
    """
    torch.manual_seed(0)
    layout = plan.layout
    models: Models = {}
    for pipeline in layout.pipelines:
        models[pipeline.name] = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
            for _ in range(pipeline.start, pipeline.stop)
        ]
    if judged is not None:
        models[judged][-1] = Judged()
    for stage in layout.frozen:
        pipeline = layout.pipeline_of[stage]
        models[pipeline.name][stage - pipeline.start].requires_grad_(False)
    return models


def batch(layout: Layout, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and targets of each model; those with as many microbatches have the same inputs."""
    inputs = {}
    targets = {}
    for number, pipeline in enumerate(layout.pipelines):
        generator = torch.Generator().manual_seed(seed)
        shape = pipeline.microbatches * ROWS, WIDTH
        inputs[pipeline.name] = torch.randn(
            *shape, generator=generator, dtype=torch.float64
        )
        # Targets differ by model, inputs do not.
        generator.manual_seed(seed + 100 * number)
        targets[pipeline.name] = torch.randn(
            *shape, generator=generator, dtype=torch.float64
        )
    return inputs, targets


def through(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def judged_by(other: str, own: str) -> Alone:
    """One model beside another that it is kept near; more are trained for themselves."""

    def alone(
        models: Models, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        losses = {}
        for name in inputs:
            if name == own:
                *stages, last = models[own]
                with torch.no_grad():
                    given = through(models[other], inputs[other])
                losses[own] = near(
                    last(through(stages, inputs[own]), given), targets[own]
                )
            elif name != other:
                output = through(models[name], inputs[name])
                losses[name] = nn.functional.mse_loss(output, targets[name])
        return losses

    return alone


def train(
    plan: Plan, other: str, own: str, with_outputs: bool = False
) -> dict[str, Any]:
    """What ten steps give with the plan, and in one process: losses and weights, and how far they
    are from each other.
    """
    layout = plan.layout
    models = stages_of(plan, own)
    whole = stages_of(plan, own)
    alone = judged_by(other, own)
    mine = plan.stages_of(dist.get_rank())
    stages = {}
    for stage in mine:
        pipeline = layout.pipeline_of[stage]
        stages[stage] = models[pipeline.name][stage - pipeline.start]
    losses = {
        each.name: nn.functional.mse_loss
        for each in layout.pipelines
        if each.name != other
    }
    losses[own] = near
    # Only these are trained.
    makers = {own: torch.optim.AdamW, "critic": torch.optim.SGD}
    optimizers = {}
    others = []
    for stage in filter(layout.trains, mine):
        make = makers[layout.model_of(stage)]
        optimizers[stage] = make(stages[stage].parameters(), lr=0.01)
    for name, parts in whole.items():
        if name in makers:
            weights = [weight for part in parts for weight in part.parameters()]
            others.append(makers[name](weights, lr=0.01))
    updates = plan.has_updates
    pipeline = Pipeline(
        plan, stages, losses, optimizers=optimizers if updates else None
    )
    found: list[float] = []
    names: set[str] = set()
    for step in range(STEPS):
        inputs, targets = batch(layout, step)
        assert pipeline.step(inputs, targets, return_outputs=with_outputs) == (
            (None, None) if with_outputs else None
        )
        named = pipeline.named_losses()
        right: dict[str, list[Tensor]] = {}
        parts = {
            each.name: (
                inputs[each.name].chunk(each.microbatches),
                targets[each.name].chunk(each.microbatches),
                each.microbatches,
            )
            for each in layout.pipelines
        }
        for number in range(max(count for _, _, count in parts.values())):
            # A model with fewer microbatches is done before others.
            here = {name: each for name, each in parts.items() if number < each[2]}
            for name, loss in alone(
                whole,
                {name: values[number] for name, (values, _, _) in here.items()},
                {name: values[number] for name, (_, values, _) in here.items()},
            ).items():
                (loss / parts[name][2]).backward()
                right.setdefault(name, []).append(loss.detach())
        assert named.keys() == {f"{name}.loss" for name in right}
        for name, each in right.items():
            found.append(abs(named[f"{name}.loss"] - float(torch.stack(each).mean())))
            if name in pipeline.losses:
                names.add(name)
                found.append(difference(pipeline.losses[name], torch.stack(each)))
        for optimizer in [*([] if updates else optimizers.values()), *others]:
            optimizer.step()
            optimizer.zero_grad()
    for stage, module in stages.items():
        pipeline_of = layout.pipeline_of[stage]
        other_module = whole[pipeline_of.name][stage - pipeline_of.start]
        for weight, expected in zip(
            module.parameters(), other_module.parameters(), strict=True
        ):
            found.append(difference(weight.detach(), expected.detach()))
    return {"worst": max(found), "losses": sorted(names)}


def teacher_and_student() -> list[dict[str, Any]]:
    """The gallery's program, at two depths of the teacher."""
    return [
        train(
            compile(
                PROGRAMS / "distillation.sched",
                {"microbatches": 4, "teachers": teachers},
            ),
            "teacher",
            "student",
        )
        for teachers in (2, 4)
    ]


def test_a_frozen_teacher_beside_its_student(run_ranks: Run) -> None:
    results = run_ranks(teacher_and_student, 4).results()
    for found in results:
        assert [each["worst"] for each in found] == [0.0, 0.0]
    assert [each["losses"] for each in results[3]] == [["student"], ["student"]]


def actor_and_critic() -> dict[str, Any]:
    """Three models, two of which train, with other optimizers and numbers of microbatches."""
    plan = compile(PROGRAMS / "rlhf.sched", {"critic_microbatches": 3})
    return train(plan, "reference", "actor", with_outputs=True)


def test_actor_critic_and_reference(run_ranks: Run) -> None:
    results = run_ranks(actor_and_critic, 4).results()
    assert max(each["worst"] for each in results) == 0.0
    assert [each["losses"] for each in results] == [[], [], ["critic"], ["actor"]]


#: GPipe, with the teacher on all ranks.
GPIPE = """schedule gpipe_of_two {
    param ranks = 4
    param microbatches = 4
    model teacher runs microbatches stage s in 0 .. ranks on s
    model student runs microbatches stage s in 0 .. ranks on s
    edge s in 0 .. 1 from teacher(ranks - 1) to student(ranks - 1)
    frozen teacher
    rank r {
        repeat microbatches { F(teacher(r), next) }
        repeat microbatches { F(student(r), next) }
        repeat microbatches { B(student(r), next) }
    }
}"""


def llamas(folder: Path) -> list[float]:
    """How far the losses of a small Llama are from those of one process: ten steps, of which the
    second half goes on from a folder under another schedule.
    """

    class Llama(LlamaForCausalLM):
        """With the teacher's scores, if it is given them."""

        def forward(self, tokens: Tensor, teacher: Tensor | None = None) -> Tensor:
            scores: Tensor = super().forward(tokens, use_cache=False).logits
            if teacher is not None:
                wanted = teacher.log_softmax(-1)
                distance = nn.functional.kl_div(
                    scores.log_softmax(-1), wanted, log_target=True
                )
                add_loss("distance", distance, weight=0.5)
            return scores

    def llama(seed: int, layers: int) -> Llama:
        torch.manual_seed(seed)
        return Llama(
            LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=8,
            )
        )

    def loss_of(scores: Tensor, following: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    blocks = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
    teacher = llama(0, 4).requires_grad_(False)
    student = llama(1, 3)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    found = []
    plans = [
        compile(PROGRAMS / "distillation.sched", {"microbatches": 4}),
        compile(Source("gpipe_of_two.sched", GPIPE)),
    ]
    for half, plan in enumerate(plans):
        # The weights come from the folder, but for the first time.
        seeds = (0, 1) if half == 0 else (2, 3)
        of_teacher = split(
            llama(seeds[0], 4).requires_grad_(False), plan, blocks, stages="teacher"
        )
        of_student = split(llama(seeds[1], 3), plan, blocks, stages="student")
        optimizers = [
            torch.optim.AdamW(each.parameters(), lr=0.01)
            for each in of_student.values()
        ]
        pipeline = Pipeline(plan, of_teacher | of_student, {"student": loss_of})
        if half:
            assert load_model(folder / "teacher", of_teacher) == STEPS // 2
            assert load_model(folder / "student", of_student) == STEPS // 2
            load_optimizers(folder / "student", of_student, optimizers)
        for step in range(STEPS // 2):
            generator = torch.Generator().manual_seed(half * STEPS + step)
            tokens = torch.randint(32, (8, 9), generator=generator)
            inputs = tokens[:, :-1]
            following = tokens[:, 1:]
            pipeline.step(
                {"teacher": inputs, "student": inputs}, {"student": following}
            )
            named = pipeline.named_losses()
            right = []
            distances = []
            for given, wanted in zip(inputs.chunk(4), following.chunk(4), strict=True):
                with torch.no_grad():
                    scores = teacher(given)
                with added_losses() as added:
                    loss = loss_of(student(given, scores), wanted)
                ((loss + added.total) / 4).backward()
                right.append(float(loss))
                distances.append(float(added["distance"]))
            found.append(abs(named["student.loss"] / (sum(right) / 4) - 1))
            found.append(abs(named["student.distance"] / (sum(distances) / 4) - 1))
            for each in (*optimizers, optimizer):
                each.step()
                each.zero_grad()
        if not half:
            pipeline.save_model(folder, STEPS // 2, optimizers)
    return found


def test_a_llama_learns_from_another_and_goes_on_under_another_schedule(
    run_ranks: Run, tmp_path: Path
) -> None:
    for found in run_ranks(llamas, 4, tmp_path / "models").results():
        assert len(found) == 2 * STEPS
        assert max(found) < 1e-5
    index = tmp_path / "models" / "student" / "model.safetensors.index.json"
    assert "model.layers.2.mlp.up_proj.weight" in index.read_text()


#: A frozen reference that hands on to none, beside two models of other sizes and numbers of
#: microbatches.
THREE = """schedule three {
    param ranks = 2
    param microbatches = 3
    model actor     runs microbatches stage s in 0 .. ranks on s
    model reference runs 2            stage s in 0 .. ranks on s
    model critic    runs 4            stage s in 0 .. 1 on 0
    frozen reference
    rank r {
        repeat microbatches { F(actor(r), next) }
        repeat 2 { F(reference(r), next) }
        if r == 0 { repeat 4 { F(critic(0), next)  B(critic(0), next) } }
        repeat microbatches { B(actor(r), next) }
    }
}"""


def apart() -> dict[str, Any]:
    """What a script does with models one by one: the outputs of the frozen one, norms, evaluations
    of unequal numbers of rows.
    """
    plan = compile(Source("three.sched", THREE))
    layout = plan.layout
    models = stages_of(plan)
    whole = stages_of(plan)
    stages = {}
    for stage in plan.stages_of(dist.get_rank()):
        pipeline_of = layout.pipeline_of[stage]
        stages[stage] = models[pipeline_of.name][stage - pipeline_of.start]
    mse = nn.functional.mse_loss
    pipeline = Pipeline(plan, stages, {"actor": mse, "critic": mse})
    inputs, targets = batch(layout, 0)
    pipeline.step(inputs, {name: targets[name] for name in ("actor", "critic")})
    worst = [0.0]
    for outputs in pipeline.outputs.values():
        expected = through(whole["reference"], inputs["reference"])
        worst.append(difference(torch.cat(outputs), expected))
    found: dict[str, Any] = {
        "names": sorted(pipeline.named_losses()),
        "losses": sorted(pipeline.losses),
        "outputs": {name: len(outputs) for name, outputs in pipeline.outputs.items()},
    }
    # In one process, each model has a norm of its own.
    for name in ("actor", "critic"):
        mse(through(whole[name], inputs[name]), targets[name]).backward()
        weights = [weight for part in whole[name] for weight in part.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(weights, 0.01)
        worst.append(abs(float(pipeline.clip_grad_norm_(0.01, model=name) - norm)))
    for stage, module in stages.items():
        pipeline_of = layout.pipeline_of[stage]
        part = whole[pipeline_of.name][stage - pipeline_of.start]
        for weight, other in zip(module.parameters(), part.parameters(), strict=True):
            if weight.grad is not None and other.grad is not None:
                worst.append(difference(weight.grad, other.grad))
    # Of the critic there are more rounds than of the others.
    # With two rows a microbatch: 2, 3 and 6 microbatches, of which the last one may be smaller.
    rows = {"reference": 3, "actor": 5, "critic": 11}
    given = {
        name: torch.rand(count, WIDTH, dtype=torch.float64)
        for name, count in rows.items()
    }
    pipeline.evaluate(given, {"actor": given["actor"]}, rows=2)
    for name, outputs in pipeline.outputs.items():
        expected = through(whole[name], given[name]).detach()
        if name != "actor":
            worst.append(difference(torch.cat(outputs), expected))
    found["evaluated"] = {
        name: len(outputs) for name, outputs in pipeline.outputs.items()
    }
    return found | {"worst": max(worst)}


def test_models_by_themselves(run_ranks: Run) -> None:
    first, last = run_ranks(apart, 2).results()
    assert first["names"] == last["names"] == ["actor.loss", "critic.loss"]
    assert (first["losses"], first["outputs"]) == (["critic"], {})
    assert (last["losses"], last["outputs"]) == (["actor"], {"reference": 2})
    assert (first["evaluated"], last["evaluated"]) == (
        {"critic": 6},
        {"reference": 2, "actor": 3},
    )
    assert max(first["worst"], last["worst"]) < 1e-15


#: An encoder that hands on to the first stage of a decoder.
ENCODER = """schedule encoder_and_decoder {
    param ranks = 2
    param microbatches = 4
    let deep = max(ranks / 2, 1)
    model encoder runs microbatches stage s in 0 .. deep on s
    model decoder runs microbatches stage s in 0 .. ranks on s
    edge s in 0 .. 1 from encoder(deep - 1) to decoder(0)
    rank r {
        repeat microbatches { if r < deep { F(encoder(r), next) } }
        repeat microbatches { F(decoder(r), next) }
        repeat microbatches { B(decoder(r), next) }
        repeat microbatches { if r < deep { B(encoder(r), next) } }
    }
}"""


class Decoder(nn.Module):
    """The first stage of a model that looks at what another one makes: at its tokens as well, or at
    nothing else.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.alone = alone

    def forward(self, own: Tensor, encoded: Tensor) -> Tensor:
        return self.layer(encoded if self.alone else own * 2 + encoded).tanh()


def mine(plan: Plan, models: Models) -> dict[int, nn.Module]:
    """The stages of this rank."""
    parts = [part for stages in models.values() for part in stages]
    return {stage: parts[stage] for stage in plan.stages_of(dist.get_rank())}


def decode(alone: bool) -> float:
    """How far a step is from one process, with inputs for the decoder, or with none to speak of."""
    plan = compile(Source("encoder.sched", ENCODER))
    models = stages_of(plan)
    models["decoder"][0] = Decoder(alone)
    whole = copy.deepcopy(models)
    layout = plan.layout
    stages = mine(plan, models)
    inputs, targets = batch(layout, 0)
    inputs["encoder"] = inputs["encoder"].flip(0)
    if alone:
        inputs["decoder"] = torch.empty(len(inputs["decoder"]), 0)
    pipeline = Pipeline(plan, stages, {"decoder": nn.functional.mse_loss})
    pipeline.step(inputs, targets)
    first, *others = whole["decoder"]
    output = first(inputs["decoder"], through(whole["encoder"], inputs["encoder"]))
    loss = nn.functional.mse_loss(through(others, output), targets["decoder"])
    loss.backward()
    parts = [*whole["encoder"], *whole["decoder"]]
    return max(
        difference(own.grad, other.grad)
        for stage, module in stages.items()
        for own, other in zip(
            module.parameters(), parts[stage].parameters(), strict=True
        )
    )


@pytest.mark.parametrize("alone", [False, True])
def test_a_first_stage_takes_inputs_and_what_another_model_makes(
    run_ranks: Run, alone: bool
) -> None:
    assert max(run_ranks(decode, 2, alone).results()) < 1e-15


@pytest.mark.parametrize(
    ("sizes", "options"),
    [(["-p", "ranks=2"], []), (["-p", "ranks=3"], ["--unequal"])],
)
def test_the_command_trains_an_encoder_before_its_decoder(
    tmp_path: Path, sizes: list[str], options: list[str]
) -> None:
    program = tmp_path / "encoder.sched"
    program.write_text(ENCODER)
    command = ["-m", "schedlang", "run", program, *sizes, "--steps", "2"]
    command += ["--check", "--json"]
    done = python(*command, *options)
    assert done.returncode == 0, done.stderr
    checked = json.loads(done.stdout.splitlines()[-1])
    assert checked["loss_error"] < 1e-6
    assert checked["gradient_error"] < 1e-6


def without_inputs() -> None:
    plan = compile(Source("encoder.sched", ENCODER))
    models = stages_of(plan)
    layout = plan.layout
    stages = mine(plan, models)
    inputs, targets = batch(layout, 0)
    del inputs["decoder"]
    pipeline = Pipeline(plan, stages, {"decoder": nn.functional.mse_loss})
    pipeline.step(inputs, targets)


def test_a_first_stage_without_inputs_is_named_with_its_model(run_ranks: Run) -> None:
    said = "\n".join(run_ranks(without_inputs, 2).logs)
    assert (
        "there are no `inputs` for stage 0 of the model `decoder`, which is on this rank and takes "
        "them, before what stage 0 of the model `encoder` makes: give `inputs={'decoder': …}`"
    ) in said


def without_names(what: str) -> None:
    plan = compile(Source("three.sched", THREE))
    layout = plan.layout
    models = stages_of(plan)
    stages = {}
    for stage in plan.stages_of(dist.get_rank()):
        pipeline_of = layout.pipeline_of[stage]
        stages[stage] = models[pipeline_of.name][stage - pipeline_of.start]
    mse = nn.functional.mse_loss
    if what == "loss":
        Pipeline(plan, stages, {"teacher": mse})
    pipeline = Pipeline(plan, stages, mse)
    inputs, targets = batch(layout, 0)
    if what == "inputs":
        pipeline.step(inputs["actor"], targets)
    pipeline.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "loss",
            "`loss_fn` is for ['teacher'], and the plan has the models actor, reference",
        ),
        (
            "inputs",
            "so `inputs` must be a dictionary with those of each, by name; it is a Tensor",
        ),
        ("norm", "and each has a norm of its own: clip one after the other"),
    ],
)
def test_what_is_for_one_model_is_refused(run_ranks: Run, what: str, said: str) -> None:
    assert said in "\n".join(run_ranks(without_names, 2, what).logs)
