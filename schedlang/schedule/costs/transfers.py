"""How long a tensor takes from one rank to another."""

from collections.abc import Sequence

from attrs import frozen

from schedlang.schedule.kinds import SENDS


@frozen
class Transfers:
    """A transfer takes the latency of its link, and its bytes over the link's bandwidth.

    Ranks `n * ranks_per_node` up to the next multiple are node n; without `ranks_per_node` all are
    on one node. `latency` and `bandwidth` are those inside a node, then those between nodes.
    `boundary_bytes[s]` is the size of what stage s hands on of one microbatch, or of one slice, to
    each stage that takes it; the gradient that comes back is as large. Or all transfers from rank
    r to rank q take `link_times[r][q]`.
    """

    latency: tuple[float, float]
    bandwidth: tuple[float, float]
    boundary_bytes: tuple[float, ...]
    ranks_per_node: int | None = None
    link_times: Sequence[Sequence[float]] | None = None

    def time(self, kind: int, earlier: int, sender: int, receiver: int) -> float:
        """How long what an op of a kind makes takes from its rank to another; 0 on the same rank.

        It is the output of the stage `earlier`, or the gradient of it. Sums of
        gradients over replicas are no transfers: `Costs.sums` has their times.
        """
        if sender == receiver or kind not in SENDS:
            return 0.0
        if self.link_times is not None:
            return self.link_times[sender][receiver]
        return self.time_of(self.boundary_bytes[earlier], sender, receiver)

    def time_of(self, amount: float, sender: int, receiver: int) -> float:
        """How long so many bytes take from a rank to another one, by the link between them."""
        size = self.ranks_per_node
        is_between = size is not None and sender // size != receiver // size
        latency = self.latency[is_between]
        return latency + amount / self.bandwidth[is_between]
