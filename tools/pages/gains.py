"""The tables of docs/reports/published-gains.md: what papers say that their schedules gain, and what
`schedc simulate` predicts at the costs of the papers. The text around them is written by hand.

All of it is simulation, so the figures are the same on every machine.
"""

import random
from collections.abc import Callable
from math import log, sqrt
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from schedlang import Costs, Kind, compile, simulate
from schedlang.extras.search.unit_order import Unit, best_order, pair_of_units
from schedlang.extras.search.unit_order import makespan as time_of
from schedlang.plan.plan import Plan
from schedlang.ranks.warm_up import warm_ups
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.kinds import HOPS, SENDS
from tools.pages.tables import line, with_rows

ROOT = Path(__file__).parents[2]
PAGE = "docs/reports/published-gains.md"


@frozen
class Setting:
    """A model of Yeung et al. 2025, tables 1 and 5: microbatches of one sequence."""

    ranks: int
    layers: int
    hidden: int
    sequence: int
    #: MFU in percent of the baseline, of layers spread anew, and of algorithm 1, for each size of
    #: the vocabulary.
    baseline: tuple[float, ...]
    spread: tuple[float, ...]
    shards: tuple[float, ...]

    @property
    def layer(self) -> float:
        """What a layer computes for a token, forward and backward (table 4)."""
        return 72 * self.hidden + 12 * self.sequence


#: Thousands of tokens in the vocabulary.
VOCABULARIES = (32, 64, 128, 256)
MICROBATCHES = 128
SETTINGS = (
    Setting(
        8, 32, 3072, 2048,
        (46.16, 40.48, 33.11, 25.23), (46.01, 46.37, 44.22, 38.91), (50.42, 50.28, 49.93, 50.12),
    ),
    Setting(
        8, 32, 3072, 4096,
        (47.05, 41.87, 35.00, 26.75), (46.93, 46.78, 47.44, 43.01), (50.98, 50.98, 50.83, 50.66),
    ),
    Setting(
        16, 48, 4096, 2048,
        (45.66, 40.09, 32.44, 24.21), (45.56, 42.82, 38.65, 36.98), (49.02, 50.62, 50.54, 50.66),
    ),
    Setting(
        32, 64, 5120, 2048,
        (42.81, 37.28, 28.97, 20.86), (43.48, 37.29, 36.32, 29.16), (45.85, 45.92, 45.90, 46.11),
    ),
)  # fmt: skip

#: Microbatches of all units together.
ALL_UNITS = 32
PIPEMARE_MICROBATCHES = 8
#: For each rank.
STP_MICROBATCHES = 8
#: A model of 7 billion parameters.
HELIX_RANKS = 8
HELIX_LAYERS = 32
HELIX_HIDDEN = 4096
#: One for each rank and fold, and twice as many.
HELIX_MICROBATCHES = (16, 32)
AF_SIZE = {"ranks": 8, "microbatches": 48}
AF_LAYERS = 16
EXPERTS_SIZE = {"ranks": 8, "microbatches": 64}
BIGMAC_RANKS = 8
INFINIPIPE_SIZE = {"ranks": 8, "microbatches": 16, "slices": 8}
#: What it takes a slice to see another one, as a share of what else it computes.
INFINIPIPE_ATTENTION = 0.2
#: For each rank.
BPIPE_MICROBATCHES = 8
DYNAPIPE_SIZE = {"ranks": 8, "microbatches": 32}
DYNAPIPE_DRAWS = 20
WEIPIPE_LAYERS = 32
#: For each rank.
WEIPIPE_MICROBATCHES = 4
#: Thousands of tokens in a microbatch.
WEIPIPE_TOKENS = (16, 64, 256)


@frozen
class Model:
    """A model of Qi et al. 2024: milliseconds of a forward and of both halves of a backward (table
    6), and samples for each GPU and second with post-validation and with a sum over all ranks
    before each update (table 7), with three microbatches for each rank.
    """

    name: str
    ranks: int
    times: tuple[float, float, float]
    samples: tuple[float, float]


MODELS = (
    Model("1.5B", 8, (18.522, 18.086, 9.337), (14.5, 13.11)),
    Model("6.2B", 8, (29.718, 29.444, 19.927), (4.32, 4.00)),
    Model("14.6B", 16, (11.347, 11.248, 8.132), (1.81, 1.68)),
    Model("28.3B", 32, (10.419, 10.207, 7.715), (0.99, 0.91)),
)


