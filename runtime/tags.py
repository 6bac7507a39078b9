"""The tags of a pipeline's messages, by which gloo matches a send with its receive.

For n channels, r ranks, and u microbatches (or slices) that pass through a stage, from 1 on:

    n           announcements, one for each first stage
    r           copies to another rank and back, one for each rank
    1           hops of weights and gradients
    n * u       headers, one for each channel and form of a step
    2 * n * u   the first tensor of each message: activation, gradient, activation, …
    2 * n * u   the second tensor of each message, and so on

A plan with more microbatches gives headers and tensors other tags. All ranks follow it from the
same step on, and what is sent in a step is received in it, so no message meets one of another plan.
"""

from attrs import define

# A user's script may send its own messages, which have tag 0 by default.
_FIRST = 1
_LAST = 2**31


@define(eq=False)
class Tags:
    """The tags of a pipeline with so many channels and ranks; `units` is the largest number of
    microbatches or slices so far.
    """

    channels: int
    ranks: int
    units: int

    def announcement(self, first: int) -> int:
        """The tag of the announcements of a first stage."""
        return _FIRST + first

    def copies(self, rank: int) -> int:
        """The tag of all copies of activations that a rank offloads to another one."""
        return _FIRST + self.channels + rank

    @property
    def hops(self) -> int:
        """The tag of all weights and gradients that hop from replica to replica."""
        return self.copies(self.ranks)

    def headers(self, channel: int) -> range:
        """The tags of a channel's headers, one for each form of a step."""
        begin = self.hops + 1 + channel * self.units
        return range(begin, begin + self.units)

    def tensors(self, channel: int, microbatch: int, is_gradient: bool) -> range:
        """Tags for the tensors of a message, more than are needed."""
        place = 2 * (channel * self.units + microbatch) + is_gradient
        first = self.headers(self.channels).start
        return range(first + place, _LAST, 2 * self.channels * self.units)
