"""`schedc optimize` against recorded results of published schedulers: `make bench-search`.

tests/cases/zero_bubble.json has what the public code of the zero-bubble schedulers gives
(github.com/sail-sg/zero-bubble-pipeline-parallelism; Qi et al. 2024, arXiv 2401.10241 and
2405.15362): ZB with a limit of memory, ZB-V, V-Half, V-Min, 1F1B-V, grouped interleaving, 1F1B and
others, each with its costs, the longest span of a rank (`cost`), the makespan (`flush_makespan`)
and what ranks hold. Here, the same ops on the same stages are put in order for both objectives,
where no rank holds more: activations until their last use, or where the case gives what ops add to
memory, and a limit, by these.

`python benchmarks/published.py 60 10 20` looks at the cases 10 to 19, for at most 60 seconds of
processor time each. What is at the bound ends at once.
"""

import json
import sys
from collections import Counter
from math import inf
from pathlib import Path
from time import process_time
from typing import Any

from schedlang import Costs, Source, compile
from schedlang.search.optimize.optimize import optimize
from schedlang.search.optimize.problem import Answer, Problem

RECORDED = Path(__file__).parent.parent / "tests" / "cases" / "zero_bubble.json"
#: Seconds of processor time for one objective of one case.
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
    return Problem.of(compile(Source("recorded.sched", text), {}, costs), limit_of(case))


def searched(problem: Problem, seconds: float) -> Answer:
    """The answer that is there after some seconds of processor time, or before, if it is proved."""
    begin = process_time()
    answer = Answer([], inf, 0.0, "")
    for better in optimize(problem, 20 * seconds, workers=1):
        answer = better
        if process_time() - begin > seconds:
            break
    return answer


def verdict(value: float, recorded: float) -> str:
    """Whether a figure is below what was recorded, above it, or the same."""
    if value < recorded * (1 - ALMOST):
        return "better"
    return "worse" if value > recorded * (1 + ALMOST) else "same"


def main() -> None:
    """Print a row for each case and objective, and how many are better and worse."""
    seconds, first, last = [*map(float, sys.argv[1:4]), *(LIMIT, 0, inf)[len(sys.argv) - 1 :]]
    cases = json.loads(RECORDED.read_text())["cases"]
    print(f"    {'schedule':14} ranks costs         {'objective':9} {'recorded':>11}", end=" ")
    print(f"{'found':>11} {'bound':>11}    less")
    counts: Counter[str] = Counter()
    best_of: Counter[str] = Counter()
    for number, case in enumerate(cases):
        if not first <= number < last:
            continue
        verdicts = []
        for objective, figure in FIGURES.items():
            answer = searched(problem_of(case, objective), seconds)
            recorded = case[figure]
            verdicts.append(verdict(answer.value, recorded))
            counts[f"{objective} {verdicts[-1]}"] += 1
            size = f"{case['p']}x{case['m']}"
            row = (
                f"{number:3} {case['schedule']:14} {size:6} {case['cost_profile']:12} {objective:9}"
            )
            figures = f"{recorded:11.10g} {answer.value:11.10g} {answer.bound:11.10g}"
            print(f"{row} {figures} {1 - answer.value / recorded:7.2%} {verdicts[-1]}", flush=True)
        kinds = "whole backwards" if family(case) in WHOLE else "split backwards"
        whole = next(word for word in ("worse", "better", "same") if word in verdicts)
        best_of[f"{kinds}, of both: {whole}"] += 1
    for name, count in sorted((counts + best_of).items()):
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
