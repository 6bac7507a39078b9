"""What becomes of a feature under a schedule: as alone, refused, or neither."""

import hashlib
import math
import os
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from schedlang.runtime import PipelineError
from schedlang.runtime.errors import way_out
from tests.models.features import find
from tests.models.model import Feature
from tests.models.schedules import Column, column
from tests.models.sides import REPLICAS, Alone, InPipeline, Results
from tests.support.forks import write
from tests.support.ranks import Run

EQUAL = "="
ROUNDING = "~"
REFUSED = "refused"
#: It is trained as the stages say by themselves, and the run asked whether that is what is meant.
ASKED = "asked"
DIFFERS = "differs"
TRACEBACK = "traceback"
HANGS = "hangs"
#: It cannot be trained alone, so there is nothing to compare.
NOT_ALONE = "not alone"
NOT_FOR = "-"

#: What the runtime says of weights that may be one weight, of hooks whose order counts, of
#: optimizers that move other memory, and of copies of weights that drift apart.
_QUESTIONS = (
    "are trained apart: if they are one weight of the model",
    "if both change it, let one of them take a view of the tensor",
    "if the optimizer changes memory of its own",
    "are not alike any more",
)

#: More would only wait for each other.
MOST_PROCESSES = 8

#: A feature and a schedule, by their names.
Cell = tuple[str, str]
Columns = Mapping[str, Column]

#: What is compared absolutely, where all numbers are about as small.
_SMALL = 1e-3


@frozen
class Verdict:
    """What became of a cell, and how it differs or why it was refused."""

    kind: str
    words: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in (EQUAL, ROUNDING, REFUSED, ASKED, NOT_FOR)


def is_for(feature: Feature, column: Column) -> bool:
    """Whether the schedule can have stages with this feature."""
    layout = column.plan.layout
    lasts = [layout.placement[pipeline.stop - 1] for pipeline in layout.pipelines]
    has = {
        "slices": layout.slices > 1,
        "skips": bool(layout.skips or layout.edges),
        "replicas": len(layout.pipelines) > 1,
        "replicas of a loss": len(lasts) > len(set(lasts)),
        "updates": column.plan.has_updates,
        "frozen": bool(layout.frozen),
    }
    return not any(has[word] for word in feature.not_for) and (
        processes_for(feature, column) <= MOST_PROCESSES
    )


def processes_for(feature: Feature, column: Column) -> int:
    """How many processes train it."""
    return len(column.plan.ranks) * (REPLICAS if feature.mesh else 1)


def outcomes(
    run_ranks: Run, folder: Path, cells: Iterable[Cell]
) -> dict[Cell, Verdict]:
    """What becomes of some cells, on real processes: those of as many ranks on the same ones, one
    after the other, until one of them ends its processes. The folder is for what they leave.
    """
    verdicts: dict[Cell, Verdict] = {}
    by_ranks: dict[int, list[Cell]] = {}
    for cell in cells:
        feature = find(cell[0])
        under = column(cell[1])
        if is_for(feature, under):
            by_ranks.setdefault(processes_for(feature, under), []).append(cell)
        else:
            verdicts[cell] = Verdict(NOT_FOR)
    trained: list[Cell] = []
    for ranks, ahead in by_ranks.items():
        while ahead:
            limit = 60 + 10 * len(ahead)
            run = run_ranks(
                train_all, ranks, ahead, _columns(ahead), folder, seconds=limit
            )
            done = next(
                (
                    number
                    for number, cell in enumerate(ahead)
                    if not _is_done(folder, cell, ranks)
                ),
                len(ahead),
            )
            trained += ahead[:done]
            if done < len(ahead):
                verdicts[ahead[done]] = _failure(folder, ahead[done], ranks, run.logs)
            # What failed has ended the processes: those behind it are tried on new ones.
            ahead = ahead[done + 1 :]
    # What fails alone as well is the model's own mistake.
    doubtful = [
        cell for cell, verdict in verdicts.items() if verdict.kind in (TRACEBACK, HANGS)
    ]
    both = [*trained, *doubtful]
    compared = run_ranks(
        compare_all,
        1,
        both,
        _columns(both),
        folder,
        joins=False,
        seconds=60 + 10 * len(both),
    )
    return verdicts | compared.results()[0]


def _columns(cells: Iterable[Cell]) -> dict[str, Column]:
    return {name: column(name) for _, name in cells}


def _file(folder: Path, cell: Cell, rank: int) -> Path:
    return folder / f"{hashlib.sha256(repr(cell).encode()).hexdigest()}.{rank}"


def _is_done(folder: Path, cell: Cell, ranks: int) -> bool:
    return all(_file(folder, cell, rank).exists() for rank in range(ranks))


def train_all(cells: Sequence[Cell], columns: Columns, folder: Path) -> None:
    """One rank: the results of each cell in a file of its own. An error is left in another one, and
    ends the process, for the others have ended by then.
    """
    rank = dist.get_rank()
    for cell in cells:
        path = _file(folder, cell, rank)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                results = InPipeline(find(cell[0]), columns[cell[1]]).run()
        except Exception as error:
            write(path.with_suffix(f".{rank}.failed"), pickle.dumps(verdict_on(error)))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        write(path, pickle.dumps((results, [str(warning.message) for warning in said])))
        # Who is refused in the next cell ends the processes of all, who may be in this one yet.
        dist.barrier()


