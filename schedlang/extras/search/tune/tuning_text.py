"""The results of a search as text and as JSON."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from attrs import evolve, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.extras.search.tune.candidates import Candidate
from schedlang.extras.search.tune.decoder_costs import Decoder
from schedlang.extras.search.tune.tuning import Result, Tuning
from schedlang.report.text_table import aligned
from schedlang.schedule.costs import Costs
from schedlang.schedule.transports import PORTABLE

_GIGABYTE = 1e9
#: A result with less memory is shown if it holds at most this share of the row above it.
_SAVING = 0.9
#: Rates from here on are printed without decimals.
_MANY = 1000


@frozen
class Units:
    """The units of the output: times are `seconds`, or in the unit of the costs; a sample has
    `tokens`. With a `model`, the output has its parameters, and the values that were `assumed`.
    """

    seconds: bool
    tokens: int | None = None
    model: Decoder | None = None
    assumed: Mapping[str, str] = field(factory=dict)

    @property
    def rate(self) -> str:
        """The unit of a training's rate."""
        what = "samples" if self.tokens is None else "tokens"
        return f"{what}/s" if self.seconds else f"{what} per unit of time"

    def rate_of(self, result: Result) -> float:
        """The number of samples or tokens in a unit of time."""
        size = result.candidate.size
        samples = size.replicas * size.microbatches * size.samples
        return samples * (self.tokens or 1) / result.time

    def time(self, value: float) -> str:
        """The text of a time, with its unit."""
        return f"{value:.4g} s" if self.seconds else f"{value:.6g}"


_MEANINGS = {
    "replicas x ranks": "how many pipelines there are, and how many ranks each has",
    "microbatches": "of a pipeline in one step, and how many samples are in each",
    "step ": "the time of one training step, with the sums of gradients over replicas",
    "95 % of steps": "are no longer than this, with the sums of gradients over replicas",
    "idle": "idle time / all time of the ranks, without these sums",
    "bytes": "of weights, activations and messages, on the rank that holds the most",
    "experts over": "the replicas that share out the experts of each layer",
    "(checkpointed)": "layers keep their inputs only, and run forward again in the backward",
}


def tuning_text(tuning: Tuning, units: Units) -> str:
    """The best result of each program, the fastest ones in less memory, and what was left out."""
    parts = []
    if units.model is not None:
        parts.append("\n".join(_of_model(units.model, units.assumed)))
    best = tuning.best_of_programs
    if best:
        parts.append("\n".join(_table(best, tuning, units)))
        parts += filter(None, [_advice(tuning, units)])
        # The frontier begins with the best result; its other ones are slower and need less memory.
        cheaper = _in_less_memory(tuning, best[0].bytes)
        if cheaper:
            lines = [
                "faster than all others in as little memory:",
                *_table(cheaper, tuning, units),
            ]
            parts.append("\n".join(lines))
        text = "\n".join(parts)
        meanings = {
            name: meaning for name, meaning in _MEANINGS.items() if name in text
        }
        parts.append(
            "\n".join(f"{name:<17} {meaning}" for name, meaning in meanings.items())
        )
    parts.append("\n".join(_left_out(tuning)))
    return "\n\n".join(parts)


def _of_model(model: Decoder, assumed: Mapping[str, str]) -> list[str]:
    """The size of the model, so that a user notices a wrong one, and the assumptions."""
    line = f"the model: {_many(model.parameters)} parameters"
    if model.experts:
        line += f", {_many(model.active_parameters)} of them used by a token"
    if model.tied:
        line += f", {_many(model.weights_of_embedding)} of them on the first and the last stage"
    if model.left_out:
        line += f", without {model.left_out}"
    return [line, *(f"  {name:<11} {words}" for name, words in assumed.items())]


def _many(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:,.2f} B" if billions >= 1 else f"{parameters / 1e6:,.1f} M"


