"""What stages of one rank hand each other."""

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch

from schedlang.runtime import PipelineError
from schedlang.runtime.within_ranks import Handed, Returned


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_value_that_changes_before_it_is_taken(is_counted: bool) -> None:
    handed = Handed(3)
    value = torch.zeros(4)
    handed[0] = value
    (value if is_counted else value.data).add_(1)
    words = "the output of stage 3 for microbatch 0 was changed in place by a later"
    with pytest.raises(PipelineError, match=words):
        handed.pop(0)


def test_a_value_that_changes_before_the_backward_of_the_next_stage() -> None:
    handed = Handed(3)
    returned = Returned(handed)
    values = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    for microbatch, value in enumerate(values):
        handed[microbatch] = value
        assert handed.pop(microbatch) is value
    # The next stage may change its input in place, and autograd knows.
    with torch.no_grad():
        values[1].add_(1)
    values[2].data.add_(1)
    returned[0] = [values[0]]
    returned[1] = [values[1]]
    words = (
        "the output of stage 3 for microbatch 2 was changed before the backward of the"
    )
    with pytest.raises(PipelineError, match=words):
        returned[2] = [values[2]]
