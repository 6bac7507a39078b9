"""Pull ops forward into bubbles, without raising peak memory.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 2.4. Weight gradients can
wait, so they count as virtual here: every slot in which a rank does nothing else runs the oldest one that it owes.
Forwards and backwards move, in order of time, to the earliest slots that their inputs, their own kind's order and the
memory allow; then everything is squeezed, and the round is repeated while it gains.
"""

from attrs import define, evolve, field

from schedlang.dependencies import MAKES, Op, needs
from schedlang.passes.fill import fill_weights
from schedlang.passes.slots import WIDTH, slots_of
from schedlang.passes.squeeze import squeeze
from schedlang.schedule import Actions, Kind, Schedule

_MOST_ROUNDS = 4


def reorder(schedule: Schedule) -> Schedule:
    """The schedule with each rank's ops in an order that ends no later, without slots.

    The peak of no rank rises above the highest peak of the given schedule.
    """
    limit = max(map(_peak, schedule.ranks))
    best = squeeze(schedule)
    for _ in range(_MOST_ROUNDS):
        moved = _Board(best, slots_of(best), limit).move_forward()
        if max(map(_peak, moved.ranks)) > limit or _end(moved) >= _end(best):
            break
        best = moved
    return best


def _end(schedule: Schedule) -> int:
    """The slot after the last op of all ranks."""
    return max(
        slot + WIDTH[Kind(kind)]
        for actions, slots in zip(schedule.ranks, slots_of(schedule), strict=True)
        for kind, slot in zip(actions.kind, slots, strict=True)
    )


def _peak(actions: Actions) -> int:
    """The most activations a rank holds, each from its forward to the last use."""
    held = peak = 0
    for kind in actions.kind:
        held += (kind == Kind.F) - (kind in (Kind.B, Kind.W))
        peak = max(peak, held)
    return peak


@define
class _Board:
    """The slots of all forwards and backwards; `start[rank]` has the first slot of each by its index."""

    schedule: Schedule
    slots: list[list[int]]
    limit: int
    start: list[dict[int, int]] = field(init=False)
    taken: list[set[int]] = field(init=False)
    end: dict[Op, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        ranks = len(self.schedule.ranks)
        self.start, self.taken = [{} for _ in range(ranks)], [set() for _ in range(ranks)]
        for rank, slots in enumerate(self.slots):
            for index, slot in enumerate(slots):
                if self.schedule.ranks[rank].kind[index] != Kind.W:
                    self.put(rank, index, slot)

    def move_forward(self) -> Schedule:
        """Move every op as far forward as it can go, in order of time."""
        ends: dict[tuple[int, int], int] = {}
        for _, rank, index in sorted((s, r, i) for r, each in enumerate(self.start) for i, s in each.items()):
            kind, stage = self.schedule.ranks[rank].row(index)[:2]
            self.move(rank, index, ends.get((kind, stage), 0))
            ends[kind, stage] = self.start[rank][index] + WIDTH[Kind(kind)]
        return squeeze(fill_weights(self.ordered()))

    def move(self, rank: int, index: int, earliest: int) -> None:
        """Move an op to the first slot from `earliest` on that its inputs and the rank's memory allow."""
        op = self.schedule.ranks[rank].row(index)[:3]
        now, width = self.start[rank][index], WIDTH[Kind(op[0])]
        earliest = max([earliest, *(self.end[need] for need in needs(self.schedule, *op) if need in self.end)])
        self.lift(rank, index)
        for slot in range(earliest, now):
            if self.taken[rank].isdisjoint(range(slot, slot + width)):
                self.put(rank, index, slot)
                if self.peak(rank) <= self.limit:
                    return
                self.lift(rank, index)
        self.put(rank, index, now)

    def put(self, rank: int, index: int, slot: int) -> None:
        """Let an op start at a slot."""
        kind, stage, microbatch = self.schedule.ranks[rank].row(index)[:3]
        self.start[rank][index] = slot
        self.taken[rank].update(range(slot, slot + WIDTH[Kind(kind)]))
        for made in MAKES[kind]:
            self.end[made, stage, microbatch] = slot + WIDTH[Kind(kind)]

    def lift(self, rank: int, index: int) -> None:
        """Take an op from its slot."""
        slot = self.start[rank].pop(index)
        self.taken[rank].difference_update(range(slot, slot + WIDTH[Kind(self.schedule.ranks[rank].kind[index])]))

    def peak(self, rank: int) -> int:
        """The rank's peak, with its weight gradients in its free slots."""
        kinds = self.schedule.ranks[rank].kind
        held = peak = owed = now = 0
        for index, slot in sorted(self.start[rank].items(), key=lambda each: each[1]):
            done = min(owed, slot - now)
            owed, held = owed - done + (kinds[index] == Kind.I), held - done
            held += (kinds[index] == Kind.F) - (kinds[index] == Kind.B)
            peak, now = max(peak, held), slot + WIDTH[Kind(kinds[index])]
        return peak

    def ordered(self) -> Schedule:
        """The forwards and backwards at their slots."""
        ranks, slots = [], []
        for rank, start in enumerate(self.start):
            order = sorted(start, key=lambda index: start[index])
            actions = Actions()
            for index in order:
                actions.add(*self.schedule.ranks[rank].row(index))
            ranks.append(actions)
            slots.append(tuple(start[index] for index in order))
        return evolve(self.schedule, ranks=tuple(ranks), slots=tuple(slots))