def _table(results: Iterable[Result], tuning: Tuning, units: Units) -> list[str]:
    """A row for each result."""
    has_bytes = any(result.held for result in tuning.results)
    head = ["program", "replicas x ranks", "microbatches", "step", units.rate, "idle"]
    if tuning.training.jitter:
        head[3] = "95 % of steps"
    has_experts = any(layers.experts for layers in tuning.training.layers)
    if has_experts:
        head.append("experts over")
    rows = [[*head, "bytes"] if has_bytes else head]
    #: The programs of each row; programs with equal rows share one.
    names: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        size = result.candidate.size
        rate = units.rate_of(result)
        row = (
            f"{size.replicas} x {size.ranks}",
            f"{size.microbatches} of {size.samples}",
            units.time(result.time),
            f"{rate:,.0f}" if rate >= _MANY else f"{rate:.4g}",
            f"{result.idle:.1%}",
            *([_experts_over(result.candidate)] if has_experts else []),
            *([gigabytes(result.bytes)] if has_bytes else []),
        )
        names.setdefault(row, []).append(name_of(result.candidate))
    rows += [[first, *row] for row, (first, *_) in names.items()]
    same = [
        f"as {first}: {', '.join(others)}"
        for first, *others in names.values()
        if others
    ]
    return [*aligned(rows), *same]


def _experts_over(candidate: Candidate) -> str:
    """The number of replicas over which experts are sharded."""
    experts = candidate.layers.experts
    return str(experts.over) if experts else "1"


def _advice(tuning: Tuning, units: Units) -> str:
    """How much slower the next program is than the best, and the simplest result of a tie."""
    best = tuning.fitting[0]
    if best.candidate.size.ranks == 1:
        return _without_pipeline(best)
    margin = tuning.training.margin
    sentences = []
    behind = [
        result
        for result in tuning.best_of_programs
        if result.shown_time > best.shown_time
    ]
    if behind:
        names = [name_of(result.candidate) for result in (best, behind[0])]
        gap = behind[0].time / best.time - 1
        sentence = f"{names[0]} is {gap:.1%} faster than {names[1]}"
        if gap <= margin:
            sentence += f", a tie: the costs do not tell {margin:.0%} apart"
        sentences.append(sentence)
    simplest = tuning.tied[0]
    if simplest.plainness < best.plainness:
        size = simplest.candidate.size
        name = name_of(simplest.candidate)
        words = f"the simplest is {name} on {size.replicas} x {size.ranks} ranks"
        if size.ranks == 1:
            words = _without_pipeline(simplest)
        gap = simplest.time / best.time - 1
        sentences.append(
            f"within {margin:.0%}, {words}: {units.time(simplest.time)}, {gap:.1%} slower"
        )
    return "\n".join(sentences)


def _without_pipeline(result: Result) -> str:
    """Advice if each rank has the whole model."""
    replicas = result.candidate.size.replicas
    if replicas == 1:
        return "no pipeline is needed: there is one rank, with the whole model"
    return (
        f"no pipeline is needed: {replicas} replicas of the whole model, one on each rank, train "
        "it as well, as with DistributedDataParallel"
    )


def _in_less_memory(tuning: Tuning, held: float) -> list[Result]:
    """Results of the frontier below `held` bytes, each with a tenth less than the one before, and
    the one with the least memory.
    """
    cheaper = [result for result in tuning.frontier if result.bytes < held]
    shown = []
    for result in cheaper:
        if result.bytes <= _SAVING * held or result is cheaper[-1]:
            shown.append(result)
            held = result.bytes
    return shown


def name_of(candidate: Candidate) -> str:
    """The name of a candidate: its program, its parameters without sizes, and whether its layers
    are checkpointed.
    """
    words = [candidate.program.word]
    words += [f"{name}={value}" for name, value in candidate.params.items()]
    if candidate.layers.checkpointed:
        words.append("(checkpointed)")
    return " ".join(words)


def gigabytes(value: float) -> str:
    """The text of an amount of memory."""
    return f"{value / _GIGABYTE:,.1f} GB"


