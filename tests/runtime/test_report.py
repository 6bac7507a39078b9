"""What the training says in the end, from made-up trainings."""

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)


def test_the_largest_differences_are_relative_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from schedlang.examples.demo.report import compare
    from schedlang.examples.demo.training import Training

    alone = Training(
        losses=[4.0, 2.0],
        gradients={"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([2.0])},
    )
    ours = [
        Training(gradients={"a": torch.tensor([1.0, -8.0])}),
        Training(losses=[4.0, 2.5], gradients={"b": torch.tensor([2.5])}),
    ]
    assert compare(ours, ours[1].losses, alone) == {
        "loss_error": 0.25,
        "gradient_error": 0.25,
    }
    out = capsys.readouterr().out
    assert "wrong: this is not the same training as in one process" in out
    assert (
        "largest difference over 2 steps of a loss 2.5e-01, of 2 gradients 2.5e-01 (`b`)"
        in out
    )


def test_a_gradient_that_is_nan_is_no_agreement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from schedlang.examples.demo.report import compare, is_rounding
    from schedlang.examples.demo.training import Training

    alone = Training(losses=[4.0], gradients={"a": torch.ones(1), "b": torch.ones(1)})
    nan = torch.tensor([float("nan")])
    ours = Training(losses=[4.0], gradients={"a": nan, "b": torch.ones(1)})
    assert not is_rounding(compare([ours], [4.0], alone))
    assert "wrong: this is not the same training" in capsys.readouterr().out


def test_a_missing_gradient_is_no_agreement() -> None:
    from schedlang.examples.demo.report import compare
    from schedlang.examples.demo.training import Training

    alone = Training(losses=[4.0], gradients={"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(AssertionError):
        compare([Training(losses=[4.0], gradients={"a": torch.ones(1)})], [4.0], alone)
