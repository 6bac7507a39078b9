"""A pipeline along one dimension of a mesh, and layers cut over the other by torch's tensor
parallelism.
"""

import pytest

from tests.support.launches import Run, fixtures

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytestmark = pytest.mark.processes

worker, run = fixtures("tensor_parallel_worker.py")


def test_losses_norms_and_weights_are_those_of_one_process(run: Run) -> None:
    for found in run("gradients", 4).found():
        assert len(found) == 4
        for name, worst in found.items():
            assert max(worst) < 1e-12, name
