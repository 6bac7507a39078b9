"""docs/reports/gpu.md, from what `make gpu` has found on GPUs."""

import json
from pathlib import Path
from typing import Any

from tests.gpu import against_torch, loops, one_rank, several_ranks, verdicts
from tests.gpu.checks import CHECKS

RUNS = Path(__file__).parents[2] / "tests" / "gpu" / "runs"

_HEAD = """# GPUs

What has run on a GPU, what it showed, and what has not run. `make gpu` starts processes that share one GPU, each check
under a time limit, and prints one line of JSON for each; it takes some minutes, and no package beside torch's and this
project's own. Those that need no GPU run on CPUs with `python -m tests.gpu --device cpu`; `make test` runs two of
them, and `make large` the others.

```sh elsewhere: it needs a GPU
make gpu                                     # all checks; build/gpu/gpu.json has what they found
python3 -m tests.gpu                         # the same with a torch that is there, without an environment
python3 -m tests.gpu --only gallery,replicas # some of them
```

Processes that share a GPU send each other messages over sockets of this machine: NCCL takes them for several hosts. That
shows whether ranks hang, compute the right gradients and wait for the GPU. It shows nothing of the speed of links between
GPUs, and nothing here has run on more than one.

The tables below are of three runs on one day, of each check the last one; what a check has found to be wrong was mended
between them. At the end stand the checks that have not run. In the checks of steps as CUDA graphs, the graph also held
what the host does before and after the walk over a step's calls; it has the walk alone since then, which has not run.
"""


def page() -> str:
    """The page, of all runs that are kept."""
    assert {against_torch, loops, one_rank, several_ranks, verdicts}
    parts = [_HEAD]
    for file in sorted(RUNS.glob("*.json")):
        parts.append(_run(json.loads(file.read_text())["checks"]))
    return "\n".join(parts)


def _run(found: dict[str, Any]) -> str:
    versions = found["versions"]["said"]
    title = f"## {versions['gpu']}, torch {versions['torch']}, NCCL {versions['nccl']}"
    missing = [name for name in CHECKS if name not in found]
    return "\n".join(
        [
            f"{title}\n",
            _checks(found),
            _verdicts(found),
            _step_time(found["step_time"]["said"]),
            _graph_time(found["graph_time"]["said"]),
            _host_time(found["host_time"]["said"]),
            f"Not run: {', '.join(missing) or 'nothing'}.\n",
        ]
    )


def _checks(found: dict[str, Any]) -> str:
    rows = ["| check | ranks | went well | what it asks |", "|---|---:|---|---|"]
    of_verdicts = {name for name in found if "proved" in (found[name]["said"] or {})}
    for name, check in CHECKS.items():
        if name not in found or name in of_verdicts:
            continue
        what = " ".join((check.run.__doc__ or "").split())
        went = "yes" if found[name]["verdict"] == "ok" else _why(found[name])
        rows.append(f"| `{name}` | {check.ranks} | {went} | {what} |")
    rows.append(
        "\nOf a check that did not go well, what comes behind that place has not run."
    )
    return "\n".join(rows) + "\n"


def _why(found: Any) -> str:
    last = [text.strip().splitlines()[-1] for text in found["ends"] if text.strip()]
    return f"no: {last[0] if last else found['verdict']}"


def _verdicts(found: dict[str, Any]) -> str:
    rows = [
        "### What is proved, and what NCCL does\n",
        "Messages of 64 MiB, larger than NCCL's buffers: a plan that has not ended after "
        f"{verdicts.HANGS:g} s is taken for one that hangs.\n",
        "| plan | transport | proved | ends |",
        "|---|---|---|---|",
    ]
    for name, each in found.items():
        said = each["said"] or {}
        if "proved" in said:
            plan, transport = name.split("_on_")
            words = ["yes" if said[what] else "no" for what in ("proved", "ends")]
            plan = plan.replace("_twin", ", its twin")
            rows.append(
                f"| {plan} | `{transport.replace('_', '-')}` | {' | '.join(words)} |"
            )
    return "\n".join(rows) + "\n"


def _step_time(said: dict[str, Any]) -> str:
    rows = [
        "### Beside torch.distributed.pipelining\n",
        "The same eight blocks of bfloat16 on two ranks, 8 microbatches, steps in turns in one run. "
        "The ranks share the GPU, so a bubble of one is time for the other: this compares what both "
        "runtimes add, and not the schedules.\n",
        "| schedule | ms a step | with the plan for `nccl` | torch, ms | ratio | peak, GiB | torch's |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for program, each in said.items():
        ours, for_nccl, torchs = each["ours"], each["for_nccl"], each["torch"]
        rows.append(
            f"| {program} | {ours['ms']:.1f} | {for_nccl['ms']:.1f} | {torchs['ms']:.1f} | "
            f"{each['ratio']:.2f} | {ours['peak_gib']:.2f} | {torchs['peak_gib']:.2f} |"
        )
    return "\n".join(rows) + "\n"


def _graph_time(said: dict[str, Any]) -> str:
    rows = [
        "The same with [steps as CUDA graphs](../training.md#cuda-graphs), in a run of its own. The "
        "host of this machine is slow, and a split backward has more ops for it to launch; in a "
        "graph it launches none.\n",
        "| schedule | ms a step | as a graph | torch, ms | ratio of the graph |",
        "|---|---:|---:|---:|---:|",
    ]
    for program, each in said.items():
        ours, graph, torchs = (
            each[way]["ms"] for way in ("ours", "as_a_graph", "torch")
        )
        rows.append(
            f"| {program} | {ours:.1f} | {graph:.1f} | {torchs:.1f} | {graph / torchs:.2f} |"
        )
    return "\n".join(rows) + "\n"


def _host_time(said: dict[str, Any]) -> str:
    rows = [
        "### What the host does for a microbatch\n",
        "In one process, with layers that leave the GPU next to nothing to do, beside a loop over "
        "them without any pipeline.\n",
        "| schedule | µs a microbatch | as a CUDA graph | plain loop, µs |",
        "|---|---:|---:|---:|",
    ]
    for program, each in said.items():
        rows.append(
            f"| {program} | {each['us_per_microbatch']} | {each['as_a_graph']} | "
            f"{each['plain_loop']} |"
        )
    return "\n".join(rows) + "\n"


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    return {"docs/reports/gpu.md": page()}
