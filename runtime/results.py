"""The results of a step or an evaluation: the losses and outputs of a rank's last stages, and the
extra values that loss functions return.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.runtime.batches import Batches, Round, mean_of_slices
from schedlang.runtime.finite import FiniteCheck
from schedlang.runtime.microbatches import weighted
from schedlang.runtime.stage import Stage
from schedlang.runtime.values import Value


class Results:
    """The results of the last step or evaluation; `losses` and `outputs` are by model."""

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        batches: Batches,
        finite: FiniteCheck,
    ) -> None:
        self.extras: list[Mapping[str, Any]] = []
        self.losses: dict[str, Tensor] = {}
        self.outputs: dict[str, list[Value]] = {}
        #: For each model, the losses of the last stages here as parts of their mean, and the number
        #: of microbatches.
        self.parts: dict[str, list[Tensor]] = {}
        self.microbatches = Counter[str]()
        self._plan = plan
        self._stages = stages
        self._batches = batches
        self._finite = finite

    def begin(self) -> None:
        """Drop the results of the last step."""
        self.extras = []
        self.losses = {}
        self.outputs = {}
        self.parts = {}
        self.microbatches.clear()
        for stage in self._stages.values():
            stage.added = {}

    def take(self, this: Sequence[Round], step: int, return_outputs: bool) -> None:
        """Take the results of a training step."""
        self._count(this)
        for model, units in self._units_of_models(this).items():
            # The outputs of a stage with a loss are the losses.
            made = [stage.outputs.pop(unit) for stage, unit in units]
            if units[0][0].loss is None:
                # The output of a frozen model, such as the scores of a reference.
                self.outputs[model] = self._batches.joined(made)
                continue
            self._take_extras(units)
            self.losses[model] = self._losses_of(model, units, made, step)
            results = [
                stage.results.pop(unit) for stage, unit in units if return_outputs
            ]
            if results:
                self.outputs[model] = self._batches.joined(results)
        self._check_finite(step)

    def take_evaluated(self, this: Sequence[Round]) -> None:
        """Take the results of a round of an evaluation."""
        self._count(this)
        for model, units in self._units_of_models(this).items():
            self._take_extras(units)
            outputs = [stage.outputs.pop(unit) for stage, unit in units]
            if units[0][0].targets:
                losses = mean_of_slices(outputs, units, self._plan.layout.slices)
                self.parts.setdefault(model, []).append(losses)
                of_round: list[Value] = [*losses]
            else:
                of_round = self._batches.joined(outputs)
            if of_round:
                self.outputs.setdefault(model, []).extend(of_round)

    def end_evaluation(self) -> None:
        """Join the losses of all rounds."""
        self.losses = {model: torch.cat(each) for model, each in self.parts.items()}

    def _units_of_models(
        self, this: Sequence[Round]
    ) -> dict[str, list[tuple[Stage, int]]]:
        """By model, the last stages here, each with a unit that has passed through it."""
        by_model: dict[str, list[tuple[Stage, int]]] = {}
        for stage, unit in self._batches.last_units(this):
            model = self._plan.layout.model_of(stage.number)
            by_model.setdefault(model, []).append((stage, unit))
        return by_model

    def _count(self, this: Sequence[Round]) -> None:
        """Count the microbatches of each model; its pipelines have equal rounds."""
        pipelines = self._plan.layout.pipelines
        models = [self._plan.layout.model_of(pipeline.start) for pipeline in pipelines]
        counts = {model: each.count for model, each in zip(models, this, strict=True)}
        self.microbatches.update(counts)

    def _losses_of(
        self,
        model: str,
        units: Sequence[tuple[Stage, int]],
        losses: Sequence[Tensor],
        step: int,
    ) -> Tensor:
        """The losses of a step by microbatch."""
        slices = self._plan.layout.slices
        by_microbatch = mean_of_slices(losses, units, slices)
        shares = [stage.shares.of_microbatch(unit) for stage, unit in units[::slices]]
        self.parts[model] = [weighted(by_microbatch, shares)]
        of_model = f" of the model `{model}`" if model else ""
        self._finite.note(step, f"the loss{of_model}", by_microbatch)
        return by_microbatch

    def _take_extras(self, units: Sequence[tuple[Stage, int]]) -> None:
        self.extras += [
            stage.extras.pop(unit) for stage, unit in units if unit in stage.extras
        ]

    def _check_finite(self, step: int) -> None:
        """Check that losses are finite, also those that stages have added; on a GPU, those of
        earlier steps.
        """
        for number, stage in self._stages.items():
            for name, value in stage.added.items():
                self._finite.note(step, f"the loss `{name}` of stage {number}", value)
        self._finite.look()
