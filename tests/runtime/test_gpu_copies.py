"""A step records and waits for the events that the plan's streams have, no more and no fewer: with
streams that only note what they are given, since these tests need no GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn

from schedlang import Costs, Plan, compile, read_source
from schedlang.ranks.gpu_streams import Event, Record, Wait, gpu_steps
from schedlang.ranks.gpu_streams import Run as RunOn
from schedlang.runtime.parts.edge_wire import EdgeWire
from schedlang.runtime.parts.exchanges import Beside, Exchanges
from schedlang.runtime.parts.gpu_copies import CopiesOfGpu, Streams
from schedlang.runtime.parts.hops import Ring
from schedlang.runtime.parts.offload import Offload
from schedlang.runtime.stage import Stage, StagePlan
from schedlang.runtime.wire import Wire
from schedlang.schedule.actions import is_beside, is_collective, is_transfer
from schedlang.schedule.kinds import Kind
from schedlang.schedule.transports import NCCL_EDGE
from tests.runtime.test_gradients import compare, in_one_process
from tests.support.models import batch, pipeline, replicated
from tests.support.paths import PROGRAMS
from tests.support.storages import counted_storages


@frozen(eq=False)
class Log:
    """What streams were given: `(what, stream, an action or the number of an event)`."""

    entries: list[tuple[str, str, int]] = field(factory=list)
    events: list[object] = field(factory=list)

    def record(self, stream: str, event: object = None) -> int:
        self.events.append(event)
        self.entries.append(("record", stream, len(self.events) - 1))
        return len(self.events) - 1

    def clear(self) -> None:
        self.entries.clear()
        self.events.clear()


@frozen(eq=False)
class NotedStream:
    name: str
    log: Log

    def record_event(self) -> int:
        return self.log.record(self.name)

    def wait_event(self, event: int) -> None:
        self.log.entries.append(("wait", self.name, event))


class NotedStreams(Streams):
    """Streams of a CPU, which copy at once; `action` tells the action that the rank is at."""

    def __init__(self, log: Log, action: Any = lambda: 0) -> None:
        self.device = torch.device("cpu")
        self.copies_out = NotedStream("copies out", log)
        self.copies_in = NotedStream("copies in", log)
        self.exchanges = NotedStream("exchanges", log)
        self._compute = NotedStream("compute", log)
        self._action = action

    @property
    def compute(self) -> NotedStream:
        return self._compute

    @contextmanager
    def run_on(self, stream: NotedStream) -> Iterator[None]:
        stream.log.entries.append(("run", stream.name, self._action()))
        yield

    def room_on_host(self, bytes: Tensor) -> Tensor:
        return torch.empty_like(bytes)


def noted_step(plan: Plan) -> list[tuple[str, str, int]]:
    """What the second step of this rank gives its streams."""
    log = Log()
    ours = pipeline(plan, replicated(plan))

    def at() -> int:
        action = ours._watchdog.action
        assert action is not None
        return action

    beside = Beside(NotedStreams(log, at))  # type: ignore[arg-type]
    for stage in ours._stages.values():
        for part in stage.parts:
            if isinstance(part, Offload):
                part.copies = CopiesOfGpu(NotedStreams(log, at))
            if isinstance(part, Exchanges):
                part.beside = beside
                stage.module.exchange = torch.clone  # type: ignore[assignment]

    def post(begin: Any, sends: bool) -> Any:
        """As NCCL does: behind what was computed, with an event at the end."""

        def noted(wire: EdgeWire, tensor: Tensor, peer: int, tag: int) -> dist.Work:
            stream = NotedStream(f"lane {(peer + 1) * 2 + sends}", log)
            stream.wait_event(log.record("compute"))
            log.entries.append(("run", stream.name, at()))
            work = begin(wire, tensor, peer, tag)
            log.record(stream.name, work)
            return work

        return noted

    def hop(begin: Any, stream: NotedStream) -> Any:
        def noted(ring: Ring, tensors: Any) -> Any:
            stream.wait_event(log.record("compute"))
            log.entries.append(("run", stream.name, at()))
            in_flight = begin(ring, tensors)
            ((work, _),) = in_flight
            log.record(stream.name, work)
            return in_flight

        return noted

    def wait(wire: Wire, in_flight: Any, peer: int) -> None:
        for work, _ in in_flight:
            if work in log.events:
                log.entries.append(("wait", "compute", log.events.index(work)))
        waits(wire, in_flight, peer)

    def noted_op(index: int, call: Any, op: Any) -> Any:
        kind = op and op[0]
        if kind is None or is_transfer(kind) or is_beside(kind):
            return index, call, op

        def noted() -> None:
            call()
            log.entries.append(("run", "compute", index))

        return index, noted, op

    waits = Wire.wait
    ours._training = [noted_op(*call) for call in ours._training]
    with (
        patch.object(EdgeWire, "post_send", post(EdgeWire.post_send, True)),
        patch.object(EdgeWire, "post_receive", post(EdgeWire.post_receive, False)),
        patch.object(Ring, "send", hop(Ring.send, NotedStream("hops out", log))),
        patch.object(Ring, "receive", hop(Ring.receive, NotedStream("hops in", log))),
        patch.object(Wire, "wait", wait),
    ):
        for step in range(2):
            log.clear()
            ours.step(*batch(plan, step))
    return log.entries


def expected_step(plan: Plan, rank: int) -> list[tuple[str, str, int]]:
    """What the plan's streams have, without what is computed of weights and gradients that travel."""
    kinds = plan.ranks[rank].kind
    numbers: dict[Event, int] = {}
    entries = []
    for step in gpu_steps(plan, rank, NCCL_EDGE):
        match step:
            case Record(stream, event):
                numbers[event] = len(numbers)
                entries.append(("record", stream, numbers[event]))
            case Wait(stream, event):
                entries.append(("wait", stream, numbers[event]))
            case RunOn("compute", (action, *_)) if is_collective(kinds[action]):
                pass
            case RunOn(stream, (action,)):
                entries.append(("run", stream, action))
    return entries


