"""A report of a pipeline's recorded steps: speed, FLOPs, idle time, memory, the slowest rank.

    a step     begin ─► F: count its FLOPs, once for each shape ─► the times of its ops
    a report   every rank fills in its row of a table ─ all-reduce ─► the same report on all ranks

A recorded step only records times and waits for nothing; times of a GPU are read for a report. This
file is loaded with the first recorded step.
"""

import resource
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from attrs import asdict, astuple, define

from schedlang.plan.plan import Plan
from schedlang.runtime.clock import Clock, Moment, Recording
from schedlang.runtime.exchange import Given
from schedlang.runtime.part import Forward
from schedlang.runtime.processes import Processes
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.flop_counter import FlopCounter
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.values import ValueSpec, look_of
from schedlang.runtime.wire import Wire
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.costs.devices import DEVICES

_GIB = 2**30
#: A rank that computes at most this many times the mean is as fast as the others.
_EVEN = 1.02


class Report(dict[str, float]):
    """Figures of a pipeline's steps by name, for a logger, and as text. `Pipeline.report` explains
    them.
    """

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        speeds = [f"{self['samples_per_second']:,.1f} samples/s"]
        if "tokens_per_second" in self:
            speeds.append(f"{self['tokens_per_second']:,.0f} tokens/s")
        speeds.append(f"{self['tflops_per_rank']:.4g} TFLOPS per rank")
        if "mfu" in self:
            speeds.append(f"{self['mfu']:.1%} of the peak (MFU)")
        yield f"{self['seconds_per_step']:.3g} s per step: {', '.join(speeds)}"
        yield f"idle {self['bubble']:.1%}; {self._slowest()}"
        yield f"peak memory {self['peak_memory_gib']:.2f} GiB"

    def _slowest(self) -> str:
        time = self["slowest_rank_time"]
        work = self["slowest_rank_work"]
        rank = f"rank {self['slowest_rank']:.0f}"
        if time <= _EVEN:
            return "all ranks compute as long as each other"
        why = f"with {work:.2f} times the mean FLOPs"
        if work < (1 + time) / 2:
            # The FLOPs of its stages explain less than half of the difference.
            why += ", so its device is slower or shared, or its stages do more than matrix products"
        return f"{rank} computes longest, {time:.2f} times the mean, {why}"


class FlopCount:
    """The FLOPs of a stage's forwards, which are counted once for each shape of inputs."""

    def __init__(self) -> None:
        self.is_on = False
        #: The FLOPs of the forwards since the step began.
        self.of_step = 0
        self._known: dict[Hashable, int] = {}

    def before_forward(self, run: Forward) -> None:
        """Add the FLOPs of a forward; count them first for a new shape."""
        if not self.is_on or run.is_repeated:
            return
        tensors, _ = tree_flatten(run.input)
        look = run.slice, look_of(tensors)
        if look in self._known:
            self.of_step += self._known[look]
        else:
            run.contexts = [*run.contexts, self._counting(look)]

    @contextmanager
    def _counting(self, look: Hashable) -> Iterator[None]:
        counter = FlopCounter()
        with counter:
            yield
        self._known[look] = counter.get_total_flops()
        self.of_step += self._known[look]


@define
class _Row:
    """A rank's row in the table from which a report is made."""

    steps: float = 0
    seconds: float = 0
    samples: float = 0
    tokens: float = 0
    flops: float = 0
    #: The last step: the time of its compute ops, its whole time, and its FLOPs.
    busy: float = 0
    length: float = 0
    work: float = 0
    #: The device's peak FLOPs per second, 0 if unknown; and the peak memory in bytes.
    peak: float = 0
    memory: float = 0


