"""What published schedules are said to gain, and what `schedc simulate` predicts at the costs of
their papers: `make gains`, which writes docs/published-gains.md.

It is simulation: the figures are the same on every machine.
"""

import random
from math import log, sqrt

from attrs import frozen

from schedlang import Costs, Kind, compile, simulate
from schedlang.plan.plan import Plan
from schedlang.ranks.warm_up import warm_ups
from schedlang.ranks.weights import follow_weights
from schedlang.schedule.kinds import HOPS, SENDS

HEAD = """\
# What published schedules gain

`make gains` writes this page. On the left is what a paper has measured, or says; on the right what
`schedc simulate` predicts for the program of the gallery, at the costs of the paper: of computation
alone, without transfers. Below each table is why the two differ.
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

#: Ranks, and slices of a sequence.
SLIMPIPE = ((4, 16), (8, 32), (16, 64))

VOCABULARY_TEXT = """\
## Vocabulary parallelism

[`vocabulary_parallel.sched`](../programs/vocabulary_parallel.sched), against 1F1B with the output
layer on its last stage: the throughput of algorithm 1, and of 1F1B with the layers spread anew so
that the longest stage is as short as can be, each as a multiple of the baseline's. Yeung et al.
2025, arXiv 2411.05288: MFU of table 5, models of table 1, costs of table 4, 128 microbatches.
"""
VOCABULARY_REASONS = """\
What is published for shards is {least:.0%} to {most:.0%} below what is predicted: shards reach
80 to 91% of the throughput of the whole layer (table 3 of the paper), and their sums take time on
the link. The input layer, which is cut there and stays whole here, is too small to be seen. Layers
spread anew mostly gain less than predicted: costs are numbers of operations, and an output layer
does not take as long as other layers of as many. Activations: the program claims the peak of the
paper, two microbatches more than 1F1B on each rank.
"""
RECYCLE_TEXT = """\
## ReCycle

[`recycle.sched`](../programs/recycle.sched): one update when a rank is lost, against one when none
is (1F1B), at unit costs. Gandhi et al. 2024, arXiv 2405.14009, abstract: rerouted microbatches are
processed in the bubbles of the schedule, so that degradation is small or none.
"""
RECYCLE_REASONS = """\
A helper has `replicas / (replicas - 1)` times the work, which the first column has: where it is
less than 1, the bubble of 1F1B has room for it. The span is what an update takes where stages
update their weights apart from each other, as the paper's do; the flush is a little longer. It is
below 1 where the split backwards fill more of the bubble than the lost rank leaves. The price is
memory: weight gradients wait, in up to twice what 1F1B holds. The paper measures whole systems
under failures, which this page does not predict.
"""
SLIMPIPE_TEXT = """\
## SlimPipe

The order of [`seq1f1b.sched`](../programs/seq1f1b.sched) with four slices of a sequence for each
rank: activations on the first rank, in microbatches of its stage, and the bubble over the makespan
of two microbatches, against 1F1B. Li et al. 2025, arXiv 2504.14519, abstract: activations of one
microbatch in place of several, and a small bubble.
"""
SLIMPIPE_REASONS = """\
All slices take as long here. In the paper they do since ranks share the work of attention, which
grows along a sequence: that exchange is not in the program.
"""
#: Microbatches of a scheduling unit, of so many in all.
UNITS = (4, 8, 16, 32)
ALL_UNITS = 32
ZEROPP_TEXT = """\
## ZeroPP

[`zeropp.sched`](../programs/zeropp.sched): what a step exchanges of the weights and gradients of a
layer in the first chunk, in h² for a hidden size h; and what a rank holds of activations, and
idles. Tang et al. 2024, arXiv 2402.03791: 36 B h² / U for B microbatches in units of U. A layer has
12 h² weights; the gathers and sums are those of the plan.
"""
ZEROPP_REASONS = """\
The volumes are equal: a unit gathers a chunk twice and sums its gradients once; the last chunk, of
which the backwards follow the forwards, is gathered once. The price of a large unit is memory, that
of a small one idle time: the program ends a unit before it begins the next one, and has each
chunk's weight halves right behind its halves for the inputs. The throughputs of the paper are of
whole systems, against three-dimensional parallelism, which this page does not predict.
"""
#: Ranks, for `PIPEMARE_MICROBATCHES` of an update.
PIPEMARE = (8, 16, 32, 107)
PIPEMARE_MICROBATCHES = 8
PIPEMARE_TEXT = """\
## PipeMare

