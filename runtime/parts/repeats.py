"""Forwards that are recomputed (R), and checks that the second run repeats the first one.

    F ── input, random state ──► R ──── graph ────► B, or I and W

The second run makes the graph for the backward. Later stages have the output of the first run, so
if the second one differs, gradients are silently wrong. Torch's random state and the buffers are
restored for it (`schedlang.runtime.parts.buffers`). Other state that a forward may read and change
is detected:

    F    inputs, and how often they were changed ──► the same after it?
    F    some numbers of what is returned ─────────► the same in R?
"""

from collections.abc import Container, Iterable, Iterator

import torch
from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part, Wants
from schedlang.runtime.parts.without_graph import WithoutGraph
from schedlang.runtime.random_state import State, random_state, set_random_state
from schedlang.runtime.setup import Verify, is_watched
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import (
    Value,
    dense_parts,
    of_its_own,
    sample,
    tolerance,
    wants_others,
)
from schedlang.schedule.kinds import REPEATS

#: For each weight of a stage, whether it requires a gradient.
Trained = list[bool]


class Recomputed(WithoutGraph):
    """The ops F and R of `recomputed` microbatches: two runs of the module with the same random
    numbers. Other microbatches have one run.
    """

    def __init__(self, recomputed: Container[int]) -> None:
        super().__init__()
        self._recomputed = recomputed
        #: From F to R: the input, the random state, which outputs want a gradient, and which
        #: weights required one before and after F.
        self._again: dict[int, tuple[Value, State, Wants, Trained, Trained]] = {}
        #: During R, the random state with which the rank continues afterwards.
        self._goes_on_with: State = {}
        #: While a first run makes a graph, the weights and their earlier gradients.
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    def bind(self, stage: Stage) -> None:
        """Keep the stage and its weights."""
        super().bind(stage)
        self._weights = [*stage.module.parameters()]

    def forward(self, microbatch: int) -> None:
        """F: compute the output. The last stage computes its loss in R."""
        stage = self.stage
        if microbatch not in self._recomputed:
            stage.forward(microbatch)
            return
        input = stage.take_input(microbatch)
        before = self._trained()
        state = random_state(stage.device)
        options = stage.options_of(microbatch)
        # A copy of the tensors, or R would also call the hooks that this run registers.
        run = Forward(microbatch, of_its_own(input), options, has_graph=False)
        run.has_loss = False
        output = self.run(run)
        if stage.loss is None:
            stage.put_output(microbatch, stage.hand_on(run, output))
        self._again[microbatch] = input, state, run.wants, before, self._trained()

    def recompute(self, microbatch: int) -> None:
        """R: run the forward again with the random numbers of the first run, and with the weights
        frozen that were frozen then.

        PipelineError if other outputs want a gradient than in the first run, which later stages
        know; or if the forward freezes or thaws other weights.
        """
        stage = self.stage
        input, state, told, before, after = self._again.pop(microbatch)
        now = self._trained()
        self._train(before)
        options = stage.options_of(microbatch)
        run = Forward(microbatch, input, options, has_graph=True, is_repeated=True)
        self._goes_on_with = random_state(stage.device)
        set_random_state(stage.device, state)
        output = stage.record(run)
        for what, wants in run.wants.items():
            if wants != told[what]:
                raise wants_others(what, microbatch, wants, told[what])
        if self._trained() != after:
            raise PipelineError(
                f"stage {stage.number} freezes or thaws other weights when its forward of "
                f"microbatch {microbatch} is run again (R): does it count its calls? Freeze "
                "weights between two steps, or do not recompute the stage"
            )
        self._train(now)
        if stage.loss is not None:
            stage.outputs[microbatch] = output

    def before_forward(self, run: Forward) -> None:
        """Set gradients aside in a first run that makes a graph. A backward inside the forward, for
        a loss of its own, runs again in R, so its gradients here must not count.
        """
        super().before_forward(run)
        if run.known is None and not run.has_graph and not run.is_evaluation:
            weights = self.stage.module.parameters()
            self._gradients = [(weight, weight.grad) for weight in weights]
            for weight, _ in self._gradients:
                weight.grad = None

    def after_forward(self, run: Forward) -> None:
        """Restore the gradients, and after R the random state."""
        for weight, gradient in self._gradients:
            weight.grad = gradient
        self._gradients = []
        if run.is_repeated:
            set_random_state(self.stage.device, self._goes_on_with)

    def _trained(self) -> Trained:
        """For each weight, whether it requires a gradient."""
        return [weight.requires_grad for weight in self._weights]

    def _train(self, trained: Trained) -> None:
        """Let these weights require a gradient, and no others."""
        if trained != self._trained():
            for weight, is_trained in zip(self._weights, trained, strict=True):
                weight.requires_grad_(is_trained)


