"""One rank's nodes at their slots, and its memory over time. A move updates only the rows that it
changes.
"""

from bisect import bisect_left
from math import inf

from attrs import define, field

from schedlang.passes.op_graph import Graph

#: A slot and the node that starts there.
Row = tuple[int, int]
#: The state before a row: the slot from which the rank is free, how many weight gradients have run,
#: and how many have become ready to run.
State = tuple[int, int, int]


@define
class Track:
    """The rows of a rank in order of slots. Every empty slot runs the oldest weight gradient that
    the rank *owes*, which is ready and has not run.

    `owes` maps a node to the weight gradients that are ready after it, `width` has the number of
    slots that a node takes, and `limit` is the rank's memory.
    """

    graph: Graph
    limit: float
    owes: dict[int, list[int]]
    width: list[int]
    rows: list[Row]
    #: Before each row, and after the last: the rank's state, its memory, and its peak from there
    #: to the next row.
    states: list[State] = field(init=False)
    held: list[float] = field(init=False)
    most: list[float] = field(init=False)
    #: The number of rows that exceed the limit; the weight gradients in the order in which they
    #: become ready; whether none of these needs additional memory.
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
        """How many of these amounts exceed the limit."""
        return sum(amount > self.limit for amount in amounts)

    def first_fitting(self, node: int, now: int, slot: int) -> int:
        """The first slot from `slot` on to which a node might move. Slots from which the node would
        surely exceed the limit in some later row are left out.
        """
        # A node that no weight gradient follows only delays weight gradients, which free memory.
        # So until its old row the rank holds at least as much as before, plus what the node adds.
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
        """Let a node start at an earlier slot, if that stays within the limit; return whether it
        moved.
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
        """Whether a weight gradient is owed anywhere from row `first` to row `last`."""
        _, paid, count = self.states[first]
        return paid < count or count < self.states[last + 1][2]

    def shift(self, first: int, last: int) -> bool:
        """Update the rows after row `last` has moved to `first`, if no weight gradient is owed
        between them. Returns False, and changes nothing, if the rank would exceed its limit.
        """
        # Between the two, the rank now also holds the memory of the node that has moved.
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
        """Update the rows as `shift` does, if weight gradients are owed: they run at other slots
        now.
        """
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
        """Execute the rows from `first` on, until the state after row `last` equals the one from
        before the move, or to the end. None if a row exceeds the limit, unless `to_the_end`.

        Returns the state and the memory after each row, the peak of each row, and the weight
        gradients that become ready.
        """
        # A pass spends most of its time here, so attributes are read into local variables.
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
            # After the last row, all weight gradients that are left run.
            slot, node = (now + count - paid, -1) if is_end else rows[index]
            most = 0.0
            # Weight gradients that are owed fill the empty slots before this row.
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
