"""Keyword arguments of a step, which are cut into microbatches as the inputs are."""

import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.runtime import Pipeline
from schedlang.runtime.announcement import Rows
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.keywords import Keywords, with_options
from tests.support.models import WIDTH, difference, pipeline, program, replicated
from tests.support.ranks import Run

PLANS: dict[str, dict[str, int]] = {
    "1f1b": {"microbatches": 4},
    "zb_v": {"microbatches": 4},
    "1f1b_recompute": {"microbatches": 4},
    "gems": {"microbatches": 4},
}


class Masked(nn.Module):
    """A layer whose output is masked by row, moved and scaled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, x: Tensor, *, mask: Tensor, moved: Any, scale: float = 1.0
    ) -> Tensor:
        by, wide = moved
        assert by.shape == x.shape[:1]
        y: Tensor = self.layer(x) * mask * scale + by[:, None] + wide["wide"]
        return y


def masked(plan_name: str) -> float:
    """The largest difference of losses, outputs and gradients from one process."""
    plan = program(plan_name, ranks=2, **PLANS[plan_name])
    model = replicated(plan)
    for number, each in enumerate(model):
        model[number] = Masked(each)
    ours = pipeline(plan, model)
    alone = [Masked(each) for each in replicated(plan)[: plan.layout.pieces]]
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    rows = 12
    inputs, targets, mask = draw(3, rows, WIDTH)
    keywords = {
        "mask": mask,
        "moved": (draw(rows), {"wide": draw(rows, WIDTH)}),
        "scale": 0.5,
    }

    def expected(size: int) -> list[Tensor]:
        y = inputs
        for each in alone:
            y = each(y, **keywords)
        return [*y.split(size)]

    worst = []
    # In rounds of which the last one is short, and in one round.
    for of_microbatch in (2, 5):
        evaluated = ours.evaluate(inputs, rows=of_microbatch, **keywords)
        right = expected(of_microbatch)
        if evaluated is not None and len(plan.layout.pipelines) == 1:
            pairs = zip(evaluated, right, strict=True)
            worst += [difference(*pair) for pair in pairs]
    losses = ours.step(inputs, targets, **keywords)
    pairs = zip(expected(3), targets.split(3), strict=True)
    right = [nn.functional.mse_loss(*pair) for pair in pairs]
    (sum(right) / 4).backward()
    if losses is not None and len(plan.layout.pipelines) == 1:
        worst.append(difference(losses, torch.stack(right)))
    for stage in ours.parameters():
        assert stage.grad is not None
    for number in range(len(plan.placement)):
        own = model[number].layer[0].weight.grad
        if own is not None:
            other = alone[plan.layout.piece(number)].layer[0].weight.grad
            worst.append(difference(own, other))
    return max(worst)


@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_keyword_arguments_are_cut_as_inputs_are(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(masked, 2, name).results()) < 1e-12


def of_models() -> float:
    """Keyword arguments of one of two models; the other one takes none."""
    plan = program("distillation", ranks=2, microbatches=2)
    given = torch.arange(8.0).reshape(4, 2)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, *scores: Tensor, scale: Tensor) -> Tensor:
            return x * scale[:, None] * self.weight

    model: dict[int, nn.Module] = {}
    for stage in plan.stages_of(dist.get_rank()):
        name = plan.layout.model_of(stage)
        model[stage] = Scaled() if name == "student" else nn.Identity()
    ours = Pipeline(plan, model, {"student": nn.functional.mse_loss})
    inputs = {"teacher": given, "student": given}
    scale = torch.arange(4.0)
    ours.evaluate(inputs, scale={"student": scale})
    outputs = ours.outputs.get("student")
    if outputs is None:
        return 0.0
    return difference(torch.cat(outputs), given * scale[:, None] ** 2)


@pytest.mark.processes
def test_models_have_keyword_arguments_of_their_own(run_ranks: Run) -> None:
    assert run_ranks(of_models, 2).results() == [0.0, 0.0]


def wrong_name() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    inputs = torch.zeros(8, WIDTH, dtype=torch.float64)
    pipeline(plan, replicated(plan)).step(inputs, inputs, return_output=True)


@pytest.mark.processes
def test_a_name_that_no_module_takes_is_told(run_ranks: Run) -> None:
    run = run_ranks(wrong_name, 2)
    said = (
        r"rank 0 failed at 0F0 .*got an unexpected keyword argument 'return_output' "
        r"\(keyword arguments of `step` and `evaluate`, .* go to all modules of this rank"
    )
    assert any(re.search(said, log) for log in run.logs), run.logs
    assert run.codes == [1, 1]


#: Inputs of eight rows of five tokens.
TOKENS = torch.zeros(8, 5, dtype=torch.int64)


def cut_by(
    keywords: dict[str, Any], inputs: Any = TOKENS, has_slices: bool = False
) -> list[dict[str, Any]]:
    """Keyword arguments for four microbatches."""
    is_list = isinstance(inputs, list)
    rows = Rows(4, 1, is_list=True) if is_list else Rows(8, 2)
    sizes = [1] * 4 if is_list else [2] * 4
    return Keywords(rows, 0, inputs, has_slices).by_microbatch(keywords, 0, sizes)


def test_what_is_no_tensor_with_rows_is_the_same_for_all() -> None:
    scalar = torch.tensor(2.0)
    given = {"a": 3, "b": None, "c": (scalar, "text"), "d": torch.arange(8)}
    for number, each in enumerate(cut_by(given)):
        assert (each["a"], each["b"]) == (3, None)
        assert each["c"][0] is scalar
        assert each["c"][1] == "text"
        assert each["d"].tolist() == [2 * number, 2 * number + 1]


def test_a_list_goes_with_a_list_of_inputs() -> None:
    given = {"mask": ["a", "b", "c", "d"], "flag": True}
    cut = cut_by(given, [TOKENS] * 4)
    assert cut == [{"mask": each, "flag": True} for each in "abcd"]


#: What is refused: keyword arguments, inputs, whether there are slices, and what is told.
UNCLEAR: dict[str, tuple[Any, Any, bool, str]] = {
    "another size": (
        torch.zeros(5, 5),
        TOKENS,
        False,
        "`mask` is a tensor [5, 5], and the batch has 8 rows along dimension 0: it may be 8 rows, "
        "which are cut as those of `inputs`, or the same for all microbatches",
    ),
    "positions": (
        torch.zeros(8, 8),
        torch.zeros(8, 8, dtype=torch.int64),
        False,
        "`mask` is a tensor [8, 8], whose rows may be those of the batch or positions: it may be 8 "
        "rows, which are cut as those of `inputs`, or the same for all microbatches",
    ),
    "slices": (
        torch.zeros(8, 5),
        TOKENS,
        True,
        "`mask` is a tensor [8, 5], and the plan has slices: it may be cut into slices as `inputs` "
        "are, or the same for all microbatches",
    ),
    "a list": (
        [torch.zeros(2, 5)] * 4,
        TOKENS,
        False,
        "`mask` is a list of 4, and `inputs` are a batch in one piece: it may be a value for each "
        "microbatch, or the same for all microbatches",
    ),
    "in one piece": (
        torch.zeros(8, 5),
        [TOKENS[:2]] * 4,
        False,
        "`mask` is a tensor [8, 5], and `inputs` are a list of microbatches: it may be the "
        "arguments of all of them in one piece, or the same for all microbatches",
    ),
    "in a tuple": (
        (torch.zeros(8, 5), torch.zeros(1, 5)),
        TOKENS,
        False,
        "`mask` is a tensor [1, 5], and the batch has 8 rows along dimension 0",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_what_may_be_cut_or_not_is_refused(what: str) -> None:
    """With both readings, and the way out."""
    mask, inputs, has_slices, told = UNCLEAR[what]
    with pytest.raises(PipelineError) as found:
        cut_by({"mask": mask}, inputs, has_slices)
    assert told in str(found.value)
    assert "Say which by `options=[{'mask': …}, …]`" in str(found.value)


def test_other_wrong_arguments() -> None:
    with pytest.raises(PipelineError, match=r"`mask` is a list of 3, one for each mic"):
        cut_by({"mask": [1, 2, 3]}, [TOKENS] * 4)
    with pytest.raises(PipelineError, match="`a` is in `options`, and an argument"):
        with_options([{"a": 1, "b": 2}], [{"a": 3, "c": 4}])
    assert with_options([{"a": 1}], [{"c": 4}]) == [{"a": 1, "c": 4}]
    # Rows of numbers have no positions, so a square of them is rows.
    square = torch.zeros(8, 8)
    assert cut_by({"mask": square}, square)[0]["mask"].shape == (2, 8)
