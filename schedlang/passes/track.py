"""One rank's nodes at their slots, and how much it holds: also after a move, from the nodes that
the move concerns.
"""

from bisect import bisect_left
from math import inf

from attrs import define, field

from schedlang.passes.op_graph import Graph

#: A node and its slot, which comes first.
Row = tuple[int, int]
#: Before a row: the slot from which the rank is free, how many weight gradients have run, and how
#: many have come to be owed.
State = tuple[int, int, int]


@define
class Track:
    """The rows of a rank in order of slots; in every free slot runs the oldest weight gradient that
    is owed.

    `owes` has the weight gradients that nodes leave owed, `width` how many slots a node takes. A
    rank may hold `limit`.
    """

    graph: Graph
    limit: float
    owes: dict[int, list[int]]
    width: list[int]
    rows: list[Row]
    #: Before each row, and after the last: the rank's state, what it holds, and the most that it
    #: holds from there to the next.
    states: list[State] = field(init=False)
    held: list[float] = field(init=False)
    most: list[float] = field(init=False)
    #: In how many rows it holds too much; the weight gradients in the order in which they come to
    #: be owed; whether none of them takes memory.
    excess: int = 0
    owed: list[int] = field(factory=list)
    is_relief: bool = True

    def __attrs_post_init__(self) -> None:
        self.states = [(0, 0, 0)]
        self.held = [0.0]
        walked = self.walk(0, len(self.rows), True)
        assert walked is not None
        states, held, self.most, self.owed = walked
        self.states += states
        self.held += held
        self.excess = self.count_over(self.most)
        self.is_relief = all(self.graph.rise[weight] <= 0 for weight in self.owed)

    def count_over(self, amounts: list[float]) -> int:
        """How many amounts are more than the rank may hold."""
        return sum(amount > self.limit for amount in amounts)

    def first_fitting(self, node: int, now: int, slot: int) -> int:
        """The first slot from `slot` on to which a node may move: where it is clear that the rank
        would hold too much if it ran before some row, the one behind this row.
        """
        # A node that leaves nothing owed takes a slot from weight gradients, and gives none before
        # its own: so the rank holds at least as much as before, and what the node adds.
        if node in self.owes or self.excess or not self.is_relief:
            return slot
        rows = self.rows
        room = self.limit - self.graph.change[node]
        first = bisect_left(rows, (slot,))
        most = self.most[first : bisect_left(rows, (now, node))]
        if not most or max(most) <= room:
            return slot
        last = len(most) - 1
        while most[last] <= room:
            last -= 1
        return rows[first + last][0] + 1

    def move(self, node: int, now: int, slot: int) -> bool:
        """Let a node start at an earlier slot, if the rank holds no more than it may then; whether
        it does.
        """
        old = bisect_left(self.rows, (now, node))
        new = bisect_left(self.rows, (slot, node))
        del self.rows[old]
        self.rows.insert(new, (slot, node))
        if self.excess or self.is_owed(new, old):
            is_moved = self.walk_moved(new, old)
        else:
            is_moved = self.shift(new, old)
        if not is_moved:
            del self.rows[new]
            self.rows.insert(old, (now, node))
        return is_moved

    def is_owed(self, first: int, last: int) -> bool:
        """Whether a weight gradient is owed anywhere from the `first` row to the `last`."""
        _, paid, count = self.states[first]
        return paid < count or count < self.states[last + 1][2]

    def shift(self, first: int, last: int) -> bool:
        """Take in that the row at the `last` has moved to the `first`, and nothing is owed between
        them; False, and nothing changes, where the rank would hold too much.
        """
        # Between them the rank holds what the row's node changes, besides.
        slot, node = self.rows[first]
        change = self.graph.change[node]
        before = self.held[first]
        most = [before + self.graph.rise[node]]
        most += [amount + change for amount in self.most[first:last]]
        if max(most) > self.limit:
            return False
        self.most[first : last + 1] = most
        held = self.held[first : last + 1]
        self.held[first + 1 : last + 2] = [amount + change for amount in held]
        _, paid, count = self.states.pop(last + 1)
        self.states.insert(first + 1, (slot + self.width[node], paid, count))
        return True

    def walk_moved(self, first: int, last: int) -> bool:
        """The same where weight gradients are owed, which then run at other slots."""
        walked = self.walk(first, last, self.excess > 0)
        if walked is None:
            return False
        states, held, most, owed = walked
        if self.excess:
            before = self.most[first : first + len(most)]
            excess = self.excess + self.count_over(most) - self.count_over(before)
            if excess:
                return False
            self.excess = excess
        base = self.states[first][2]
        self.states[first + 1 : first + 1 + len(states)] = states
        self.held[first + 1 : first + 1 + len(held)] = held
        self.most[first : first + len(most)] = most
        self.owed[base : base + len(owed)] = owed
        return True

    def walk(
        self, first: int, last: int, to_the_end: bool
    ) -> tuple[list[State], list[float], list[float], list[int]] | None:
        """What comes after each row from the `first` on, until behind the `last` all is as it was;
        or to the end. None where a row holds too much, unless it is to go on `to_the_end`.

        That is the states, what is held, the most that is held in each row, and the weight
        gradients that come to be owed.
        """
        # Most of the time of a pass is spent here, so all that is asked for in it has a name.
        rise = self.graph.rise
        change = self.graph.change
        owes = self.owes
        width = self.width
        rows = self.rows
        end = len(rows)
        before = self.states
        held_before = self.held
        earlier = self.owed
        limit = inf if to_the_end else self.limit
        now, paid, count = before[first]
        held = held_before[first]
        base = count
        states = list[State]()
        amounts = list[float]()
        mosts = list[float]()
        owed = list[int]()
        for index in range(first, end + 1):
            if (
                index > last
                and held == held_before[index]
                and (now, paid, count) == before[index]
            ):
                start = max(paid, base)
                if owed[start - base :] == earlier[start:count]:
                    break
            is_end = index == end
            # Behind the last row there is room for all that is left.
            slot, node = (now + count - paid, -1) if is_end else rows[index]
            most = 0.0
            # Weight gradients that are owed, up to the slot.
            while paid < count and now < slot:
                weight = earlier[paid] if paid < base else owed[paid - base]
                if held + rise[weight] > most:
                    most = held + rise[weight]
                held += change[weight]
                now += 1
                paid += 1
            if not is_end and held + rise[node] > most:
                most = held + rise[node]
            if most > limit:
                return None
            mosts.append(most)
            if is_end:
                break
            if node in owes:
                owed += owes[node]
                count = base + len(owed)
            held += change[node]
            if slot + width[node] > now:
                now = slot + width[node]
            states.append((now, paid, count))
            amounts.append(held)
        return states, amounts, mosts, owed
