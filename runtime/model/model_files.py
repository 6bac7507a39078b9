"""A model in files, under its own names: safetensors in parts, with an index, as `transformers`
writes and reads them.

    step-12/
        model-00001-of-00004.safetensors        the weights of rank 0's stages
        model.safetensors.index.json            which file has which weight; the step
        optimizer-00001-of-00004.safetensors    what its optimizers keep for each, by the same names
        optimizer.safetensors.index.json
        state.pt                                states of the script's own, such as a scheduler's

Of several models each has a folder of its own within it. All ranks write it together, each its own
part. Who reads it takes what it needs: a rank of another plan its part, or one process all of it.
So these files are for other schedules, and for the finished model. To go on with the same plan, to
the bit, is what `schedlang.runtime.model.checkpoint` is for, which also has random states and older
versions of the weights.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from schedlang.plan.plan import Plan
from schedlang.ranks.weight_homes import homes_of
from schedlang.runtime.arguments import check_stages
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.checkpoint import reason, sharing_weights
from schedlang.runtime.model.model_arguments import (
    check_folder,
    check_optimizers,
    check_state,
)
from schedlang.runtime.model.named_state import (
    in_parts_as,
    kept_by,
    load_kept,
    name_in,
    other_names,
    weights_and_buffers,
)
from schedlang.runtime.shared_memory import sharing
from schedlang.runtime.stateful import Stateful
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.watchdog import Watchdog

_MODEL = "model"
_OPTIMIZER = "optimizer"
_STATE = "state.pt"
#: What others are told of a rank that does not come here in time.
_MISSES = "not written its part of the model"

#: Numbers of Python that an optimizer may keep: `layer.weight.step (int)` in a file.
_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}

_Device = str | torch.device
Tensors = dict[str, Tensor]


@frozen(eq=False)
class ModelPart:
    """The part of a model that a rank of a plan has, with its optimizers."""

    plan: Plan
    rank: int
    stages: Mapping[int, nn.Module]
    optimizers: Sequence[Optimizer]

    @property
    def modules(self) -> dict[str, list[nn.Module]]:
        """The modules to write, by the folder of their model: where the plan has several pipelines
        that are replicas, those of the first one, or those at home, if their weights travel.
        """
        layout = self.plan.layout
        homes = homes_of(self.plan, self.stages)
        by_model: dict[str, list[nn.Module]] = {
            layout.model_of(pipeline.start): [] for pipeline in layout.pipelines
        }
        for number, module in self.stages.items():
            if homes.get(number, min(layout.replicas(number))) == number:
                by_model[layout.model_of(number)].append(module)
        return by_model

    def files(self) -> dict[str, Tensors]:
        """The files of this part, by their paths in the folder."""
        part = f"{self.rank + 1:05}-of-{len(self.plan.ranks):05}.safetensors"
        by_file: dict[str, Tensors] = {}
        for model, modules in self.modules.items():
            weights = {
                name: _whole(tensor)
                for module in modules
                for name, tensor in weights_and_buffers(module).items()
            }
            states = _optimizer_state(modules, self.optimizers)
            kept = {name: _whole(tensor) for name, tensor in states}
            by_file[str(Path(model, f"{_MODEL}-{part}"))] = weights
            by_file[str(Path(model, f"{_OPTIMIZER}-{part}"))] = kept
        return by_file

    def weights(self) -> list[str]:
        """The names of the weights, each behind the folder of its model."""
        return [
            str(Path(model, name))
            for model, modules in self.modules.items()
            for module in modules
            for name, _ in module.named_parameters()
        ]


def write_model(
    folder: Path,
    step: int,
    part: ModelPart,
    state: Mapping[str, Stateful],
    watchdog: Watchdog,
) -> None:
    """Write this rank's part, together with all ranks: the folder appears whole or not at all.

    Of several replicas of the pipeline the first one writes. Of pipelines beside each other that
    have parts of the same weights, as with FSDP, the first one writes whole weights, which all of
    them gather. The `state` is that of all ranks: rank 0 writes it. PipelineError if the folder
    cannot be written, if a rank does not write its part in time, or has another state than rank 0.
    """
    states = {name: each.state_dict() for name, each in state.items()}
    for name, own in states.items():
        _check_can_be_read(name, own)
    everyone = sharing_weights(part.stages.values(), watchdog)
    _check_alike(states, watchdog, everyone)
    processes = watchdog.processes
    is_first = processes.replicas.processes[0] == dist.get_rank()
    # All processes that have parts of a weight gather it, and one of them writes it.
    files = part.files() if is_first else {}
    is_writer = is_first and min(everyone) in processes.all
    if not is_writer:
        files.clear()
    new = folder.with_name(f"{folder.name}.new")
    try:
        new.mkdir(parents=True, exist_ok=True)
        if is_writer and part.rank == 0:
            _write_states(new / _STATE, states)
        for name, tensors in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            _write(new / name, tensors)
        sizes = {
            file: {name: tensor.nbytes for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        weights = part.weights() if is_writer else []
        # Every rank has its files on the disk when it tells their names; rank 0 then makes the
        # index, and the last gather lets nobody go on before the folder has its name.
        written = [
            json.loads(answer)
            for answer in watchdog.gather(
                json.dumps([weights, sizes]), _MISSES, everyone
            ).values()
        ]
        if is_writer and part.rank == 0:
            _check_names(weight for weights, _ in written for weight in weights)
            _finish(
                new,
                folder,
                step,
                {file: of for _, sizes in written for file, of in sizes.items()},
            )
        watchdog.gather("", _MISSES, everyone)
    except (OSError, SafetensorError) as error:
        raise PipelineError(
            f"the model `{folder}` cannot be written: {reason(error)}"
        ) from error


def load_model(
    folder: str | Path, stages: Mapping[int, nn.Module], device: _Device = "cpu"
) -> int:
    """Load the weights of some stages, of `split` or the whole model; the step of `save_model`, or
    else 0.

    The folder is of `Pipeline.save_model`, or of `save_pretrained` of transformers. One that has
    such folders as `step-12` stands for the newest of them. Where there is nothing yet, nothing is
    loaded, with a warning, and the step is 0. Weights on the meta device are made on `device`,
    which a module's optimizer must not have seen before. PipelineError where a weight is not
    there, or has another shape.
    """
    check_folder(folder)
    check_stages(stages)
    newest = newest_in(Path(folder))
    if newest is None:
        return _nothing_yet(folder, stages)
    source = _Source.of(newest, _MODEL)
    for module in stages.values():
        state = weights_and_buffers(module)
        others = other_names(module)
        is_meta = any(tensor.is_meta for tensor in state.values())
        there = {name: name_in(source.files, name, stages) for name in state}
        tensors = source.read(there.values(), device)
        loaded = {name: tensors[there[name]] for name in state}
        for name, ours in state.items():
            if loaded[name].shape != ours.shape:
                raise PipelineError(
                    f"`{name}` is {list(loaded[name].shape)} in `{folder}`, here {list(ours.shape)}"
                )
            # Without a copy, weights would stay in the memory of the file until they are changed.
            loaded[name] = in_parts_as(ours, loaded[name].to(ours.dtype, copy=is_meta))
        module.load_state_dict(loaded, strict=False, assign=is_meta)
        for other, name in others.items():
            part, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(part), attribute, module.get_parameter(name))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta:
                raise PipelineError(
                    f"`{name}` is on the meta device and in no file: make its module on a real one"
                )
    return source.step


def newest_in(folder: Path) -> Path | None:
    """The newest folder `step-12` in a folder; the folder itself where it has a model, in files of
    any kind; None where there is none yet. PipelineError for what is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise PipelineError(f"`{folder}` is a file, and a model is in a folder")
    steps = {
        int(name[1]): path
        for path in folder.glob("step-*")
        if (name := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    }
    if steps and not (folder / _index(_MODEL)).exists():
        return steps[max(steps)]
    kinds = ("*.safetensors*", "*.bin*", "config.json")
    has_model = any(True for kind in kinds for _ in folder.glob(kind))
    return folder if has_model else None


def _nothing_yet(folder: str | Path, stages: Mapping[int, nn.Module]) -> int:
    """Step 0 of a training that begins; PipelineError for weights that nothing gives values."""
    for number, module in stages.items():
        for name, weight in module.named_parameters():
            if weight.is_meta:
                raise PipelineError(
                    f"there is no model in `{folder}` yet, and `{name}` of stage {number} is on "
                    "the meta device: make the module on a real one, or load a model that is there"
                )
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"there is no model in `{folder}` yet: the stages keep the weights that they have",
            stacklevel=3,
        )
    return 0


