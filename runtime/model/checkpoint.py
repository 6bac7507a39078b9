"""Checkpoints: a folder with one file for each rank and step, which appears whole or not at all.

A run goes on from the newest step of which every rank has its file. Ranks on several machines may
share the folder, or have one of their own on each machine.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.ranks.weight_homes import homes_of
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.meshes import meshes_of
from schedlang.runtime.random_state import RandomState
from schedlang.runtime.stage import Stage
from schedlang.runtime.stateful import Stateful
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.watchdog import Watchdog

#: The part that has the older versions of weights, by stage.
VERSIONS = "the versions of the weights"
#: How many checkpoints of a rank are kept: while the newest is written, only the one before it is
#: there on all ranks.
KEPT = 2


@frozen(eq=False)
class Checkpoints:
    """The checkpoints of this rank in a folder: of a plan, and made of some parts, by name."""

    folder: Path
    plan: Plan
    parts: Mapping[str, Stateful]
    #: The modules of this rank's stages.
    modules: Sequence[nn.Module]

    def write(self, step: int) -> None:
        """Write a checkpoint, and delete old ones; PipelineError if it cannot be written."""
        rank = dist.get_rank()
        path = self.folder / f"step-{step}-rank-{rank}.pt"
        new = path.with_suffix(".new")
        states = {name: part.state_dict() for name, part in self.parts.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with new.open("wb") as file:
                torch.save({"plan": _identity(self.plan), "states": states}, file)
                file.flush()
                os.fsync(file.fileno())
            # The name is there only when the bytes are on the disk: a file that can be found is
            # whole.
            new.replace(path)
            # Not those of later steps, which a run that went back further has left: this one may be
            # resumed.
            files = steps_of_rank(self.folder, rank)
            for old in sorted(other for other in files if other <= step)[:-KEPT]:
                files[old].unlink()
        # Torch raises a RuntimeError of its own if the disk is full.
        except (OSError, RuntimeError) as error:
            raise PipelineError(
                f"the checkpoint `{path}` cannot be written: {reason(error)}"
            ) from error

    def resume(self, device: torch.device, watchdog: Watchdog) -> int:
        """Load the newest checkpoint of which all ranks have their file, as they tell each other;
        gives its step, or 0.
        """
        files = steps_of_rank(self.folder, dist.get_rank())
        if files:
            # Even if not all ranks have one: a checkpoint of another plan is not to be overwritten.
            _read(files[max(files)], self.plan, device)
        # All parts of a weight must be those of one step.
        everyone = sharing_weights(self.modules, watchdog)
        told = watchdog.gather(json.dumps([0, *files]), "not resumed", everyone)
        # Step 0 is the beginning, which all have.
        newest = max(set.intersection(*map(set[int], map(json.loads, told.values()))))
        if newest:
            self._load(_read(files[newest], self.plan, device))
        return newest

    def _load(self, states: Mapping[str, Any]) -> None:
        """Give all parts their states back; PipelineError where they do not fit."""
        if states.keys() != self.parts.keys():
            raise PipelineError(
                f"the checkpoint has {', '.join(states)}; here are {', '.join(self.parts)}"
            )
        for name, part in self.parts.items():
            try:
                if isinstance(part, Optimizer):
                    load_optimizer(part, states[name])
                else:
                    part.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise PipelineError(
                    f"the checkpoint does not fit {name}: {' '.join(str(error).split())}"
                ) from error


def sharing_weights(modules: Iterable[nn.Module], watchdog: Watchdog) -> set[int]:
    """The processes of this pipeline, and of those beside it that have other parts of its weights,
    such as shards of FSDP: all of them call this together.
    """
    own = {rank for mesh in meshes_of(modules) for rank in mesh.mesh.flatten().tolist()}
    told = watchdog.gather(json.dumps([*own]), "come to a checkpoint")
    return {*told}.union(*map(json.loads, told.values()))


def checkpoints_of(
    folder: str | Path,
    plan: Plan,
    stages: Mapping[int, Stage],
    versions: Stateful,
    device: torch.device,
    others: Sequence[Stateful],
) -> Checkpoints:
    """The checkpoints of a rank in a folder: of its stages where their weights are at home, with
    the `versions` of these, of their optimizers, the random state, and `others`.
    """
    # Modules come before the versions of their weights.
    parts = dict[str, Stateful]()
    homes = homes_of(plan, stages)
    for number, stage in stages.items():
        if homes.get(number, number) == number:
            parts[f"stage {number}"] = stage.module
    for number, stage in stages.items():
        if stage.optimizer is not None:
            parts[f"the optimizer of stage {number}"] = stage.optimizer
    parts[VERSIONS] = versions
    parts["the random state"] = RandomState(device)
    for number, other in enumerate(others):
        parts[f"number {number} of the others"] = other
    modules = [stage.module for stage in stages.values()]
    return Checkpoints(Path(folder), plan, parts, modules)


def warn_of_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Warn where weights still have gradients of the steps before the last checkpoint, as a step
    begins that adds to them.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if any(bool(each.any()) for each in gradients):
        warnings.warn(
            "the last checkpoint was written while gradients of several steps add up, and has none "
            "of them: a run that resumes there goes on without. Save after an update, behind "
            "`zero_grad()`",
            stacklevel=5,
        )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer its state back, in the types that it had.

    Torch alone casts it to the types of the weights: of weights in bfloat16, masters in float32
    would lose their bits.
    """
    kept = dict(state["state"])
    optimizer.load_state_dict(dict(state))
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    places = [each for group in state["param_groups"] for each in group["params"]]
    for weight, place in zip(weights, places, strict=True):
        # One that is in parts on several processes may have this one elsewhere.
        if weight not in optimizer.state or place not in kept:
            continue
        cast, tree = tree_flatten(optimizer.state[weight])
        saved, saved_tree = tree_flatten(kept[place])
        if tree == saved_tree:
            pairs = zip(cast, saved, strict=True)
            optimizer.state[weight] = tree_unflatten(
                [_in_own_type(*pair) for pair in pairs], tree
            )


