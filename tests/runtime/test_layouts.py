"""Layouts as other trainers give them, and stages without blocks: read, refused, and trained as in
one process.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import nn

from schedlang.runtime import EvenLayers, Pipeline, PipelineError, split
from schedlang.runtime.model.layouts import StageLayout, cuts_of
from tests.support.cut_models import ROWS, alone, gradients, sequence
from tests.support.models import OPTIMIZERS, difference, program
from tests.support.ranks import Run


def llm(layers: int, further: int = 0) -> list[str]:
    """The blocks of a language model, as torchtitan names them."""
    predict = [f"mtp.{layer}" for layer in range(further)]
    return [
        "tok_embeddings",
        *(f"layers.{layer}" for layer in range(layers)),
        *predict,
        "norm",
        "lm_head",
    ]


def sizes(layout: StageLayout, blocks: Sequence[str], stages: int) -> list[int]:
    """How many blocks each stage has."""
    cuts = cuts_of(layout, blocks, stages)
    return [stop - start for start, stop in pairwise(cuts)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # The examples of Megatron-LM, with as many layers as each is for.
        ("E|t*3|(t|)*4,m|L", [1, 3, 1, 1, 1, 1, 1, 2]),
        ("Et*3|(tt|)*29,m|L", [4, *[2] * 29, 1, 2]),
        ("E|(t|)*3,m|m||L", [1, 1, 1, 1, 1, 1, 0, 2]),
        ("Ettt|(tt|)*2,m|L", [4, 2, 2, 1, 2]),
        # What is multiplied stands side by side, also across stages.
        ("E,(t|t|tt)*2,|L", [2, 1, 3, 1, 2, 2]),
        ("E(|t)*3|*3L", [1, 1, 1, 1, 0, 0, 2]),
        ("E t*0 t | L", [2, 2]),
        ("EtttL", [6]),
    ],
)
def test_letters(layout: str, expected: list[int]) -> None:
    # The layout written out, to count its layers: first groups, then letters.
    flat = re.sub(r"\(([^)]+)\)\*(\d+)", lambda group: group[1] * int(group[2]), layout)
    flat = re.sub(r"(.)\*(\d+)", lambda letter: letter[1] * int(letter[2]), flat)
    blocks = llm(flat.count("t"), flat.count("m"))
    assert sizes(layout, blocks, len(expected)) == expected


def test_letters_of_other_models() -> None:
    """What is before the layers is E, what is behind them L, and may be several blocks, or none."""
    blocks = [
        "tokens",
        "positions",
        *(f"layers.{layer}" for layer in range(4)),
        "norm",
        "head",
    ]
    assert sizes("E|tt|ttL", blocks, 3) == [2, 2, 4]
    assert sizes("E|tt|ttL", list("0123"), 3) == [0, 2, 2]


@pytest.mark.parametrize(
    ("layout", "what", "caret"),
    [
        ("E|t*3|x|L", "`x`, where there is E (the embedding), t (layers)", 6),
        ("E|t*3|(t|L", "`(` without a `)` behind it", 6),
        ("E|(t|)4,t|L", "a group without `*` and a number behind it: `(tt|)*4`", 2),
        ("E|(t|(t|)*2)*2|L", "`(`, where there is", 5),
        ("Ett)*2|L", "`)`, where there is", 3),
        ("E|t*|L", "`*` without a number behind it", 3),
        ("*3E|L", "`*`, where there is", 0),
        ("E|t*999999|L", "more than 100,000 letters", 3),
        ("E|t*5|L", "5 `t`, layers, where the model has 4", 2),
        ("E|tt|L", "2 `t`, layers, where the model has 4", 5),
        ("tttt|L", "0 `E`, the embedding, where the model has 1", 0),
        ("E|tttt|", "0 `L`, the output, where the model has 1", 7),
        ("E|ttEtt|L", "`E` behind `t`: they come as E, t, m, L", 4),
        ("E|tttt|m|L", "1 `m`, layers of a second list, where the model has 0", 7),
        ("", "0 `E`, the embedding, where the model has 1", 0),
    ],
)
def test_letters_that_are_no_layout(layout: str, what: str, caret: int) -> None:
    """The message shows the place."""
    with pytest.raises(PipelineError) as caught:
        cuts_of(layout, llm(4), 3)
    first, text, mark = str(caught.value).split("\n")
    assert first.startswith(f"`layout` has {what}")
    assert (text, mark) == (f"  {layout}", f"  {' ' * caret}^")


def test_names_of_layers_are_letters() -> None:
    """As a configuration of Megatron-LM has them; a model may call its own blocks so."""
    named = [
        ["embedding", "decoder"],
        ["decoder"] * 2,
        [],
        ["decoder", "mtp"],
        ["loss"],
    ]
    assert sizes(named, llm(4, 1), 5) == sizes("Et|tt||tm|L", llm(4, 1), 5)
    assert sizes([["embedding"], ["decoder"], ["loss"]], llm(1), 3) == [1, 1, 2]
    own = ["embedding", "decoder.0", "decoder.1", "loss"]
    assert sizes([["embedding"], ["decoder", "loss"]], own, 2) == [1, 3]
    assert sizes([["embedding", "decoder"], ["decoder", "loss"]], own, 2) == [2, 2]
    with pytest.raises(PipelineError, match="2 `t`, layers, where the model has 4"):
        cuts_of([["embedding", "decoder"], ["decoder", "loss"]], llm(4), 2)


def test_names() -> None:
    """As torchtitan has them; in a stage in any order, and a list of modules by its name."""
    named = [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        [],
        ["layers.3", "layers.2", "norm", "lm_head"],
    ]
    assert sizes(named, llm(4), 4) == [2, 1, 0, 4]
    assert sizes([["tok_embeddings"], ["layers"], ["lm_head", "norm"]], llm(4), 3) == [
        1,
        4,
        2,
    ]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            [["tok_embeddings"], ["layers.9"], ["norm", "lm_head"]],
            "`layout` has `layers.9` in stage 1, which is no block: did you mean `layers.",
        ),
        (
            [["xxx"]],
            "`layout` has `xxx` in stage 0, which is no block: they are `tok_embeddings`, `layers.0`, `layers.1`, …, `norm`, `lm_head`",
        ),
        (
            [["tok_embeddings", "layers"], ["layers.2", "norm", "lm_head"]],
            "`layout` has `layers.2` twice, in stage 0 and in stage 1: a block is in one stage",
        ),
        (
            [
                ["tok_embeddings", "layers.0"],
                ["layers.2", "layers.3", "norm", "lm_head"],
            ],
            "`layout` has no `layers.1`, one of the blocks of the model: name it in a stage",
        ),
        (
            [
                ["tok_embeddings", "layers.0", "layers.2"],
                ["layers.1", "layers.3", "norm", "lm_head"],
            ],
            "`layout` has `layers.1` in stage 1 and `layers.2` in stage 0, and the model calls `layers.1` first",
        ),
        (
            [["tok_embeddings", "layers"], ["norm"], ["lm_head"]],
            "`layout` has 3 stages, the plan cuts the model into 2: give as many",
        ),
        (
            EvenLayers(layers_per_stage=2),
            "4 layers and 1 + 1 make 3 stages at 2 for each, the plan cuts the model into 2: give another `layers_per_stage`, or another plan",
        ),
        (
            EvenLayers(6, 1),
            "`first_stage_less` is 6, where 4 layers and 6 + 1 are 5 for each of 2 stages: give 5 at most",
        ),
    ],
)
def test_layouts_that_do_not_fit(layout: StageLayout, message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        cuts_of(layout, llm(4), 2)


#: Stages, layers, less in the first and in the last one: layers by stage, from torchtitan 0.3.0.
EVEN = [
    (4, 8, 1, 1, [2, 3, 2, 1]),
    (4, 16, 1, 1, [4, 5, 4, 3]),
    (2, 3, 2, 2, [2, 1]),
    (8, 61, 1, 2, [7, 8, 8, 8, 8, 8, 8, 6]),
    (4, 8, 0, 0, [2, 2, 2, 2]),
    (3, 4, 2, 2, [1, 3, 0]),
    (1, 6, 1, 1, [6]),
]


@pytest.mark.parametrize(("stages", "layers", "first", "last", "expected"), EVEN)
def test_layers_by_number(
    stages: int, layers: int, first: int, last: int, expected: list[int]
) -> None:
    # Beside the layers, the first stage has the embedding, and the last one the norm and the
    # output.
    expected[0] += 1
    expected[-1] += 2
    assert sizes(EvenLayers(first, last), llm(layers), stages) == expected


def test_layers_that_are_none() -> None:
    with pytest.raises(
        PipelineError, match="`layout` counts layers, and `blocks` has none"
    ):
        cuts_of(EvenLayers(), ["embedding", "body", "head"], 2)
    with pytest.raises(PipelineError, match="two lists of layers, `blocks` has 3"):
        cuts_of("EtL", ["a.0", "b.0", "c.0"], 1)
    with pytest.raises(
        ValueError, match="`first_stage_less` is -1: it must be a whole number from 0"
    ):
        EvenLayers(-1)
    with pytest.raises(ValueError, match="`layers_per_stage` is 0"):
        EvenLayers(layers_per_stage=0)


def test_what_is_no_layout() -> None:
    plan = program("1f1b", ranks=2)
    for wrong in (3, ["0", "1"], [["0"], [1]], {"0": 1}):
        with pytest.raises(TypeError, match="layout"):
            split(sequence(), plan, layout=wrong, rank=0)


def test_how_even_a_layout_is() -> None:
    """In costs and in weights, and beside the most even split."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    plan = program("1f1b", ranks=4)
    stages = split(
        model, plan, layout=[["0", "1", "2"], ["3", "4"], [], ["5", "6", "7"]], rank=0
    )
    assert str(stages) == (
        "stage 0 on rank 0: 0 to 2, 37.5% of the work, 60 weights\n"
        "stage 1 on rank 1: 3 to 4, 25.0% of the work, 40 weights\n"
        "stage 2 on rank 2: no block, 0.0% of the work, 0 weights\n"
        "stage 3 on rank 3: 5 to 7, 37.5% of the work, 60 weights\n"
        "stage 0 has 50.0% more weights than an even share\n"
        "stage 0 limits: it has 50.0% more than an even share, and the most even split 0.0%\n"
        "rank 0 works 50.0% more than an even share"
    )
    few = nn.Sequential(nn.Linear(4, 4))
    assert "there are not enough blocks for all stages" in str(
        split(few, plan, layout="E|t||L", rank=0)
    )


