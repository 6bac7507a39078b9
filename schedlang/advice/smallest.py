"""The smallest size at which a program shows the same mistake: easier to read, and quicker to run
on real ranks.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from math import prod

#: The work that a search may take, where a trial takes some to begin with, and then as much as it
#: has ops or so.
_MOST_WORK = 100_000
_TRIAL = 200


def smallest(
    params: Mapping[str, int], fails: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """Parameters from 1 up to the given ones at which a program fails, with the smallest product.

    So none of them can be made smaller by itself. None if only the given ones are found, or nothing
    within the work that a search may take, which is counted, not timed.
    """
    names = [name for name, value in params.items() if value > 1]
    waiting = [(1, (1,) * len(names))]
    seen = {waiting[0][1]}
    work = 0
    while waiting:
        product, size = heappop(waiting)
        trial = {**params, **dict(zip(names, size, strict=True))}
        work += _TRIAL + product
        if trial == params or work > _MOST_WORK:
            return None
        if fails(trial):
            return trial
        for index, name in enumerate(names):
            larger = (*size[:index], size[index] + 1, *size[index + 1 :])
            if larger[index] <= params[name] and larger not in seen:
                seen.add(larger)
                heappush(waiting, (prod(larger), larger))
    return None
