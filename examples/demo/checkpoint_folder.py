"""The checkpoints of the command in a folder.

They are models, `step-12/`, from which any plan goes on, for any number of ranks. But where stages
read older versions of their weights, a model is not enough, and where they have skips, it is
another one if it is cut otherwise: then each rank writes a file
(`schedlang.runtime.model.checkpoint`), with which the same plan goes on. Batches follow from the
number of a step, and nothing is drawn at random, so no more is kept.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from attrs import define
from torch import nn
from torch.optim import Optimizer

from schedlang.examples.demo.collective import share, together
from schedlang.plan.plan import Plan
from schedlang.ranks.weight_versions import follow_weights
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.checkpoint import KEPT, steps_of_rank
from schedlang.runtime.model.model_files import load_model, load_optimizers, names_in
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.watchdog import say


@define
class CheckpointFolder:
    """A folder, in which there is a checkpoint for every so many updates, as far as the plan's
    steps allow.

    `newest` is the step of the newest model in it, or 0, and `layers` how many layers that has. The
    processes of the `group` use it together.
    """

    folder: Path
    every: int
    are_models: bool
    newest: int
    layers: int
    group: dist.ProcessGroup
    #: Whether the user was told that old checkpoints go.
    has_told: bool = False

    def load(
        self, stages: Mapping[int, nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """Load stages and what their optimizers keep from the newest model, if there is one; or all
        processes end.
        """

        def read() -> None:
            path = _path(self.folder, self.newest)
            load_model(path, stages)
            load_optimizers(path, stages, optimizers)

        if self.newest:
            together(read, self.group)

    def resume(self, pipeline: Pipeline, others: Sequence[Optimizer]) -> int:
        """The step from which a pipeline goes on that has the stages that were loaded."""
        return self.newest if self.are_models else pipeline.resume(self.folder, others)

    def is_due(self, begin: int, end: int, last: int) -> bool:
        """Whether a checkpoint is to be written after a step of some updates."""
        return end >= last or end // self.every > begin // self.every

    def save(self, pipeline: Pipeline, step: int, others: Sequence[Optimizer]) -> None:
        """Write a checkpoint, and delete old ones."""
        self._tell_once(step)
        if not self.are_models:
            pipeline.save(self.folder, step, others)
            return
        pipeline.save_model(_path(self.folder, step), step, others)
        if dist.get_rank() == 0:
            for old in sorted(other for other in _models(self.folder) if other <= step)[
                :-KEPT
            ]:
                shutil.rmtree(_path(self.folder, old), ignore_errors=True)

    def _tell_once(self, step: int) -> None:
        """Say that the checkpoints before the newest are deleted, when the first ones are to go."""
        if self.has_told or dist.get_rank() != 0:
            return
        steps = (
            _models(self.folder) if self.are_models else steps_of_rank(self.folder, 0)
        )
        if sum(other < step for other in steps) >= KEPT:
            say(
                f"`{self.folder}` keeps the newest {KEPT} checkpoints, older ones are deleted"
            )
            self.has_told = True


def find_checkpoints(
    folder: Path, every: int, plan: Plan, group: dist.ProcessGroup
) -> CheckpointFolder:
    """The checkpoints in a folder. If the plan cannot go on from them, all processes end."""
    models = share(_models(folder), group)
    # Rank 0 says what is there, for the folder may be filling up, and each compares its own view.
    why = _why_no_models(plan)
    layers = together(lambda: _check(folder, plan, why, models), group)
    return CheckpointFolder(
        folder, every, why is None, max(models, default=0), layers, group
    )


def _why_no_models(plan: Plan) -> str | None:
    """Why the checkpoints of a plan are no models, if so."""
    if max(follow_weights(plan).held) > 1:
        return f"the stages of `{plan.name}` also read older versions of their weights"
    if plan.layout.models:
        return f"`{plan.name}` trains several models"
    if plan.layout.graph or plan.layout.skips:
        what = "edges" if plan.layout.graph else "skips"
        return f"`{plan.name}` has {what}, so its model depends on its stages"
    return None


def _check(folder: Path, plan: Plan, why: str | None, models: list[int]) -> int:
    """The layers of the newest model; PipelineError where the plan cannot go on from what is in the
    folder.
    """
    if _models(folder) != models:
        raise PipelineError(
            f"rank {dist.get_rank()} sees other models in `{folder}` than rank 0: all ranks must "
            "share the folder"
        )
    if models and why:
        raise PipelineError(
            f"`{folder}` has models, and {why}: it cannot go on from there, use another folder"
        )
    if not why and any(folder.glob("step-*-rank-*.pt")):
        raise PipelineError(
            f"`{folder}` has the checkpoints of a plan that alone goes on from them: use another "
            "folder"
        )
    if not models:
        return 0
    path = _path(folder, models[-1])
    layers = len({name.partition(".")[0] for name in names_in(path)})
    stages = plan.layout.pieces
    if layers < stages:
        raise PipelineError(
            f"the model `{path}` has {layers} layers, too few for {stages} stages"
        )
    return layers


def _models(folder: Path) -> list[int]:
    """The steps of the models in a folder, which are whole."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"