#: A Sequential of 13 blocks in 4 or 8 stages, some of which have none.
WITH_EMPTY = {
    "1f1b": [[], [*"0123456"], [], ["7", "8", "9", "10", "11", "12"]],
    "interleaved_1f1b": [
        [*"012"],
        [],
        [*"345"],
        ["6"],
        ["7", "8"],
        ["9"],
        ["10", "11", "12"],
        [],
    ],
    "zb_v": "E|t*2|(tt|)*2|t*5|t*2|L",
    "zb_h1": EvenLayers(3, 3),
    "dualpipe": [[*"0123456"], [], [], ["7", "8", "9", "10", "11", "12"]],
    "1f1b_recompute": [["0"], [], [*"123456789"], ["10", "11", "12"]],
}


def with_empty_stages() -> dict[str, float]:
    """A Sequential under schedules of all kinds: how far losses and gradients of two steps are from
    those of one process, with clipping and an update between them.
    """
    inputs, targets = torch.randn(
        2, 8 * ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = {}
    for name, layout in WITH_EMPTY.items():
        plan = program(name, ranks=4, microbatches=8)
        reference = sequence()
        stages = split(sequence(), plan, layout=layout)
        pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
        worst = 0.0
        weights = [weight for stage in stages.values() for weight in stage.parameters()]
        optimizers = [OPTIMIZERS["adamw"](weights)] if weights else []
        optimizers.append(OPTIMIZERS["adamw"](list(reference.parameters())))
        for _ in range(2):
            expected = alone(reference, nn.functional.mse_loss, inputs, targets)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            losses = pipeline.step(inputs, targets)
            pipeline.clip_grad_norm_(0.1)
            # Of two pipelines, each has the losses of its own microbatches.
            if losses is not None and len(losses) == len(expected):
                worst = max(worst, difference(losses, expected))
            worst = max(
                [worst, *(difference(*each) for each in gradients(stages, reference))]
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[name] = worst
    return found


@pytest.mark.processes
def test_stages_without_blocks_train_as_one_process(run_ranks: Run) -> None:
    for found in run_ranks(with_empty_stages, 4).results():
        assert found.keys() == WITH_EMPTY.keys()
        assert max(found.values()) < 1e-12, found


#: Plans that update their stages themselves; with stages that have no weights, and with none such.
UPDATED = {
    "pipedream_2bw": [["0", "1"], [], [*"23456789"], ["10", "11", "12"]],
    "pipedream_vertical": [[], ["0", "1"], [*"23456789", "10", "11", "12"], []],
    "pipedream_replicated": [[str(block) for block in range(13)], []],
}


def updates_of_empty_stages() -> dict[str, float]:
    """How far the losses are from those of the most even split, of which every stage has weights."""
    found = {}
    for name, layout in UPDATED.items():
        # Of replicas, both stages have two; gradients of replicas are not clipped.
        has_replicas = name == "pipedream_replicated"
        plan = program(name, **({"ranks": 4, "first": 2} if has_replicas else {}))
        max_norm = None if has_replicas else 0.1
        inputs, targets = torch.randn(
            2,
            plan.microbatches * ROWS,
            8,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(1),
        )
        all_losses = []
        for each in (layout, None):
            stages = split(sequence(), plan, layout=each)
            # Replicas on one rank are one module, and have one optimizer.
            of_module = {
                id(module): OPTIMIZERS["adamw"](weights)
                for module in stages.values()
                if (weights := list(module.parameters()))
            }
            optimizers = {
                stage: of_module[id(module)]
                for stage, module in stages.items()
                if id(module) in of_module
            }
            pipeline = Pipeline(
                plan,
                stages,
                nn.functional.mse_loss,
                optimizers=optimizers,
                max_norm=max_norm,
            )
            all_losses.append(pipeline.step(inputs, targets))
        found[name] = 0.0 if all_losses[0] is None else difference(*all_losses)
    return found


@pytest.mark.processes
def test_stages_without_weights_are_updated_too(run_ranks: Run) -> None:
    """Without an optimizer, since torch has none for no weights."""
    for found in run_ranks(updates_of_empty_stages, 4).results():
        assert found.keys() == UPDATED.keys()
        assert max(found.values()) < 1e-12, found