def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    source = read_source(PROGRAMS / f"{name}.sched")
    params = {"ranks": ranks, "microbatches": microbatches}
    return compile(source, params, Costs(p2p_time=0.5), transport="nccl-edge")


PLANS = (
    pytest.param("pipe_offload", 2, 8, marks=pytest.mark.core),
    ("1f1b", 3, 5),
    ("weipipe", 2, 4),
    ("weipipe", 4, 8),
    ("unet_1f1b", 2, 4),
    ("zb_v", 2, 4),
    ("interleaved_1f1b", 2, 4),
    ("experts_1f1b", 2, 3),
)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PLANS)
def test_a_step_gives_its_streams_what_the_plan_has(
    run_ranks: Run, name: str, ranks: int, microbatches: int
) -> None:
    plan = plan_of(name, ranks, microbatches)
    assert bool(plan.offloaded) == (name == "pipe_offload")
    noted = run_ranks(noted_step, ranks, plan).results()
    for rank, found in enumerate(noted):
        assert found == expected_step(plan, rank)


def by_streams(plan: Plan) -> list[float]:
    """The differences from one process, with copies on streams."""
    expected = in_one_process(plan)
    copies = CopiesOfGpu(NotedStreams(Log()))
    with patch("schedlang.runtime.parts.offload.CopiesOfCpu", lambda: copies):
        return compare(plan, expected)


@pytest.mark.processes
def test_gradients_are_those_of_one_process(run_ranks: Run) -> None:
    plan = plan_of("pipe_offload", 2, 8)
    for differences in run_ranks(by_streams, 2, plan).results():
        assert max(differences) < 1e-12


def test_memory_is_held_until_the_next_copy_begins() -> None:
    """Or, if there is none, until the backward that needs the activation again."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    copies = CopiesOfGpu(NotedStreams(Log()))
    offload = Offload(1, module, cpu, {0, 1}, copies)
    stage = Stage(StagePlan(1), module, cpu, parts=[offload])
    with counted_storages() as storages:

        def held() -> int:
            """How often an activation is there: what lies between the two layers."""
            return sum(
                size == 4 * 64 * 4 and not storage.expired()
                for storage, size in storages.made.items()
            )

        def forward(microbatch: int) -> None:
            stage.inputs[microbatch] = torch.randn(4, 8, requires_grad=True)
            stage.gradients[microbatch] = [torch.ones(4, 2)]
            stage.forward(microbatch)

        forward(0)
        assert held() == 1
        stage.ops[Kind.OFFLOAD, 1](0)
        # It is here until its copy is over, and on the host.
        assert held() == 2
        forward(1)
        assert held() == 3
        stage.ops[Kind.OFFLOAD, 1](1)
        # 0 is on the host alone.
        assert held() == 3
        stage.ops[Kind.RELOAD, 1](1)
        assert held() == 4
        stage.backward(1)
        stage.ops[Kind.RELOAD, 1](0)
        # 1 is gone from here and from the host; of 0, the copy back has begun.
        assert held() == 2
        stage.backward(0)
        assert held() == 0