def _left_out(tuning: Tuning) -> list[str]:
    """The numbers of candidates that were simulated, left out and refused, with the reasons."""
    lines = [
        f"{counted(tuning.candidates, 'candidate')}: {len(tuning.results):,} proved and simulated, "
        f"{tuning.left_out:,} left out, since their lower bounds show that they are no better, "
        f"{tuning.refused:,} refused by their programs"
    ]
    if tuning.is_cut_off:
        lines.append(
            "the time was over before all candidates had a turn: a longer --for may show better "
            "ones"
        )
    # Measured costs have no sizes of gradients.
    choices = tuning.training.layers
    is_summed = any(layers.summed or layers.costs.sum_times for layers in choices)
    if not is_summed and any(
        result.candidate.size.replicas > 1 for result in tuning.results
    ):
        lines.append(
            "not counted: the time in which replicas sum their gradients, of which the costs say "
            "nothing; -p ranks=N keeps one number of ranks for a pipeline"
        )
    # Programs with the same reason share a line.
    words: dict[str, list[str]] = {}
    for word, reason in tuning.unlike.items():
        words.setdefault(reason, []).append(word)
    for reason, programs in words.items():
        lines.append(f"not tried: {', '.join(programs)}: {reason}")
    return lines


def costs_within(candidate: Candidate, memory: float) -> Costs:
    """The costs of a candidate's stages. With a limit of memory, they have the capacity of ranks,
    so that the plan is proved to stay within it.
    """
    if memory == inf:
        return candidate.costs
    return evolve(candidate.costs, capacity_bytes=(memory - candidate.layers.beside,))


def command_of(
    candidate: Candidate, transport: str, costs: str | None, plan: str
) -> str:
    """The command that compiles a candidate; `costs` is a file with its costs."""
    words = ["schedc", "compile", candidate.program.word]
    for name, value in candidate.all_params.items():
        words += ["-p", f"{name}={value}"]
    if transport != PORTABLE:
        words += ["--transport", transport]
    if costs is not None:
        words += ["--costs", costs]
    return shlex.join([*words, "-o", plan])


def tuning_json(tuning: Tuning, units: Units) -> dict[str, Any]:
    """All results as JSON, the best first; `programs` and `frontier` are indices of the results in
    the tables.
    """
    # Results are looked up by identity, since two of them may have equal figures.
    places = {id(result): place for place, result in enumerate(tuning.results)}

    def indices(results: Sequence[Result]) -> list[int]:
        return [places[id(result)] for result in results]

    training = tuning.training
    return {
        "ranks": training.ranks,
        "batch": training.batch,
        "memory": None if training.memory == inf else training.memory,
        "transport": training.transport,
        "rate": units.rate,
        "parameters": units.model and units.model.parameters,
        "active_parameters": units.model and units.model.active_parameters,
        "assumed": dict(units.assumed),
        "margin": training.margin,
        "tied": indices(tuning.tied) if tuning.fitting else [],
        "candidates": tuning.candidates,
        "simulated": len(tuning.results),
        "left_out": tuning.left_out,
        "refused": tuning.refused,
        "cut_off": tuning.is_cut_off,
        "not_tried": tuning.unlike,
        "programs": indices(tuning.best_of_programs),
        "frontier": indices(tuning.frontier),
        "results": [_row(result, tuning, units) for result in tuning.results],
    }


def _row(result: Result, tuning: Tuning, units: Units) -> dict[str, Any]:
    candidate = result.candidate
    size = candidate.size
    row = {
        "program": candidate.program.word,
        "params": candidate.all_params,
        "replicas": size.replicas,
        "samples": size.samples,
        "checkpointed": candidate.layers.checkpointed,
        "layers": list(candidate.shares),
        "step": result.time,
        "makespan": result.makespan,
        "sums": candidate.sums,
        "rate": units.rate_of(result),
        "idle": result.idle,
        "peak_activations": list(result.activations),
        "fits": result.bytes <= tuning.training.memory,
    }
    if candidate.layers.experts is not None:
        row["experts_over"] = candidate.layers.experts.over
    if result.with_noise is not None:
        row["percentile_95"] = result.with_noise
    if result.held is not None:
        row["bytes"] = result.bytes
        row["peak_bytes"] = list(result.held)
    return row
