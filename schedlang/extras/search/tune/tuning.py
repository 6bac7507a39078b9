"""The search: simulate candidates in the order of their lower bounds, and leave out those whose
bounds show that they cannot be better than known results.
"""

from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

from attrs import define, field, frozen

from schedlang.cli.workers import processes
from schedlang.compiler import compile_tree
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.extras.noise.noise import Noise
from schedlang.extras.noise.runs import simulate_runs
from schedlang.extras.search.tune.candidates import Candidate, Training, candidates
from schedlang.extras.search.tune.tried_programs import Program, loaded, unlike
from schedlang.proof.prove import simulate
from schedlang.schedule.costs import Costs

#: The candidates of each program that are simulated in one turn.
_AT_ONCE = 4
#: The number of equally spaced limits of memory; the search finds the fastest candidate within
#: each.
_LEVELS = 8
#: The percentile of noisy runs by which candidates are ranked.
_PERCENT = 95
#: The relative tolerance within which times are equal.
_ROUNDING = 1e-9


@frozen(eq=False)
class Result:
    """The simulation of a candidate: its makespan, the idle share of the ranks' time, and for each
    rank its peak of activations, and of bytes (`held`) if the costs have any; and with noise, the
    95th percentile of the makespan.
    """

    candidate: Candidate
    makespan: float
    idle: float
    activations: tuple[int, ...]
    held: tuple[float, ...] | None
    with_noise: float | None = None

    @property
    def time(self) -> float:
        """The time of a training step, with the sums of gradients after the schedule; with noise,
        the 95th percentile.
        """
        makespan = self.makespan if self.with_noise is None else self.with_noise
        return makespan + self.candidate.sums

    @property
    def bytes(self) -> float:
        """The peak bytes of the fullest rank; 0 if they are unknown."""
        return max(self.held) + self.candidate.layers.beside if self.held else 0.0

    @property
    def shown_time(self) -> float:
        """The time rounded to nine digits, so that equal times compare as equal."""
        return float(f"{self.time:.9g}")

    @property
    def plainness(self) -> tuple[int, int, int]:
        """A sort key with plain schedules first: those without a pipeline, then by the number of
        kinds of ops besides F and B, then by the stages of a rank.
        """
        candidate = self.candidate
        kinds = candidate.program.simplicity.kinds
        return int(candidate.size.ranks > 1), kinds, candidate.chunks

    @property
    def order(self) -> tuple[Any, ...]:
        """A sort key for results: the fastest first; among equals the plainest, then the one with
        the least memory, then the one with the shortest program.
        """
        program = self.candidate.program
        simplicity = program.simplicity
        params = sorted(self.candidate.all_params.items())
        return (
            self.shown_time,
            self.plainness,
            self.bytes,
            max(self.activations),
            len(params),
            simplicity.directives,
            simplicity.lines,
            program.word,
            params,
        )


@define
class Tuning:
    """The state of a search: its `results`, the best first; the numbers of candidates, of those
    that their programs refused, and of those that were left out by their bounds; and the lowest
    bound of bytes among all candidates.

    `unlike` maps the programs that were not tried to the reasons. If `is_cut_off`, the time was
    over before all candidates were judged.
    """

    training: Training
    unlike: dict[str, str]
    results: list[Result] = field(factory=list)
    candidates: int = 0
    refused: int = 0
    left_out: int = 0
    least_bytes: float = inf
    is_cut_off: bool = False

    @property
    def fitting(self) -> list[Result]:
        """The results that fit into the memory of a rank."""
        return [
            result for result in self.results if result.bytes <= self.training.memory
        ]

    @property
    def best_of_programs(self) -> list[Result]:
        """The best fitting result of each program, the best first."""
        best: dict[str, Result] = {}
        for result in self.fitting:
            best.setdefault(result.candidate.program.word, result)
        return list(best.values())

    @property
    def tied(self) -> list[Result]:
        """The best result, and those that are slower by at most the margin; the plainest first."""
        best = self.fitting[0].time * (1 + self.training.margin)
        tied = [result for result in self.fitting if result.time <= best]
        return sorted(tied, key=lambda result: (result.plainness, result.order))

    @property
    def frontier(self) -> list[Result]:
        """The Pareto frontier of time and memory, the fastest result first."""
        frontier: list[Result] = []
        for result in sorted(
            self.results, key=lambda each: (each.shown_time, each.bytes)
        ):
            if not frontier or result.bytes < frontier[-1].bytes:
                frontier.append(result)
        return frontier


