"""What a transport does with sends and receives: the rules by which a plan is proved.

docs/transports.md says it in words.
"""

from math import inf
from typing import Any

from attrs import frozen

from schedlang.diagnostics.wrong_arguments import check_type

#: The most sends and receives that NCCL is given in one group. Of more, it makes several kernels; a
#: send may be in another one than its receive, and then both ranks hang. The number is that of
#: torch's pull request 174942.
_GROUP = 256


@frozen
class Transport:
    """The rules of a transport; a batch is transfers that are issued as one, at most
    `most` of them.

    If it `blocks`, a rank waits at each batch until it is complete; if not, at the op that needs
    what a receive brings. Batches in one `lane` of a rank go one after the other: all of the
    rank's, or those with one other rank. By lanes for each `edge`, to another rank and from it, or
    with none, a batch is no more than its transfers, each for itself. If batches are `apart`, those
    of several transfers have a lane and a communicator of their own. A send is complete once
    `capacity` allows its message to wait for the receive. With `tags`, messages meet by what they
    carry, not in the order of their sends. If `atomic`, batches that exchange messages complete
    together. If its communicators have a `first_use`, the first batch on each waits until all its
    ranks come to theirs.
    """

    name: str
    blocks: bool = False
    lane: str = "rank"
    apart: bool = False
    capacity: float = 0
    tags: bool = False
    atomic: bool = False
    first_use: bool = False
    most: float = inf

    @property
    def splits_batches(self) -> bool:
        """Whether transfers that are issued as one go each for itself."""
        return self.lane in ("edge", "none")

    def lanes(self, ranks: int, peer: Any, is_send: Any, size: Any) -> Any:
        """The number of the lane, among those of its rank, that a batch of so many transfers goes
        by; or of many batches, as arrays. `peer` is the other rank, -1 where there is none.
        """
        if self.lane == "pair":
            return (peer + 1) + (size > 1) * (ranks - peer)
        if self.lane == "edge":
            return (peer + 1) * 2 + is_send
        return 0 * peer


BLOCKING = Transport("blocking", blocks=True)
GLOO = Transport("gloo", lane="none", tags=True)
NCCL = Transport("nccl", lane="pair", apart=True, first_use=True, most=_GROUP)
NCCL_EAGER = Transport("nccl-eager", most=_GROUP)
NCCL_EDGE = Transport("nccl-edge", lane="edge")
ATOMIC = Transport("blocking with atomic batches", blocks=True, atomic=True)
#: `nccl` once its communicators are there.
WARM_NCCL = Transport("nccl", lane="pair", apart=True, most=_GROUP)
#: What every transport does at least: messages of a channel meet in the order of their sends, and
#: nothing holds a rank but what it needs, and the waits that are written.
LOOSEST = Transport("loosest", lane="none")

_BY_NAME = {
    each.name: (each,) for each in (BLOCKING, GLOO, NCCL, NCCL_EAGER, NCCL_EDGE)
}

#: What a plan is proved for unless its user says otherwise: all of the others.
PORTABLE = "portable"
#: The transport that a portable plan is timed on.
TIMED = GLOO
#: The transports of `schedc check --transport all`.
NAMES = (PORTABLE, *_BY_NAME, "buffered", "buffered:1")


def timed(name: str) -> Transport:
    """The rules by which a plan for a transport is timed; ValueError for an unknown name."""
    return TIMED if name == PORTABLE else transports(name)[0]


def transports(name: str, batches: bool = True) -> tuple[Transport, ...]:
    """The rules that a plan for a transport must satisfy, each set for itself; ValueError for an
    unknown name.

    `portable` asks for the strictest ones, which allow only what all the others allow: ranks that
    block; and for a plan with batches, that these are atomic, and go over communicators of their
    own as on `nccl`.
    """
    check_type("transport", name, str, "the name of a transport, such as 'portable'")
    if name == PORTABLE:
        return (ATOMIC, WARM_NCCL) if batches else (BLOCKING,)
    if name == "buffered":
        return (Transport(name, blocks=True, capacity=inf),)
    kind, _, capacity = name.partition(":")
    if kind == "buffered" and capacity.isdecimal() and 0 < int(capacity) < 10**9:
        return (Transport(name, blocks=True, capacity=int(capacity)),)
    if name not in _BY_NAME:
        raise ValueError(
            f"there is no transport `{name}`: it is {', '.join(NAMES)} or buffered:k"
        )
    return _BY_NAME[name]
