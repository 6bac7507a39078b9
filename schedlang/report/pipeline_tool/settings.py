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

#: The program of a strategy, and how many stages it has per device; None for as many as there are.
_STRATEGIES = {
    "1f1b": ("1f1b", 1),
    "interleave": ("interleaved_1f1b", None),
    "zb1p": ("zb_h1", 1),
    "1f1b_overlap": ("interleaved_overlap", 1),
    "1f1b_interleave_overlap": ("interleaved_overlap", None),
    "dualpipe": ("dualpipe", 1),
    "dualpipe_v": ("dualpipe_v", 2),
}

#: The costs that an op's time gives.
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

#: The names that the first version has for the same.
_FIRST_NAMES = {
    "forward_times": "op_times.forward",
    "backward_times": "op_times.backward",
    "p2p_time": "p2p_latency",
}


@frozen
class Settings:
    """What is to be shown: a strategy at a size, with costs; `group` and `output` may be left
    open.
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
            params |= {"chunks": self.stages // self.devices, "least": 1}
            params |= {"group": self.group} if self.group else {}
        return compile(read_source(GALLERY / f"{program}.sched"), params, self.costs)


def settings_of(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """The settings in some layers, of which later ones override earlier ones; ValueError says what
    is wrong.
    """
    given = dict(_DEFAULTS)
    for layer in layers:
        given |= _by_later_names(layer)
    strategy = given["strategy"]
    stages = _whole(given, "num_stages")
    microbatches = _whole(given, "num_batches")
    devices = _devices(given, stages)
    warnings: list[str] = []
    costs = _costs(given, stages, 2 if strategy == "dualpipe" else 1, warnings.append)
    group = None if given[_GROUP] is None else _whole(given, _GROUP)
    return Settings(
        strategy, devices, stages, microbatches, costs, group, given["output_file"], warnings
    )


def _by_later_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer by the keys of `_DEFAULTS`."""
    times = layer.get("op_times", {})
    if not isinstance(times, dict):
        raise ValueError("`op_times` must have a time for each op")
    found = {_FIRST_NAMES.get(key, key): value for key, value in layer.items() if key != "op_times"}
    found |= {f"op_times.{op}": value for op, value in times.items()}
    for key in found:
        if key not in _DEFAULTS:
            close = get_close_matches(str(key), [*_DEFAULTS, *_FIRST_NAMES], n=1)
            raise ValueError(
                f"there is no key `{key}`{f', there is `{close[0]}`' if close else ''}"
            )
    return found


def _devices(given: Mapping[str, Any], stages: int) -> int:
    """How many devices there are: as many as the strategy asks for, unless it is said."""
    strategy = given["strategy"]
    if strategy not in _STRATEGIES:
        raise ValueError(f"there is no strategy `{strategy}`, there are {', '.join(_STRATEGIES)}")
    _, each = _STRATEGIES[strategy]
    devices = (
        stages // (each or 1) if given["num_devices"] is None else _whole(given, "num_devices")
    )
    if devices < 1 or stages % devices or (each and stages != devices * each):
        wanted = f"{each} per device" if each else "as many on each device"
        raise ValueError(
            f"`{strategy}` has {wanted}, there are {stages} stages and {devices} devices"
        )
    return devices


def _whole(given: Mapping[str, Any], key: str) -> int:
    value = given[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"`{key}` is {value}, it must be a whole number from 1")
    return value


def _costs(
    given: Mapping[str, Any], stages: int, pipelines: int, warn: Callable[[str], None]
) -> Costs:
    """The costs; in each of several pipelines, stage s is the same."""
    lists = {"p2p_time": [_number("p2p_latency", given["p2p_latency"])]}
    for key, name in _TIMES.items():
        if given[key] is not None:
            lists[name] = (
                _per_stage(key.removeprefix("op_times."), given[key], stages, warn) * pipelines
            )
    return make_costs(lists)


def _per_stage(op: str, value: Any, stages: int, warn: Callable[[str], None]) -> list[float]:
    """One number per stage: of one number, of a list, which is cut or filled up with its last, or
    of each stage's.
    """
    if isinstance(value, dict):
        missing = [stage for stage in range(stages) if stage not in value]
        if missing:
            raise ValueError(f"there is no {op} time for stage {missing[0]}")
        value = [value[stage] for stage in range(stages)]
    if not isinstance(value, list):
        return [_number(f"{op} times", value)] * stages
    numbers = [_number(f"{op} times", each) for each in value]
    if not numbers:
        raise ValueError(f"there are no {op} times")
    if len(numbers) != stages:
        change = "the last one is repeated" if len(numbers) < stages else "the others are left out"
        warn(f"there are {len(numbers)} {op} times for {stages} stages: {change}")
    return (numbers + numbers[-1:] * stages)[:stages]


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"`{name}` must be numbers, it has {value!r}")
    return float(value)