def names_in(folder: Path) -> list[str]:
    """The names of the weights in a folder of `save_model`; PipelineError if it cannot be read."""
    return list(_Source.of(folder, _MODEL).files)


def load_optimizers(
    folder: str | Path, stages: Mapping[int, nn.Module], optimizers: Iterable[Optimizer]
) -> None:
    """Load what the optimizers of some stages keep for each weight, but not their options, such as
    learning rates, which a scheduler has (`load_state`).

    The folder is as for `load_model`. PipelineError where it has a model without optimizers, or an
    optimizer has a weight that is in no stage.
    """
    check_folder(folder)
    check_stages(stages)
    check_optimizers(optimizers)
    newest = newest_in(Path(folder))
    if newest is None:
        return
    source = _Source.of(newest, _OPTIMIZER)
    kept: dict[str, list[str]] = {}
    for key in source.files:
        kept.setdefault(key.rpartition(".")[0], []).append(key)

    def read(names: Sequence[str]) -> list[dict[str, Any]]:
        """What the files have for some weights."""
        keys = [kept.get(name_in(kept, name, stages), []) for name in names]
        # The optimizer moves its state to the devices where it belongs.
        tensors = source.read(chain.from_iterable(keys), "cpu")
        return [dict(_kept(key, tensors[key]) for key in of) for of in keys]

    load_kept(stages, optimizers, read)


