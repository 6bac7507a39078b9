"""How long actions take."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from attrs import frozen

from schedlang.diagnostics import CompileError, Diagnostic
from schedlang.schedule import Kind
from schedlang.source import read_source

#: The names of what can be given, at the command and in a file.
TIMES = ("forward_times", "backward_times", "input_times", "weight_times", "p2p_time")


@frozen
class Costs:
    """Durations in any one unit: one value for all stages, or one per stage; `p2p` for any transfer between ranks.

    The defaults are the unit costs of the pipeline papers: a forward is 1, a whole backward 2, each of its halves 1.
    """

    forward: tuple[float, ...] = (1.0,)
    backward: tuple[float, ...] = (2.0,)
    input: tuple[float, ...] = (1.0,)
    weight: tuple[float, ...] = (1.0,)
    p2p: float = 0.0

    def table(self, stages: int) -> dict[int, list[float]]:
        """For each kind of compute action, its duration on each stage; ValueError for a wrong number of values."""
        named = {
            Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.input, Kind.W: self.weight,
            Kind.R: self.forward, Kind.U: (0.0,),
        }  # fmt: skip
        table = {}
        for kind, values in named.items():
            if len(values) not in (1, stages):
                raise ValueError(f"{len(values)} durations of `{kind.name}` are given, there are {stages} stages")
            table[int(kind)] = list(values) * (stages if len(values) == 1 else 1)
        return table


def make_costs(times: Mapping[str, Sequence[float]]) -> Costs:
    """Costs from the user's lists, by the names of the command's options; ValueError for what is not a duration.

    A half of the backward that is not given is half of the whole one.
    """
    for name, durations in times.items():
        if name not in TIMES:
            close = get_close_matches(name, TIMES, n=1)
            raise ValueError(f"there is no cost `{name}`{f', there is `{close[0]}`' if close else ''}")
        if not durations or not all(isfinite(each) and each >= 0 for each in durations):
            raise ValueError(f"`{name}` must be numbers from 0")
    lists = {name: tuple(float(each) for each in durations) for name, durations in times.items()}
    backward = lists.get("backward_times", Costs().backward)
    half = tuple(each / 2 for each in backward)
    return Costs(
        lists.get("forward_times", Costs().forward),
        backward,
        lists.get("input_times", half),
        lists.get("weight_times", half),
        lists.get("p2p_time", (0.0,))[0],
    )


def read_costs(path: str | Path) -> Costs:
    """Costs from a JSON file such as `{"forward_times": [1, 1.5], "p2p_time": 0.1}`.

    CompileError says what is wrong with it.
    """
    try:
        document = json.loads(read_source(path).text)
        if not isinstance(document, dict):
            raise ValueError('it must be an object, such as {"forward_times": [1, 2]}')
        lists = {name: times if isinstance(times, list) else [times] for name, times in document.items()}
        for name, times in lists.items():
            if not all(type(each) in (int, float) for each in times):
                raise ValueError(f"`{name}` must be numbers from 0")
        return make_costs(lists)
    except (ValueError, RecursionError) as error:
        raise CompileError([Diagnostic("costs", f"costs in `{path}`: {error}", file=str(path))]) from None
