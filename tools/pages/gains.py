"""docs/reports/published-gains.md: what papers say that their schedules gain, and what `schedc simulate`
predicts at the costs of the papers.

All of it is simulation, so the figures are the same on every machine. `SECTIONS` has a schedule in
each row: what is compared, the table, and why the two sides differ.
"""

import random
from collections.abc import Callable
from math import log, sqrt
from typing import Any

from attrs import frozen

from schedlang import Costs, Kind, compile, simulate
from schedlang.plan.plan import Plan
from schedlang.ranks.warm_up import warm_ups
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.kinds import HOPS, SENDS

HEAD = """\
# What published schedules gain

`make regenerate WHAT=gains` writes this page. *Published* is what a paper has measured, or says. *Predicted* is what
`schedc simulate` says of the program of the gallery at the costs of the paper: of computing alone, without transfers.
Below each table is why the two differ. Throughputs of whole systems are not predicted.
"""


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
    return _line([f"{setting.ranks} GPUs, {setting.sequence} tokens", *cells])


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
    return _line([size, *(f"{figure / whole.makespan:.2f}" for figure in figures)])


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
    return _line(
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
    return _line([str(unit), str(published), str(counted), str(peak), f"{idle:.1%}"])


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
    return _line(
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
    return _line([f"{ranks} ranks, {share:.0%}", *cells, *gains])


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
    return _line([f"{thousands}K", *gains])


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
    return _line([f"{share:.0%}", f"{gain:.2f}", *(f"{each:.1%}" for each in idle)])


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
    return _line(
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
    return _line([str(room), str(peak), *(f"{gain:.2f}" for gain in gains)])


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
    return _line([str(ranks), *peaks, *gains])


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
    return _line([f"{ranks} ranks, {microbatches} microbatches", *peaks, *gains])


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
        ]
        alike = _step("1f1b", [sum(lengths) / microbatches] * microbatches)
        ratios.append([time / alike for time in times])
    means = [sum(column) / DYNAPIPE_DRAWS for column in zip(*ratios, strict=True)]
    return _line([f"{spread:.0%}", *(f"{mean:.2f}" for mean in means)])


def _step(program: str, lengths: list[float]) -> float:
    """The makespan of a program whose microbatches take as long as they are."""
    costs = Costs(
        forward_times=(lengths,), backward_times=([2 * length for length in lengths],)
    )
    return simulate(compile(program, DYNAPIPE_SIZE, costs), costs).timeline.makespan


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
    return _line([f"{model.name}, {model.ranks} ranks", *gains, f"{slack:.0f} ms"])


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
    return _line(
        [
            f"{ranks} ranks, hidden size {hidden}",
            *(f"{volume / 1e9:.1f}" for volume in volumes),
            *(f"{bubble:.1%}" for bubble in bubbles),
        ]
    )


SOURCES = ("published", "predicted")


@frozen
class Section:
    """A published schedule: what is compared, the columns, what gives a row of which sizes, and why
    the two sides differ.
    """

    title: str
    text: str
    columns: list[str]
    row: Callable[..., str]
    sizes: tuple[Any, ...]
    reasons: str

    def rows(self, sizes: tuple[Any, ...] | None = None) -> list[str]:
        """The rows, of all sizes or of some."""
        chosen = self.sizes if sizes is None else sizes
        return [
            self.row(*size) if isinstance(size, tuple) else self.row(size)
            for size in chosen
        ]


SECTIONS = (
    Section(
        "Vocabulary parallelism",
        """\
[`vocabulary_parallel`](../../programs/vocabulary_parallel.sched) against 1F1B with the output layer on its last stage.
Throughput of algorithm 1 (shards), and of 1F1B whose layers are spread anew so that the longest stage is as short as can
be, as multiples of the baseline's. Yeung et al. 2025, arXiv 2411.05288: MFU of table 5, models of table 1, costs of table
4, 128 microbatches.""",
        [
            f"vocabulary of {', '.join(f'{each}K' for each in VOCABULARIES)}",
            *(
                f"{what}, {source}"
                for what in ("spread anew", "shards")
                for source in SOURCES
            ),
        ],
        vocabulary_row,
        SETTINGS,
        """\
Shards gain 5% to 11% less than predicted: they reach 80 to 91% of the throughput of the whole layer (table 3 of the
paper), and their sums take time on the link. Layers spread anew mostly gain less, since costs are numbers of operations,
and an output layer takes another time than other layers of as many.""",
    ),
    Section(
        "ReCycle",
        """\
[`recycle`](../../programs/recycle.sched): one update when a rank is lost, over one when none is (1F1B), at unit costs.
Gandhi et al. 2024, arXiv 2405.14009, abstract: rerouted microbatches run in the bubbles, so degradation is small or none.""",
        ["replicas x stages, microbatches", "work of a helper", "span", "flush"],
        recycle_row,
        ((3, 4, 6), (3, 4, 12), (4, 8, 12), (4, 8, 24)),
        """\
A helper has `replicas / (replicas - 1)` times the work, which is the first column: where it is less than 1, the bubble of
1F1B has room for it. The span is what an update takes where stages update apart from each other, as the paper's do. It is
below 1 where split backwards fill more of the bubble than the lost rank leaves. The price is memory: weight gradients
wait, in up to twice what 1F1B holds.""",
    ),
    Section(
        "SlimPipe",
        """\
The order of [`seq1f1b`](../../programs/seq1f1b.sched) with four slices of a sequence for each rank, against 1F1B:
activations on the first rank, in microbatches of its stage, and the bubble over the makespan of two microbatches. Li et
al. 2025, arXiv 2504.14519, abstract: activations of one microbatch in place of several, and a small bubble.""",
        ["size", "peak, 1F1B", "peak, slices", "bubble, 1F1B", "bubble, slices"],
        slimpipe_row,
        ((4, 16), (8, 32), (16, 64)),
        """\
All slices take as long here. In the paper they do because ranks share the work of attention, an exchange that is not in
the program.""",
    ),
    Section(
        "ZeroPP",
        """\
[`zeropp`](../../programs/zeropp.sched): what a step exchanges of a layer's weights and gradients in the first chunk, in
h² for a hidden size h (a layer has 12 h² weights), and what a rank holds and idles. Tang et al. 2024, arXiv 2402.03791:
36 B h² / U for B microbatches in units of U.""",
        [f"unit, of {ALL_UNITS}", *SOURCES, "peak activations", "bubble"],
        zeropp_row,
        (4, 8, 16, 32),
        """\
The volumes are equal: a unit gathers a chunk twice and sums its gradients once. The price of a large unit is memory, that
of a small one idle time: the program ends a unit before it begins the next one.""",
    ),
    Section(
        "PipeMare",
        """\
[`pipemare`](../../programs/pipemare.sched) against GPipe, with eight microbatches an update: how often its pipeline is
busy, as a multiple; by how many updates its forwards are late; and how many versions of the weights PipeDream would keep
on its first rank, where PipeMare keeps one. Yang et al. 2021, arXiv 1910.05124: up to 14.3 times the utilization of
synchronous training.""",
        ["ranks", "utilization", "updates late", "versions of PipeDream"],
        pipemare_row,
        (8, 16, 32, 107),
        """\
The abstract does not say at which size it is 14.3 times: eight microbatches on 107 ranks come to that. Whether the model is
as good in the end is a matter of learning rates.""",
    ),
    Section(
        "STP",
        """\
[`stp`](../../programs/stp.sched) against interleaved 1F1B with two chunks and ZB-V, where tensor parallelism sums
activations: the idle time of a step with the sums that nothing hides, in forwards of a chunk that only compute; and the
time of a step as a multiple of STP's. Qi et al. 2025, arXiv 2510.27257: the formulas in the authors' repository; up to 1.12
times the throughput for language models. Eight microbatches for each rank.""",
        [
            "size, sums",
            *(
                f"idle, {program}, {source}"
                for program in ("1F1B-I", "ZB-V", "STP")
                for source in SOURCES
            ),
            "time, 1F1B-I",
            "time, ZB-V",
        ],
        stp_row,
        ((2, 0.2), (4, 0.2), (4, 0.4), (8, 0.2)),
        """\
The formulas of the other two are met, ZB-V's but for the sums of one chunk. STP idles for the sums of three chunks more for
each rank but one: the authors count the 2p + 1 forwards of the first rank's warm-up, and the last rank's has p - 1 more;
the last sum of a forward and half a backward together has nothing to hide under; and ranks wait for each other's sums.""",
    ),
    Section(
        "HelixPipe",
        """\
[`helixpipe`](../../programs/helixpipe.sched) against 1F1B and ZB-1P, on 8 ranks with a model of 7 billion parameters: the
time of a step as a multiple of HelixPipe's, with microbatches of one sequence. Zhang et al. 2025, arXiv 2507.00394,
abstract: 26% faster than others with 128K tokens, on 64 H20.""",
        [
            "tokens",
            *(
                f"{name}, {microbatches} microbatches"
                for microbatches in HELIX_MICROBATCHES
                for name in ("1F1B", "ZB-1P")
            ),
        ],
        helixpipe_row,
        (32, 64, 128),
        """\
Costs are numbers of operations: 24 h² for each token in a layer without its attention, 4 h for each pair of tokens. The
bubble of HelixPipe does not depend on attention, so long sequences and few microbatches gain most; the abstract does not say
how many there were. What ranks exchange around every attention is not predicted.""",
    ),
    Section(
        "BigMac",
        f"""\
[`bigmac`](../../programs/bigmac.sched) on {BIGMAC_RANKS} ranks, against 1F1B with the encoder before its first stage and the generator
behind its last one: the time of a step as a multiple of BigMac's. Against encoding all microbatches first, a part on each
rank, which idles as little: the encoder's activations on a rank. The first column is what encoder and generator take, as
shares of a stage of the language model, and the microbatches. Jin et al. 2026, arXiv 2605.25451, abstract: 1.08 to 1.9 times
as fast as others; activations of encoder and generator are O(1), those of the language model of the same order as before.""",
        [
            "encoder, generator, microbatches",
            "time, 1F1B",
            "encoder's, all first",
            "encoder's, BigMac",
            "language model's, 1F1B",
            "language model's, BigMac",
        ],
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
        """\
The gain is that of any order in which all ranks share the work of the encoder: BigMac's idles no longer than the 1F1B of the
language model alone. The abstract does not say how large its encoders and generators are, nor where the others have them.
With a generator, the language model holds a round more of activations here, twice as many: a microbatch waits for those of
its round. What the ranks send each other is not predicted.""",
    ),
    Section(
        "DisagMoE",
        f"""\
[`af_pipe`](../../programs/af_pipe.sched) with attention and experts on {AF_SIZE["ranks"] // 2} ranks each, against interleaved 1F1B on all {AF_SIZE["ranks"]}, a layer in
each of its stages: the time of a step as a multiple of the AF pipe's, and the shares of it in which ranks compute nothing.
The first column is how long a layer exchanges tokens with the experts, there and back, as a share of what it computes.
{AF_LAYERS} layers, {AF_SIZE["microbatches"]} microbatches. Zeng et al. 2026, arXiv 2605.11005, abstract: up to 1.8 times as fast, on 16 nodes of 8 H800.""",
        [
            "exchanges",
            "time, 1F1B-I",
            "not computing, 1F1B-I",
            "not computing, AF pipe",
        ],
        af_pipe_row,
        (0.0, 0.2, 0.4, 0.6, 0.8),
        """\
Every rank computes as much in both, and as much for attention as for experts. 1F1B exposes its exchanges here, in the AF pipe
they are messages beside the computing. That leaves out what others hide of them, that fewer nodes share the experts, and that
messages of several ranks meet on a link. The paper gives both groups the ranks and links that balance them.""",
    ),
    Section(
        "InfiniPipe",
        f"""\
[`infinipipe`](../../programs/infinipipe.sched) where a rank has room for fewer slices than are in flight: the most that a rank
holds, and the time of a step with the activations of all slices dropped, and with those of none, as multiples of its own.
{INFINIPIPE_SIZE["ranks"]} ranks, {INFINIPIPE_SIZE["microbatches"]} microbatches in {INFINIPIPE_SIZE["slices"]} slices each, half of them long sequences, in which a slice takes {INFINIPIPE_ATTENTION:.0%} more for each slice
that it sees. Wang et al. 2025, arXiv 2509.21275, abstract: 1.69 times as fast as others.""",
        ["room, in slices", "peak", "time, all dropped", "time, none dropped"],
        infinipipe_row,
        (15, 12, 8, 4, 2, 1),
        """\
This is what it gains to drop no more than a rank has no room for, where others drop all. The abstract does not say against what
the paper measures, nor on which sequences; there, sequences have different numbers of slices, and a solver chooses these and
what is dropped.""",
    ),
    Section(
        "BPipe",
        """\
[`bpipe`](../../programs/bpipe.sched) against 1F1B: the activations of the rank that holds most, and the time of a step of
1F1B, plain and with all forwards recomputed, as multiples of BPipe's. A copy to another rank takes as long as a forward;
eight microbatches for each rank. Kim et al. 2023, ICML, abstract: GPT-3 of 96 and 134 billion parameters 1.25 to 2.17 times
as fast as by Megatron-LM, on 48 A100.""",
        [
            "ranks",
            "peak, 1F1B",
            "peak, BPipe",
            "time, 1F1B",
            "time, 1F1B that recomputes",
        ],
        bpipe_row,
        (4, 8, 16),
        """\
BPipe idles as long as 1F1B does: it gains by what the room is used for. The abstract names two uses, no recomputation (the
last column) and larger microbatches, whose kernels take less time a token. Huang et al. 2024, arXiv 2401.02088, find no
such gain for LLaMA, and next to none for GPT-3 with flash attention.""",
    ),
    Section(
        "Mario",
        """\
[`mario`](../../programs/mario.sched) against 1F1B, without checkpoints and with them: the activations of the rank that
holds most, and the time of a step as a multiple of Mario's. Liu et al. 2025, PPoPP, abstract: on average 1.16 times as fast
as others without checkpoints, and 1.57 times as others with them.""",
        [
            "size",
            "peak, 1F1B",
            "peak, Mario",
            "time, 1F1B",
            "time, 1F1B with checkpoints",
        ],
        mario_row,
        ((4, 4), (8, 8), (8, 16), (16, 16), (16, 64)),
        """\
Each microbatch takes a rank another forward, so no order gains more than 4 / 3 against checkpoints, and none gains by itself
against none. The paper's scheduler uses the room for larger microbatches and fewer ranks, which is not predicted. The order
takes as little time as any within this memory, in all rows (`schedc optimize`).""",
    ),
    Section(
        "DynaPipe",
        """\
The order of [`eager_1f1b`](../../programs/eager_1f1b.sched), where microbatches differ in length: the time of a step of
that, of 1F1B and of GPipe, and of 1F1B with all padded to the longest, as multiples of what it would be if all were alike.
8 ranks, 32 microbatches, lengths of a log-normal distribution, the mean of 20 draws. Jiang et al. 2024, arXiv 2311.10418,
abstract: up to 4.39 times the throughput of packing for T5, and 3.25 times for GPT, on FLANv2.""",
        ["spread of lengths", "padded", "GPipe", "1F1B", "DynaPipe"],
        dynapipe_row,
        (0.0, 0.25, 0.5, 1.0),
        """\
The paper neither pads nor packs, makes microbatches of samples of about one length, and runs forwards ahead. The last is
predicted here, for up to twice the activations of 1F1B, and the first column is what padding costs. What packing costs
depends on attention and on FLANv2. The order of microbatches counts as well ([costs of lengths](../models.md#what-it-costs)).""",
    ),
    Section(
        "Post-validation",
        """\
[`zb_2p`](../../programs/zb_2p.sched) where updates do not wait for the norm of all gradients, over those that wait
([training](../training.md#post-validation)): steps then repeat after the longest span of a rank, and not after the makespan.
Qi et al. 2024, arXiv 2401.10241: throughputs of table 7, costs of table 6. The last column is how long the sum over all
ranks may take before any rank waits for it.""",
        ["model", *SOURCES, "time for the sum"],
        post_validation_row,
        MODELS,
        """\
For three models the published gain is smaller: a whole step has more than forwards and backwards, such as the updates. For
the smallest it is larger; the prediction leaves out how long the sums took, which the paper does not say.""",
    ),
    Section(
        "WeiPipe",
        f"""\
[`weipipe`](../../programs/weipipe.sched), whose weights travel, against 1F1B, whose activations do: what a rank sends in a
step, in billions of numbers, and the bubble over the makespan. {WEIPIPE_LAYERS} layers of 12 h² weights, {WEIPIPE_MICROBATCHES} microbatches
for each rank. Lin et al. 2025, PPoPP, abstract: up to 30.9% more throughput than other pipelines with NVLink, 82% with
PCIe and InfiniBand, on up to 32 GPUs.""",
        [
            "size",
            "flows of the paper",
            "WeiPipe",
            *(f"1F1B, {each}K tokens" for each in WEIPIPE_TOKENS),
            "bubble, 1F1B",
            "bubble, WeiPipe",
        ],
        weipipe_row,
        ((8, 2048), (16, 1024), (16, 2048), (16, 4096), (32, 2048)),
        """\
WeiPipe sends the same for every length, 1F1B in proportion to it: WeiPipe sends less from about 18 h layers / ranks tokens
in a microbatch on. The plan passes on once, or not at all, what both flows of the paper have or what is at home on the next
rank; it sends more where the flows begin and end. The bubble comes from the turns, whose hops a rank reaches only after the
ops of the turn before. How much of what is sent is hidden behind ops, a simulation says with `cost gather` and `cost sum`.""",
    ),
)


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *map(section, SECTIONS)])


def section(of: Section) -> str:
    """A section of the page."""
    rule = ["---", *["---:"] * (len(of.columns) - 1)]
    table = [_line(of.columns), _line(rule), *of.rows()]
    return "\n".join([f"## {of.title}\n", f"{of.text}\n", *table, f"\n{of.reasons}\n"])


def _line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    return {"docs/reports/published-gains.md": page()}
