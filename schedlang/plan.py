"""The plan file: one self-describing JSON document that the compiler writes and the runtime trusts.

`actions` holds one line of text per rank, `sources` the place of each action as an index into `spans`, which are
character ranges of the program text, so that any later error can name the line an action came from.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from attrs import asdict, frozen

from schedlang.costs import Costs, costs_of
from schedlang.diagnostics import CompileError, Diagnostic
from schedlang.machine import prove
from schedlang.schedule import Actions, Layout, Pipeline, Schedule, parse_actions
from schedlang.source import Source, Span, unreadable

FORMAT = "schedlang.plan/1"
T = TypeVar("T")


@frozen
class Plan(Schedule):
    """A schedule with its communication, proved for `transport`: a runtime may run it as it stands."""

    transport: str = "blocking"

    def to_json(self) -> dict[str, Any]:
        """The document that `write_plan` writes."""
        return {
            "format": FORMAT,
            "program": {
                "name": self.name,
                "file": self.source.path,
                "sha256": hashlib.sha256(self.source.text.encode()).hexdigest(),
                "text": self.source.text,
            },
            "params": self.params,
            "ranks": len(self.ranks),
            "pipelines": [asdict(pipeline) for pipeline in self.layout.pipelines],
            "slices": self.layout.slices,
            "placement": list(self.placement),
            "transport": self.transport,
            "costs": self.costs.to_json(),
            "spans": [[span.start, span.end] for span in self.spans],
            "actions": [actions.text() for actions in self.ranks],
            "sources": [" ".join(map(str, actions.source)) for actions in self.ranks],
        }

    def digest(self) -> str:
        """A hash of everything in the plan; equal digests mean the same plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def where(self, rank: int, index: int) -> str:
        """The program line that action `index` of a rank came from, as `file:line`."""
        span = self.spans[self.ranks[rank].source[index]]
        return f"{self.source.path}:{self.source.position(span.start)[0]}"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file; the file appears whole or not at all. CompileError when it cannot be written."""
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            temporary = file.name
            json.dump(plan.to_json(), file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise _wrong(path, f"cannot be written: {error.strerror}", code="unwritable") from None


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, proved again, since a file may come from anywhere; CompileError says what is wrong."""
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _wrong(path, "not a plan file: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"not a whole plan file: {error}", help="write it again with `schedc compile -o`") from None
    plan = _Reader(path, document).plan()
    prove(plan)
    return plan


def _wrong(path: str | Path, message: str, *, code: str = "plan", help: str | None = None) -> CompileError:
    return CompileError([Diagnostic(code, f"`{path}`: {message}", help=help, file=str(path))])


@frozen
class _Reader:
    """Reads the document's fields, each with its check."""

    path: str | Path
    document: Any

    def plan(self) -> Plan:
        """The plan that the document holds; its actions are not yet proved."""
        if not isinstance(self.document, dict) or "format" not in self.document:
            self.wrong("not a plan file: it has no `format`")
        if self.document["format"] != FORMAT:
            self.wrong(
                f"the format is `{self.document['format']}`, this is a reader of `{FORMAT}`",
                help="compile the program again with this version of schedc",
            )
        program = self.field("program", dict)
        if not all(isinstance(program.get(key), str) for key in ("name", "file", "text")):
            self.wrong("`program` must hold the texts `name`, `file` and `text`")
        placement = self.numbers(self.field("placement", list), "placement")
        ranks = self.field("ranks", int)
        if not placement or any(rank >= ranks for rank in placement):
            self.wrong("`placement` must give every stage one of the `ranks`")
        params = self.field("params", dict)
        if not all(isinstance(value, int) for value in params.values()):
            self.wrong("`params` must be whole numbers")
        spans = self.spans(len(program["text"]))
        return Plan(
            name=program["name"],
            params=params,
            layout=Layout(tuple(placement), self.pipelines(len(placement)), self.slices()),
            ranks=self.actions(ranks, len(spans)),
            source=Source(program["file"], program["text"]),
            spans=spans,
            transport=self.field("transport", str),
            costs=self.costs(len(placement)),
        )

    def costs(self, stages: int) -> Costs:
        """The field `costs`, which may be empty."""
        costs = self.check(lambda: costs_of(self.document.get("costs")), "costs")
        self.check(lambda: (costs.durations(stages), costs.memory(stages)), "costs")
        return costs

    def pipelines(self, stages: int) -> tuple[Pipeline, ...]:
        """The field `pipelines`: together they have every stage, in order."""
        found: list[Pipeline] = []
        for each in self.field("pipelines", list):
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                self.wrong("`pipelines` must be objects with a `name`, `start`, `stop` and `microbatches`")
            numbers = self.numbers([each.get(key) for key in ("start", "stop", "microbatches")], "pipelines")
            found.append(Pipeline(each["name"], *numbers))
        starts = [0, *(each.stop for each in found)]
        if [*(each.start for each in found), stages] != starts or any(a >= b for a, b in pairwise(starts)):
            self.wrong(f"`pipelines` must divide the {stages} stages of `placement` among them, in order")
        return tuple(found)

    def slices(self) -> int:
        """The field `slices`, from 1."""
        slices = self.field("slices", int)
        if slices < 1:
            self.wrong("`slices` must be 1 or more")
        return slices

    def spans(self, length: int) -> tuple[Span, ...]:
        """The field `spans`, each within the program text."""
        spans = [self.numbers(span, "spans") for span in self.field("spans", list)]
        if not all(len(span) == 2 and span[0] <= span[1] <= length for span in spans):
            self.wrong("`spans` must be pairs of places in the program text")
        return tuple(Span(start, end) for start, end in spans)

    def actions(self, ranks: int, spans: int) -> tuple[Actions, ...]:
        """The fields `actions` and `sources`, one line per rank each."""
        texts, sources = self.field("actions", list), self.field("sources", list)
        if not all(isinstance(line, str) for line in [*texts, *sources]):
            self.wrong("`actions` and `sources` must be lines of text, one per rank")
        if not len(texts) == len(sources) == ranks:
            self.wrong(f"`actions` and `sources` must have {ranks} lines, one per rank")
        return tuple(self.rank(rank, *lines, spans) for rank, lines in enumerate(zip(texts, sources, strict=True)))

    def rank(self, rank: int, text: str, sources: str, spans: int) -> Actions:
        """One rank's actions."""
        indices = self.check(lambda: [int(each) for each in sources.split()], f"sources of rank {rank}")
        if not all(0 <= index < spans for index in indices):
            self.wrong(f"sources of rank {rank}: not an index of `spans`")
        return self.check(lambda: parse_actions(text, indices), f"actions of rank {rank}")

    def field(self, name: str, kind: type[T]) -> T:
        """A field of the document that must have a type."""
        value = self.document.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            words = {dict: "an object", list: "a list", int: "a whole number", str: "text"}
            self.wrong(f"`{name}` must be {words[kind]}")
        return value

    def numbers(self, value: Any, name: str) -> list[int]:
        """A list of whole numbers from 0."""
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            self.wrong(f"`{name}` must hold whole numbers from 0")
        return list(value)

    def check(self, read: Callable[[], T], name: str) -> T:
        """What `read` returns; its ValueError becomes the user's error."""
        try:
            return read()
        except ValueError as error:
            self.wrong(f"{name}: {error}")

    def wrong(self, message: str, help: str | None = None) -> NoReturn:
        """Give up."""
        raise _wrong(self.path, message, help=help)
