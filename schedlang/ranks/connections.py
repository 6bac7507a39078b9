"""The communicators of `nccl-edge`, one for each sender and receiver, and the rounds in which all
ranks create them.

Two ranks wait for each other while they create a communicator, so all ranks follow the same rounds.
In a round, each rank creates at most one communicator:

    round     1            2            3            4
    edges     0→1, 2→3     1→0, 3→2     1→2          2→1
"""

from collections.abc import Iterable

from schedlang.schedule.kinds import RECEIVES, Kind
from schedlang.schedule.layout import Layout

#: A rank that sends, and the one that receives from it.
Edge = tuple[int, int]


def edges_of(layout: Layout, is_forward_only: bool = False) -> list[Edge]:
    """The edges on which a plan sends, sorted: activations between the ranks of neighbouring
    stages, or along a skip, and gradients in the other direction.
    """
    edges: set[Edge] = set()
    for made, receive in RECEIVES.items():
        if is_forward_only and made == Kind.B:
            continue
        for number in layout.all_numbers:
            sender = layout.peer(receive, number)
            if sender is not None:
                stage, _ = layout.ends(receive, number)
                edges.add((sender, layout.placement[stage]))
    return sorted(edges)


def rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Group the edges into rounds, so that a rank occurs at most once in a round. Each pair of
    rounds takes disjoint pairs of ranks, the lowest first: edges to the higher rank, then edges
    back.
    """
    wanted = set(edges)
    left = sorted({(min(edge), max(edge)) for edge in wanted})
    rounds_so_far: list[list[Edge]] = []
    while left:
        taken: set[int] = set()
        pairs = []
        for pair in left:
            if taken.isdisjoint(pair):
                taken.update(pair)
                pairs.append(pair)
        left = [pair for pair in left if pair not in pairs]
        for one_way in (pairs, [(high, low) for low, high in pairs]):
            among = [edge for edge in one_way if edge in wanted]
            if among:
                rounds_so_far.append(among)
    return rounds_so_far
