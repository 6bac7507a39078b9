"""What differs between two schedules, for programs: with it and what the ranks of the first one do,
it is known what those of the second do.
"""

from typing import Any

from schedlang.extras.difference.difference import Difference, RankDifference, Side
from schedlang.report.alignment import Change, Run


def difference_json(found: Difference) -> dict[str, Any]:
    """The difference as a JSON document.

    `a` and `b` of a run are places among the actions of a rank, from the first one up to one behind
    the last; its `actions` are named unless they are equal. Times are in the unit of the costs.
    """
    return {
        "equal": found.is_equal,
        "a": _side(found.before),
        "b": _side(found.after),
        "settings": [
            {"name": setting.name, "a": setting.before, "b": setting.after}
            for setting in found.settings
        ],
        "stages_elsewhere": [
            {"stage": stage, "a": rank, "b": other}
            for stage, rank, other in found.elsewhere
        ],
        "ranks": list(map(_rank, found.ranks)),
    }


def _side(side: Side) -> dict[str, Any]:
    """A schedule: its file, its figures as `schedc simulate --json` has them, and idle time by
    cause and rank.
    """
    return {
        "file": side.file,
        "figures": side.figures,
        "ops": side.ops,
        "transfers": side.transfers,
        "idle": {cause: times for cause, times in side.idle.items() if any(times)},
    }


def _rank(rank: RankDifference) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "equal": rank.is_equal,
        "runs": [_run(rank, run) for run in rank.runs],
        "apart": list(rank.apart),
        "together": list(rank.together),
    }


def _run(rank: RankDifference, run: Run) -> dict[str, Any]:
    document: dict[str, Any] = {
        "change": str(run.change),
        "a": [run.before.start, run.before.stop],
        "b": [run.after.start, run.after.stop],
    }
    if run.change is not Change.EQUAL:
        document["actions"] = list(rank.actions(run))
    return document
