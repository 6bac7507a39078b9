"""Traces of runs that went as a simulation."""

import json
from pathlib import Path

from schedlang import Costs, Plan, simulate


def recorded_as(path: Path, plan: Plan, *steps: Costs) -> Path:
    """The trace of a run each of whose steps went as the simulation at some costs."""
    events = []
    begin = 1000.0
    for costs in steps:
        timeline = simulate(plan, costs).timeline
        for rank, bars in enumerate(timeline.ranks):
            for bar in bars:
                times = {"ts": begin + bar.start, "dur": bar.end - bar.start}
                events.append({"name": str(bar), "ph": "X", "pid": rank, **times})
        begin += timeline.makespan + 50
    path.write_text(
        json.dumps({"traceEvents": events, "otherData": {"plan": plan.to_json()}})
    )
    return path
