"""Gathers and sums that ranks write: whether they stand where they must, and which of them are over;
written apart from the verifier.
"""

from collections import Counter

from schedlang import Kind, Schedule
from tests.support.graph import pieces
from tests.support.own_hops import comes_home, next_replica, travelling
from tests.support.own_needs import HOPS, needs

#: Exchanges, which are of a microbatch.
EXCHANGES = (Kind.EXCHANGE_F, Kind.EXCHANGE_B)
#: What all replicas of a stage come to together, and what else there is of it.
EVENTS = (Kind.UNSHARD, Kind.REDUCE_GRAD, *EXCHANGES)
COLLECTIVES = (*EVENTS, Kind.RESHARD)
#: What runs a stage's module, and what adds to its gradient.
USES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
ADDS = (Kind.B, Kind.W)
Row = tuple[int, int, int]


def comes_to_its_end(schedule: Schedule) -> bool:
    """Whether every op finds its weights gathered, every gradient is summed, and all ranks end: of a
    schedule without transfers.
    """
    return are_in_place(schedule) and _Run(schedule).ends()


def are_in_place(schedule: Schedule) -> bool:
    """Whether, as far as a rank alone can tell, gathers and sums stand where they must. Hops must come
    to their end.
    """
    beside = (*COLLECTIVES, *HOPS)
    # They go on by themselves, and are in no batch.
    if any(
        kind in beside and group
        for actions in schedule.ranks
        for kind, group in zip(actions.kind, actions.group, strict=True)
    ):
        return False
    has_hops = any(kind in HOPS for actions in schedule.ranks for kind in actions.kind)
    if has_hops and not comes_home(schedule):
        return False
    hopping = travelling(schedule)
    for rank, actions in enumerate(schedule.ranks):
        rows = [actions.row(index) for index in range(len(actions))]
        written = {row[1] for row in rows if row[0] in COLLECTIVES} - hopping
        if not all(_is_of(schedule, rank, stage) for stage in written):
            return False
        for stage in written:
            own = [row[0] for row in rows if row[1] == stage]
            if not (_has_weights(own) and _has_sums(own)):
                return False
    return True


def _is_of(schedule: Schedule, rank: int, stage: int) -> bool:
    """Whether a rank holds a stage, and no replica of it."""
    if stage >= len(schedule.placement) or schedule.placement[stage] != rank:
        return False
    ranks = [schedule.placement[each] for each in pieces(schedule.layout, stage)]
    return ranks.count(rank) == 1


def _has_weights(kinds: list[int]) -> bool:
    """Whether the ops of a stage find its weights, if any gather of them is written, and updates do
    not.
    """
    if not {Kind.UNSHARD, Kind.RESHARD} & {*kinds}:
        return True
    is_there = False
    for kind in kinds:
        if kind in (Kind.UNSHARD, Kind.U) and is_there:
            return False
        if kind in (Kind.RESHARD, *USES) and not is_there:
            return False
        if kind in (Kind.UNSHARD, Kind.RESHARD):
            is_there = kind == Kind.UNSHARD
    return not is_there


def _has_sums(kinds: list[int]) -> bool:
    """Whether each sum of a stage has gradients, if any is written, and each gradient a sum before
    its update or the end.
    """
    if Kind.REDUCE_GRAD not in kinds:
        return True
    is_open = False
    for kind in kinds:
        if (kind == Kind.REDUCE_GRAD and not is_open) or (kind == Kind.U and is_open):
            return False
        if kind == Kind.REDUCE_GRAD or kind in ADDS:
            is_open = kind in ADDS
    return not is_open


