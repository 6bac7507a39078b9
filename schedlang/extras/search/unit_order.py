"""The order of the units of two microbatches that keeps a rank busy for the least time, exactly.

A layer of experts is made of units on two resources: attention and experts compute, tokens go to
their experts and come back over the network. A rank runs a forward of one microbatch and a backward
of another one, and the units of one may run beside those of the other:

    compute    attention F   experts B    experts F    attention B   experts W   attention W
    network    combine B     dispatch F   dispatch B   combine F

Which order is best depends on how long each unit takes. It is a job-shop problem of a few jobs on a
few resources, which is solved by dynamic programming: of all orders of the same units, one is
dropped if another one is nowhere later, or if it cannot end before the best order that is known.
"""

from collections.abc import Iterator, Sequence

from attrs import frozen


@frozen
class Unit:
    """A part of an op: how long it takes, the resource of its rank on which it runs, and the units
    that must be over before it begins, by their indices.
    """

    name: str
    time: float
    resource: str = "compute"
    after: tuple[int, ...] = ()


@frozen
class Run:
    """A unit in time, by its index."""

    unit: int
    start: float
    end: float


def pair_of_units(
    forward: Sequence[Unit], backward: Sequence[Unit], weight: Sequence[Unit] = ()
) -> list[Unit]:
    """The units of a forward and of a backward, each one after the other. A unit of `weight`
    computes gradients of weights: it waits for the unit of the backward that has its name, and
    nothing waits for it. ValueError if there is none.
    """
    units: list[Unit] = []
    places = {}
    for chain in (forward, backward):
        for index, unit in enumerate(chain):
            after = (len(units) - 1,) if index else ()
            if chain is backward:
                places[unit.name] = len(units)
            units.append(Unit(unit.name, unit.time, unit.resource, after))
    for unit in weight:
        if unit.name not in places:
            raise ValueError(
                f"there is no unit `{unit.name}` in the backward: the gradients of its weights "
                "follow from those of its inputs"
            )
        units.append(Unit(unit.name, unit.time, unit.resource, (places[unit.name],)))
    return units


def best_order(units: Sequence[Unit]) -> list[Run]:
    """The units in an order of least makespan, each as early as it can be in that order; a resource
    runs one unit at a time. ValueError if units wait for each other.
    """
    return _Search(units).best()


def makespan(runs: Sequence[Run]) -> float:
    """When the last unit ends."""
    return max((run.end for run in runs), default=0.0)


@frozen
class _Order:
    """An order of some units: when each resource is free, when each unit ends that others still
    wait for, and all units in the order in which they were added.
    """

    free: tuple[float, ...]
    ends: tuple[float, ...]
    runs: tuple[Run, ...] = ()

    def is_behind(self, other: "_Order") -> bool:
        """Whether another order of the same units is nowhere later."""
        pairs = zip(self.free + self.ends, other.free + other.ends, strict=True)
        return all(own >= theirs for own, theirs in pairs)


class _Search:
    """All orders of some units, one unit longer in each round."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.resources = [*dict.fromkeys(unit.resource for unit in units)]
        self.empty = _Order((0.0,) * len(self.resources), (0.0,) * len(units))
        #: For each unit the longest chain of units from its begin on.
        self.tails = [unit.time for unit in units]
        for _ in units:
            for unit, tail in zip(units, [*self.tails], strict=True):
                for each in unit.after:
                    longer = self.units[each].time + tail
                    self.tails[each] = max(self.tails[each], longer)

    def best(self) -> list[Run]:
        """An order of least makespan."""
        found = self.listed()
        orders = {frozenset[int](): [self.empty]}
        for _ in self.units:
            longer: dict[frozenset[int], list[_Order]] = {}
            for done, kept in orders.items():
                for index in self.ready(done):
                    front = longer.setdefault(done | {index}, [])
                    for order in kept:
                        following = self.then(order, done, index)
                        if self.bound(following, done | {index}) < makespan(found):
                            _keep(front, following)
            orders = {done: front for done, front in longer.items() if front}
        for front in orders.values():
            found = list(min(front, key=lambda order: max(order.free)).runs)
        return found

    def listed(self) -> list[Run]:
        """An order by list scheduling: of the units that could begin first, the one with the
        longest chain behind it.
        """
        done = frozenset[int]()
        order = self.empty
        for _ in self.units:
            ready = [*self.ready(done)]
            if not ready:
                raise ValueError("some units wait for each other")
            begins = {index: self.begin(order, index) for index in ready}
            index = min(ready, key=lambda each: (begins[each], -self.tails[each]))
            order = self.then(order, done, index)
            done |= {index}
        return list(order.runs)

    def ready(self, done: frozenset[int]) -> Iterator[int]:
        """The units that wait for nothing but what is done."""
        for index, unit in enumerate(self.units):
            if index not in done and done.issuperset(unit.after):
                yield index

    def begin(self, order: _Order, index: int) -> float:
        """When a unit would begin behind an order."""
        unit = self.units[index]
        free = order.free[self.resources.index(unit.resource)]
        return max([free, *(order.ends[each] for each in unit.after)])

    def then(self, order: _Order, done: frozenset[int], index: int) -> _Order:
        """An order of the units that are done, with one more unit behind it."""
        begin = self.begin(order, index)
        end = begin + self.units[index].time
        free = [*order.free]
        free[self.resources.index(self.units[index].resource)] = end
        awaited = {
            each
            for number, unit in enumerate(self.units)
            if number not in done and number != index
            for each in unit.after
        }
        ends = [*order.ends]
        ends[index] = end
        # When a unit ends that nobody waits for any more, does not matter.
        known = tuple(
            time if each in awaited else 0.0 for each, time in enumerate(ends)
        )
        return _Order(tuple(free), known, (*order.runs, Run(index, begin, end)))

    def bound(self, order: _Order, done: frozenset[int]) -> float:
        """No order that begins like this one has a makespan below this."""
        left = [
            (index, unit) for index, unit in enumerate(self.units) if index not in done
        ]
        bounds = [*order.free]
        for _, unit in left:
            bounds[self.resources.index(unit.resource)] += unit.time
        for index in self.ready(done):
            bounds.append(self.begin(order, index) + self.tails[index])
        return max(bounds, default=0.0)


def _keep(front: list[_Order], order: _Order) -> None:
    """Add an order to those of the same units, unless one of them is nowhere later."""
    if any(order.is_behind(other) for other in front):
        return
    front[:] = [other for other in front if not other.is_behind(order)]
    front.append(order)
