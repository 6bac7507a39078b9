"""What ranks do in windows of time, as shares: what can still be said of a schedule whose ops are
narrower than a column of a terminal.
"""

from collections.abc import Sequence

import numpy as np

from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Bar

#: A kind of op, or None for idle time, and how many hundredths of a window it takes.
Share = tuple[Kind | None, int]


def shares(bars: Sequence[Bar], edges: Sequence[float]) -> list[list[Share]]:
    """Of each window between two edges, the kinds that take time in it and then idle time, in
    hundredths that add up to 100; what rounds to 0 is left out.
    """
    kinds = sorted({bar.kind for bar in bars})
    busy = np.array(
        [_busy([bar for bar in bars if bar.kind == kind], edges) for kind in kinds]
    )
    lengths = np.diff(edges)
    # A row for each kind, a column for each edge: what the kind has taken by then. From one edge to
    # the next it grows by what it takes in that window.
    parts = np.diff(busy.reshape(len(kinds), len(edges)), axis=1) / lengths
    names: list[Kind | None] = [*map(Kind, kinds), None]
    of_windows = []
    for column in parts.T.tolist():
        hundredths = _hundredths([*column, max(1 - sum(column), 0.0)])
        of_windows.append(
            [each for each in zip(names, hundredths, strict=True) if each[1]]
        )
    return of_windows


def _busy(bars: Sequence[Bar], edges: Sequence[float]) -> list[float]:
    """The time that bars in order have taken up to each of some times."""
    # The time taken so far goes up while a bar lasts, and stays between bars:
    #
    #    bars     ├──┤   ├────┤
    #    taken    0  2   2    5
    times = [time for bar in bars for time in (bar.start, bar.end)]
    lengths = np.array([bar.end - bar.start for bar in bars])
    taken = np.cumsum(lengths)
    levels = np.column_stack([taken - lengths, taken]).ravel()
    done: list[float] = np.interp(edges, times, levels).tolist()
    return done


def _hundredths(parts: Sequence[float]) -> list[int]:
    """Parts of 1 as whole hundredths: what rounding down loses goes to those that lose most."""
    exact = [part * 100 for part in parts]
    whole = [int(part) for part in exact]
    missing = round(sum(exact)) - sum(whole)
    for place in sorted(
        range(len(exact)), key=lambda place: whole[place] - exact[place]
    )[:missing]:
        whole[place] += 1
    return whole