[`pipemare.sched`](../programs/pipemare.sched) against GPipe, with eight microbatches an update: how
often its pipeline is busy, as a multiple; by how many updates its forwards are late; and the
versions of the weights that PipeDream would keep on its first rank, where PipeMare keeps one. Yang
et al. 2021, arXiv 1910.05124: up to 14.3 times the utilization of synchronous training (abstract in
the proceedings of MLSys).
"""
PIPEMARE_REASONS = """\
An update takes as long as its microbatches, once the pipeline is full, and in GPipe the ranks less
one more of them. The abstract does not say at which size it is 14.3 times: eight microbatches on
107 ranks come to that. That the model is as good in the end is a matter of learning rates, which
this page does not predict.
"""
#: Ranks, and how long the sums of a chunk's forward take, as a part of its computing.
STP = ((2, 0.2), (4, 0.2), (4, 0.4), (8, 0.2))
#: For each rank.
STP_MICROBATCHES = 8
STP_TEXT = """\
## STP

[`stp.sched`](../programs/stp.sched) against interleaved 1F1B with two chunks and ZB-V, where
tensor parallelism sums activations: the idle time of a step, sums included that nothing hides, in
forwards of a chunk that only compute; and the time of a step of the other two as a multiple of
STP's. Qi et al. 2025, arXiv 2510.27257: the formulas of the authors' table, in their repository; up
to 1.12 times the throughput for language models (abstract). Eight microbatches for each rank.
"""
STP_REASONS = """\
Forwards and both halves of a backward compute for as long; a whole backward hides its sums under
its weight gradients, as the formulas have it. Those of the other two are met, ZB-V's but for the
sums of one chunk; STP's where sums take no time, and otherwise it idles for the sums of three
chunks more for each rank but one. The authors count the 2p + 1 forwards of the first rank's
warm-up. The last rank's has p - 1 more, of a forward and half a backward together the last sum has
nothing to hide under, and ranks wait for each other's sums. ZB-V halves all backwards, and so hides
no sums. Published throughputs are of whole models, whose share of sums the abstract does not say.
"""

#: A model of 7 billion parameters: layers and hidden size; and thousands of tokens in a sequence.
HELIX_RANKS = 8
HELIX_LAYERS = 32
HELIX_HIDDEN = 4096
HELIX_SEQUENCES = (32, 64, 128)
#: Microbatches in all: one for each rank and fold, and twice as many.
HELIX_MICROBATCHES = (16, 32)
HELIXPIPE_TEXT = """\
## HelixPipe

[`helixpipe.sched`](../programs/helixpipe.sched) against 1F1B and ZB-1P, on 8 ranks with a model of
7 billion parameters (32 layers, hidden size 4096): the time of a step of these as multiples of
HelixPipe's, for 16 and for 32 microbatches of one sequence. Zhang et al. 2025, arXiv 2507.00394,
abstract: 26% faster than others with 128K tokens, on 64 H20.
"""
HELIXPIPE_REASONS = """\
Costs are numbers of operations, 24 h² for each token in a layer without its attention, and 4 h for
each pair of tokens that attention looks at: a token looks at those before it. Weight halves of
ZB-1P are those of the rest of a layer, since attention has no weights. The bubble of HelixPipe does
not depend on attention, so it gains the more, the longer sequences and the fewer microbatches are;
of how many the 26% are, the abstract does not say. What ranks exchange is not predicted: around the
attention of every layer it is several times as much as what others exchange around a stage.
"""

#: Ranks, with so many microbatches for each.
BPIPE = (4, 8, 16)
BPIPE_MICROBATCHES = 8
BPIPE_TEXT = """\
## BPipe

[`bpipe.sched`](../programs/bpipe.sched) against 1F1B: the activations of the rank that holds most,
and the time of a step of 1F1B, and of one that recomputes all forwards instead, as multiples of
BPipe's. A copy to another rank takes as long as a forward. Eight microbatches for each rank. Kim et
al. 2023, ICML, abstract: GPT-3 of 96 and 134 billion parameters trained 1.25 to 2.17 times as fast
as by Megatron-LM, on 48 A100.
"""
BPIPE_REASONS = """\
BPipe idles as long as 1F1B does: what it gains is what the room is used for. The abstract names two
uses, no recomputation of forwards and larger microbatches. The first is the last column, a little
above the least that is published. The second is a matter of kernels, which take less time for each
token of a larger microbatch; this page does not predict it. Huang et al. 2024, arXiv 2401.02088
(abstract), find no such gain for LLaMA, and with flash attention next to none for GPT-3. The
abstracts do not say how many activations a rank holds; the program claims half of what 1F1B's first
rank does, and one more.
"""

MARIO = ((4, 4), (8, 8), (8, 16), (16, 16), (16, 64))
MARIO_TEXT = """\
## Mario

