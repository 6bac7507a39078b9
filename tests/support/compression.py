"""A kind of op that schedlang does not have: `compress` makes the activations of a microbatch
smaller, on a stream of its own, between forward and backward.

This is all of it, as a user would write it (CONTRIBUTING.md, "An op kind"). The file is imported
before anything else of schedlang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.schedule.ops import Kind, Op, add_kind

if TYPE_CHECKING:
    from schedlang.runtime.stage import Stage

#: The stages and microbatches that were compressed in this process, in order.
COMPRESSED: list[tuple[int, int]] = []


def compress(stage: Stage, microbatch: int) -> None:
    """What the runtime does: here it only writes down that it was called."""
    COMPRESSED.append((stage.number, microbatch))


COMPRESS = add_kind(
    "COMPRESS",
    Op(
        word="compress",
        name="compression",
        cost="compress",
        method=compress,
        colours=("#c9b1e8", "#8a63b8"),
        follows=Kind.F,
        before=(Kind.B, Kind.I),
        stream="compression",
    ),
)
