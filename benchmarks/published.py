"""`schedc optimize` against recorded results of published schedulers: `make bench WHAT=search`.

tests/cases/zero_bubble.json has what the public code of the zero-bubble schedulers gives
(github.com/sail-sg/zero-bubble-pipeline-parallelism; Qi et al. 2024, arXiv 2401.10241 and
2405.15362): ZB with a limit of memory, ZB-V, V-Half, V-Min, 1F1B-V, grouped interleaving, 1F1B and
others, each with its costs, the longest span of a rank (`cost`), the makespan (`flush_makespan`)
and what ranks hold. Here, the same ops on the same stages are put in order for both objectives,
where no rank holds more: activations until their last use, or where the case gives what ops add to
memory, and a limit, by these.

`python benchmarks/published.py 10:20 --limit 60` looks at the cases 10 to 19, at each objective for
at most 60 seconds, as `schedc optimize --for 60s` would on a machine without other work. What is at
the bound ends at once; more is in benchmarks/rows.py.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

from rows import Row, print_rows

from schedlang import Costs, Source, compile
from schedlang.extras.search.optimize.optimize import optimize
from schedlang.extras.search.optimize.problem import Answer, Problem

RECORDED = Path(__file__).parent.parent / "tests" / "cases" / "zero_bubble.json"
#: Seconds for one objective of one case.
LIMIT = 30.0
#: The schedules with whole backwards, and those whose stages go round the ranks again and again.
WHOLE = {"GPipe", "1F1B", "Eager-1F1B", "1F1B-I", "Seq1F1B", "1F1B-V"}
LOOPED = {"GIS", "1F1B-I"}
#: What each objective is called in the file.
FIGURES = {"span": "cost", "makespan": "flush_makespan"}
#: Shares below this are rounding.
ALMOST = 1e-9


def family(case: dict[str, Any]) -> str:
    """The schedule of a case, without its parameters."""
    return str(case["schedule"]).split()[0]


def limit_of(case: dict[str, Any]) -> float:
    """What a rank may hold: what was given, or else what the recorded order holds."""
    if case["mem_limit"] and case["mem_deltas"]:
        return float(case["mem_limit"])
    return float(max(case["peak_chunk_activations_until_W"]))


def problem_of(case: dict[str, Any], objective: str) -> Problem:
    """A case as a problem: its ops, one microbatch after the other."""
    backward, weight = ("B", None) if family(case) in WHOLE else ("I", "W")
    held: dict[str, tuple[float, ...]] = {}
    if case["mem_limit"] and case["mem_deltas"]:
        forward, input, last = case["mem_deltas"]
        held = {
            "forward_memory": (forward,),
            "input_memory": (input,),
            "weight_memory": (last,),
            "backward_memory": (input + last,),
        }
    costs = Costs(
        forward_times=(case["cost_f"],),
        input_times=(case["cost_b"],),
        weight_times=(case["cost_w"],),
        backward_times=(case["cost_b"] + case["cost_w"],),
        p2p_time=case["comm"],
        **held,
    )
    # Stages go round the ranks again and again, or to and fro, as a V.
    turn = "s % ranks"
    if family(case) not in LOOPED:
        turn = "if s / ranks % 2 == 0 then s % ranks else ranks - 1 - s % ranks"
    slices = case.get("nseq") or 1
    unit = "m, k" if slices > 1 else "m"
    reverse = "m, slices - 1 - k" if slices > 1 else "m"
    loop = "for k in 0 .. slices" if slices > 1 else "repeat 1"
    stage = "stage(chunks - 1 - c)"
    backwards = f"{backward}({stage}, {reverse})"
    if weight:
        backwards += f" {weight}({stage}, {reverse})"
    text = f"""schedule recorded {{
        param ranks = {case["p"]}
        param microbatches = {case["m"]}
        param chunks = {case["chunks"]}
        {f"param slices = {slices}" if slices > 1 else ""}
        stage s in 0 .. ranks * chunks on {turn}
        objective {objective}
        rank r {{
            for m in 0 .. microbatches {{
                for c in 0 .. chunks {{ {loop} {{ F(stage(c), {unit}) }} }}
                for c in 0 .. chunks {{ {loop} {{ {backwards} }} }}
            }}
        }}
    }}"""
    return Problem.of(
        compile(Source("recorded.sched", text), {}, costs), limit_of(case)
    )


def searched(problem: Problem, seconds: float) -> Answer:
    """The best answer after so many seconds of the clock, or before, if it is proved."""
    return deque(optimize(problem, seconds, workers=1), maxlen=1)[0]


def verdict(value: float, recorded: float) -> str:
    """Whether a figure is below what was recorded, above it, or the same."""
    if value < recorded * (1 - ALMOST):
        return "better"
    return "worse" if value > recorded * (1 + ALMOST) else "same"


def row(number: int, seconds: float) -> Row:
    """The rows of a case, one for each objective."""
    case = cases()[number]
    lines = []
    verdicts = []
    for objective, figure in FIGURES.items():
        answer = searched(problem_of(case, objective), seconds)
        recorded = case[figure]
        word = verdict(answer.value, recorded)
        size = f"{case['p']}x{case['m']}"
        line = f"{number:3} {case['schedule']:14} {size:6} {case['cost_profile']:12} {objective:9}"
        figures = f"{recorded:11.10g} {answer.value:11.10g} {answer.bound:11.10g}"
        lines.append(f"{line} {figures} {1 - answer.value / recorded:7.2%} {word}")
        # Where no order comes to less, there is nothing better to find.
        verdicts.append(
            "same, the least" if word == "same" and answer.is_best else word
        )
    kinds = "whole backwards" if family(case) in WHOLE else "split backwards"
    order = ("worse", "better", "same", "same, the least")
    whole = next(word for word in order if word in verdicts)
    counts = [
        f"{objective} {word}" for objective, word in zip(FIGURES, verdicts, strict=True)
    ]
    return Row("\n".join(lines), [*counts, f"{kinds}, of both: {whole}"])


def cases() -> list[dict[str, Any]]:
    """What is recorded."""
    recorded: list[dict[str, Any]] = json.loads(RECORDED.read_text())["cases"]
    return recorded


def main() -> None:
    """Print a row for each case and objective, and how many are better and worse."""
    head = f"    {'schedule':14} ranks costs         {'objective':9} {'recorded':>11}"
    head += f" {'found':>11} {'bound':>11}    less"
    print_rows("published", head, len(cases()), row, LIMIT)


if __name__ == "__main__":
    main()