@frozen
class RoundPipeModel:
    """A model of the simulations that RoundPipe's authors published: layers, milliseconds of a
    layer, of the layer with the loss and of a transfer, the slots of a round, the layers of 1F1B's
    stages; and the shares of idle time that they found, of 1F1B and of RoundPipe, in percent.
    """

    name: str
    layer: tuple[float, float]
    loss: tuple[float, float]
    transfer: float
    slots: tuple[int, int]
    stages: tuple[int, ...]
    idle: tuple[float, float]


ROUNDPIPE_SIZE = {"ranks": 8, "microbatches": 16}
ROUNDPIPE_MODELS = (
    RoundPipeModel(
        "Qwen3-1.7B", (7.429, 15.831), (22.0655, 43.707), 1.6, (4, 10),
        (3, 3, 4, 4, 4, 4, 4, 2), (35.19, 19.07),
    ),
    RoundPipeModel(
        "Llama3-8B", (18.50370313, 41.20659375), (37.2255, 74.501), 3.2, (6, 16),
        (4,) * 8, (42.08, 14.28),
    ),
    RoundPipeModel(
        "GPT-OSS-20B", (21.6445625, 81.780875), (44.2925, 86.264), 2.25, (5, 24),
        (3,) * 8, (41.73, 13.98),
    ),
    RoundPipeModel(
        "Qwen3-32B", (40.5610625, 91.17429688), (54.928, 108.294), 4, (22, 64),
        (8,) * 8, (34.88, 6.67),
    ),
    RoundPipeModel(
        "Qwen3-235B", (43.016, 58.376), (42.444, 43.294), 3.2, (47, 94),
        (11, *(12,) * 6, 11), (31.21, 3.29),
    ),
)  # fmt: skip


def makespan(plan: Plan, forwards: list[float]) -> float:
    """How long a plan takes where backwards take twice as long as forwards."""
    costs = Costs(
        forward_times=tuple(forwards),
        backward_times=tuple(2 * time for time in forwards),
    )
    return simulate(plan, costs).timeline.makespan


