"""What differs between two schedules, for people: what it does to the whole, then rank by rank what
moved, came and went.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from schedlang.diagnostics.style import Style
from schedlang.extras.difference.difference import Difference, RankDifference, Side
from schedlang.report.alignment import Change, Run
from schedlang.report.bubbles.op_waits import ROUNDING
from schedlang.report.text_table import aligned, rounded
from schedlang.schedule.actions import SHOWN, first_words
from schedlang.schedule.findings import ranks_text

#: The most lines on what a rank does, and stages on other ranks that are named.
_MOST_LINES = 40
_MOST_STAGES = 8
#: So many equal actions are named, and no more.
_FEW = 2
#: What a line begins with, by what became of the actions in it.
_MARKS = {Change.EQUAL: "=", Change.REMOVED: "-", Change.ADDED: "+", Change.MOVED: ">"}
_LEGEND = "= in both, - only in A, + only in B, > moved"


def difference_text(found: Difference, style: Style) -> str:
    """What differs, the whole first; equal actions are counted, all others named."""
    head = [f"A  {_title(found.before)}", f"B  {_title(found.after)}"]
    parts = [
        head,
        *_settings(found),
        aligned([["", "A", "B", "change"], *_summary(found)]),
    ]
    if found.is_equal:
        parts.append(["equal: all ranks do the same, in the same order"])
    else:
        parts += _ranks(found, style)
    return "\n\n".join("\n".join(lines) for lines in parts)


def _title(side: Side) -> str:
    return f"{side.plan.title}, from {side.file}"


#: What to know of some settings if they differ.
_NOTES = {
    "stages": "; makespans compare between schedules with as many",
    "microbatches": "; bubbles and idle times compare between schedules with as many",
}


def _settings(found: Difference) -> Iterator[list[str]]:
    """What differs for the whole, and with what the figures of the two may be compared."""
    lines = [
        f"{setting.name}: {setting.before} in A, {setting.after} in B{_NOTES.get(setting.name, '')}"
        for setting in found.settings
    ]
    if found.elsewhere:
        moves = [
            f"{stage} ({rank} to {other})" for stage, rank, other in found.elsewhere
        ]
        more = len(moves) - _MOST_STAGES
        shown = ", ".join(moves[:_MOST_STAGES]) + (
            f", and {more} more" if more > 0 else ""
        )
        lines.append(f"stages on other ranks: {shown}")
    if lines:
        yield lines


def _summary(found: Difference) -> Iterator[list[str]]:
    """The rows of figures that are in both: name, before, after and change."""
    before = found.before
    after = found.after
    for name in ("ranks", "stages", "microbatches"):
        yield _row(name, before.figures[name], after.figures[name])
    yield _row("ops", before.ops, after.ops)
    yield _row("transfers", before.transfers, after.transfers)
    yield _row(
        "makespan", before.figures["makespan"], after.figures["makespan"], is_time=True
    )
    yield _row("idle time", before.idle_time, after.idle_time, is_time=True)
    for cause, of_ranks in before.idle.items():
        time = sum(of_ranks)
        time_after = sum(after.idle[cause])
        if time or time_after:
            yield _row(f"  {cause}", time, time_after, is_time=True)
    shares = [side.figures["bubble"]["over_makespan"] for side in (before, after)]
    points = (shares[1] - shares[0]) * 100
    change = f"{points:+.2f} points" if f"{abs(points):.2f}" != "0.00" else ""
    yield ["bubble over makespan", *(f"{share:.2%}" for share in shares), change]
    for title, of_before, of_after in _peaks(found):
        yield _row(title, max(of_before), max(of_after))


#: What ranks hold, of which the most is told: the name among the figures, and that in a text.
_PEAKS = {
    "peak_activations": "peak activations",
    "peak_messages": "peak messages",
    "peak_memory": "peak memory",
    "peak_bytes": "peak bytes",
    "versions": "weights versions",
}


def _peaks(found: Difference) -> Iterator[tuple[str, list[float], list[float]]]:
    """What ranks hold at most, as far as it is told of a schedule: name, before and after, by
    rank.
    """
    sides = [side.figures for side in (found.before, found.after)]
    for name, title in _PEAKS.items():
        # Where programs give no amounts of their own, the two are one figure.
        if name == "peak_memory" and all(
            side[name] == side["peak_activations"] for side in sides
        ):
            continue
        if name == "versions" and all(max(side[name]) == 1 for side in sides):
            continue
        if all(name in side for side in sides):
            yield title, sides[0][name], sides[1][name]


def _row(name: str, before: float, after: float, is_time: bool = False) -> list[str]:
    """A row of the summary; what a time has become is also told in percent."""
    change = ""
    if abs(after - before) > ROUNDING * max(abs(before), abs(after)):
        change = rounded(after - before, sign="+")
        if is_time and before:
            change += f" ({after / before - 1:+.1%})"
    return [name, f"{before:.10g}", f"{after:.10g}", change]


def _ranks(found: Difference, style: Style) -> Iterator[list[str]]:
    """What differs on each rank, and which ranks do the same."""
    same = []
    is_told = False
    for rank in found.ranks:
        lines = [*_figures(found, rank.rank), *_runs(rank, style)]
        if not lines:
            same.append(rank.rank)
            continue
        is_told = is_told or not rank.is_equal
        yield [f"{_rank_title(found, rank)}", *(f"  {line}" for line in lines)]
    if same:
        yield [f"{ranks_text(same)}: nothing differs"]
    if is_told:
        yield [_LEGEND]


def _rank_title(found: Difference, rank: RankDifference) -> str:
    """Which rank it is, what it holds, and of how many actions something became."""
    number = rank.rank
    stages = [
        side.plan.names.stages(side.plan.stages_of(number))
        if number < len(side.plan.ranks)
        else None
        for side in (found.before, found.after)
    ]
    if None in stages:
        where = "A" if stages[1] is None else "B"
        return f"rank {number}, only in {where}, {stages[0] or stages[1]}"
    held = (
        stages[0] if stages[0] == stages[1] else f"{stages[0]} in A, {stages[1]} in B"
    )
    counts = [
        f"{rank.count(change)} {change}" for change in Change if rank.count(change)
    ]
    return f"rank {number}, {held}: {', '.join(counts)}"


def _figures(found: Difference, rank: int) -> Iterator[str]:
    """What differs in the idle time and in the memory of a rank that both have."""
    before = found.before
    after = found.after
    if rank >= min(len(before.plan.ranks), len(after.plan.ranks)):
        return
    least = ROUNDING * max(side.figures["makespan"] for side in (before, after))
    changes = {
        cause: after.idle[cause][rank] - times[rank]
        for cause, times in before.idle.items()
    }
    causes = [
        f"{cause} {rounded(change, sign='+')}"
        for cause, change in changes.items()
        if abs(change) > least
    ]
    if causes:
        idle = [
            sum(times[rank] for times in side.idle.values()) for side in (before, after)
        ]
        yield f"idle {rounded(idle[0])} -> {rounded(idle[1])}: {', '.join(causes)}"
    for title, of_before, of_after in _peaks(found):
        if of_before[rank] != of_after[rank]:
            yield f"{title} {of_before[rank]:.10g} -> {of_after[rank]:.10g}"


def _runs(rank: RankDifference, style: Style) -> list[str]:
    """What became of the actions of a rank, run by run."""
    if rank.is_equal:
        return []
    lines = []
    # What has gone elsewhere is told there: here, its neighbours on both sides are one run.
    for change, runs in groupby(rank.runs, lambda run: run.change):
        if change is Change.MOVED:
            texts = [_moved(rank, run) for run in runs]
        else:
            texts = [
                _names(change, [name for run in runs for name in rank.actions(run)])
            ]
        lines += [style.paint(change, f"{_MARKS[change]} {text}") for text in texts]
    for batches, only_in in ((rank.apart, "A"), (rank.together, "B")):
        if batches:
            lines.append(
                f"issued as one only in {only_in}: {first_words(batches[:SHOWN], len(batches))}"
            )
    more = len(lines) - _MOST_LINES
    if more > 0:
        lines[_MOST_LINES:] = [f"… and {more:,} more lines: --json has all"]
    return lines


def _names(change: Change, actions: Sequence[str]) -> str:
    """The first of some actions, and how many they are."""
    if change is Change.EQUAL and len(actions) > _FEW:
        return f"{len(actions)} equal, {actions[0]} … {actions[-1]}"
    return first_words(actions[:SHOWN], len(actions))


def _moved(rank: RankDifference, run: Run) -> str:
    """Some actions that moved, from where, and to where."""
    was = _behind(rank.before, run.before.start)
    names = _names(run.change, rank.actions(run))
    return f"{names}  from {was} to {_behind(rank.after, run.after.start)}"


def _behind(names: tuple[str, ...], place: int) -> str:
    """Where an action stands: behind which other one."""
    return f"behind {names[place - 1]}" if place else "the start"
