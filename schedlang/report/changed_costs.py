"""Costs as they would be if something took longer or shorter."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from attrs import evolve

from schedlang.schedule.arrays import Floats
from schedlang.schedule.costs import Costs
from schedlang.schedule.costs.model import KIND_OF
from schedlang.schedule.fixed_point import as_float, meant
from schedlang.schedule.layout import Layout


def faster(
    costs: Costs, name: str, stage: int, layout: Layout | int, factor: float
) -> Costs:
    """The costs if an op, such as `forward`, took `factor` times as long on a stage."""
    durations = costs.durations(layout)
    changed: dict[str, Any] = {}
    for op, means in costs.every_duration(layout).items():
        values: list[Any] = list(means)
        kind = KIND_OF.get(op)
        if kind in durations.by_unit and not isinstance(layout, int):
            rows = zip(durations.by_unit[kind], durations.units.tolist(), strict=True)
            values = [_nested(row[:length], layout.slices) for row, length in rows]
        if op == name:
            values[stage] = _scaled(values[stage], factor)
        changed[f"{op}_times"] = tuple(values)
    return evolve(costs, **changed)


def resized(costs: Costs, factor: Fraction, layout: Layout) -> Costs:
    """The costs if each stage were `factor` times as much of the model: all its ops take so
    many times as long, and transfers as long as before.
    """
    times: dict[str, Sequence[float]] = {
        f"{op}_times": each for op, each in costs.every_duration(layout).items()
    }
    for name in ("sum_times", "gather_times"):
        times[name] = getattr(costs, name) or ()
    changed: dict[str, Any] = {
        name: tuple(as_float(meant(time) * factor) for time in each) or None
        for name, each in times.items()
    }
    return evolve(costs, **changed)


def _scaled(value: Any, factor: float) -> Any:
    """A number, or all numbers in nested tuples, times a factor."""
    if isinstance(value, tuple):
        return tuple(_scaled(each, factor) for each in value)
    return value * factor


def _nested(row: Floats, slices: int) -> tuple[Any, ...]:
    """The values of a stage's microbatches, and slices, as `Costs` has them."""
    if slices == 1:
        return tuple(row.tolist())
    return tuple(map(tuple, row.reshape(-1, slices).tolist()))
