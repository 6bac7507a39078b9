"""What ranks hold, step by step, where several changes come at one time."""

from schedlang import Costs, simulate
from tests.support.written import written


def test_what_changes_nothing_is_shown_as_it_ends() -> None:
    """The half for the inputs gives nothing back; it takes from 1 to 2."""
    (steps,) = simulate(written("0F0 0I0 0W0")).memory
    assert steps == ((0, 1), (2, 1), (3, 0))


def test_ops_that_take_no_time_hold_what_they_make() -> None:
    costs = Costs(forward_times=(0,), backward_times=(0,))
    plan = written("0F0 0B0 0F1 0B1", microbatches=2)
    assert simulate(plan, costs).memory == (((0, 1), (0, 0), (0, 1), (0, 0)),)
    assert simulate(plan, costs).peak_activations == (1,)


def test_what_is_dropped_at_once_comes_behind_what_is_kept() -> None:
    """Stage 0 takes no time, and keeps 5; of stage 1 there is 2 until it is dropped."""
    costs = Costs(forward_times=(0, 1), forward_memory=(5, 2))
    plan = written("0F0 1F0 1R0 1B0 0B0", placement=(0, 0))
    (steps,) = simulate(plan, costs).memory
    assert steps == ((0, 5), (0, 7), (0, 5), (1, 7), (4, 5), (6, 0))
