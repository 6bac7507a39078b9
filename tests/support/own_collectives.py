"""Whether ranks that write gathers and sums come to their end, found by going round the ranks; written
apart from the verifier, and without transfers.
"""

from collections import Counter

from attrs import evolve

from schedlang import Kind, Schedule
from tests.support.own_hops import comes_home
from tests.support.own_needs import HOPS, needs

EVENTS = (Kind.UNSHARD, Kind.REDUCE_GRAD)
Row = tuple[int, int, int]


def comes_to_its_end(schedule: Schedule) -> bool:
    """Whether every op finds its weights gathered, every gradient is summed, and all ranks end."""
    ranks = _rows(schedule)
    return (
        all(map(_is_right_alone, ranks))
        and _all_have_as_many(schedule, ranks)
        and _Run(schedule, ranks).ends()
    )


def are_in_place(schedule: Schedule) -> bool:
    """Whether, as far as a rank alone can tell, gathers and sums stand where they must: all that
    there is to them where no stage has a replica in the plan. Hops must come to their end.
    """
    if any(kind in HOPS for actions in schedule.ranks for kind in actions.kind):
        return comes_home(schedule)
    return all(map(_is_right_alone, _rows(schedule)))


def without_collectives(schedule: Schedule) -> Schedule:
    """What is left for those who know ops and transfers alone."""
    return evolve(schedule, ranks=tuple(each.without_collectives() for each in schedule.ranks))


def _rows(schedule: Schedule) -> list[list[Row]]:
    computed = [each.compute() for each in schedule.ranks]
    return [[actions.row(i)[:3] for i in range(len(actions))] for actions in computed]


def _is_right_alone(rows: list[Row]) -> bool:
    for stage in {stage for kind, stage, _ in rows if kind in (*EVENTS, Kind.RESHARD)}:
        own = [kind for kind, number, _ in rows if number == stage]
        if Kind.UNSHARD in own or Kind.RESHARD in own:
            is_there = False
            for kind in own:
                if kind in (Kind.UNSHARD, Kind.RESHARD):
                    if is_there == (kind == Kind.UNSHARD):
                        return False
                    is_there = not is_there
                elif kind != Kind.REDUCE_GRAD and not is_there:
                    return False
            if is_there:
                return False
        if Kind.REDUCE_GRAD in own:
            adds = [kind for kind in own if kind in (Kind.B, Kind.W, Kind.REDUCE_GRAD)]
            pairs = zip([Kind.REDUCE_GRAD, *adds], adds, strict=False)
            if adds[-1] != Kind.REDUCE_GRAD or (Kind.REDUCE_GRAD,) * 2 in pairs:
                return False
    return True


def _replicas(schedule: Schedule, stage: int) -> list[int]:
    if schedule.layout.models:
        return [stage]
    pieces = len(schedule.placement) // len(schedule.layout.pipelines)
    return list(range(stage % pieces, len(schedule.placement), pieces))


def _all_have_as_many(schedule: Schedule, ranks: list[list[Row]]) -> bool:
    counts = Counter(row[:2] for rows in ranks for row in rows if row[0] in EVENTS)
    return all(
        counts[kind, other] == number and (other == stage or not _share(schedule, stage, other))
        for (kind, stage), number in counts.items()
        for other in _replicas(schedule, stage)
    )


def _share(schedule: Schedule, stage: int, other: int) -> bool:
    return schedule.placement[stage] == schedule.placement[other]


class _Run:
    def __init__(self, schedule: Schedule, ranks: list[list[Row]]) -> None:
        self.schedule = schedule
        self.ranks = ranks
        self.at = [0] * len(ranks)
        self.made: set[Row] = set()
        #: Of each rank the events that it has begun, as kind, first replica and number.
        self.begun: list[list[Row]] = [[] for _ in ranks]
        self.over: set[Row] = set()

    def ends(self) -> bool:
        moves = True
        while moves:
            moves = any([self.step(rank) for rank in range(len(self.ranks))] + [self.meet()])
        return all(at == len(rows) for at, rows in zip(self.at, self.ranks, strict=True)) and all(
            event in self.over for events in self.begun for event in events
        )

    def step(self, rank: int) -> bool:
        if self.at[rank] == len(self.ranks[rank]):
            return False
        kind, stage, unit = self.ranks[rank][self.at[rank]]
        if kind in EVENTS:
            piece = _replicas(self.schedule, stage)[0]
            number = sum(event[:2] == (kind, piece) for event in self.begun[rank])
            self.begun[rank].append((kind, piece, number))
        elif kind != Kind.RESHARD:
            piece = _replicas(self.schedule, stage)[0]
            gathers = [each for each in self.begun[rank] if each[:2] == (Kind.UNSHARD, piece)]
            if any(each not in self.over for each in gathers):
                return False
            if not all(need in self.made for need in needs(self.schedule, kind, stage, unit)):
                return False
            self.made.add((Kind.B if kind == Kind.I else kind, stage, unit))
        self.at[rank] += 1
        return True

    def meet(self) -> bool:
        """The first event of each rank that is not over is, if it is that of all its ranks."""
        first = [next((e for e in own if e not in self.over), None) for own in self.begun]
        for event in filter(None, first):
            stages = _replicas(self.schedule, event[1])
            if all(first[self.schedule.placement[stage]] == event for stage in stages):
                self.over.add(event)
                return True
        return False
