"""What it gains to overlap a forward and a backward, as `schedc simulate` predicts it, beside what
is published: `make bench WHAT=overlap`.

The costs are those of a layer of experts in four components (DeepSeek-V3, arXiv 2412.19437, section
3.2.1). Attention and MLP take 1 each in a forward, and 2 in a backward, half of it for gradients of
weights. Each of two all-to-alls takes as long in both, as many bytes go either way; `share` is
their part of a forward. DeepSeek-V3 names half of it: a ratio of computation to communication of
approximately 1:1.

It prints three tables.

1. A forward and a backward as one, `F&B`, beside one after the other, and how much of their
   all-to-all is hidden: what computing takes is the bound, which they reach.
2. The longest idle time of a rank beside the bubble that DualPipe's authors give: (PP/2 - 1) (F&B +
   B - 3W) for PP stages of a direction (github.com/deepseek-ai/DualPipe, README; for DualPipeV the
   same, with two stages per rank). Ranks at the ends wait less: the formula is for those that wait
   most.
3. A step without the overlap over one with it, for combined 1F1B, DualPipe and DualPipeV; and the
   gain of one run that is published: NVIDIA, Megatron Bridge, Qwen3 30B-A3B with experts over 16
   H100, which are all there are, so without a pipeline: 41.25 s and 31.31 s for a step
   (docs.nvidia.com/nemo/megatron-bridge/nightly/skills/nemo-mbridge-perf-moe-comm-overlap). What
   part of it was all-to-all is not said. The prediction has no slower kernels under communication,
   which uses some of a GPU's processors too, no waits for ranks with more tokens than others, and
   nothing beside the layers, such as the optimizer: real gains are smaller, at the same share.
"""

from attrs import evolve

from schedlang import Costs, compile, simulate
from schedlang.schedule.costs import Durations
from schedlang.schedule.kinds import Kind

SHARES = (0.2, 0.3, 0.4, 0.5)
#: What runs: a name, the program, its parameters.
STEPS = (
    (
        "combined 1F1B, no pipeline",
        "interleaved_overlap",
        {"ranks": 1, "chunks": 1, "microbatches": 64},
    ),
    ("combined 1F1B", "interleaved_overlap", {"ranks": 8, "microbatches": 64}),
    ("DualPipe", "dualpipe", {"ranks": 8, "microbatches": 64}),
    ("DualPipeV", "dualpipe_v", {"ranks": 8, "microbatches": 64}),
)
BUBBLES = (
    ("dualpipe", {"ranks": 8, "microbatches": 20}),
    ("dualpipe", {"ranks": 4, "microbatches": 8}),
    ("dualpipe_v", {"ranks": 4, "microbatches": 10}),
    ("dualpipe_v", {"ranks": 8, "microbatches": 32}),
)
#: Seconds of a step without and with the overlap, of the published run.
PUBLISHED = (41.25, 31.31)


def layer(share: float) -> Costs:
    """The costs of a layer whose forward is all-to-all for a share of its time."""
    exchange = share / (1 - share)  # where computing takes 2
    send = f"dispatch {exchange} all_to_all"
    receive = f"combine {exchange} all_to_all"

    def back(time: int) -> list[str]:
        return [receive, f"mlp {time} compute", send, f"attention {time} compute"]

    return Costs(
        forward_times=(2 + 2 * exchange,),
        backward_times=(4 + 2 * exchange,),
        input_times=(2 + 2 * exchange,),
        weight_times=(2,),
        components={
            "F": ["attention 1 compute", send, "mlp 1 compute", receive],
            "B": back(2),
            "I": back(1),
        },
    )


def pair(durations: Durations) -> float:
    """How long a forward and a backward take as one."""
    return durations.ends([(Kind.F, 0, 0), (Kind.B, 0, 0)])[-1]


def makespan(program: str, params: dict[str, int], costs: Costs) -> float:
    """The time of a step."""
    return simulate(compile(program, params, costs)).timeline.makespan


def print_pairs() -> None:
    """A forward and a backward."""
    print("share    F    B  F, then B   F&B   all-to-all hidden")
    for share in SHARES:
        durations = layer(share).durations(1)
        forward = durations[Kind.F][0]
        backward = durations[Kind.B][0]
        together = pair(durations)
        # A layer computes for 2 in a forward and 4 in a backward; the rest of both is all-to-all.
        exchange = forward + backward - 6
        hidden = (forward + backward - together) / exchange
        print(
            f"{share:5.0%} {forward:4.2f} {backward:4.2f} {forward + backward:10.2f} "
            f"{together:5.2f} {hidden:19.0%}"
        )


def print_bubbles() -> None:
    """The idle time of ranks, and the published formula."""
    print("\nprogram     ranks  microbatches  share   idle  published")
    for program, params in BUBBLES:
        for share in SHARES:
            costs = layer(share)
            durations = costs.durations(1)
            stages = params["ranks"] * (2 if program == "dualpipe_v" else 1)
            whole = durations[Kind.B][0]
            weight = durations[Kind.W][0]
            published = (stages / 2 - 1) * (pair(durations) + whole - 3 * weight)
            timeline = simulate(compile(program, params, costs)).timeline
            idle = timeline.makespan - min(timeline.busy)
            print(
                f"{program:10} {params['ranks']:6} {params['microbatches']:13} {share:6.0%} "
                f"{idle:6.2f} {published:10.2f}"
            )


def print_steps() -> None:
    """Steps with and without overlap."""
    print(
        f"\nwithout overlap over with it{'':8}"
        + "".join(f"{share:7.0%}" for share in SHARES)
    )
    for name, program, params in STEPS:
        gains = []
        for share in SHARES:
            costs = layer(share)
            apart = evolve(costs, components=None)
            gains.append(
                makespan(program, params, apart) / makespan(program, params, costs)
            )
        print(f"{name:36}" + "".join(f"{gain:7.2f}" for gain in gains))
    without, with_overlap = PUBLISHED
    print(f"published, share not known: {without / with_overlap:.2f}")


if __name__ == "__main__":
    print_pairs()
    print_bubbles()
    print_steps()
