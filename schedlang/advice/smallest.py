"""The smallest size at which a program shows the same mistake.

It is easier to read than the size that was asked for, and quicker to try on real ranks.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from math import prod

#: How much work a search may take. It is counted and not timed, so that a message is the same on
#: every machine.
MOST_WORK = 100_000
#: The work of a trial, to which comes the product of its parameters: about as many ops it has.
_TRIAL = 200


def smallest(
    params: Mapping[str, int], fails: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """Parameters up to those in `params` at which a program fails too, with the smallest product.

    So none of them can be made smaller by itself. None if there are no smaller ones, or none was
    found with the work that a search may take.
    """
    names = [name for name, value in params.items() if value > 1]
    ones = (1,) * len(names)
    # Sizes to try, with their products: the smallest product comes first.
    waiting = [(1, ones)]
    seen = {ones}
    work = 0
    while waiting:
        product, size = heappop(waiting)
        trial = {**params, **dict(zip(names, size, strict=True))}
        work += _TRIAL + product
        if trial == params or work > MOST_WORK:
            return None
        if fails(trial):
            return trial
        # The next sizes have one parameter that is larger by 1.
        for index, name in enumerate(names):
            larger = (*size[:index], size[index] + 1, *size[index + 1 :])
            if larger[index] <= params[name] and larger not in seen:
                seen.add(larger)
                heappush(waiting, (prod(larger), larger))
    return None
