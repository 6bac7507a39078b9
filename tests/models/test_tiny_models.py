"""Models of transformers, cut by `split` alone, train as in one process, or are refused with their
own line: `make explore WHAT=transformers`, which writes docs/reports/transformers.md.
"""

import pickle
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, PipelineError, split
from schedlang.runtime.model.split import Stages
from tests.models.rows import read_row, write_row
from tests.models.tiny_models import LANGUAGE_MODELS, ROWS, TOWERS, build, microbatch_of
from tests.models.verdicts import DIFFERS, EQUAL, REFUSED, ROUNDING, Cell, Verdict
from tests.support.models import program
from tests.support.paths import DOCS
from tests.support.ranks import Outcome, Run

pytestmark = pytest.mark.processes

#: One stage on each rank; and two, with split backwards.
SCHEDULES = ["1f1b", "zb_v"]
MICROBATCHES = 4
NAMES = [*LANGUAGE_MODELS, *TOWERS]
#: So many models are tried by the same processes.
AT_ONCE = 8
#: By how much a gradient may differ, relative to the largest one, where sums have another order.
TOLERANCE = 1e-5
#: What becomes of models for which transformers has no tiny config of ours, or no forward of it.
NOT_BUILT = "not built"


def loss_of(output: object, _: Tensor) -> Tensor:
    """Cross entropy, where class 0 is the right one everywhere: for scores of all kinds."""
    scores = next(
        getattr(output, name)
        for name in ("logits", "logits_per_image")
        if hasattr(output, name)
    )
    return (scores.float().logsumexp(-1) - scores.float()[..., 0]).mean()


def trained_alone(name: str) -> tuple[nn.Module, Tensor]:
    """A model with the gradients of a step in one process, and its losses."""
    model = build(name)
    losses = []
    for number in range(MICROBATCHES):
        given = microbatch_of(name, number)
        output = model(**given) if isinstance(given, dict) else model(given)
        loss = loss_of(output, Tensor())
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def trained(cells: Sequence[Cell]) -> dict[Cell, Verdict]:
    """The verdicts of this rank on models under schedules, until a step fails, after which the
    processes have to end.
    """
    found: dict[Cell, Verdict] = {}
    for name, schedules in groupby(cells, itemgetter(0)):
        try:
            alone, losses = trained_alone(name)
        except Exception as error:
            words = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            found |= dict.fromkeys(schedules, Verdict(NOT_BUILT, words))
            continue
        for cell in schedules:
            plan = program(cell[1], ranks=2, microbatches=MICROBATCHES)
            # Tokens alone are what a model is cut by if nobody says anything.
            inputs = microbatch_of(name, 0) if name in TOWERS else None
            try:
                stages = split(build(name), plan, inputs=inputs)
            except PipelineError as error:
                found[cell] = Verdict(REFUSED, str(error).split("\n", 1)[0])
                continue
            try:
                found[cell] = _compared(name, plan, stages, alone, losses)
            except PipelineError as error:
                found[cell] = Verdict(REFUSED, str(error).split("\n", 1)[0])
                return found
    return found


def _compared(
    name: str, plan: Plan, stages: Stages, alone: nn.Module, losses: Tensor
) -> Verdict:
    inputs = [microbatch_of(name, number) for number in range(MICROBATCHES)]
    targets = [torch.zeros(ROWS)] * MICROBATCHES
    ours = Pipeline(plan, stages, loss_of).step(inputs, targets)
    apart = {}
    if ours is not None:
        apart["the losses"] = float((ours - losses).abs().max())
    weights = dict(alone.named_parameters(remove_duplicate=False))
    gradients = [each.grad for each in weights.values() if each.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for stage in stages.values():
        for own, weight in stage.named_parameters():
            right = weights[own].grad
            if (weight.grad is None) != (right is None):
                return Verdict(DIFFERS, f"one side has no gradient of `{own}`")
            if right is not None:
                difference = float((weight.grad - right).abs().max())
                apart[f"the gradient of `{own}`"] = difference / largest
    worst = max(apart, key=lambda what: apart[what])
    if apart[worst] == 0:
        return Verdict(EQUAL)
    kind = ROUNDING if apart[worst] < TOLERANCE else DIFFERS
    return Verdict(kind, f"{worst}: {apart[worst]:.1e}")


def verdicts_on(run_ranks: Run, names: Sequence[str]) -> dict[str, dict[str, Verdict]]:
    """What becomes of models under each schedule: the worse of what the ranks say."""
    order = [NOT_BUILT, EQUAL, ROUNDING, REFUSED, DIFFERS]
    cells = [(name, schedule) for name in names for schedule in SCHEDULES]
    found: dict[Cell, Verdict] = {}
    while left := [cell for cell in cells if cell not in found]:
        outcome = run_ranks(trained, 2, left, seconds=60 + 60 * len(left))
        told = _told(outcome)
        before = len(found)
        for cell in set.intersection(*(set(each) for each in told)):
            verdicts = [each[cell] for each in told]
            worst = max(verdicts, key=lambda verdict: order.index(verdict.kind))
            # A rank whose step fails ends the other one, which then says nothing.
            if len(told) == 2 or worst.kind == REFUSED:
                found[cell] = worst
        assert len(found) > before, outcome.logs
    return {
        name: {schedule: found[name, schedule] for schedule in SCHEDULES}
        for name in names
    }


def _told(outcome: Outcome) -> list[dict[Cell, Verdict]]:
    """The verdicts of the ranks that have come to an end."""
    files = [outcome.folder / f"{rank}.result" for rank in range(2)]
    told = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    assert told, outcome.logs
    return told


@pytest.mark.transformers
@pytest.mark.parametrize(
    "names",
    [NAMES[begin : begin + AT_ONCE] for begin in range(0, len(NAMES), AT_ONCE)],
    ids=lambda names: f"{names[0]} to {names[-1]}",
)
def test_they_train_as_in_one_process_or_are_refused_with_their_line(
    run_ranks: Run, names: Sequence[str], request: pytest.FixtureRequest
) -> None:
    folder = request.config.getoption("--rows")
    rows = {name: read_row(folder, name) for name in names}
    left = [name for name, row in rows.items() if row is None]
    for name, row in verdicts_on(run_ranks, left).items():
        rows[name] = row
        write_row(folder, name, row)
    wrong = {
        (name, schedule): verdict
        for name, row in rows.items()
        for schedule, verdict in (row or {}).items()
        if not _is_right(verdict)
    }
    assert wrong == {}


#: In the core: an encoder with a decoder, and a tower whose grids Python looks at.
CORE = ["T5", "Qwen2-VL"]
#: Phi-3.5-MoE draws random numbers, by which it sends tokens to experts.
OTHERS = ["phimoe", *(name for name in TOWERS if name not in CORE)]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(CORE, marks=pytest.mark.core, id=", ".join(CORE)),
        *(
            pytest.param(names, marks=pytest.mark.large, id=", ".join(names))
            for names in (OTHERS[begin::6] for begin in range(6))
        ),
    ],
)
def test_towers_and_models_that_draw_train_as_in_one_process(
    run_ranks: Run, names: Sequence[str]
) -> None:
    for name, row in verdicts_on(run_ranks, names).items():
        assert {verdict.kind for verdict in row.values()} <= {EQUAL, ROUNDING}, name


def test_the_page_names_them() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert [name for name in TOWERS if name not in page] == []


def _is_right(verdict: Verdict) -> bool:
    has_line = re.search(r"\.py:\d+", verdict.words)
    return verdict.kind in (EQUAL, ROUNDING, NOT_BUILT) or (
        verdict.kind == REFUSED and has_line is not None
    )
