"""Checkpoints: a folder with one file for each rank and step, which appears whole or not at all.

A run goes on from the newest step of which every rank has its file. Ranks on several machines may
share the folder, or each have one of their own.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.runtime.watch.watchdog import PipelineError, Watchdog

#: The part that has the older versions of weights, by stage.
VERSIONS = "the versions of the weights"
#: How many checkpoints of a rank are kept: while one is written, the one before is that of all
#: ranks.
_KEPT = 2


class Stateful(Protocol):
    """A module, an optimizer, a learning rate schedule, a data loader: what has a state to save."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Take up a state."""


class RandomState:
    """Torch's random numbers, on the CPU and on the device of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Tensor]:
        """The state."""
        state = {"cpu": torch.get_rng_state()}
        return state | (
            {"cuda": torch.cuda.get_rng_state(self._device)} if self._device.type == "cuda" else {}
        )

    def load_state_dict(self, state_dict: Mapping[str, Tensor], /) -> None:
        """Take up a state."""
        torch.set_rng_state(state_dict["cpu"].cpu())
        if "cuda" in state_dict:
            torch.cuda.set_rng_state(state_dict["cuda"].cpu(), self._device)


def write(folder: Path, plan: Plan, rank: int, step: int, parts: Mapping[str, Stateful]) -> None:
    """Write a checkpoint of this rank, and delete its old ones; PipelineError if it cannot be
    written.
    """
    path = folder / f"step-{step}-rank-{rank}.pt"
    new = path.with_suffix(".new")
    states = {name: part.state_dict() for name, part in parts.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            torch.save({"plan": _identity(plan), "states": states}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        files = steps_in(folder, rank)
        for old in sorted(each for each in files if each <= step)[:-_KEPT]:
            files[old].unlink()
    # Torch has its own words for a full disk.
    except (OSError, RuntimeError) as error:
        raise PipelineError(
            f"the checkpoint `{path}` cannot be written: {reason(error)}"
        ) from error


def read(path: Path, plan: Plan, device: torch.device) -> dict[str, Any]:
    """The states in a checkpoint; PipelineError if it cannot be read, or is of another plan."""
    try:
        found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        theirs = found["plan"]
        states = found["states"]
    # A damaged file may raise anything.
    except Exception as error:
        raise PipelineError(f"the checkpoint `{path}` cannot be read: {reason(error)}") from error
    ours = _identity(plan)
    if theirs != ours:
        named = [f"`{each['name']}` with {each['params']}" for each in (theirs, ours)]
        what = (
            f"of {named[0]}, not of {named[1]}"
            if named[0] != named[1]
            else f"of another `{plan.name}`"
        )
        why = (
            "it has older versions of the weights of its own stages, so "
            if states.get(VERSIONS)
            else ""
        )
        raise PipelineError(
            f"the checkpoint `{path}` is {what}: {why}resume with its own plan, or in another "
            "folder"
        )
    return dict(states)


def load(states: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
    """Give all parts their states back; PipelineError where they do not fit."""
    if states.keys() != parts.keys():
        raise PipelineError(f"the checkpoint has {', '.join(states)}; here are {', '.join(parts)}")
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise PipelineError(
                f"the checkpoint does not fit {name}: {' '.join(str(error).split())}"
            ) from error


def resume(
    folder: Path,
    plan: Plan,
    device: torch.device,
    parts: Mapping[str, Stateful],
    watchdog: Watchdog,
) -> int:
    """Load the newest checkpoint of which all ranks have their file, as they tell; its step,
    or 0.
    """
    files = steps_in(folder, dist.get_rank())
    if files:
        # Also where there is none of all ranks: what is of another plan is not to be written over.
        read(files[max(files)], plan, device)
    told = watchdog.gather(json.dumps([0, *files]), "not resumed").values()
    newest = max(set.intersection(*map(set[int], map(json.loads, told))))
    if newest:
        load(read(files[newest], plan, device), parts)
    return newest


def steps_in(folder: Path, rank: int) -> dict[int, Path]:
    """The checkpoints of a rank, by step."""
    names = (
        (re.fullmatch(r"step-(\d+)-rank-(\d+)\.pt", each.name), each)
        for each in folder.glob("*.pt")
    )
    return {int(name[1]): path for name, path in names if name and int(name[2]) == rank}


def _identity(plan: Plan) -> dict[str, str]:
    """What a checkpoint is of: the program and its sizes, for any number of updates."""
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
