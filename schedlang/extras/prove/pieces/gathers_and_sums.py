"""Checks, for every n, that weights are gathered when ops use them and that all gradients are
summed, in programs that write `unshard`, `reshard` and `reduce`. Without replicas in the plan this
concerns each rank alone, and takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedlang.extras.prove.pieces.linear import NotLinear, holds_from
from schedlang.extras.prove.pieces.pieces import Op, Orders, Piece
from schedlang.language.faults import Fault
from schedlang.schedule.actions import is_collective
from schedlang.schedule.kinds import GATHERS, MAKERS, SUMS, USES_WEIGHTS, Kind, op_of
from schedlang.schedule.layout import Layout


def check_gathers(orders: Orders, layout: Layout) -> None:
    """Fault if weights are missing, gathered twice or never dropped, or if a gradient is not
    summed, for all n. NotLinear for stages with replicas.
    """
    for pieces in orders.ranks:
        ops = [op for piece in pieces for op in piece.ops]
        written = {(op.kind, op.stage) for op in ops if is_collective(op.kind)}
        if any(len(layout.replicas(stage)) > 1 for _, stage in written):
            raise NotLinear(
                "it gathers or sums stages of which it has replicas, or passes on to them, and "
                "each of them goes on meanwhile"
            )
        if written:
            _check_rank(pieces, written)


def _check_rank(pieces: Sequence[Piece], written: set[tuple[int, int]]) -> None:
    #: The stages whose "weights" are gathered, and those with a "gradient" that no sum has.
    there: set[tuple[str, int]] = set()
    for piece in pieces:
        # The state after a round depends on the last gather, drop, sum or gradient of each stage in
        # it. So the second round stands for all later ones.
        for number in range(2 if piece.grows else 1):
            for op in piece.ops:
                wrong = _met(op, there, written)
                if wrong and piece.rounds.constant <= number:
                    # There is no second round at n = 0.
                    holds_from(1)
                if wrong:
                    raise wrong
    for what, stage in sorted(there, key=lambda each: (each[0] != "weights", each[1])):
        if what == "weights":
            raise Fault("unshard", f"the weights of stage {stage} are never dropped", 0)
        raise Fault("reduce-grad", f"a gradient of stage {stage} is never summed", 0)


def _met(
    op: Op, there: set[tuple[str, int]], written: set[tuple[int, int]]
) -> Fault | None:
    """Update what is gathered and what is to be summed by one op; return the fault of the op, if
    any.
    """
    stage = op.stage
    at = op.location
    row = op_of(op.kind)
    weights = "weights", stage
    gradient = "gradient", stage
    if any((kind, stage) in written for kind in GATHERS):
        if row.weights in ("bring", "change") and weights in there:
            return Fault(
                "unshard", f"the weights of stage {stage} are gathered already", at
            )
        needs_weights = row.weights == "drop" or op.kind in USES_WEIGHTS
        if needs_weights and weights not in there:
            return Fault(
                "unshard", f"the weights of stage {stage} are not gathered", at
            )
        if row.weights == "bring":
            there.add(weights)
        elif row.weights == "drop":
            there.discard(weights)
    if any((kind, stage) in written for kind in SUMS):
        if row.gradients and gradient not in there:
            return Fault("reduce-grad", f"a sum of stage {stage} has no gradient", at)
        if row.is_update and gradient in there:
            return Fault(
                "reduce-grad", f"a gradient of stage {stage} is not summed", at
            )
        if op.kind in MAKERS[Kind.W]:
            there.add(gradient)
        elif row.gradients:
            there.discard(gradient)
    return None
