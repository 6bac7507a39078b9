"""What it costs to compile, prove, write, read and simulate a plan, beside torch's own pipelining:
`make bench`.

All figures are seconds of processor time, from processes of their own, the least of a few runs
where these are short. Ours is from the text of a program to a proved plan on disk, and its parts;
torch's is its lowering of its own schedule (`_prepare_schedule_with_comms`) and its simulator
(`_simulate_comms_compute`, of ops and transfers). Both are for all ranks; `part` is what one rank
takes to read its own, and the memory for it. `--large` adds the sizes of the largest runs; no
process takes longer than LIMIT seconds. `--plot FILE` draws the time of both over the size.

`--gallery` measures every program of the gallery instead, at 100,000 actions and more: from its
text to a proved plan, and the most memory that the process takes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import log
from pathlib import Path
from time import process_time
from typing import Any

PROGRAMS = Path(__file__).parent.parent / "programs"
#: Of one process, in seconds of the clock; how much processor time the runs of one figure take
#: together at least.
LIMIT = 300
LONG = 2.0
#: The parts of `schedlang.compiler.compile_tree`, as it calls them, in order; the rest is reading
#: and parsing.
PARTS = (
    "expand",
    "check_structure",
    "choose_lowering",
    "_proved",
    "_wrong_figures",
)
HEADS = (
    "expand",
    "check",
    "lower",
    "prove",
    "claims",
    "write",
    "simulate",
    "read",
    "part",
    "MiB",
)

#: Torch's schedule, our program for it, and the sizes: ranks and microbatches.
CASES = {
    "ScheduleInterleaved1F1B": ("interleaved_1f1b", [(8, 64), (16, 128), (32, 256)]),
    "ScheduleInterleavedZeroBubble": ("interleaved_zb", [(8, 64), (16, 128)]),
    "ScheduleZBVZeroBubble": ("zb_v", [(8, 64), (16, 128)]),
    "ScheduleDualPipeV": ("dualpipe_v", [(8, 64), (16, 128)]),
}
LARGE = {
    "ScheduleInterleaved1F1B": [(64, 512), (64, 1024), (64, 2048), (512, 1536)],
    "ScheduleInterleavedZeroBubble": [(32, 256), (64, 1024)],
    "ScheduleZBVZeroBubble": [(32, 256), (64, 1024)],
    "ScheduleDualPipeV": [(32, 256), (64, 1024)],
}
#: The sizes of the gallery's programs: ranks, microbatches, and slices, if there are any.
SIZE = (32, 640)
SIZES = {
    "1f1b_uneven": (4, 5120),
    "forward_only": (32, 1280),
    "frozen_1f1b": (32, 760),
    "pipedream": (96, 1),
    "pipedream_2bw": (32, 256),
    "pipedream_replicated": (17, 4800),
    "pipedream_vertical": (96, 1),
    "pipemare": (32, 256),
    "recycle": (32, 1920),
    "seq1f1b": (32, 256, 4),
    "terapipe": (32, 16, 64),
    "wpipe": (32, 128),
}


def least(work: Callable[[], object]) -> float:
    """The processor time of some work, the least of as many runs as take LONG seconds."""
    times: list[float] = []
    while sum(times) < LONG and len(times) < 10:
        start = process_time()
        work()
        times.append(process_time() - start)
    return min(times)


def ours(program: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """The figures of one of our programs at a size."""
    from schedlang import (
        compile,
        compiler,
        read_plan,
        read_source,
        simulate,
        write_plan,
    )

    source = read_source(PROGRAMS / f"{program}.sched")
    params = {"ranks": ranks, "microbatches": microbatches}
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = process_time()
            found = part(*arguments, **options)
            spent[name] = process_time() - start
            return found

        return run

    # The compiler's own functions, each behind a clock: so the parts are those of the compilation
    # itself, not of a copy of it.
    for name in PARTS:
        setattr(compiler, name, timed(name, getattr(compiler, name)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan = compile(source, params)
        found = {
            "actions": sum(map(len, plan.ranks)),
            "compile": least(lambda: compile(source, params)),
            **spent,
            "write": least(lambda: write_plan(plan, path)),
            "bytes": path.stat().st_size,
            "simulate": least(lambda: simulate(plan)),
        }
        for name in PARTS:
            if not found[name]:
                sys.exit(f"the compiler never called {name}, or not by this name")
        found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found["read"] = least(lambda: read_plan(path))
        return found | json.loads(one("part", str(path), ranks // 2))


def part(path: str, rank: int) -> dict[str, float]:
    """What it takes one rank to read its own part of a plan, of time and of memory."""
    from schedlang.plan.reader import open_plan

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_plan(path).ranks[rank]
    # The maximum of a process only ever grows, which is why each figure has a process of its own.
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "part": least(lambda: open_plan(path).ranks[rank]),
        "part memory": more * 1024,
    }


def text_to_plan(
    program: str, ranks: int, microbatches: int, *slices: int
) -> dict[str, float]:
    """What it takes to compile a program of the gallery at a size, of time and of memory."""
    from schedlang import compile, read_source

    source = read_source(PROGRAMS / f"{program}.sched")
    names = ("ranks", "microbatches", "slices")
    params = dict(zip(names, (ranks, microbatches, *slices), strict=False))
    actions = sum(map(len, compile(source, params).ranks))
    seconds = least(lambda: compile(source, params))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"actions": actions, "seconds": seconds, "memory": memory}


def gallery() -> None:
    """Print the table of the gallery."""
    print(f"{'':24}{'size':>14}{'actions':>12}{'s':>10}{'actions/s':>12}{'MiB':>8}")
    for path in sorted(PROGRAMS.glob("*.sched")):
        size = SIZES.get(path.stem, SIZE)
        head = f"{path.stem:24}{' x '.join(map(str, size)):>14}"
        figures = measured("text_to_plan", path.stem, *size)
        if figures is None:
            print(f"{head} >{LIMIT} s", flush=True)
            continue
        print(
            f"{head}{figures['actions']:>12,}{figures['seconds']:>10.3f}"
            f"{figures['actions'] / figures['seconds']:>12,.0f}{figures['memory'] / 2**20:>8.0f}",
            flush=True,
        )


def torchs(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """The figures of one of torch's schedules at a size; its stages are mocks, as in its own
    visualizer.
    """
    from unittest import mock

    from torch.distributed.pipelining import PipelineStage, schedules

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank = 0
    stage.group_size = ranks
    stage.num_stages = 2 * ranks
    stage.submod = None
    made = getattr(schedules, name)([stage, stage], microbatches)
    orders = made.pipeline_order
    runtime = schedules._PipelineScheduleRuntime([stage, stage], microbatches)
    lower = least(lambda: runtime._prepare_schedule_with_comms(orders))
    # The simulator knows none of these, and no ops that overlap.
    without = {schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD}
    actions = sum(map(len, runtime.pipeline_order_with_comms.values()))
    order = {
        rank: [action for action in row if action.computation_type not in without]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    rank_of = runtime.stage_index_to_group_rank.__getitem__
    simulate = 0.0
    if not any(
        action.computation_type == schedules.OVERLAP_F_B
        for row in order.values()
        for action in row
    ):
        simulate = least(
            lambda: schedules._simulate_comms_compute(order, rank_of, 2 * ranks)
        )
    return {"lower": lower, "simulate": simulate, "actions": actions}


def one(what: str, *arguments: object) -> str:
    """The figures from a process of their own, as JSON; TimeoutExpired if they take too long."""
    command = [sys.executable, __file__, "--one", what, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if result.returncode:
        sys.exit(result.stderr)
    return result.stdout


def measured(what: str, *arguments: object) -> dict[str, Any] | None:
    """The figures from a process of their own; none if they take too long."""
    try:
        return dict(json.loads(one(what, *arguments)))
    except subprocess.TimeoutExpired:
        return None


def process_seconds(*arguments: str) -> float:
    """The least processor time of a whole `schedc` process."""
    found = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "schedlang", *arguments],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        )
    return min(found)


def row(
    name: str, program: str, ranks: int, microbatches: int
) -> dict[str, Any] | None:
    """Print a case's line; our figures."""
    theirs = measured("torchs", name, ranks, microbatches)
    mine = measured("ours", program, ranks, microbatches)
    late = f">{LIMIT}"
    cells = [
        program,
        ranks,
        microbatches,
        *([theirs["lower"], theirs["simulate"] or "-"] if theirs else [late, late]),
    ]
    if mine:
        whole = mine["compile"] + mine["write"]
        ratio = whole / (theirs["lower"] + theirs["simulate"]) if theirs else ""
        cells += [
            whole,
            ratio,
            f"{whole / mine['actions'] * 1e6:.1f}",
            *(mine[part] for part in (*PARTS, "write")),
        ]
        cells += [
            mine["simulate"],
            mine["read"],
            mine["part"],
            f"{mine['part memory'] / 2**20:.1f}",
        ]
        cells += [f"{mine['memory'] / 2**20:.0f}", f"{mine['actions']:,}"]
        mine |= {
            "whole": whole,
            "torch's": theirs and theirs["lower"] + theirs["simulate"],
        }
    else:
        cells.append(late)
    print(line(cells), flush=True)
    return mine


