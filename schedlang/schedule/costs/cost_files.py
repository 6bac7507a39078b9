"""Costs from files: JSON, YAML, or the traces of a measured run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.files.documents import read_document
from schedlang.files.file_kinds import FileKind, kind_of_file
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.costs.given import costs_of
from schedlang.schedule.costs.measured import measured_costs
from schedlang.schedule.costs.model import Costs
from schedlang.schedule.costs.traces import traced_actions, why_no_actions

#: The kinds of file of which it is told what is wrong with them as costs.
_MAY_BE_COSTS = (
    FileKind.COSTS,
    FileKind.TRACE,
    FileKind.OBJECT,
    FileKind.DAMAGED,
    FileKind.TEXT,
)


def traced_costs(traces: Sequence[Any]) -> Costs:
    """The costs in the traces of a run, such as one of each rank."""
    runs = [traced_actions(trace["traceEvents"]) for trace in traces]
    stages = {bar.stage for run in runs for _, bar in run if not is_transfer(bar.kind)}
    if not stages:
        raise ValueError(why_no_actions(traces[0]["traceEvents"]))
    missing = set(range(max(stages))) - stages
    if missing:
        raise ValueError(
            f"there are ops of {_stages(stages)}, and none of {_stages(missing)}: each rank has a "
            "trace of its own, give those of all, or their folder"
        )
    return measured_costs(*runs)


def _stages(numbers: Iterable[int]) -> str:
    words = list(map(str, sorted(numbers)))
    return f"stage{'s' if len(words) > 1 else ''} {', '.join(words)}"


def read_costs(path: str | Path, *others: str | Path) -> Costs:
    """Costs from a JSON or YAML file, or from the trace of a run (docs/costs.md); or from several
    traces, such as one of each rank, or a folder with nothing else. CompileError says what is wrong
    with them.
    """
    files = [file for each in (path, *others) for file in _files(each)]
    if len(files) > 1:
        return _costs_of_traces(files)
    (path,) = files
    try:
        return costs_of(read_document(path))
    except ValueError as error:
        kind = kind_of_file(path)
        if kind not in _MAY_BE_COSTS:
            message = f"`{path}` is {kind.called}, not costs"
            raise _wrong(path, message, kind.help(path)) from None
        raise _wrong(path, f"costs in `{path}`: {error}") from None


def _files(path: str | Path) -> list[str | Path]:
    """The files that a path names: those in a folder, or itself."""
    if not (isinstance(path, str | Path) and Path(path).is_dir()):
        return [path]
    files = sorted(Path(path).glob("*.json"))
    if not files:
        raise _wrong(path, f"the folder `{path}` has no file *.json, such as a trace")
    return list(files)


def _costs_of_traces(files: Sequence[str | Path]) -> Costs:
    """The costs that several traces show; CompileError says what is wrong with them."""
    traces = []
    for file in files:
        try:
            document = read_document(file)
        except ValueError as error:
            raise _wrong(file, f"costs in `{file}`: {error}") from None
        if not isinstance(document, dict) or "traceEvents" not in document:
            message = (
                f"`{file}` is no trace: of several files, each is a trace of some ranks"
            )
            raise _wrong(file, message)
        traces.append(document)
    try:
        return traced_costs(traces)
    except ValueError as error:
        message = f"costs in `{files[0]}` to `{files[-1]}`: {error}"
        raise _wrong(files[0], message) from None


def _wrong(path: str | Path, message: str, help: str | None = None) -> CompileError:
    return CompileError([Diagnostic("costs", message, help=help, file=str(path))])