def awaited(kind: int) -> tuple[Kind, ...]:
    """What of its stage must be over before a rank goes on to an action: for an op the gather or the
    hop that brings its weights, and the exchange of its microbatch; for an update its sums, for a
    send of a hop what it passes on, and for the end of weights all that was sent.
    """
    if kind == Kind.F:
        return (Kind.UNSHARD, Kind.RECV_WEIGHTS, Kind.EXCHANGE_F)
    if kind in (Kind.B, Kind.I):
        return (Kind.UNSHARD, Kind.RECV_WEIGHTS, Kind.EXCHANGE_B)
    if kind in USES:
        return (Kind.UNSHARD, Kind.RECV_WEIGHTS)
    if kind == Kind.RESHARD:
        return (Kind.RECV_WEIGHTS, Kind.SEND_WEIGHTS, Kind.SEND_GRADIENTS)
    of_kind = {
        Kind.U: Kind.REDUCE_GRAD,
        Kind.SEND_WEIGHTS: Kind.RECV_WEIGHTS,
        Kind.SEND_GRADIENTS: Kind.RECV_GRADIENTS,
    }
    return (of_kind[Kind(kind)],) if kind in of_kind else ()


def sides(schedule: Schedule, kind: int, stage: int) -> list[tuple[int, int]]:
    """The actions that are one event with an action: of all replicas, or the two sides of a hop, the
    send first.
    """
    replicas = pieces(schedule.layout, stage)
    if kind not in HOPS:
        return [(kind, each) for each in replicas]
    receives = {
        Kind.SEND_WEIGHTS: Kind.RECV_WEIGHTS,
        Kind.SEND_GRADIENTS: Kind.RECV_GRADIENTS,
    }
    for send, receive in receives.items():
        for sender in replicas:
            both = [(send, sender), (receive, next_replica(schedule, sender))]
            if (kind, stage) in both:
                return both
    raise AssertionError


class Begun:
    """The gathers, sums and hops that ranks have begun, and which of them are over."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        #: Of each rank what it has begun and is not over, in order: its kind, stage and number.
        self.open: list[list[Row]] = [[] for _ in schedule.ranks]
        self.counts: Counter[tuple[int, int]] = Counter()

    def begin(self, rank: int, kind: int, stage: int, unit: int) -> None:
        """A rank comes to a gather, a sum, a hop or an exchange."""
        number = unit if kind in EXCHANGES else self.counts[kind, stage]
        self.open[rank].append((kind, stage, number))
        self.counts[kind, stage] += 1

    def keep(self, rank: int, kind: int, stage: int, unit: int) -> bool:
        """Whether an action of a stage waits for some of these."""
        return any(
            each in awaited(kind)
            and of == stage
            and (each not in EXCHANGES or number == unit)
            for each, of, number in self.open[rank]
        )

    def meet(self) -> bool:
        """End one that stands first on all of its ranks; whether there is one."""
        for kind, stage, number in [own[0] for own in self.open if own]:
            of_ranks = {
                self.schedule.placement[of]: (each, of, number)
                for each, of in sides(self.schedule, kind, stage)
            }
            if all(self.open[rank][:1] == [own] for rank, own in of_ranks.items()):
                for rank in of_ranks:
                    del self.open[rank][0]
                return True
        return False


class _Run:
    """Goes round the ranks, whose ops wait for what other ranks have made."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        computed = [each.compute() for each in schedule.ranks]
        self.ranks = [
            [actions.row(i)[:3] for i in range(len(actions))] for actions in computed
        ]
        self.at = [0] * len(self.ranks)
        self.made: set[Row] = set()
        self.begun = Begun(schedule)

    def ends(self) -> bool:
        moves = True
        while moves:
            moves = any(
                [self.step(rank) for rank in range(len(self.ranks))]
                + [self.begun.meet()]
            )
        is_done = all(
            at == len(rows) for at, rows in zip(self.at, self.ranks, strict=True)
        )
        return is_done and not any(self.begun.open)

    def step(self, rank: int) -> bool:
        if self.at[rank] == len(self.ranks[rank]):
            return False
        kind, stage, unit = self.ranks[rank][self.at[rank]]
        if kind in EVENTS:
            self.begun.begin(rank, kind, stage, unit)
        elif kind != Kind.RESHARD:
            if self.begun.keep(rank, kind, stage, unit):
                return False
            if not all(
                need in self.made for need in needs(self.schedule, kind, stage, unit)
            ):
                return False
            self.made.add((Kind.B if kind == Kind.I else kind, stage, unit))
        self.at[rank] += 1
        return True
