"""The communicators of `nccl-edge`: one for each pair of ranks and direction in which something is
sent, and the rounds in which all ranks make them.

Two ranks wait for each other where they make a communicator, so all ranks go by the same rounds. In
a round each rank has one communicator to make at most:

    round     1            2            3            4
    edges     0→1, 2→3     1→0, 3→2     1→2          2→1
"""

from collections.abc import Iterable

from schedlang.schedule.kinds import RECEIVES, Kind
from schedlang.schedule.layout import Layout

#: A rank that sends, and the one that receives from it.
Edge = tuple[int, int]


def edges_of(layout: Layout, is_forward_only: bool = False) -> list[Edge]:
    """The edges on which a plan sends, in order: between ranks that have stages next to each other,
    or a skip, with activations one way and gradients the other.
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
    """The edges in rounds, in none of which a rank comes twice: the lowest pairs of ranks that go
    together, from the lower rank to the higher one and then back, then the pairs that are left.
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
