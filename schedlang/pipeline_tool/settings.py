"""The settings of the visualizer: its keys, their defaults, and what they mean here."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import field, frozen

from schedlang.compiler import compile
from schedlang.costs import Costs, make_costs
from schedlang.plan import Plan
from schedlang.source import read_source

_PROGRAMS = Path(__file__).parent.parent / "programs"

#: The program of a strategy, and how many stages it has per device; 0 for as many as the settings say.
_STRATEGIES = {
    "1f1b": ("1f1b", 1), "interleave": ("interleaved_1f1b", 0), "zb1p": ("zb_h1", 1),
    "1f1b_overlap": ("interleaved_overlap", 1), "1f1b_interleave_overlap": ("interleaved_overlap", 0),
    "dualpipe": ("dualpipe", 1), "dualpipe_v": ("dualpipe_v", 2),
}  # fmt: skip

#: The keys, and their values where none is given.
_DEFAULTS: dict[str, Any] = {
    "strategy": "1f1b", "num_stages": 4, "num_batches": 10, "num_devices": None, "p2p_time": 0.0,
    "forward_times": 1.0, "backward_times": 2.0, "input_times": None, "weight_times": None, "overlap_times": None,
    "microbatch_group_size_per_vp_stage": None, "output_file": None, "visualization_port": None,
}  # fmt: skip

#: The names that the later version has for the same.
_LATER_NAMES = {
    "p2p_latency": "p2p_time", "op_times.forward": "forward_times", "op_times.backward": "backward_times",
    "op_times.backward_D": "input_times", "op_times.backward_W": "weight_times",
    "op_times.overlapped_forward_backward": "overlap_times",
}  # fmt: skip


@frozen
class Settings:
    """What is to be shown: a strategy at a size, with costs; `group` and `output` may be left open."""

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
        return compile(read_source(_PROGRAMS / f"{program}.sched"), params, self.costs)


def settings_of(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """The settings in some layers, of which later ones override earlier ones; ValueError says what is wrong."""
    given = dict(_DEFAULTS)
    for layer in layers:
        given |= _in_our_names(layer)
    strategy = given["strategy"]
    if strategy not in _STRATEGIES:
        raise ValueError(f"there is no strategy `{strategy}`, there are {', '.join(_STRATEGIES)}")
    stages, microbatches = _whole(given, "num_stages"), _whole(given, "num_batches")
    per_device = _STRATEGIES[strategy][1]
    devices = stages // max(per_device, 1) if given["num_devices"] is None else _whole(given, "num_devices")
    if devices < 1 or (stages != devices * per_device if per_device else stages % devices):
        wanted = f"{per_device} per device" if per_device else "as many on each device"
        raise ValueError(f"`{strategy}` has {wanted}, there are {stages} stages and {devices} devices")
    warnings: list[str] = []
    costs = _costs(given, stages, 2 if strategy == "dualpipe" else 1, warnings.append)
    group = None if given["microbatch_group_size_per_vp_stage"] is None else _whole(
        given, "microbatch_group_size_per_vp_stage"
    )  # fmt: skip
    return Settings(strategy, devices, stages, microbatches, costs, group, given["output_file"], warnings)


def _in_our_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer by the keys of `_DEFAULTS`."""
    flat = {key: value for key, value in layer.items() if key != "op_times"}
    times = layer.get("op_times", {})
    if not isinstance(times, dict):
        raise ValueError("`op_times` must have a time for each op")
    flat |= {f"op_times.{op}": value for op, value in times.items()}
    found = {}
    for key, value in flat.items():
        name = _LATER_NAMES.get(key, key)
        if name not in _DEFAULTS or (name == key and name in ("input_times", "weight_times", "overlap_times")):
            known = [*_DEFAULTS, *_LATER_NAMES]
            close = get_close_matches(str(key), known, n=1)
            raise ValueError(f"there is no key `{key}`{f', there is `{close[0]}`' if close else ''}")
        found[name] = value
    return found


def _whole(given: Mapping[str, Any], key: str) -> int:
    value = given[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"`{key}` is {value}, it must be a whole number from 1")
    return value


def _costs(given: Mapping[str, Any], stages: int, pipelines: int, warn: Callable[[str], None]) -> Costs:
    """The costs; in each of several pipelines, stage s is the same."""
    lists: dict[str, list[float]] = {"p2p_time": [_number("p2p_time", given["p2p_time"])]}
    for key in ("forward_times", "backward_times", "input_times", "weight_times", "overlap_times"):
        if given[key] is not None:
            lists[key] = _per_stage(key, given[key], stages, warn) * pipelines
    return make_costs(lists)


def _per_stage(key: str, value: Any, stages: int, warn: Callable[[str], None]) -> list[float]:
    """One number per stage: of one number, of a list, which is cut or filled up with its last, or of each stage's."""
    if isinstance(value, dict):
        missing = [stage for stage in range(stages) if stage not in value]
        if missing:
            raise ValueError(f"`{key}` has nothing for stage {missing[0]}")
        value = [value[stage] for stage in range(stages)]
    if not isinstance(value, list):
        return [_number(key, value)] * stages
    numbers = [_number(key, each) for each in value]
    if not numbers:
        raise ValueError(f"`{key}` must be numbers")
    if len(numbers) != stages:
        change = "the last one is repeated" if len(numbers) < stages else "the others are left out"
        warn(f"`{key}` has {len(numbers)} values for {stages} stages: {change}")
    return (numbers + numbers[-1:] * stages)[:stages]


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"`{key}` must be numbers")
    return float(value)