def verdict_on(error: Exception) -> Verdict:
    """Whether an error is a refusal: it names what it is about, and is of the runtime's own."""
    words = str(error).split("\n", 1)[0]
    if not isinstance(error, PipelineError):
        return Verdict(TRACEBACK, f"{type(error).__name__}: {words}")
    if re.search("made no progress|does not answer|has waited|within .* s$", words):
        return Verdict(HANGS, words)
    # An error of torch is a refusal if it says what to do about it.
    cause = error.__cause__
    is_plain = cause is None or way_out(cause) is not None
    is_clear = is_plain and re.search("stage|weight|the loss|`", words)
    return Verdict(REFUSED if is_clear else TRACEBACK, words)


def _failure(folder: Path, cell: Cell, ranks: int, logs: Sequence[str]) -> Verdict:
    """What the ranks that have failed say of it; those that failed by themselves come first."""
    paths = [
        _file(folder, cell, rank).with_suffix(f".{rank}.failed")
        for rank in range(ranks)
    ]
    verdicts = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
    order = [REFUSED, TRACEBACK, HANGS]
    verdicts.sort(key=lambda verdict: order.index(verdict.kind))
    return verdicts[0] if verdicts else Verdict(HANGS, " ".join(logs)[-1000:])


def compare_all(
    cells: Sequence[Cell], columns: Columns, folder: Path
) -> dict[Cell, Verdict]:
    """The verdicts on cells: those that have been trained on all ranks are compared."""
    alone: dict[Hashable, Results | Exception] = {}
    verdicts = {}
    for cell in cells:
        feature = find(cell[0])
        column = columns[cell[1]]
        paths = [
            _file(folder, cell, rank) for rank in range(processes_for(feature, column))
        ]
        is_trained = all(path.exists() for path in paths)
        if feature.is_mistake:
            if is_trained:
                verdicts[cell] = Verdict(DIFFERS, "it trains, which it cannot")
            continue
        # Most schedules mean the same training, so that many columns need a few alone.
        meaning = feature.name, _meaning(column, feature.draws)
        if meaning not in alone:
            alone[meaning] = _train_alone(feature, column)
        expected = alone[meaning]
        if isinstance(expected, Exception):
            words = f"{type(expected).__name__}: {expected}"
            verdicts[cell] = Verdict(NOT_ALONE, words.split("\n", 1)[0])
        elif is_trained:
            left = [pickle.loads(path.read_bytes()) for path in paths]
            results = [own for own, _ in left]
            verdict = compare(results, expected, feature.model(2).tolerance)
            said = [words for _, warned in left for words in warned]
            asked = [
                words for words in said if any(each in words for each in _QUESTIONS)
            ]
            if verdict.kind == DIFFERS and asked:
                verdict = Verdict(ASKED, asked[0])
            verdicts[cell] = verdict
    return verdicts


def _train_alone(feature: Feature, column: Column) -> Results | Exception:
    try:
        return Alone(feature, column).run()
    except Exception as error:
        return error


def _meaning(column: Column, draws: bool) -> Hashable:
    """What a training alone depends on: most schedules mean the same."""
    plan = column.plan
    layout = plan.layout
    delays = tuple(column.delays)
    graph = layout.skips, layout.edges, layout.frozen
    own = (
        column.name
        if draws
        else (layout.slices, graph, layout.updates, plan.has_updates)
    )
    return layout.pipelines, delays, plan.weights_of(0).keeps_none, own


def compare(results: Sequence[Results], expected: Results, tolerance: float) -> Verdict:
    """Whether all numbers of all ranks are those of the training alone: to the bit, or to
    rounding.
    """
    missing = expected.keys() ^ set().union(*results)
    if missing:
        return Verdict(DIFFERS, f"only one side has {', '.join(sorted(missing)[:3])}")
    wrong: dict[str, str] = {}
    are_equal = True
    for name, right in expected.items():
        for ours in (own[name] for own in results if name in own):
            how = _how_far(ours, right)
            if isinstance(how, float):
                are_equal = are_equal and how == 0
                how = f"{how:.1e}" if how > tolerance else ""
            if how:
                wrong[name] = how
    if wrong:
        # What differs first is nearer to the cause than what differs most.
        shown = "; ".join(f"{name} ({how})" for name, how in [*wrong.items()][:2])
        return Verdict(DIFFERS, f"{len(wrong)} of {len(expected)}: {shown}")
    return Verdict(EQUAL if are_equal else ROUNDING)


def _how_far(ours: Tensor | None, right: Tensor | None) -> str | float:
    """How two results differ, in words or as a number."""
    if ours is None or right is None:
        return 0.0 if ours is right else f"{_words(ours)}, alone {_words(right)}"
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return f"{_words(ours)}, alone {_words(right)}"
    return 0.0 if torch.equal(ours, right) else _difference(ours, right)


def _words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    if tensor.is_floating_point() and not tensor.any():
        return "zeros"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _difference(ours: Tensor, right: Tensor) -> float:
    """The largest one, relative to the largest number; infinite where one side has no number."""
    if not torch.equal(ours.isfinite(), right.isfinite()):
        return math.inf
    finite = right.isfinite()
    far = (ours - right)[finite].abs().max() if finite.any() else torch.zeros(())
    size = right[finite].abs().max() if finite.any() else torch.ones(())
    return float(far / max(float(size), _SMALL))
