"""Updates that correct each other where gradients are late by one: on a quadratic, against the
formula; under PipeDream-2BW on 4 processes, against one process; and saved and resumed.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch

from schedlang.cli.main import main
from schedlang.runtime import error_feedback
from tests.support.paths import PROGRAMS
from tests.support.training import Train, printed_figures

TWO_BW = PROGRAMS / "pipedream_2bw.sched"


def gradients(weight: Any, step: int) -> Any:
    """Of a quadratic, with another target in each step."""
    return torch.tensor([0.5, 2.0]) * (weight - step % 3)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.05}),
        (torch.optim.Adam, {"lr": 0.05, "fused": True}),
    ],
)
def test_updates_follow_the_formula(kind: Any, options: dict[str, Any]) -> None:
    """x(k+1) = x(k) - 2 u(k) + u(k-1), where u(k) is what an optimizer without it takes."""
    weight = torch.nn.Parameter(torch.tensor([4.0, -3.0]))
    corrected = error_feedback(kind([weight], **options))
    other = torch.nn.Parameter(weight.detach().clone())
    plain = kind([other], **options)
    x = read = weight.detach().clone()
    last = None
    for step in range(6):
        late = gradients(read, step)
        read = x
        with torch.no_grad():
            other.copy_(x)
        other.grad = late
        plain.step()
        update = x - other.detach()
        x = x - (update if last is None else 2 * update - last)
        last = update
        weight.grad = late.clone()
        corrected.step()
        torch.testing.assert_close(weight.detach(), x)


@pytest.mark.core
def test_a_weight_that_gets_its_first_gradient_later() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = error_feedback(torch.optim.AdamW(weights, lr=0.1))
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weights[1], torch.ones(2))
    weights[1].grad = torch.ones(2)
    optimizer.step()
    assert weights[1][0] < 1
    weights[0].grad = None
    before = weights[0].detach().clone()
    optimizer.step()
    # Nothing was to be changed, and the step before did change something: it is taken back.
    assert weights[0][0] > before[0]


@pytest.mark.core
def test_it_is_closer_to_gradients_in_time() -> None:
    """On a quadratic, the loss under a delay falls as without one."""

    def losses(late: bool, feedback: bool) -> float:
        weight = torch.nn.Parameter(torch.tensor([4.0]))
        optimizer = torch.optim.SGD([weight], lr=0.3)
        if feedback:
            error_feedback(optimizer)
        read = weight.detach().clone()
        total = 0.0
        for _ in range(20):
            total += float(weight.detach().square())
            newest = weight.detach().clone()
            weight.grad = (read if late else newest).clone()
            read = newest
            optimizer.step()
        return total

    in_time = losses(late=False, feedback=False)
    without = losses(late=True, feedback=False)
    corrected = losses(late=True, feedback=True)
    assert abs(corrected - in_time) < abs(without - in_time)


@pytest.mark.core
def test_wrong_optimizers_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert error_feedback(optimizer) is optimizer
    with pytest.raises(ValueError, match="has error feedback already"):
        error_feedback(optimizer)
    wanted = r"`optimizer` is \[\]: it must be one optimizer of torch"
    with pytest.raises(TypeError, match=wanted):
        error_feedback([])  # type: ignore[arg-type]


def test_a_pipeline_trains_as_one_process(train: Train) -> None:
    sizes = ["-p", "microbatches=3", "--optimizer", "adamw", "--steps", 6]
    options = ["--error-feedback", "--check"]
    done = train(4, TWO_BW, *sizes, *options)
    assert done.codes == [0] * 4, done.stderr
    assert "adamw with a learning rate of 0.003, error feedback" in done.stdout
    figures = printed_figures(done.stdout)
    assert figures["loss_error"] <= 1e-5
    assert figures["gradient_error"] <= 1e-5


def test_what_the_last_step_changed_is_in_checkpoints(
    train: Train, tmp_path: Path
) -> None:
    options = ["-p", "microbatches=2", "--optimizer", "adamw", "--error-feedback"]
    whole = train(2, TWO_BW, *options, "--steps", 6)
    folder = tmp_path / "checkpoints"
    saved = [*options, "--checkpoint", folder, "--every", 3]
    first = train(2, TWO_BW, *saved, "--steps", 3)
    rest = train(2, TWO_BW, *saved, "--steps", 6)
    for done in (whole, first, rest):
        assert done.codes == [0, 0], done.stderr
    assert printed_figures(rest.stdout)["loss"] == printed_figures(whole.stdout)["loss"]


@pytest.mark.core
def test_other_delays_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rule in (("1f1b", "latest"), ("pipedream", "stash")):
        with pytest.raises(SystemExit):
            main(["run", str(PROGRAMS / f"{name}.sched"), "--error-feedback"])
        assert f"has `weights {rule}`" in capsys.readouterr().err
