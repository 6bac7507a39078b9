"""What is proved and what NCCL does: plans whose verdicts differ by transport, each with a twin that
ends on all of them.

Their messages are larger than NCCL's buffers, so that a send is complete with its receive.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from schedlang import CompileError, Kind, Plan, compile
from schedlang.runtime.communicators import warm_up
from schedlang.runtime.parts.edge_wire import EdgeWire
from schedlang.runtime.processes import Processes, all_processes
from schedlang.schedule.actions import is_transfer
from tests.gpu.checks import Said, check, device, join, rank

#: Bytes of a message, and the seconds after which a plan is taken for one that hangs.
BYTES = 1 << 26
HANGS = 6.0

#: Two ranks issue single transfers in other orders.
ORDER = """
schedule order {
    param ranks = 2
    param microbatches = 2
    rank r {
        if r == 0 { F(0) send F(0) F(1) %s B(0) recv B(1) B(1) }
        else { recv F(0) F(0) B(0) send B(0) recv F(1) F(1) B(1) send B(1) }
    }
}
"""

#: One side of two transfers is a batch, the other side is not.
BATCH = """
schedule batch {
    param ranks = 2
    param microbatches = 2
    rank r {
        if r == 0 { F(0) send F(0) F(1) overlap { send F(1) recv B(0) } B(0) recv B(1) B(1) }
        else { recv F(0) F(0) B(0) %s F(1) B(1) send B(1) }
    }
}
"""

#: In a ring, every rank sends to the next one before it receives from the one before.
RING = """
schedule ring {
    param ranks = 3
    param microbatches = 3
    stage s in 0 .. 6 on s %% ranks
    rank r {
        if r == 0 {
            %s
        }
        if r == 1 {
            for m in 0 .. 3 { recv F(1, m) F(1, m) send F(1, m) }
            for m in 0 .. 3 { recv F(4, m) F(4, m) send F(4, m) }
        }
        if r == 2 {
            for m in 0 .. 3 { recv F(2, m) F(2, m) send F(2, m) }
            for m in 0 .. 3 { recv F(5, m) F(5, m) }
        }
    }
}
"""

#: What rank 0 does in it.
_SENDS_FIRST = """
            for m in 0 .. 3 { F(0, m) send F(0, m) }
            for m in 0 .. 3 { recv F(3, m) F(3, m) send F(3, m) }
"""
_RECEIVES_FIRST = """
            F(0, 0) send F(0, 0) F(0, 1) send F(0, 1)
            recv F(3, 0) F(0, 2) send F(0, 2)
            recv F(3, 1) recv F(3, 2)
            for m in 0 .. 3 { F(3, m) send F(3, m) }
"""

#: By name: the ranks, and the program with what it does in its own way, and in its twin's.
CASES = {
    "order": (2, ORDER, "send F(1) recv B(0)", "recv B(0) send F(1)"),
    "batch": (2, BATCH, "send B(0) recv F(1)", "overlap { send B(0) recv F(1) }"),
    "ring": (3, RING, _SENDS_FIRST, _RECEIVES_FIRST),
}


def verdict(text: str, transport: str) -> bool:
    """Whether a program is proved for a transport."""
    try:
        compile(text, transport=transport)
    except CompileError:
        return False
    return True


def carry_out(
    plan: Plan, processes: Processes, wire: EdgeWire | None
) -> Callable[[], bool]:
    """Issue this rank's transfers as its actions say, each op behind what it needs; gives a function
    that says whether the GPU has come to the end.
    """
    own = processes.own
    actions = plan.ranks[own]
    message = torch.ones(BYTES, dtype=torch.uint8, device=device())
    coming: dict[tuple[Kind, int, int], dist.Work] = {}
    works: list[dist.Work] = []

    def operations(batch: range) -> Iterator[tuple[Kind, int, int, int]]:
        for index in batch:
            kind = Kind(actions.kind[index])
            stage = actions.stage[index]
            peer = plan.peer(kind, stage)
            assert peer is not None
            yield kind, stage, actions.microbatch[index], peer

    def single(kind: Kind, peer: int) -> dist.Work:
        sends = kind in (Kind.SEND_F, Kind.SEND_B)
        tensor = message if sends else torch.empty_like(message)
        if wire is not None:
            return (wire.post_send if sends else wire.post_receive)(tensor, peer, 0)
        call = dist.isend if sends else dist.irecv
        work = call(tensor, processes.pipeline[peer], processes.group)
        assert work is not None
        return work

    for batch in actions.batches():
        kind = Kind(actions.kind[batch.start])
        if not is_transfer(kind):
            needed = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}.get(kind)
            key = (needed, actions.stage[batch.start], actions.microbatch[batch.start])
            if key in coming:
                coming.pop(key).wait()
            continue
        ops = list(operations(batch))
        if len(ops) > 1 and wire is None:
            given = [
                dist.P2POp(
                    dist.isend if kind in (Kind.SEND_F, Kind.SEND_B) else dist.irecv,
                    message
                    if kind in (Kind.SEND_F, Kind.SEND_B)
                    else torch.empty_like(message),
                    processes.pipeline[peer],
                    processes.group,
                )
                for kind, _, _, peer in ops
            ]
            made = dist.batch_isend_irecv(given) * len(ops)
        else:
            made = [single(kind, peer) for kind, _, _, peer in ops]
        for (kind, stage, microbatch, _), work in zip(ops, made, strict=False):
            works.append(work)
            if kind in (Kind.RECV_F, Kind.RECV_B):
                coming[kind, stage, microbatch] = work
    for work in works:
        work.wait()
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(device()))

    def ends() -> bool:
        limit = time.monotonic() + HANGS
        while time.monotonic() < limit:
            if end.query():  # type: ignore[no-untyped-call]
                return True
            time.sleep(0.01)
        return False

    return ends


class _NoWatchdog:
    """Nobody looks on: a plan that hangs is what is asked for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _compare(
    transport: str, name: str, *, own_way: bool, eagerly: bool = False
) -> Said:
    """Carry out a case, and compare whether it ends with what is proved for the transport."""
    join(eagerly=eagerly)
    _, text, wrong, right = CASES[name]
    text %= wrong if own_way else right
    expected = verdict(text, transport)
    # The actions are the program's own: on every transport the same.
    plan = compile(text, transport="gloo")
    processes = all_processes()
    wire = None
    if transport == "nccl-edge":
        watchdog: Any = _NoWatchdog()
        wire = EdgeWire(plan, processes, device(), 30.0, watchdog)
    else:
        warm_up(plan, processes, device())
    torch.cuda.synchronize()
    found = carry_out(plan, processes, wire)()
    # Whoever ends breaks its connections, on which others may still receive.
    dist.all_reduce(torch.zeros(1))
    said = {"proved": expected, "ends": found}
    assert expected == found, (rank(), said)
    return said


def _register() -> None:
    """A check for each case, each of its twins, and each transport of NCCL."""
    for name, (ranks, *_) in CASES.items():
        for transport in ("nccl", "nccl-eager", "nccl-edge"):
            for own_way in (True, False):

                def run(
                    transport: str = transport,
                    name: str = name,
                    own_way: bool = own_way,
                ) -> Said:
                    eagerly = transport == "nccl-eager"
                    return _compare(transport, name, own_way=own_way, eagerly=eagerly)

                twin = "" if own_way else "_twin"
                run.__name__ = f"{name}{twin}_on_{transport.replace('-', '_')}"
                check(ranks=ranks, seconds=40, breaks=True, needs_gpu=True)(run)


_register()