def load_state(folder: str | Path, state: Mapping[str, Stateful]) -> None:
    """Give what a script has saved beside the model its states back, by the names that
    `Pipeline.save_model` was given: learning rate schedulers, data loaders, counters.

    The folder is as for `load_model`, of any plan; where there is nothing in it yet, nothing is
    loaded. A scheduler's optimizer also gets the learning rates that it had. PipelineError where
    other names were saved.
    """
    check_folder(folder)
    check_state(state)
    newest = newest_in(Path(folder))
    if newest is None:
        return
    path = newest / _STATE
    if not path.exists():
        raise PipelineError(
            f"`{newest}` has no states of a script, as `save_model(…, state=…)` writes them"
        )
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file may raise anything, and torch has much to say of it.
    except Exception as error:
        raise PipelineError(
            f"`{path}` cannot be read: {type(error).__name__}, it may be damaged"
        ) from error
    if states.keys() != state.keys():
        raise PipelineError(
            f"`{path}` has {_named(states)}, and here {_named(state)} was asked for"
        )
    for name, each in state.items():
        each.load_state_dict(states[name])
        if isinstance(each, LRScheduler):
            # It has the rates, and torch leaves it to the optimizer's own state to set them.
            for group, rate in zip(
                each.optimizer.param_groups, each.get_last_lr(), strict=True
            ):
                group["lr"] = rate


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