[`mario.sched`](../programs/mario.sched) against 1F1B, without checkpoints and with them: the
activations of the rank that holds most, and the time of a step as multiples of Mario's. Liu et al.
2025, PPoPP, abstract: on average 1.16 times as fast as 1F1B, Chimera and interleaved 1F1B without
checkpoints, and 1.57 times as with them.
"""
MARIO_REASONS = """\
With checkpoints a backward begins with another forward, when the gradient is there: in Mario it is
over by then, where ranks wait anyway. Once a rank has more to do than it waits, each microbatch
takes it another forward, so no order gains more than 4 / 3; and against no checkpoints, none gains
by itself: next to nothing is held, and what room there is then, larger microbatches and fewer
ranks for a model, is used by the automatic scheduler of the paper. This page does not predict it.
The order here takes as little time as any within this memory, in all of the rows
(`schedc optimize`).
"""
DYNAPIPE_SPREADS = (0.0, 0.25, 0.5, 1.0)
DYNAPIPE_SIZE = {"ranks": 8, "microbatches": 32}
DYNAPIPE_DRAWS = 20
DYNAPIPE_TEXT = """\
## DynaPipe

The order of [`eager_1f1b.sched`](../programs/eager_1f1b.sched), where microbatches take as long as
their lengths, which differ: the time of a step of that, of 1F1B, and of GPipe, as multiples of what
it would be if all took as long as each other; and of 1F1B where all are padded to the longest. On 8
ranks with 32 microbatches, lengths drawn by a log-normal distribution, the mean of 20 draws. Jiang
et al. 2024, arXiv 2311.10418, abstract: up to 4.39 times the throughput of packing for T5, and 3.25
times for GPT, on FLANv2.
"""
DYNAPIPE_REASONS = """\
The paper neither pads nor packs, makes microbatches of samples that are about as long as each
other, and runs forwards ahead, so that ranks need not wait for each other's long ones. The last
is what is predicted here, for up to twice the activations of 1F1B; the first column is what padding
costs beside it. What packing costs is a matter of attention and of the lengths of FLANv2, which the
abstract does not give. In which order microbatches come counts as well, and here they come as they
are drawn ([lengths.md](lengths.md#what-it-costs)).
"""


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
POST_VALIDATION_TEXT = """\
## Post-validation

[`zb_2p.sched`](../programs/zb_2p.sched) where updates do not wait for the norm of all gradients,
over those that wait for it ([training.md](training.md#post-validation)): the longest span of a
rank, after which steps repeat that wait for nobody, and the makespan, after which they repeat where
all ranks begin together. Qi et al. 2024, arXiv 2401.10241: throughputs of table 7, costs of table
6. The last column is how long the sum over all ranks may take, after the last one has ended a step,
before any rank waits for it at the end of the next warm-up.
"""
POST_VALIDATION_REASONS = """\
Of three of the models the published gain is smaller: a whole step has more than forwards and
backwards, such as the updates themselves, which take as long in both ways. Of the smallest one it
is larger; the paper does not say how long its sums took, which the prediction does not have.
"""
#: Ranks and hidden sizes; layers, microbatches of a rank, and thousands of tokens of one.
WEIPIPE = ((8, 2048), (16, 1024), (16, 2048), (16, 4096), (32, 2048))
WEIPIPE_LAYERS = 32
WEIPIPE_MICROBATCHES = 4
WEIPIPE_TOKENS = (16, 64, 256)
WEIPIPE_TEXT = f"""\
## WeiPipe

[`weipipe.sched`](../programs/weipipe.sched), whose weights travel, against 1F1B, whose activations
do: what a rank sends in a step, in billions of numbers, of 1F1B one in the middle; and the bubble
over the makespan. {WEIPIPE_LAYERS} layers of 12 h² weights, {WEIPIPE_MICROBATCHES} microbatches for
each rank, of so many tokens. In each turn of the paper a rank sends the weights of two stages and
the gradients of one. Lin et al. 2025, PPoPP, abstract: up to 30.9% more throughput than other
pipelines with NVLink, 82% with PCIe and InfiniBand, on up to 32 GPUs.
"""
WEIPIPE_REASONS = """\
WeiPipe sends the same for every length, and 1F1B in proportion to it: WeiPipe sends less from about
18 h layers / ranks tokens in a microbatch on. The plan sends less than the flows of the paper, for
what both flows have, or is at home on the next rank, is passed on once or not at all; and more
where the flows begin and end, for what a rank passes on there, it does not use. With many rounds
the first counts more. The bubble comes from the turns: a rank comes to the hops of one when it has
done the ops of the one before, and its neighbours wait for that; in the first round of a rank these
are forwards alone, while others run both. It is a little less than that of 1F1B, since weights are
passed on before they are used. Throughput also depends on how much of what is sent is hidden behind
the ops, which a simulation says with `cost gather` and `cost sum`; the paper measures whole
systems, which this page does not predict.
"""


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


def vocabulary_row(setting: Setting, gains: tuple[Gains, Gains]) -> str:
    """The row of a model."""
    cells = []
    for kind in range(2):
        for figures in gains:
            cells.append(" ".join(f"{figure[kind]:.2f}" for figure in figures))
    return _line([f"{setting.ranks} GPUs, {setting.sequence} tokens", *cells])


def vocabulary_lines() -> list[str]:
    """The rows of all models, and why the figures differ."""
    gains = [gains_of(setting) for setting in SETTINGS]
    below = [
        1 - published[1] / predicted[1]
        for both in gains
        for published, predicted in zip(*both, strict=True)
    ]
    reasons = VOCABULARY_REASONS.format(least=min(below), most=max(below))
    rows = [vocabulary_row(*row) for row in zip(SETTINGS, gains, strict=True)]
    return [*rows, "", reasons]


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


def page() -> str:
    """The page, in Markdown."""
    vocabularies = ", ".join(f"{thousands}K" for thousands in VOCABULARIES)
    lines = [HEAD, VOCABULARY_TEXT]
    columns = [
        f"{what}, {source}" for what in ("spread anew", "shards") for source in SOURCES
    ]
    lines += _head([f"vocabulary of {vocabularies}", *columns])
    lines += [*vocabulary_lines(), RECYCLE_TEXT]
    lines += _head(
        ["replicas x stages, microbatches", "work of a helper", "span", "flush"]
    )
    lines += [
        recycle_row(*size) for size in ((3, 4, 6), (3, 4, 12), (4, 8, 12), (4, 8, 24))
    ]
    lines += ["", RECYCLE_REASONS, SLIMPIPE_TEXT]
    columns = [
        f"{what}, {order}"
        for what in ("peak", "bubble")
        for order in ("1F1B", "slices")
    ]
    lines += _head(["size", *columns])
    lines += [slimpipe_row(*size) for size in SLIMPIPE]
    lines += ["", SLIMPIPE_REASONS, ZEROPP_TEXT]
    lines += _head([f"unit, of {ALL_UNITS}", *SOURCES, "peak activations", "bubble"])
    lines += map(zeropp_row, UNITS)
    lines += ["", ZEROPP_REASONS, PIPEMARE_TEXT]
    lines += _head(["ranks", "utilization", "updates late", "versions of PipeDream"])
    lines += map(pipemare_row, PIPEMARE)
    lines += ["", PIPEMARE_REASONS, STP_TEXT]
    others = ("1F1B-I", "ZB-V")
    idle = [
        f"idle, {program}, {source}"
        for program in (*others, "STP")
        for source in SOURCES
    ]
    lines += _head(["size, sums", *idle, *(f"time, {program}" for program in others)])
    lines += [stp_row(*size) for size in STP]
    lines += ["", STP_REASONS, HELIXPIPE_TEXT]
    columns = [
        f"{name}, {microbatches} microbatches"
        for microbatches in HELIX_MICROBATCHES
        for name in ("1F1B", "ZB-1P")
    ]
    lines += _head(["tokens", *columns])
    lines += map(helixpipe_row, HELIX_SEQUENCES)
    lines += ["", HELIXPIPE_REASONS, BPIPE_TEXT]
    of_1f1b = ("time, 1F1B", "time, 1F1B that recomputes")
    lines += _head(["ranks", "peak, 1F1B", "peak, BPipe", *of_1f1b])
    lines += map(bpipe_row, BPIPE)
    lines += ["", BPIPE_REASONS, MARIO_TEXT]
    of_1f1b = ("time, 1F1B", "time, 1F1B with checkpoints")
    lines += _head(["size", "peak, 1F1B", "peak, Mario", *of_1f1b])
    lines += [mario_row(*size) for size in MARIO]
    lines += ["", MARIO_REASONS, DYNAPIPE_TEXT]
    lines += _head(["spread of lengths", "padded", "GPipe", "1F1B", "DynaPipe"])
    lines += map(dynapipe_row, DYNAPIPE_SPREADS)
    lines += ["", DYNAPIPE_REASONS, POST_VALIDATION_TEXT]
    lines += _head(["model", *SOURCES, "time for the sum"])
    lines += map(post_validation_row, MODELS)
    lines += ["", POST_VALIDATION_REASONS, WEIPIPE_TEXT]
    volumes = (
        "flows of the paper",
        "WeiPipe",
        *(f"1F1B, {each}K tokens" for each in WEIPIPE_TOKENS),
    )
    lines += _head(["size", *volumes, "bubble, 1F1B", "bubble, WeiPipe"])
    lines += [weipipe_row(*size) for size in WEIPIPE]
    return "\n".join([*lines, "", WEIPIPE_REASONS])


SOURCES = ("published", "predicted")


def _head(columns: list[str]) -> list[str]:
    return [_line(columns), _line(["---", *["---:"] * (len(columns) - 1)])]


def _line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    print(page(), end="")
