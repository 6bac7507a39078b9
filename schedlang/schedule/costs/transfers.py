"""How long a tensor takes from one rank to another."""

from collections.abc import Sequence

from attrs import frozen

from schedlang.schedule.kinds import SENDS


@frozen
class Transfers:
    """The times of transfers: the latency of the link, plus the bytes over its bandwidth.

    Ranks `n * ranks_per_node` up to the next multiple are on node n; without `ranks_per_node` all
    are on one. `latency` and `bandwidth` have two numbers, one for links inside a node and one for
    links between nodes. `boundary_bytes[s]` is the size of the output of stage s for one
    microbatch, or one slice; the gradient of it is as large. Where there are `link_times`, every
    transfer from rank r to rank q takes `link_times[r][q]`.
    """

    latency: tuple[float, float]
    bandwidth: tuple[float, float]
    boundary_bytes: tuple[float, ...]
    ranks_per_node: int | None = None
    link_times: Sequence[Sequence[float]] | None = None

    def time(self, kind: int, earlier: int, sender: int, receiver: int) -> float:
        """How long the product of an op takes from one rank to another; 0 on the same rank.

        The product is the output of the stage `earlier`, or its gradient. Gradients of weights are
        summed and not sent: `Costs.sums` has their times.
        """
        if sender == receiver or kind not in SENDS:
            return 0.0
        if self.link_times is not None:
            return self.link_times[sender][receiver]
        return self.time_of(self.boundary_bytes[earlier], sender, receiver)

    def time_of(self, amount: float, sender: int, receiver: int) -> float:
        """How long so many bytes take from one rank to another."""
        size = self.ranks_per_node
        is_between = size is not None and sender // size != receiver // size
        latency = self.latency[is_between]
        return latency + amount / self.bandwidth[is_between]