def line(cells: list[Any]) -> str:
    """Cells under each other."""
    texts = [f"{each:.3f}" if isinstance(each, float) else str(each) for each in cells]
    return f"{texts[0]:<17}" + "".join(f"{each:>10}" for each in texts[1:])


def exponents(program: str, found: list[dict[str, Any]]) -> None:
    """Print by which power of the actions each part grows, from the smallest size to the
    largest.
    """
    if len(found) < 2:
        return
    first = found[0]
    last = found[-1]
    # A time that grows as a power of the actions is a straight line between logarithms, with that
    # power as its slope: 1 is linear.
    more = log(last["actions"] / first["actions"])
    parts = ("whole", *PARTS, "write", "simulate", "read")
    powers = {part: log(last[part] / first[part]) / more for part in parts}
    print(
        f"{program}: exponent in actions "
        + ", ".join(f"{part} {power:.2f}" for part, power in powers.items())
    )


def plot(found: dict[str, list[dict[str, Any]]], path: str) -> None:
    """Draw the times over the numbers of actions."""
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for number, (program, rows) in enumerate(found.items()):
        for which, style in (("torch's", "o:"), ("whole", "o-")):
            points = [(row["actions"], row[which]) for row in rows if row[which]]
            label = f"{program}, {'torch' if which != 'whole' else 'schedlang'}"
            axes.loglog(
                *zip(*points, strict=True), style, color=f"C{number}", label=label
            )
    axes.set(xlabel="actions with communication, all ranks", ylabel="processor time, s")
    axes.legend()
    pyplot.savefig(path)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--large", action="store_true", help="also the sizes of the largest runs"
    )
    parser.add_argument(
        "--gallery", action="store_true", help="every program of the gallery"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the times, with matplotlib"
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, name, *numbers = options.one
        parts = {
            "ours": ours,
            "torchs": torchs,
            "part": part,
            "text_to_plan": text_to_plan,
        }
        print(json.dumps(parts[what](name, *map(int, numbers))))
        return
    if options.gallery:
        gallery()
        return
    example = str(PROGRAMS / "1f1b.sched")
    print(f"schedc --help      {process_seconds('--help'):.3f} s, whole process")
    print(
        f"schedc compile 4x8 {process_seconds('compile', example):.3f} s, whole process\n"
    )
    print(
        line(
            [
                "",
                "",
                "",
                "torch",
                "torch",
                "ours",
                "of",
                "us per",
                *[""] * 8,
                "of a",
                "rank",
                "peak",
                "lowered",
            ]
        )
    )
    print(
        line(
            [
                "program",
                "ranks",
                "mb",
                "lower",
                "simulate",
                "whole",
                "torch's",
                "action",
                *HEADS,
                "MiB",
                "actions",
            ]
        )
    )
    found = {}
    for name, (program, sizes) in CASES.items():
        rows = [
            row(name, program, *size)
            for size in sizes + (LARGE[name] if options.large else [])
        ]
        found[program] = [each for each in rows if each]
        exponents(program, found[program])
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
