"""When each action runs on each rank: predicted by the machine, or measured by the runtime."""

from attrs import frozen

from schedlang.actions import word


@frozen
class Bar:
    """One compute action, or one copy to or from the host, in time."""

    kind: int
    stage: int
    microbatch: int
    start: float
    end: float

    def __str__(self) -> str:
        return word(self.kind, self.stage, self.microbatch)


@frozen
class Timeline:
    """The compute actions of every rank in order of time, in the unit of the costs or in seconds; and its copies.

    Idle time is counted three ways in the field; each property below says which it is.
    """

    ranks: tuple[tuple[Bar, ...], ...]
    copies: tuple[tuple[Bar, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any rank."""
        bars = [bar for rank in self.ranks for bar in rank]
        return max((bar.end for bar in bars), default=0.0) - min((bar.start for bar in bars), default=0.0)

    @property
    def busy(self) -> list[float]:
        """For each rank, the time spent in actions."""
        return [sum((bar.end - bar.start for bar in rank), 0.0) for rank in self.ranks]

    @property
    def copying(self) -> list[float]:
        """For each rank, the time that its copies to and from the host take, beside its actions."""
        return [sum((bar.end - bar.start for bar in rank), 0.0) for rank in self.copies]

    @property
    def spans(self) -> list[float]:
        """For each rank, the time from its own first start to its own last end."""
        return [rank[-1].end - rank[0].start if rank else 0.0 for rank in self.ranks]

    @property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end."""
        return max(self.spans)

    @property
    def idle(self) -> list[float]:
        """For each rank, the share of the makespan that it does not work."""
        makespan = self.makespan
        return [1 - busy / makespan if makespan else 0.0 for busy in self.busy]

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over working time, both summed over the ranks: (P-1)/M for 1F1B."""
        work = sum(self.busy)
        return (len(self.ranks) * self.makespan - work) / work if work else 0.0

    @property
    def bubble_over_makespan(self) -> float:
        """Idle time over all time: (P-1)/(M+P-1) for 1F1B."""
        return sum(self.idle) / len(self.idle)

    @property
    def bubble_of_span(self) -> float:
        """Idle share within the largest rank span: what the zero-bubble papers call the bubble rate.

        Each rank's time runs from its own first start to its own last end, so idle time before the first and after
        the last op is not counted (Qi et al., Zero Bubble Pipeline Parallelism, section 5.3).
        """
        span, busy = max(zip(self.spans, self.busy, strict=True))
        return (span - busy) / span if span else 0.0
