"""The search: candidates in the order of what they may come to, and those left out that cannot be
better than what is known by then.
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
#: The fastest candidate is sought in the memory, and in each of so many equal steps below it.
_LEVELS = 8
#: The percentile of noisy runs by which candidates are ranked.
_PERCENT = 95
#: The relative tolerance within which times are equal.
_ROUNDING = 1e-9


@frozen(eq=False)
class Result:
    """A candidate as it was proved and simulated: its makespan, the share of it that ranks are
    idle, and for each rank the most activations that it holds, and the most bytes, if they are
    known; and the makespan that 95 of 100 runs with noise stay below, if there is any.
    """

    candidate: Candidate
    makespan: float
    idle: float
    activations: tuple[int, ...]
    held: tuple[float, ...] | None
    with_noise: float | None = None

    @property
    def time(self) -> float:
        """How long a training step takes, with the sums of gradients behind the schedule; with
        noise, 95 of 100 steps.
        """
        makespan = self.makespan if self.with_noise is None else self.with_noise
        return makespan + self.candidate.sums

    @property
    def bytes(self) -> float:
        """What the rank holds that holds the most; 0 where it is not known."""
        return max(self.held) + self.candidate.layers.beside if self.held else 0.0

    @property
    def shown_time(self) -> float:
        """The time to as many digits as there are without rounding: equal ones are a tie."""
        return float(f"{self.time:.9g}")

    @property
    def plainness(self) -> tuple[int, int, int]:
        """How plain the schedule is, the least first: without a pipeline, then by its kinds of ops
        beyond F and B, then by the stages of a rank.
        """
        candidate = self.candidate
        kinds = candidate.program.simplicity.kinds
        return int(candidate.size.ranks > 1), kinds, candidate.chunks

    @property
    def order(self) -> tuple[Any, ...]:
        """What results are sorted by: the fastest first; of a tie the plainest, then the one that
        holds least, then the one whose program says least.
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
    """What a search has come to: its `results`, the best first; how many candidates there were,
    how many of them the programs refused, and how many were left out, since they cannot be better;
    and the fewest bytes of any of them, by its bounds.

    `unlike` are the programs that were not tried, and why. If `is_cut_off`, its time was over
    before all was known.
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
        """The results within the memory of a rank."""
        return [
            result for result in self.results if result.bytes <= self.training.memory
        ]

    @property
    def best_of_programs(self) -> list[Result]:
        """The best result of each program that has one within the memory, the best first."""
        best: dict[str, Result] = {}
        for result in self.fitting:
            best.setdefault(result.candidate.program.word, result)
        return list(best.values())

    @property
    def tied(self) -> list[Result]:
        """The results that are slower than the best by no more than the costs can tell apart, with
        the best; the plainest first.
        """
        best = self.fitting[0].time * (1 + self.training.margin)
        tied = [result for result in self.fitting if result.time <= best]
        return sorted(tied, key=lambda result: (result.plainness, result.order))

    @property
    def frontier(self) -> list[Result]:
        """The results than which no other is faster in as little memory, the fastest first."""
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
    """Try programs for a training, and simulate all that may be the fastest of its program, or the
    fastest in a share of the memory.

    After so many seconds it ends with what is known. Without `prune` everything is simulated.

    Lower bounds are those without noise. With noise of mean 1 the mean of the makespans is no less,
    since a makespan is a maximum of sums; nor is what 95 of 100 runs stay below.
    """
    deadline = monotonic() + seconds
    reasons = {program.word: unlike(program, training.params) for program in programs}
    tried = [program for program in programs if not reasons[program.word]]
    tuning = Tuning(training, {word: why for word, why in reasons.items() if why})
    best = _Best(training.memory, training.margin)
    with processes() as workers:
        doing("listing candidates", 0, len(tried))
        waiting: list[list[Candidate]] = []
        # Programs come one by one, as they are listed, in their order.
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
                # A few of each program in turn: what is known early of one leaves out candidates of
                # all others.
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
    """The next candidates of a program; those that cannot matter any more are left out."""
    taken: list[Candidate] = []
    while own and len(taken) < _AT_ONCE:
        candidate = own.pop(0)
        if best is None or best.may_matter(candidate):
            taken.append(candidate)
        else:
            tuning.left_out += 1
    return taken


class _Best:
    """The least times that are known: of each program within the memory, of all of them, and of all
    of them within shares of the memory.
    """

    def __init__(self, memory: float, margin: float) -> None:
        self._memory = memory
        self._margin = margin
        self._of_program: dict[str, float] = {}
        shares = range(1, _LEVELS) if memory < inf else ()
        self._levels = {memory * share / _LEVELS: inf for share in shares}

    def may_matter(self, candidate: Candidate) -> bool:
        """Whether a candidate may be better than what is known, or as good without a pipeline."""
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
        """Take note of a result."""
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
    """The figures of a result; None if the program refuses the parameters, or is wrong there."""
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
