"""Stages with replicas in the plan itself, and optimizer steps on their summed gradients, on real
processes.
"""

import re

import pytest

from tests.support.launches import Run, fixtures

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytestmark = pytest.mark.processes

worker, run = fixtures("replica_worker.py")


def test_weights_are_those_of_one_process(run: Run) -> None:
    """And not those of gradients that are one update later. Replicas on one rank are one module, or
    two.
    """
    for found in run("updates", 4).found():
        assert len(found) == 10
        for name, (right, later) in found.items():
            assert right < 1e-12, name
            assert later > 1e-6, name


def test_losses_are_in_the_order_of_the_batch(run: Run) -> None:
    found = [each for each in run("losses", 4).found() if each]
    assert len(found) == 1
    ours, expected = found[0]
    assert ours == pytest.approx(expected)


def test_one_module_has_one_optimizer(run: Run) -> None:
    outcome = run("one_of_two_optimizers", 3)
    assert outcome.codes == [1] * 3
    assert re.search(
        r"rank 2 failed: stages 1 and 3 are one module, give them one optimizer", outcome.logs[2]
    )


def test_one_who_dies_before_a_sum_is_named(run: Run) -> None:
    outcome = run("killed", 4)
    assert [code for rank, code in enumerate(outcome.codes) if rank != 1] == [1] * 3
    assert outcome.codes[1] == 9
    assert all(
        re.search(r"rank 1 is gone", log) for rank, log in enumerate(outcome.logs) if rank != 1
    ), outcome.logs
