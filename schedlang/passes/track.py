"""One rank's nodes at their slots, and how much it holds: also after a move, from the nodes that
the move concerns.
"""

from bisect import bisect_left

from attrs import define, field

from schedlang.passes.graph import Graph

#: A node and its slot, which comes first.
Row = tuple[int, int]
#: Before a row: the slot from which the rank is free, how many weight gradients have run, and are
#: owed, what it holds.
State = tuple[int, int, int, float]


@define
class Track:
    """The rows of a rank in order of slots; in every free slot runs the oldest weight gradient that
    is owed.

    `owes` has the weight gradients that nodes leave owed. A rank may hold `limit`.
    """

    graph: Graph
    limit: float
    owes: dict[int, list[int]]
    rows: list[Row]
    #: Before each row, and after the last; and whether the rank holds too much in it, or in what
    #: runs after all.
    states: list[State] = field(init=False)
    over: list[bool] = field(init=False)
    #: How many are over; the weight gradients in the order in which they come to be owed.
    excess: int = 0
    owed: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.states = [(0, 0, 0, 0.0)]
        self.over = []
        states, over, self.owed = self.walk(0, len(self.rows))
        self.states += states
        self.over += over
        self.excess = sum(over)

    def move(self, node: int, now: int, slot: int) -> bool:
        """Let a node start at an earlier slot, if the rank holds no more than it may then; whether
        it does.
        """
        old = bisect_left(self.rows, (now, node))
        new = bisect_left(self.rows, (slot, node))
        del self.rows[old]
        self.rows.insert(new, (slot, node))
        states, over, owed = self.walk(new, old)
        excess = self.excess - sum(self.over[new : new + len(over)]) + sum(over)
        if excess:
            del self.rows[new]
            self.rows.insert(old, (now, node))
            return False
        first = self.states[new][2]
        self.states[new + 1 : new + 1 + len(states)] = states
        self.over[new : new + len(over)] = over
        self.owed[first : first + len(owed)] = owed
        self.excess = excess
        return True

    def walk(self, first: int, last: int) -> tuple[list[State], list[bool], list[int]]:
        """What comes after each row from the `first` on, until behind the `last` all is as it was;
        or to the end.

        That is the states, whether each row holds too much, and the weight gradients that come to
        be owed.
        """
        state = self.states[first]
        states = list[State]()
        over = list[bool]()
        owed = list[int]()
        base = state[2]
        for index in range(first, len(self.rows)):
            if index > last and state == self.states[index]:
                start = max(state[1], base)
                stop = state[2]
                if owed[start - base :] == self.owed[start:stop]:
                    return states, over, owed
            slot, node = self.rows[index]
            state, most = self.work_off(state, slot, base, owed)
            now, paid, count, held = state
            new = self.owes.get(node, [])
            owed += new
            most = max(most, held + self.graph.rise[node])
            end = max(now, slot + int(self.graph.time[node]))
            state = end, paid, count + len(new), held + self.graph.change[node]
            states.append(state)
            over.append(most > self.limit)
        _, most = self.work_off(state, state[0] + state[2] - state[1], base, owed)
        return states, [*over, most > self.limit], owed

    def work_off(self, state: State, until: int, base: int, owed: list[int]) -> tuple[State, float]:
        """Run weight gradients that are owed up to a slot: the state then, and the most that the
        rank holds meanwhile.

        Those from number `base` on are the ones in `owed`.
        """
        now, paid, count, held = state
        most = 0.0
        while paid < count and now < until:
            weight = self.owed[paid] if paid < base else owed[paid - base]
            most = max(most, held + self.graph.rise[weight])
            held += self.graph.change[weight]
            now = now + 1
            paid = paid + 1
        return (now, paid, count, held), most