class Repeats(Part):
    """Compares the two runs of `recomputed` forwards of one stage: in some steps, always or never,
    as `verify` says.
    """

    def __init__(
        self, stage: int, module: nn.Module, recomputed: Container[int], verify: Verify
    ) -> None:
        self._stage = stage
        self._module = module
        self._recomputed = recomputed
        self._verify = verify
        self._steps = 0
        #: Whether a first run without a graph was compared. The first run for each shape of inputs
        #: makes a graph, and a stage may compute something else without one.
        self._has_compared = False
        #: The inputs of the current forward, each with its count of changes in place.
        self._inputs: list[tuple[Tensor, int]] = []
        #: By microbatch, from F to R: its weights, each with its count of changes in place.
        self._weights: dict[int, list[tuple[Tensor, int]]] = {}
        #: By microbatch, from F to R: samples of its outputs.
        self._samples: dict[int, list[Tensor]] = {}

    def begin_step(self) -> None:
        """Count the steps."""
        self._steps += 1

    def before_forward(self, run: Forward) -> None:
        """Before a first run, keep its inputs' counts of changes. Before a second one, check that
        weights have not changed.
        """
        if self._is_first_of_two(run):
            self._inputs = [(tensor, changes_of(tensor)) for tensor in _inputs(run)]
        elif run.is_repeated and _have_changed(self._weights.pop(run.microbatch)):
            raise PipelineError(
                f"a weight of stage {self._stage} was changed between the forward of microbatch "
                f"{run.microbatch} and its repetition (R), perhaps by an optimizer in a hook: "
                "update weights after the step, or by `U` in the plan"
            )

    def after_forward(self, run: Forward) -> None:
        """After a first run, check that its inputs are unchanged. After a second one, compare the
        outputs.
        """
        if self._is_first_of_two(run):
            # If the plan keeps several versions of the weights, the forward has read one of these.
            weights = (
                self._module.parameters()
                if not run.substitutes
                else run.substitutes.values()
            )
            self._weights[run.microbatch] = [
                (weight, changes_of(weight)) for weight in weights
            ]
            inputs = self._inputs
            self._inputs = []
            if _have_changed(inputs):
                raise PipelineError(
                    f"stage {self._stage} changes its input in place, and its forward is run again "
                    f"(R{run.microbatch}), which would see the changed one: let it change a copy "
                    "(`x = x.clone()`, `inplace=False`), or do not recompute it"
                )
            if self._verify == "always" or (
                self._verify == "some"
                and (is_watched(self._steps) or not self._has_compared)
            ):
                self._has_compared = self._has_compared or run.known is not None
                self._samples[run.microbatch] = _samples(run)
        elif run.is_repeated and run.microbatch in self._samples:
            self._compare(run, self._samples.pop(run.microbatch))

    def _is_first_of_two(self, run: Forward) -> bool:
        return (
            not run.is_repeated
            and not run.is_evaluation
            and run.microbatch in self._recomputed
        )

    def _compare(self, run: Forward, first: list[Tensor]) -> None:
        """PipelineError if two runs have returned different outputs, up to rounding: a GPU may add
        in another order.
        """
        second = _samples(run)
        is_alike = [(one.shape, one.dtype) for one in first] == [
            (other.shape, other.dtype) for other in second
        ]
        if is_alike and all(map(_are_close, first, second)):
            return
        raise PipelineError(
            f"stage {self._stage} returns something else when its forward of microbatch "
            f"{run.microbatch} is run again (R): does it draw random numbers that are not torch's, "
            "count its calls, keep what it has seen, or look whether gradients are enabled? Keep "
            "such state in buffers, or do not recompute the stage"
        )


def _have_changed(tensors: Iterable[tuple[Tensor, int]]) -> bool:
    return any(changes_of(tensor) != changes for tensor, changes in tensors)


def _inputs(run: Forward) -> list[Tensor]:
    values, _ = tree_flatten((run.input, dict(run.options)))
    return [value for value in values if isinstance(value, Tensor)]


def _samples(run: Forward) -> list[Tensor]:
    values, _ = tree_flatten(run.returned)
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    return [sample(part).clone() for tensor in tensors for part in dense_parts(tensor)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    largest = float(one.abs().nan_to_num(0, posinf=0).max())
    return torch.allclose(
        one, other, rtol=0, atol=tolerance(one) * largest, equal_nan=True
    )


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the parts for stages whose forwards the plan recomputes."""
    for stage, module in site.modules.items():
        recomputed = site.microbatches_with(REPEATS, stage)
        if recomputed:
            yield stage, Recomputed(recomputed)
            yield stage, Repeats(stage, module, recomputed, site.setup.verify)