def tune(
    programs: Sequence[Program],
    training: Training,
    seconds: float = inf,
    prune: bool = True,
) -> Tuning:
    """Try programs for a training. Simulate every candidate that may be the fastest of its program,
    or the fastest within a share of the memory.

    After `seconds`, the search ends with the results that it has. Without `prune`, all candidates
    are simulated.

    Lower bounds are computed without noise. With noise of mean 1, the mean of the makespans is not
    below them, since a makespan is a maximum of sums; nor is the 95th percentile.
    """
    deadline = monotonic() + seconds
    reasons = {program.word: unlike(program, training.params) for program in programs}
    tried = [program for program in programs if not reasons[program.word]]
    tuning = Tuning(training, {word: why for word, why in reasons.items() if why})
    best = _Best(training.memory, training.margin)
    with processes() as workers:
        doing("listing candidates", 0, len(tried))
        waiting: list[list[Candidate]] = []
        # The lists of programs arrive one by one, in order.
        for own in workers.map(
            candidates, tried, [training] * len(tried), [deadline] * len(tried)
        ):
            waiting.append(own)
            doing("listing candidates", len(waiting), len(tried))
        tuning.candidates = sum(map(len, waiting))
        all_bytes = (candidate.bounds.bytes for own in waiting for candidate in own)
        tuning.least_bytes = min(all_bytes, default=inf)
        while any(waiting) and not tuning.is_cut_off:
            batch = []
            for own in waiting:
                # A few candidates of each program at a time: early results of one program let
                # candidates of all others be left out.
                batch += _taken(own, best if prune else None, tuning)
            figures = workers.map(
                _figures,
                [candidate.program.source for candidate in batch],
                [candidate.all_params for candidate in batch],
                [candidate.costs for candidate in batch],
                [training.transport] * len(batch),
                [training.jitter] * len(batch),
            )
            for candidate, of_candidate in zip(batch, figures, strict=True):
                if of_candidate is None:
                    tuning.refused += 1
                else:
                    result = Result(candidate, *of_candidate)
                    tuning.results.append(result)
                    best.add(result)
                known = len(tuning.results) + tuning.refused + tuning.left_out
                doing("simulating candidates", known, tuning.candidates)
                if monotonic() > deadline:
                    tuning.is_cut_off = True
                    break
    tuning.results.sort(key=lambda result: result.order)
    return tuning


def _taken(
    own: list[Candidate], best: "_Best | None", tuning: Tuning
) -> list[Candidate]:
    """Take the next candidates of a program, and leave out those that cannot matter any more."""
    taken: list[Candidate] = []
    while own and len(taken) < _AT_ONCE:
        candidate = own.pop(0)
        if best is None or best.may_matter(candidate):
            taken.append(candidate)
        else:
            tuning.left_out += 1
    return taken


class _Best:
    """The shortest known times: of each program within the memory, and of all programs within
    shares of the memory.
    """

    def __init__(self, memory: float, margin: float) -> None:
        self._memory = memory
        self._margin = margin
        self._of_program: dict[str, float] = {}
        shares = range(1, _LEVELS) if memory < inf else ()
        self._levels = {memory * share / _LEVELS: inf for share in shares}

    def may_matter(self, candidate: Candidate) -> bool:
        """Whether a candidate may be better than known results, or as good without a pipeline."""
        time = candidate.bounds.time * (1 + _ROUNDING)
        least = candidate.bounds.bytes
        if least > self._memory:
            return False
        if time < self._of_program.get(candidate.program.word, inf):
            return True
        fastest = min(self._of_program.values(), default=inf)
        if candidate.size.ranks == 1 and time <= fastest * (1 + self._margin):
            return True
        return any(
            least <= level and time < known for level, known in self._levels.items()
        )

    def add(self, result: Result) -> None:
        """Update the times with a result."""
        if result.bytes > self._memory:
            return
        word = result.candidate.program.word
        self._of_program[word] = min(result.time, self._of_program.get(word, inf))
        for level, known in self._levels.items():
            if result.bytes <= level:
                self._levels[level] = min(result.time, known)


_Figures = tuple[float, float, tuple[int, ...], tuple[float, ...] | None, float | None]


def _figures(
    source: Source,
    params: Mapping[str, int],
    costs: Costs,
    transport: str,
    jitter: float,
) -> _Figures | None:
    """The figures of a result; None if the program does not compile with these parameters."""
    whole, tree = loaded(source)
    try:
        plan = compile_tree(whole, tree, params, costs, transport=transport)
    except CompileError:
        return None
    execution = simulate(plan, costs)
    timeline = execution.timeline
    with_noise = None
    if jitter:
        runs = simulate_runs(plan, Noise(jitter=jitter), costs)
        with_noise = runs.percentile(_PERCENT)
    return (
        timeline.makespan,
        timeline.bubble_over_makespan,
        execution.peak_activations,
        execution.peak_bytes,
        with_noise,
    )