class Measured:
    """The measurements of a rank's recorded steps since the last report."""

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        device: torch.device,
        dim: int,
    ) -> None:
        self._plan = plan
        self._device = device
        #: The dimension of inputs along which their rows lie.
        self._dim = dim
        self._clock = Clock(device)
        self._row = _Row()
        #: Spans of time with only recorded steps in them; and the beginning of the current span, if
        #: the last step was recorded.
        self._spans: list[tuple[Moment, Moment]] = []
        self._begin: Moment | None = None
        self._counts = {number: FlopCount() for number in stages}
        #: The last recording, and the recording of the last step.
        self.recording = Recording(self._clock)
        self._of_step = self.recording
        for number, stage in stages.items():
            stage.add_before_forward(self._counts[number].before_forward)

    def begin(
        self, given: Mapping[int, Given], microbatches: Sequence[int], evaluates: bool
    ) -> None:
        """Begin to record a round, with the numbers of microbatches of each pipeline."""
        if evaluates and not self._plan.is_forward_only:
            # Evaluations between steps do not count in their figures.
            self.pause()
            self.recording = Recording(self._clock)
            return
        self._end_step()
        self._begin = self._begin or self._clock.now()
        self._row.steps += 1
        layout = self._plan.layout
        counts = dict(zip(layout.pipelines, microbatches, strict=True))
        for first, inputs in given.items():
            pipeline = layout.pipeline_of[first]
            # Several models usually have the same batches, so those of the first one count.
            if layout.model_of(first) != layout.model_of(0):
                continue
            units = counts[pipeline] * layout.slices
            of_each = partial(_over_units, inputs.specs, units)
            if first == pipeline.start:
                rows = of_each(lambda spec: spec.shapes[0][self._dim])
                self._row.samples += rows / layout.slices
            self._row.tokens += of_each(_tokens)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Restart the recording of the current step."""
        self.recording = self._of_step = Recording(self._clock)
        for count in self._counts.values():
            count.is_on = True
            count.of_step = 0

    def pause(self) -> None:
        """End the current span, before a step that is not recorded."""
        self._end_step()
        if self._begin is not None:
            self._spans.append((self._begin, self._clock.now()))
            self._begin = None

    def report(
        self, wire: Wire, processes: Processes, peak: float | None
    ) -> Report | None:
        """Make the report of all ranks, which all call this; None if no step was recorded. The next
        report begins with the next step.
        """
        self.pause()
        row = self._row
        row.seconds = sum(self._clock.between(*span) for span in self._spans)
        if row.steps:
            bars = [bar for bar in self._of_step.bars if not is_transfer(bar.kind)]
            row.busy = sum(bar.end - bar.start for bar in bars)
            row.length = self._of_step.seconds
        row.peak = peak_of(self._device) if peak is None else peak
        row.memory = _peak_memory(self._device)
        self._row = _Row()
        self._spans = []
        rows = _all_rows(row, wire, processes)
        return report_of(rows) if any(each.steps for each in rows.values()) else None

    def _end_step(self) -> None:
        """End the last step, if it was recorded."""
        if self._begin is None:
            return
        self._row.work = sum(
            self._passes(number) * count.of_step
            for number, count in self._counts.items()
        )
        self._row.flops += self._row.work
        for count in self._counts.values():
            count.is_on = False

    def _passes(self, stage: int) -> int:
        """A stage's FLOPs as a multiple of its forward's: as many again for the gradients of its
        inputs, and for those of its weights.
        """
        layout = self._plan.layout
        if self._plan.is_forward_only or not layout.has_backward[stage]:
            return 1
        return 3 if layout.trains(stage) else 2


def _over_units(
    specs: Sequence[ValueSpec], units: int, amount: Callable[[ValueSpec], int]
) -> int:
    """The sum of an amount over all units of a first stage in a step; one spec stands for all
    units.
    """
    if len(specs) == 1:
        return units * amount(specs[0])
    return sum(map(amount, specs))


def _tokens(spec: ValueSpec) -> int:
    """The size of the first tensor of integers; others may be masks or positions."""
    pairs = zip(spec.shapes, spec.types, strict=True)
    whole = (shape for shape, dtype in pairs if not dtype.is_floating_point)
    return prod(next(whole, (0,)))


def peak_of(device: torch.device) -> float:
    """The peak FLOPs per second of a device by its data sheet; 0 if unknown."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device).replace(" ", "")
    # PCIe cards have other figures in their data sheets.
    known = [each for each in DEVICES if each in name and "PCIe" not in name]
    # "GB200" has "B200" in it.
    return DEVICES[max(known, key=len)].flops if known else 0.0


def _peak_memory(device: torch.device) -> float:
    """The peak memory in bytes: of tensors on a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _all_rows(own: _Row, wire: Wire, processes: Processes) -> dict[int, _Row]:
    """The rows of all processes, by rank; each process fills in its own."""
    ranks = processes.all
    table = torch.zeros(len(ranks), len(astuple(own)), dtype=torch.float64)
    table[ranks.index(dist.get_rank())] = torch.tensor(astuple(own))
    wire.reduce(table, dist.ReduceOp.SUM)
    replicas = processes.replicas
    wire.end_sum(wire.begin_sum(table, replicas), replicas)
    return {rank: _Row(*row) for rank, row in zip(ranks, table.tolist(), strict=True)}


def report_of(rows: Mapping[int, _Row]) -> Report:
    """Compute the figures of `Pipeline.report`."""
    all_rows = [*rows.values()]
    total = {name: sum(each) for name, each in _columns(all_rows).items()}
    most = {name: max(each) for name, each in _columns(all_rows).items()}
    seconds = most["seconds"]
    report = Report(
        steps=most["steps"],
        seconds_per_step=seconds / most["steps"],
        samples_per_second=total["samples"] / seconds,
    )
    if total["tokens"]:
        report["tokens_per_second"] = total["tokens"] / seconds
    report["tflops_per_rank"] = total["flops"] / seconds / len(rows) / 1e12
    if all(row.peak for row in all_rows):
        report["mfu"] = total["flops"] / seconds / total["peak"]
    report["bubble"] = 1 - total["busy"] / (most["length"] * len(rows))
    slowest = max(rows, key=lambda rank: rows[rank].busy)
    report["slowest_rank"] = slowest
    report["slowest_rank_time"] = len(rows) * rows[slowest].busy / total["busy"]
    report["slowest_rank_work"] = 1.0
    if total["work"]:
        work = len(rows) * rows[slowest].work / total["work"]
        report["slowest_rank_work"] = work
    report["peak_memory_gib"] = most["memory"] / _GIB
    for rank, row in rows.items():
        report[f"peak_memory_gib/rank{rank}"] = row.memory / _GIB
    return report


def _columns(rows: Sequence[_Row]) -> dict[str, list[float]]:
    dicts = [asdict(row) for row in rows]
    return {name: [each[name] for each in dicts] for name in dicts[0]}