@frozen
class _Source:
    """A folder to read from: for each tensor its file, by name; and the step at which it was
    written.
    """

    folder: Path
    files: dict[str, str]
    step: int

    @classmethod
    def of(cls, folder: Path, kind: str) -> "_Source":
        """The weights, or what optimizers keep; PipelineError if there are none."""
        index = folder / _index(kind)
        single = folder / f"{kind}.safetensors"
        try:
            # A small model of transformers is one file, without an index.
            if not index.exists() and single.exists():
                with safe_open(single, "pt") as file:
                    return cls(folder, dict.fromkeys(file.keys(), single.name), 0)
            document = json.loads(index.read_text())
            return cls(
                folder,
                dict(document["weight_map"]),
                int(document["metadata"].get("step", 0)),
            )
        # A damaged file may raise anything.
        except Exception as error:
            raise PipelineError(f"`{index}` cannot be read: {reason(error)}") from error

    def read(self, names: Iterable[str], device: _Device) -> dict[str, Tensor]:
        """Some of the tensors, and nothing else of the files."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.files:
                raise PipelineError(f"`{self.folder}` has no `{name}`")
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for path, there in (
            (self.folder / file, names) for file, names in by_file.items()
        ):
            try:
                with safe_open(path, "pt", device=str(device)) as file:
                    tensors |= {name: file.get_tensor(name) for name in there}
            except (OSError, SafetensorError) as error:
                raise PipelineError(
                    f"`{path}` cannot be read: {reason(error)}"
                ) from error
        return tensors


def _optimizer_state(
    modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """What optimizers keep for the weights of some modules: `layer.weight.exp_avg`."""
    kept: dict[int, Mapping[str, Any]] = {}
    for optimizer in optimizers:
        kept |= kept_by(optimizer)
    for name, weight in (
        pair for module in modules for pair in module.named_parameters()
    ):
        for key, value in kept.get(id(weight), {}).items():
            kind = type(value).__name__
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value
            elif kind in _NUMBERS:
                yield (
                    f"{name}.{key} ({kind})",
                    torch.tensor(value, dtype=_NUMBERS[kind]),
                )
            else:
                raise PipelineError(
                    f"the `{key}` that an optimizer keeps for `{name}` is a {kind}, and the files "
                    "of a model have tensors and numbers alone: `save` keeps the optimizers as "
                    "they are, for the same plan"
                )


def _kept(key: str, tensor: Tensor) -> tuple[str, Any]:
    """What an optimizer keeps, by its name, from a tensor in a file."""
    name, _, kind = key.rpartition(".")[2].removesuffix(")").partition(" (")
    return name, tensor.item() if kind in _NUMBERS else tensor


def _check_can_be_read(name: str, state: Any) -> None:
    """PipelineError for a state that torch would not read again from a file."""
    file = BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    # Objects raise what they like where they cannot be pickled.
    except Exception as error:
        raise PipelineError(
            f"the state of `{name}` cannot be saved, since torch would not read it again: it may "
            "have tensors, numbers, texts, lists and dictionaries"
        ) from error


def _whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece, in the host's memory if it lay in parts on several processes."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def _check_alike(
    states: Mapping[str, Any], watchdog: Watchdog, everyone: Iterable[int]
) -> None:
    """PipelineError where ranks have other states of the script's own: only one of them is kept."""
    own = {name: _digest(state) for name, state in states.items()}
    told = watchdog.gather(json.dumps(own), _MISSES, everyone)
    first = json.loads(told[min(told)])
    for rank, answer in sorted(told.items()):
        theirs = json.loads(answer)
        for name in first.keys() | theirs.keys():
            if first.get(name) != theirs.get(name):
                raise PipelineError(
                    f"rank {rank} has another state of `{name}` than rank {min(told)}: save_model "
                    "keeps one for all ranks, so that any number of them can go on from it; `save` "
                    "keeps that of each rank"
                )


def _digest(state: Any) -> str:
    """A hash of a state, the same for the same values."""
    leaves, tree = tree_flatten(state)
    content = hashlib.sha256(str(tree).encode())
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        content.update(repr(leaf.tolist() if is_tensor else leaf).encode())
    return content.hexdigest()


def _write_states(path: Path, states: Mapping[str, Any]) -> None:
    """Write the states of the script, and wait until they are on the disk."""
    with path.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, tensors: Tensors) -> None:
    """Write a file, and wait until it is on the disk."""
    # Safetensors refuses tensors that share memory, such as one that two stages of this rank have.
    copied = {name for group in sharing(tensors) for name in group[1:]}
    own = {
        name: tensor.clone() if name in copied else tensor
        for name, tensor in tensors.items()
    }
    # transformers reads only files that name this format.
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in own.items()},
        path,
        {"format": "pt"},
    )
    path.chmod(0o644)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _check_names(weights: Iterable[str]) -> None:
    """Whether each weight has a name of its own, as in one model."""
    twice = [name for name, times in Counter(weights).items() if times > 1]
    if twice:
        raise PipelineError(
            f"two stages have a weight `{twice[0]}`: save_model is for stages of one model, by "
            "`split`"
        )


def _finish(
    new: Path, folder: Path, step: int, sizes: Mapping[str, Mapping[str, int]]
) -> None:
    """Write the indices, the step in them, when all files are there; then the folder gets its
    name.
    """
    files = {
        str(path.relative_to(new)): path for path in new.rglob("*") if path.is_file()
    }
    if missing := sizes.keys() - files.keys():
        raise PipelineError(
            f"`{new / min(missing)}` is not there for rank 0: all ranks must share the folder"
        )
    for stale in files.keys() - sizes.keys() - {_STATE}:
        files[stale].unlink()
    models = {Path(file).parent for file in sizes}
    for model, kind in product(sorted(models), (_MODEL, _OPTIMIZER)):
        parts = {
            Path(file).name: tensors
            for file, tensors in sizes.items()
            if Path(file).parent == model and Path(file).name.startswith(kind)
        }
        total = sum(sum(tensors.values()) for tensors in parts.values())
        places = {name: file for file, tensors in parts.items() for name in tensors}
        index: dict[str, Any] = {
            "metadata": {"total_size": total, "step": step},
            "weight_map": places,
        }
        with (new / model / _index(kind)).open("w") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _index(kind: str) -> str:
    return f"{kind}.safetensors.index.json"