def _in_own_type(cast: Any, saved: Any) -> Any:
    """A value of a state where torch has put it, in the type in which it was saved."""
    if not isinstance(cast, Tensor) or cast.dtype == saved.dtype:
        return cast
    return saved.to(cast.device)


def _read(path: Path, plan: Plan, device: torch.device) -> dict[str, Any]:
    """The states in a checkpoint; PipelineError if it cannot be read, or is of another plan."""
    try:
        document: dict[str, Any] = torch.load(
            path, map_location=device, weights_only=True
        )
        theirs = document["plan"]
        states = dict(document["states"])
    # A damaged file may raise anything.
    except Exception as error:
        raise PipelineError(
            f"the checkpoint `{path}` cannot be read: {reason(error)}"
        ) from error
    ours = _identity(plan)
    if theirs == ours:
        return states
    their_name = f"`{theirs['name']}` with {theirs['params']}"
    our_name = f"`{ours['name']}` with {ours['params']}"
    what = f"of another `{plan.name}`"
    if their_name != our_name:
        what = f"of {their_name}, not of {our_name}"
    why = ""
    if states.get(VERSIONS):
        why = "it has older versions of the weights of its own stages, so "
    raise PipelineError(
        f"the checkpoint `{path}` is {what}: {why}resume with its own plan, or in another folder"
    )


def steps_of_rank(folder: Path, rank: int) -> dict[int, Path]:
    """The checkpoints of a rank, by step."""
    names = (
        (re.fullmatch(r"step-(\d+)-rank-(\d+)\.pt", path.name), path)
        for path in folder.glob("*.pt")
    )
    return {int(name[1]): path for name, path in names if name and int(name[2]) == rank}


def _identity(plan: Plan) -> dict[str, str]:
    """What a checkpoint belongs to: the program and its parameters, for any number of updates."""
    document = plan.to_json()
    about = [
        document["program"]["sha256"],
        document["program"]["imports"],
        plan.params,
        plan.placement,
    ]
    sizes = ", ".join(f"{name} = {value}" for name, value in plan.params.items())
    return {
        "name": plan.name,
        "params": sizes,
        "hash": hashlib.sha256(json.dumps(about).encode()).hexdigest(),
    }


def reason(error: Exception) -> str:
    """What an error says, in a line."""
    return str(getattr(error, "strerror", None) or error).split("\n", 1)[0]
