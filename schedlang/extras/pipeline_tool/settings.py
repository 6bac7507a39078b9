"""The settings of the visualizer: its keys, their defaults, and what they mean here."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from attrs import field, frozen

from schedlang.compiler import compile
from schedlang.files.package import GALLERY
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.schedule.costs import Costs, make_costs

#: The program of each strategy, and how many stages it has per device; None if that can be chosen.
_STRATEGIES = {
    "1f1b": ("1f1b", 1),
    "interleave": ("interleaved_1f1b", None),
    "zb1p": ("zb_h1", 1),
    "1f1b_overlap": ("interleaved_overlap", 1),
    "1f1b_interleave_overlap": ("interleaved_overlap", None),
    "dualpipe": ("dualpipe", 1),
    "dualpipe_v": ("dualpipe_v", 2),
}

#: The costs that are meant by the time of an op.
_TIMES = {
    "op_times.forward": "forward_times",
    "op_times.backward": "backward_times",
    "op_times.backward_D": "input_times",
    "op_times.backward_W": "weight_times",
    "op_times.overlapped_forward_backward": "overlap_times",
}

_GROUP = "microbatch_group_size_per_vp_stage"

#: The keys of the later version, and their values where none is given.
_DEFAULTS: dict[str, Any] = {
    "strategy": "1f1b",
    "num_stages": 4,
    "num_batches": 10,
    "num_devices": None,
    "p2p_latency": 0.0,
    _GROUP: None,
    **dict.fromkeys(_TIMES),
    "op_times.forward": 1.0,
    "op_times.backward": 2.0,
    "output_file": None,
    "visualization_port": None,
}

#: The keys of the first version that have other names in the later one.
_FIRST_NAMES = {
    "forward_times": "op_times.forward",
    "backward_times": "op_times.backward",
    "p2p_time": "p2p_latency",
}


@frozen
class Settings:
    """A strategy at a size, with costs: what is to be drawn.

    `group` is how many microbatches go through a chunk before the next chunk has its turn, if that
    is said; `output` is the file to draw to.
    """

    strategy: str
    devices: int
    stages: int
    microbatches: int
    costs: Costs
    group: int | None
    output: str | None
    #: What the user should know, such as that a list was too short.
    warnings: list[str] = field(factory=list, eq=False)

    def plan(self) -> Plan:
        """The plan of the strategy's program; CompileError where it refuses the size."""
        program, _ = _STRATEGIES[self.strategy]
        params = {"ranks": self.devices, "microbatches": self.microbatches}
        if program.startswith("interleaved"):
            params["chunks"] = self.stages // self.devices
            params["least"] = 1
            if self.group:
                params["group"] = self.group
        return compile(read_source(GALLERY / f"{program}.sched"), params, self.costs)


def settings_of(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """The settings in some layers, where later ones override earlier ones; ValueError says what is
    wrong.
    """
    values = dict(_DEFAULTS)
    for layer in layers:
        values |= _renamed(layer)
    strategy = values["strategy"]
    stages = _whole(values, "num_stages")
    warnings: list[str] = []
    # DualPipe runs each stage in two pipelines.
    pipelines = 2 if strategy == "dualpipe" else 1
    return Settings(
        strategy=strategy,
        devices=_devices(values, stages),
        stages=stages,
        microbatches=_whole(values, "num_batches"),
        costs=_costs(values, stages, pipelines, warnings.append),
        group=None if values[_GROUP] is None else _whole(values, _GROUP),
        output=values["output_file"],
        warnings=warnings,
    )


def _renamed(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a layer, with the keys of `_DEFAULTS`."""
    times = layer.get("op_times", {})
    if not isinstance(times, dict):
        raise ValueError("`op_times` must have a time for each op")
    values = {}
    for key, value in layer.items():
        if key != "op_times":
            values[_FIRST_NAMES.get(key, key)] = value
    for op, value in times.items():
        values[f"op_times.{op}"] = value
    for key in values:
        if key not in _DEFAULTS:
            message = f"there is no key `{key}`"
            close = get_close_matches(str(key), [*_DEFAULTS, *_FIRST_NAMES], n=1)
            if close:
                message += f", there is `{close[0]}`"
            raise ValueError(message)
    return values


def _devices(values: Mapping[str, Any], stages: int) -> int:
    """How many devices there are: as many as the strategy needs, if it is not said."""
    strategy = values["strategy"]
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"there is no strategy `{strategy}`, there are {', '.join(_STRATEGIES)}"
        )
    _, per_device = _STRATEGIES[strategy]
    if values["num_devices"] is None:
        devices = stages // (per_device or 1)
    else:
        devices = _whole(values, "num_devices")
    if (
        devices < 1
        or stages % devices
        or (per_device and stages != devices * per_device)
    ):
        rule = f"{per_device} per device" if per_device else "as many on each device"
        raise ValueError(
            f"`{strategy}` has {rule}, there are {stages} stages and {devices} devices"
        )
    return devices


def _whole(values: Mapping[str, Any], key: str) -> int:
    """The setting of a key, which must be a whole number from 1."""
    value = values[key]
    # Not `isinstance`: for Python, true is a whole number.
    if type(value) is not int or value < 1:
        raise ValueError(f"`{key}` is {value}, it must be a whole number from 1")
    return value


def _costs(
    values: Mapping[str, Any], stages: int, pipelines: int, warn: Callable[[str], None]
) -> Costs:
    """The costs; those of a stage are the same in each of several pipelines."""
    times = {"p2p_time": [_number("p2p_latency", values["p2p_latency"])]}
    for key, name in _TIMES.items():
        if values[key] is not None:
            op = key.removeprefix("op_times.")
            times[name] = _per_stage(op, values[key], stages, warn) * pipelines
    return make_costs(times)


def _per_stage(
    op: str, value: Any, stages: int, warn: Callable[[str], None]
) -> list[float]:
    """The time of an op on each stage: from one number, from a list, or from numbers by stage.

    A list that is too long is cut, and one that is too short goes on with its last number.
    """
    if isinstance(value, dict):
        missing = [stage for stage in range(stages) if stage not in value]
        if missing:
            raise ValueError(f"there is no {op} time for stage {missing[0]}")
        value = [value[stage] for stage in range(stages)]
    if not isinstance(value, list):
        return [_number(f"{op} times", value)] * stages
    numbers = [_number(f"{op} times", item) for item in value]
    if not numbers:
        raise ValueError(f"there are no {op} times")
    if len(numbers) != stages:
        change = (
            "the last one is repeated"
            if len(numbers) < stages
            else "the others are left out"
        )
        warn(f"there are {len(numbers)} {op} times for {stages} stages: {change}")
    return (numbers + numbers[-1:] * stages)[:stages]


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"`{name}` must be numbers, it has {value!r}")
    return float(value)
