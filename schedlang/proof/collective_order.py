"""Do all ranks come to the gathers, sums and hops that they have together in one order?"""

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from schedlang.proof.collectives import sides_of
from schedlang.proof.edges import ideal_events
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import OF_HOPS
from schedlang.schedule.schedule import Schedule


def check_collective_order(schedule: Schedule) -> list[Finding]:
    """Ranks that come to the events of several replicas in different orders: a cycle of events, of
    which each comes before the next one on some rank.

    The schedule has the right structure otherwise.
    """
    # Two ranks with replicas of the stages a and b:
    #
    #     rank 0    sum of a ──▶ sum of b
    #     rank 1    sum of b ──▶ sum of a
    sides = sides_of(schedule)
    is_met = sides.counts > 1
    if not is_met.any():
        return []
    # Where all comes to its end, there is no such cycle. The compiler asks for that anyway.
    if ideal_events(schedule, schedule.costs).graph.is_whole:
        return []
    columns = schedule.columns
    rows = sides.row[is_met]
    event = sides.event[is_met]
    sorter = TopologicalSorter[int]()
    behind: dict[tuple[int, int], tuple[int, int]] = {}
    of_several = zip(rows.tolist(), event.tolist(), strict=True)
    for (row, of_row), (following, of_following) in pairwise(of_several):
        if columns.rank[row] == columns.rank[following]:
            sorter.add(of_following, of_row)
            behind.setdefault((of_row, of_following), (row, following))
    try:
        sorter.prepare()
    except CycleError as error:
        steps = [behind[pair] for pair in pairwise(error.args[1])]
    else:
        return []

    def name(row: int) -> str:
        return schedule.name_of(*columns.place(row))

    # Begin with the lowest rank.
    first = min(range(len(steps)), key=lambda step: int(columns.rank[steps[step][0]]))
    steps = steps[first:] + steps[:first]
    texts = [
        f"rank {columns.rank[one]} makes `{name(one)}` before `{name(other)}`"
        for one, other in steps
    ]
    ranks = ranks_text(sorted({int(columns.rank[one]) for one, _ in steps}))
    is_hop = any(columns.kind[one] in OF_HOPS for one, _ in steps)
    what = "hops" if is_hop else "gathers and sums"
    message = f"{ranks} come to {what} in different orders: {', '.join(texts)}"
    related = tuple(
        (int(columns.source[one]), text)
        for (one, _), text in zip(steps[1:], texts[1:], strict=True)
    )
    row = steps[0][0]
    return [
        Finding(
            "collective",
            message,
            int(columns.rank[row]),
            int(columns.source[row]),
            texts[0],
            related,
            help="let some ranks of the ring receive first, as every second one"
            if is_hop
            else "write them in one order on all ranks that hold replicas",
        )
    ]