def spread(setting: Setting, output: float) -> list[int]:
    """Layers of each stage: the last one has as many as make the longest stage shortest."""

    def longest(last: int) -> float:
        # The other stages share the rest; the fullest of them has the quotient rounded up.
        most = -(-(setting.layers - last) // (setting.ranks - 1))
        return max(most * setting.layer, last * setting.layer + output)

    last = min(range(setting.layers // setting.ranks + 1), key=longest)
    others, more = divmod(setting.layers - last, setting.ranks - 1)
    return [others + (stage < more) for stage in range(setting.ranks - 1)] + [last]


def vocabulary(setting: Setting, thousands: int) -> tuple[float, float]:
    """Throughput with layers spread anew, and with shards, over that of the baseline."""
    ranks = setting.ranks
    # Forward and backward of the output layer for a token and a unit of width, as `Setting.layer`.
    output = 6 * 1024.0 * thousands
    stage = setting.layers / ranks * setting.layer
    whole = compile("1f1b", {"ranks": ranks, "microbatches": MICROBATCHES})

    def with_output(times: list[float]) -> float:
        # Costs are of forward and backward together; a forward is a third of them.
        return makespan(whole, [time / 3 for time in [*times[:-1], times[-1] + output]])

    baseline = with_output([stage] * ranks)
    anew = with_output([layers * setting.layer for layers in spread(setting, output)])
    # The program takes the output layer's part on each rank in percent of a stage.
    share = max(1, round(100 * output / ranks / stage))
    params = {"ranks": ranks, "microbatches": MICROBATCHES, "share": share}
    # Its stages: those of the layers, one part of the output layer for each rank, and the
    # sum over the vocabulary, which takes no time.
    shards = [stage / 3] * ranks + [output / ranks / 3] * ranks + [0.0]
    return baseline / anew, baseline / makespan(
        compile("vocabulary_parallel", params), shards
    )


#: Gains by layers spread anew, and by shards, for each size of the vocabulary.
Gains = list[tuple[float, float]]


def gains_of(setting: Setting) -> tuple[Gains, Gains]:
    """Published and predicted gains."""
    measured = zip(setting.baseline, setting.spread, setting.shards, strict=True)
    published = [(anew / least, shards / least) for least, anew, shards in measured]
    return published, [vocabulary(setting, thousands) for thousands in VOCABULARIES]


def vocabulary_row(setting: Setting) -> str:
    """The row of a model."""
    cells = []
    for kind in range(2):
        for figures in gains_of(setting):
            cells.append(" ".join(f"{figure[kind]:.2f}" for figure in figures))
    return line([f"{setting.ranks} GPUs, {setting.sequence} tokens", *cells])


def recycle_row(replicas: int, stages: int, microbatches: int) -> str:
    """The row of a size: microbatches are those of each pipeline."""
    params = {
        "replicas": replicas,
        "ranks": replicas * stages - 1,
        "microbatches": replicas * microbatches,
    }
    timeline = simulate(compile("recycle", params)).timeline
    whole = simulate(
        compile("1f1b", {"ranks": stages, "microbatches": microbatches})
    ).timeline
    work = max(timeline.busy)
    figures = (work, timeline.span, timeline.makespan)
    size = f"{replicas} x {stages}, {microbatches}"
    return line([size, *(f"{figure / whole.makespan:.2f}" for figure in figures)])


def slimpipe_row(ranks: int, slices: int) -> str:
    """The row of a number of ranks."""
    sizes = {"ranks": ranks, "microbatches": 2}
    sliced = simulate(compile("seq1f1b", {**sizes, "slices": slices}))
    whole = simulate(compile("1f1b", sizes))
    # The peak of 1F1B needs as many microbatches as ranks, or it is not reached.
    many = simulate(compile("1f1b", {"ranks": ranks, "microbatches": 2 * ranks}))
    peaks = (max(many.peak_activations), max(sliced.peak_activations) / slices)
    bubbles = (
        whole.timeline.bubble_over_makespan,
        sliced.timeline.bubble_over_makespan,
    )
    return line(
        [
            f"{ranks} ranks, {slices} slices",
            *(f"{peak:.2f}" for peak in peaks),
            *(f"{bubble:.1%}" for bubble in bubbles),
        ]
    )


def zeropp_row(unit: int) -> str:
    """The row of a size of units."""
    plan = compile("zeropp", {"ranks": 4, "microbatches": ALL_UNITS, "unit": unit})
    execution = simulate(plan)
    exchanges = (Kind.UNSHARD, Kind.REDUCE_GRAD)
    pairs = zip(plan.ranks[0].kind, plan.ranks[0].stage, strict=True)
    counted = 12 * sum(kind in exchanges and stage == 0 for kind, stage in pairs)
    published = 36 * ALL_UNITS // unit
    idle = execution.timeline.bubble_over_makespan
    peak = max(execution.peak_activations)
    return line([str(unit), str(published), str(counted), str(peak), f"{idle:.1%}"])


def pipemare_row(ranks: int) -> str:
    """The row of a number of ranks."""
    params = {"ranks": ranks, "microbatches": PIPEMARE_MICROBATCHES}
    plan = compile("pipemare", params)
    # What one update more takes: the pipeline is neither filled nor drained for it.
    few, more = (
        simulate(plan.for_updates(plan.layout.updates + extra)).timeline.makespan
        for extra in range(2)
    )
    gain = simulate(compile("gpipe", params)).timeline.makespan / (more - few)
    stashed = follow_weights(compile("pipedream", {"ranks": ranks, "microbatches": 1}))
    return line(
        [
            str(ranks),
            f"{gain:.2f}",
            str(follow_weights(plan).staleness),
            str(max(stashed.held)),
        ]
    )


def with_sums(share: float) -> Costs:
    """The costs of a chunk whose forward computes for 1, and sums for a share of that."""
    sums = f"sum {share / 2} link"
    half = ["attention 0.5 compute", sums, "mlp 0.5 compute", sums]
    return Costs(
        forward_times=(1 + share,),
        backward_times=(2,),
        input_times=(1 + share,),
        weight_times=(1,),
        components={
            "F": half,
            "B": ["mlp 1 compute", "attention 1 compute"],
            "I": [half[2], sums, half[0], sums],
            "W": ["mlp 0.5 compute", "attention 0.5 compute"],
        },
    )


def stp_row(ranks: int, share: float) -> str:
    """The row of a size: idle times, and how much longer a step takes than with STP."""
    microbatches = STP_MICROBATCHES * ranks
    published = (
        (ranks - 1) * (3 + share) + 2 * microbatches * share,
        (ranks - 1) * 2 * share + 4 * microbatches * share,
        (ranks - 1) * (1 + share) + (2 * ranks + 1) * share,
    )
    # Two chunks compute for 1 in a forward, 2 in a backward.
    computing = 6 * microbatches
    spans = []
    for program, chunks in (
        ("interleaved_1f1b", {"chunks": 2}),
        ("zb_v", {}),
        ("stp", {}),
    ):
        params = {"ranks": ranks, "microbatches": microbatches, **chunks}
        spans.append(simulate(compile(program, params, with_sums(share))).timeline.span)
    cells = [
        f"{figure:.1f}"
        for idle, span in zip(published, spans, strict=True)
        for figure in (idle, span - computing)
    ]
    gains = [f"{span / spans[-1]:.2f}" for span in spans[:-1]]
    return line([f"{ranks} ranks, {share:.0%}", *cells, *gains])


def helixpipe_row(thousands: int) -> str:
    """The row of a length of sequences."""
    # What a layer computes for a token, in operations: attention, as a share of the rest of it.
    attention = 1024 * thousands * HELIX_HIDDEN * 2 / (24 * HELIX_HIDDEN**2)
    layers = HELIX_LAYERS // HELIX_RANKS
    forward = layers * (1 + attention)
    weight = layers * 1.0
    costs = Costs(
        forward_times=(forward,),
        backward_times=(2 * forward,),
        input_times=(2 * forward - weight,),
        weight_times=(weight,),
    )
    gains = []
    for microbatches in HELIX_MICROBATCHES:
        size = {"ranks": HELIX_RANKS, "microbatches": microbatches}
        params = {"layers": HELIX_LAYERS, "attention": round(100 * attention)}
        own = simulate(compile("helixpipe", size | params)).timeline.makespan
        for program in ("1f1b", "zb_1p"):
            other = simulate(compile(program, size, costs), costs).timeline.makespan
            gains.append(f"{other / own:.2f}")
    return line([f"{thousands}K", *gains])


def af_pipe_row(share: float) -> str:
    """The row of how long both exchanges of a layer take, as a share of what it computes."""
    attention = AF_SIZE["ranks"] // 2
    params = {"attention": attention, "layers": AF_LAYERS, "head": 0}
    plan = compile("af_pipe", AF_SIZE | params)
    # As long as its attention, the experts of a layer compute for a microbatch, on all ranks together.
    layer = 2.0 * attention
    messages = Costs(p2p_time=share * layer / 2)
    own = simulate(plan, messages, ideal=True).timeline
    # In the other schedule, a rank computes nothing while it exchanges.
    exposed = Costs(
        forward_times=((1 + share) * layer,), backward_times=((2 + share) * layer,)
    )
    chunks = {"chunks": AF_LAYERS // AF_SIZE["ranks"]}
    other = simulate(compile("interleaved_1f1b", AF_SIZE | chunks), exposed).timeline
    computing = 3 * layer * AF_SIZE["microbatches"] * AF_LAYERS / AF_SIZE["ranks"]
    idle = [1 - computing / each.makespan for each in (other, own)]
    gain = other.makespan / own.makespan
    return line([f"{share:.0%}", f"{gain:.2f}", *(f"{each:.1%}" for each in idle)])


def experts_row(share: float) -> str:
    """The row of the share of a forward in which tokens are exchanged."""
    # Attention and experts take 1 each, and twice that in a backward.
    exchange = share / (1 - share)
    forward = [
        Unit("attention", 1),
        Unit("dispatch", exchange, "network"),
        Unit("experts", 1),
        Unit("combine", exchange, "network"),
    ]
    whole = [
        unit if unit.resource == "network" else evolve(unit, time=2) for unit in forward
    ]
    halves = [unit for unit in forward if unit.resource == "compute"]
    apart = 6 + 4 * exchange
    pairs = [
        time_of(best_order(units))
        for units in (
            pair_of_units(forward, whole[::-1]),
            pair_of_units(forward, forward[::-1], halves),
        )
    ]
    exposed = Costs(
        forward_times=(2 + 2 * exchange,), backward_times=(4 + 2 * exchange,)
    )
    other = simulate(compile("1f1b", EXPERTS_SIZE), exposed).timeline.makespan
    plan = compile("experts_1f1b", EXPERTS_SIZE)
    own = simulate(plan, Costs(exchange_times=(exchange,))).timeline.makespan
    gains = [*(apart / pair for pair in pairs), other / own]
    return line([f"{share:.0%}", *(f"{gain:.2f}" for gain in gains)])


def bigmac_row(encoding: int, generating: int, microbatches: int) -> str:
    """The row of what encoder and generator take, in hundredths of a stage of the language model, and
    of so many microbatches for each rank.
    """
    ranks = BIGMAC_RANKS
    size = {"ranks": ranks, "microbatches": microbatches * ranks}
    nested = {
        "encoding": encoding,
        "generating": generating,
        "generators": int(generating > 0),
    }
    plan = compile("bigmac", size | nested)
    own = simulate(plan).timeline.makespan
    # 1F1B has the encoder before its first stage, and the generator behind its last one.
    forwards = [1.0] * ranks
    forwards[0] += encoding / 100
    forwards[-1] += generating / 100
    at_the_ends = makespan(compile("1f1b", size), forwards)
    pieces = plan.layout.pieces
    held = most_held(plan, lambda stage: stage % pieces == 0)
    of_language_model = most_held(plan, lambda stage: 0 < stage % pieces <= ranks)
    return line(
        [
            f"{encoding}%, {generating}%, {size['microbatches']}",
            f"{at_the_ends / own:.2f}",
            *map(str, (microbatches, held, ranks, of_language_model)),
        ]
    )


def most_held(plan: Plan, of: Callable[[int], bool]) -> int:
    """The most activations of some stages that a rank holds at once."""
    most = 0
    for actions in plan.ranks:
        held = 0
        for kind, stage in zip(actions.kind, actions.stage, strict=True):
            if of(stage):
                held += (kind == Kind.F) - (kind == Kind.B)
            most = max(most, held)
    return most


def infinipipe_row(room: int) -> str:
    """The row of a room: of how many slices a rank can hold the activations."""
    slices = INFINIPIPE_SIZE["slices"]
    # A slice of a long sequence sees those before it, and packs of short ones do not see each other.
    long = [1 + INFINIPIPE_ATTENTION * number for number in range(slices)]
    half = INFINIPIPE_SIZE["microbatches"] // 2
    forwards = [long] * half + [[1.0] * slices] * half
    costs = Costs(
        forward_times=(forwards,),
        backward_times=([[2 * time for time in each] for each in forwards],),
    )
    # With room for one slice, all are dropped.
    rooms = (room, 1, INFINIPIPE_SIZE["ranks"] + slices)
    adapted, all_dropped, none_dropped = (
        simulate(compile("infinipipe", INFINIPIPE_SIZE | {"room": each}, costs), costs)
        for each in rooms
    )
    took = adapted.timeline.makespan
    gains = [each.timeline.makespan / took for each in (all_dropped, none_dropped)]
    peak = max(adapted.peak_activations)
    return line([str(room), str(peak), *(f"{gain:.2f}" for gain in gains)])


def roundpipe_row(model: RoundPipeModel) -> str:
    """The row of a model: shares of idle time, and how long 1F1B takes."""
    forward, backward = model.layer
    of_loss = model.loss
    layers = sum(model.stages)
    forwards, backwards = model.slots
    slots = {"layers": layers, "forwards": forwards, "backwards": backwards}
    plan = compile("roundpipe", ROUNDPIPE_SIZE | slots)
    pieces = [stage < layers for stage in plan.layout.piece_of]
    costs = Costs(
        forward_times=tuple(forward if each else of_loss[0] for each in pieces),
        backward_times=tuple(backward if each else of_loss[1] for each in pieces),
        p2p_time=model.transfer,
    )
    own = simulate(plan, costs).timeline
    # 1F1B runs the forwards of all layers again, but for that with the loss.
    last = len(model.stages) - 1
    whole = Costs(
        forward_times=tuple(
            forward * count + of_loss[0] * (stage == last)
            for stage, count in enumerate(model.stages)
        ),
        backward_times=tuple(
            (forward + backward) * count + of_loss[1] * (stage == last)
            for stage, count in enumerate(model.stages)
        ),
        p2p_time=model.transfer,
    )
    other = simulate(compile("1f1b", ROUNDPIPE_SIZE), whole).timeline
    published = zip(model.idle, (other, own), strict=True)
    cells = [
        cell
        for idle, each in published
        for cell in (f"{idle:.2f}%", f"{each.bubble_over_makespan:.2%}")
    ]
    return line([model.name, *cells, f"{other.makespan / own.makespan:.2f}"])


def bpipe_row(ranks: int) -> str:
    """The row of a number of ranks: peaks, and how much longer a step takes with recomputation."""
    params = {"ranks": ranks, "microbatches": BPIPE_MICROBATCHES * ranks}
    plain, balanced, recomputed = (
        simulate(compile(program, params))
        for program in ("1f1b", "bpipe", "1f1b_recompute")
    )
    peaks = [str(max(each.peak_activations)) for each in (plain, balanced)]
    makespans = [each.timeline.makespan for each in (plain, recomputed)]
    gains = [f"{each / balanced.timeline.makespan:.2f}" for each in makespans]
    return line([str(ranks), *peaks, *gains])


def mario_row(ranks: int, microbatches: int) -> str:
    """The row of a size."""
    params = {"ranks": ranks, "microbatches": microbatches}
    # A whole backward takes 2, and another forward before it 1.
    again = Costs(backward_times=(3.0,))
    own = simulate(compile("mario", params))
    plain = simulate(compile("1f1b", params))
    with_checkpoints = simulate(compile("1f1b", params, again), again)
    peaks = [str(max(each.peak_activations)) for each in (plain, own)]
    makespans = [each.timeline.makespan for each in (plain, with_checkpoints)]
    gains = [f"{each / own.timeline.makespan:.2f}" for each in makespans]
    return line([f"{ranks} ranks, {microbatches} microbatches", *peaks, *gains])


def dynapipe_row(spread: float) -> str:
    """The row of a spread: the standard deviation of lengths, over their mean."""
    rng = random.Random(0)
    microbatches = DYNAPIPE_SIZE["microbatches"]
    # Of a log-normal distribution with a mean of 1.
    sigma = sqrt(log(1 + spread**2))
    ratios: list[list[float]] = []
    for _ in range(DYNAPIPE_DRAWS):
        lengths = [
            rng.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(microbatches)
        ]
        times = [
            _step("1f1b", [max(lengths)] * microbatches),
            _step("gpipe", lengths),
            _step("1f1b", lengths),
            _step("eager_1f1b", lengths),
            _step("dynapipe", lengths),
            _step("dynapipe", lengths, room=2 * DYNAPIPE_SIZE["ranks"] - 1),
        ]
        alike = _step("1f1b", [sum(lengths) / microbatches] * microbatches)
        ratios.append([time / alike for time in times])
    means = [sum(column) / DYNAPIPE_DRAWS for column in zip(*ratios, strict=True)]
    return line([f"{spread:.0%}", *(f"{mean:.2f}" for mean in means)])


def _step(program: str, lengths: list[float], **params: int) -> float:
    """The makespan of a program whose microbatches take as long as they are."""
    costs = Costs(
        forward_times=(lengths,), backward_times=([2 * length for length in lengths],)
    )
    plan = compile(program, DYNAPIPE_SIZE | params, costs)
    return simulate(plan, costs).timeline.makespan


def post_validation_row(model: Model) -> str:
    """The row of a model."""
    forward, input, weight = model.times
    costs = Costs(
        forward_times=(forward,),
        input_times=(input,),
        weight_times=(weight,),
        backward_times=(input + weight,),
    )
    plan = compile(
        "zb_2p", {"ranks": model.ranks, "microbatches": 3 * model.ranks}, costs
    )
    timeline = simulate(plan, costs).timeline
    behind = [
        [*bars][plan.ranks[rank].kind[:end].count(Kind.F)].start
        for rank, (bars, end) in enumerate(
            zip(timeline.ranks, warm_ups(plan), strict=True)
        )
    ]
    slack = timeline.span + min(behind) - timeline.makespan
    ahead, waits = model.samples
    gains = (
        f"{gain:.2f}" for gain in (ahead / waits, timeline.makespan / timeline.span)
    )
    return line([f"{model.name}, {model.ranks} ranks", *gains, f"{slack:.0f} ms"])


def weipipe_row(ranks: int, hidden: int) -> str:
    """The row of a size: what ranks send, in billions of numbers, and how long they idle."""
    params = {"ranks": ranks, "microbatches": WEIPIPE_MICROBATCHES * ranks}
    plans = [compile(program, params) for program in ("weipipe", "1f1b")]
    stage = WEIPIPE_LAYERS / ranks * 12 * hidden**2
    # In a turn, weights of both flows and gradients; each round has a turn for each stage.
    published = 3 * WEIPIPE_MICROBATCHES * ranks * stage
    hops = sum(kind in HOPS for actions in plans[0].ranks for kind in actions.kind)
    in_the_middle = plans[1].ranks[ranks // 2].kind
    messages = sum(kind in SENDS.values() for kind in in_the_middle)
    volumes = [published, hops / ranks * stage]
    volumes += [messages * 1024 * tokens * hidden for tokens in WEIPIPE_TOKENS]
    bubbles = [simulate(plan).timeline.bubble_over_makespan for plan in reversed(plans)]
    return line(
        [
            f"{ranks} ranks, hidden size {hidden}",
            *(f"{volume / 1e9:.1f}" for volume in volumes),
            *(f"{bubble:.1%}" for bubble in bubbles),
        ]
    )


@frozen
class Section:
    """A published schedule, as a section of the page: what gives the row of a size, and the sizes of
    its table.
    """

    title: str
    row: Callable[..., str]
    sizes: tuple[Any, ...]

    def rows(self, sizes: tuple[Any, ...] | None = None) -> list[str]:
        """The rows, of all sizes or of some."""
        chosen = self.sizes if sizes is None else sizes
        return [
            self.row(*size) if isinstance(size, tuple) else self.row(size)
            for size in chosen
        ]


SECTIONS = (
    Section("Vocabulary parallelism", vocabulary_row, SETTINGS),
    Section("ReCycle", recycle_row, ((3, 4, 6), (3, 4, 12), (4, 8, 12), (4, 8, 24))),
    Section("SlimPipe", slimpipe_row, ((4, 16), (8, 32), (16, 64))),
    Section("ZeroPP", zeropp_row, (4, 8, 16, 32)),
    Section("PipeMare", pipemare_row, (8, 16, 32, 107)),
    Section("STP", stp_row, ((2, 0.2), (4, 0.2), (4, 0.4), (8, 0.2))),
    Section("HelixPipe", helixpipe_row, (32, 64, 128)),
    Section(
        "BigMac",
        bigmac_row,
        (
            (25, 0, 8),
            (50, 0, 8),
            (100, 0, 8),
            (50, 25, 8),
            (50, 50, 8),
            (100, 50, 8),
            (100, 100, 8),
            (100, 100, 32),
        ),
    ),
    Section("DisagMoE", af_pipe_row, (0.0, 0.2, 0.4, 0.6, 0.8)),
    Section("Combined 1F1B", experts_row, (0.2, 0.3, 0.4, 0.5, 0.6)),
    Section("InfiniPipe", infinipipe_row, (15, 12, 8, 4, 2, 1)),
    Section("RoundPipe", roundpipe_row, ROUNDPIPE_MODELS),
    Section("BPipe", bpipe_row, (4, 8, 16)),
    Section("Mario", mario_row, ((4, 4), (8, 8), (8, 16), (16, 16), (16, 64))),
    Section("DynaPipe", dynapipe_row, (0.0, 0.25, 0.5, 1.0)),
    Section("Post-validation", post_validation_row, MODELS),
    Section(
        "WeiPipe",
        weipipe_row,
        ((8, 2048), (16, 1024), (16, 2048), (16, 4096), (32, 2048)),
    ),
)


def files() -> dict[str, str]:
    """The page with its tables as they are now."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for section in SECTIONS:
        page = with_rows(page, section.title, section.rows())
    return {PAGE: page}
