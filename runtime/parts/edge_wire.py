"""The wire for `nccl-edge`: a process group of two ranks for each edge, that is, for each sender
and receiver.

All ranks create their groups in the same rounds (`schedlang.ranks.connections`), when a pipeline is
built:

    round     1            2            3            4
    rank 0    0→1          1→0
    rank 1    0→1          1→0          1→2          2→1
    rank 2    2→3          3→2          1→2          2→1
    rank 3    2→3          3→2

Two ranks wait for each other while they create a group. A first message in each round connects the
group, so that no step waits for that.
"""

from datetime import timedelta
from inspect import signature
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.ranks.connections import Edge, edges_of, rounds
from schedlang.runtime.errors import raise_if_lost
from schedlang.runtime.processes import Processes, backend_of
from schedlang.runtime.watchdog import GRACE, Watchdog
from schedlang.runtime.wire import Wire, let_main_thread_go_on

#: Torch 2.11 splits the backend of the device to which a group is bound; later versions take the
#: backend as an argument.
_SPLITS_BY_BACKEND = "backend" in signature(dist.split_group).parameters

#: Messages of an edge meet in the order in which they begin.
_NO_TAG = 0

#: The groups for the processes of a pipeline, by device type and edge; None for an edge of other
#: ranks. Pipelines that are built later reuse them.
_Made = dict[tuple[str, Edge], dist.ProcessGroup | None]
_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()


class EdgeWire(Wire):
    """The connections of one rank, one for each edge of its plan; the messages of an edge keep
    their order. All ranks build theirs together.
    """

    is_by_edge = True

    def __init__(
        self,
        plan: Plan,
        processes: Processes,
        device: torch.device,
        timeout: float,
        watchdog: Watchdog,
    ) -> None:
        super().__init__(processes, timeout, watchdog)
        # Longer than the watchdog's limit, since the watchdog can name the rank that is the cause.
        limit = timedelta(seconds=timeout + 2 * GRACE)
        groups = _connect(plan, processes, device, limit, watchdog)
        #: By peer, the function that begins a message to it, or from it, and its rank in the group.
        self._to = {
            receiver: (group.send, _rank_in(group, receiver, processes))
            for (sender, receiver), group in groups.items()
            if sender == processes.own
        }
        self._from = {
            sender: (group.recv, _rank_in(group, sender, processes))
            for (sender, receiver), group in groups.items()
            if receiver == processes.own
        }
        let_main_thread_go_on()

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a tensor, after all earlier ones to this peer."""
        send, rank = self._to[peer]
        try:
            return send([tensor], rank, _NO_TAG)
        except RuntimeError as error:
            raise_if_lost({self.processes.pipeline[peer]}, error)
            raise

    def post_receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive into a tensor, after all earlier ones from this peer."""
        receive, rank = self._from[peer]
        try:
            return receive([tensor], rank, _NO_TAG)
        except RuntimeError as error:
            raise_if_lost({self.processes.pipeline[peer]}, error)
            raise


def _connect(
    plan: Plan,
    processes: Processes,
    device: torch.device,
    limit: timedelta,
    watchdog: Watchdog,
) -> dict[Edge, dist.ProcessGroup]:
    """Create the group of each edge of this rank, and send a first message over it."""
    made = _made.setdefault(processes.group, {})
    is_split = processes.group.bound_device_id is not None
    wanted = edges_of(plan.layout, plan.is_forward_only)
    # A rank has at most one edge in a round, and a rank without any still takes part in the calls.
    for edges in rounds(edge for edge in wanted if (device.type, edge) not in made):
        own = next((edge for edge in edges if processes.own in edge), None)
        peers = {processes.pipeline[rank] for rank in own or ()} - {dist.get_rank()}
        # If the peer does not come, the watchdog names it.
        watchdog.waits_for = tuple(peers)
        group = None
        if is_split:
            group = _split(edges, processes, device, limit)
        try:
            if not is_split:
                group = _new(edges, own, processes, device, limit)
            if own is not None and group is not None:
                _first_message(own, group, processes, device, limit)
        except RuntimeError as error:
            raise_if_lost(peers, error)
            raise
        watchdog.waits_for = ()
        made |= {(device.type, edge): group if edge == own else None for edge in edges}
    groups = {edge: made[device.type, edge] for edge in wanted}
    return {edge: group for edge, group in groups.items() if group is not None}


def _split(
    edges: list[Edge], processes: Processes, device: torch.device, limit: timedelta
) -> dist.ProcessGroup | None:
    """The group of this rank's edge in a round, if it has one, split from NCCL's communicator for
    all ranks.
    """
    parent = processes.group
    ranks = [[_rank_in(parent, rank, processes) for rank in edge] for edge in edges]
    of_device = {}
    if _SPLITS_BY_BACKEND:
        of_device = {"backend": f"{device.type}:{backend_of(parent, device)}"}
    return dist.split_group(parent, ranks, timeout=limit, **of_device)


def _new(
    edges: list[Edge],
    own: Edge | None,
    processes: Processes,
    device: torch.device,
    limit: timedelta,
) -> dist.ProcessGroup | None:
    """The group of this rank's edge in a round, if it has one, created without a parent."""
    # If the pipeline has all processes, each of them creates all groups. In a pipeline of some
    # processes, a rank creates only its own; torch then names a group by its members and by the
    # number of earlier groups, which must be equal on both. So a rank without an edge in this round
    # creates a group of itself.
    is_part = len(processes.pipeline) < dist.get_world_size()
    backend = backend_of(processes.group, device)
    group = None
    for members in [own or (processes.own,)] if is_part else edges:
        made = dist.new_group(
            [processes.pipeline[rank] for rank in members],
            limit,
            backend,
            use_local_synchronization=is_part,
        )
        if members == own:
            group = made
    return group


def _rank_in(group: dist.ProcessGroup, rank: int, processes: Processes) -> int:
    """The rank within a group of a rank of the plan."""
    return dist.get_group_rank(group, processes.pipeline[rank])


def _first_message(
    edge: Edge,
    group: dist.ProcessGroup,
    processes: Processes,
    device: torch.device,
    limit: timedelta,
) -> None:
    """Send a message from the first rank of an edge to the second."""
    sender, receiver = edge
    message = [torch.zeros(1, device=device)]
    if processes.own == sender:
        work = group.send(message, _rank_in(group, receiver, processes), _NO_TAG)
    else:
        work = group.recv(message, _rank_in(group, sender, processes), _NO_TAG)
    if device.type == "cpu":
        work.wait(limit)
    else:
        work.wait()
