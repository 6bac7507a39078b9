"""Whether plans whose weights and gradients hop from replica to replica are right, found by going
round the ranks with values: what each rank has of every stage. It is written from docs/transports.md
and docs/language.md, apart from the verifier; transfers of microbatches are left out.
"""

from collections import Counter, deque

from schedlang import Kind, Schedule
from tests.support.graph import pieces
from tests.support.own_needs import HOPS, needs

#: A gradient: of a stage and a microbatch.
Gradients = Counter[tuple[int, int]]
_SENDS = {
    Kind.SEND_WEIGHTS: Kind.RECV_WEIGHTS,
    Kind.SEND_GRADIENTS: Kind.RECV_GRADIENTS,
}


def travelling(schedule: Schedule) -> set[int]:
    """The stages that hop, or of which a replica does."""
    stages = len(schedule.placement)
    return {
        replica
        for actions in schedule.ranks
        for kind, stage in zip(actions.kind, actions.stage, strict=True)
        if kind in HOPS and stage < stages
        for replica in pieces(schedule.layout, stage)
    }


def comes_home(schedule: Schedule) -> bool:
    """Whether all ranks end, every op finds its weights, and all gradients are at home in the end."""
    stages = travelling(schedule)
    received = {
        s
        for rows in _rows(schedule)
        for kind, s, _ in rows
        if kind == Kind.RECV_WEIGHTS
    }
    for stage in stages:
        replicas = pieces(schedule.layout, stage)
        ranks = {schedule.placement[each] for each in replicas}
        is_spread = len(ranks) == len(replicas) > 1
        if not is_spread or len({*replicas} - received) != 1:
            return False
    return _Run(schedule, stages).ends()


def _rows(schedule: Schedule) -> list[list[tuple[int, int, int]]]:
    computed = [each.compute() for each in schedule.ranks]
    return [[actions.row(i)[:3] for i in range(len(actions))] for actions in computed]


def next_replica(schedule: Schedule, stage: int) -> int:
    """The replica to which a stage sends."""
    replicas = pieces(schedule.layout, stage)
    return replicas[(replicas.index(stage) + 1) % len(replicas)]


class _Wrong(Exception):
    pass


class _Run:
    """Every rank goes on until it must wait; messages meet in the order in which ranks come to
    them, the first that is not over of a rank with the first of another.
    """

    def __init__(self, schedule: Schedule, stages: set[int]) -> None:
        self.schedule = schedule
        self.rows = _rows(schedule)
        self.at = [0] * len(self.rows)
        self.made: set[tuple[int, int, int]] = set()
        received = {
            s for rows in self.rows for kind, s, _ in rows if kind == Kind.RECV_WEIGHTS
        }
        self.home = {stage: stage not in received for stage in stages}
        self.has = dict(self.home)
        self.gradients = {stage: Gradients() for stage in stages}
        #: What each rank has come to, and is not over: kind, stage, and what a send carries.
        self.begun: list[deque[tuple[int, int, Gradients]]] = [
            deque() for _ in self.rows
        ]

    def ends(self) -> bool:
        try:
            moves = True
            while moves:
                moves = any(
                    [self.step(rank) for rank in range(len(self.rows))] + [self.meet()]
                )
        except _Wrong:
            return False
        are_done = all(
            at == len(rows) for at, rows in zip(self.at, self.rows, strict=True)
        )
        return are_done and not any(self.begun) and self.are_home()

    def are_home(self) -> bool:
        for stage, home in self.home.items():
            if self.has[stage] != home:
                return False
            all_of = Gradients()
            if home:
                replicas = pieces(self.schedule.layout, stage)
                all_of += Gradients(
                    (replica, unit)
                    for rows in self.rows
                    for kind, replica, unit in rows
                    if kind in (Kind.B, Kind.W) and replica in replicas
                )
            if self.gradients[stage] != all_of:
                return False
        return True

    def step(self, rank: int) -> bool:
        if self.at[rank] == len(self.rows[rank]):
            return False
        kind, stage, unit = self.rows[rank][self.at[rank]]
        if stage not in self.schedule.layout.stages_of(rank):
            raise _Wrong
        if kind in (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.U) and stage in self.home:
            raise _Wrong
        if kind in (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.RESHARD) and (
            stage not in self.home
        ):
            self.at[rank] += 1
            return True
        waiting = [(each, of) for each, of, _ in self.begun[rank] if of == stage]
        carried = Gradients()
        if kind in (Kind.SEND_WEIGHTS, Kind.SEND_GRADIENTS):
            if (_SENDS[Kind(kind)], stage) in waiting:
                return False
            if kind == Kind.SEND_WEIGHTS and not self.has[stage]:
                raise _Wrong
            if kind == Kind.SEND_GRADIENTS:
                carried, self.gradients[stage] = self.gradients[stage], Gradients()
                if not carried:
                    raise _Wrong
        elif kind == Kind.RECV_WEIGHTS:
            if self.has[stage] or (kind, stage) in waiting:
                raise _Wrong
        elif kind == Kind.RESHARD:
            if any(each in _SENDS for each, _ in waiting):
                return False
            if (Kind.RECV_WEIGHTS, stage) in waiting:
                return False
            if self.home[stage] or not self.has[stage]:
                raise _Wrong
            self.has[stage] = False
        elif kind != Kind.RECV_GRADIENTS:
            if (Kind.RECV_WEIGHTS, stage) in waiting:
                return False
            if not self.has.get(stage, True):
                raise _Wrong
            if not all(
                need in self.made for need in needs(self.schedule, kind, stage, unit)
            ):
                return False
            self.made.add((Kind.B if kind == Kind.I else kind, stage, unit))
            if kind in (Kind.B, Kind.W) and stage in self.home:
                self.gradients[stage][stage, unit] += 1
        if kind in HOPS:
            self.begun[rank].append((kind, stage, carried))
        self.at[rank] += 1
        return True

    def meet(self) -> bool:
        for begun in self.begun:
            if not begun or begun[0][0] not in _SENDS:
                continue
            kind, stage, carried = begun[0]
            receiver = next_replica(self.schedule, stage)
            other = self.begun[self.schedule.placement[receiver]]
            if other and other[0][:2] == (_SENDS[Kind(kind)], receiver):
                begun.popleft()
                other.popleft()
                if kind == Kind.SEND_WEIGHTS:
                    self.has[receiver] = True
                self.gradients[receiver] += carried
                return True
        return False
