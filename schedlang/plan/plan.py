"""The plan file: one self-describing JSON document that the compiler writes and the runtime trusts.

`actions` holds one line of text per rank, `sources` the place of each action as an index into
`spans`, which are character ranges of the program text, so that any later error can name the line
an action came from. The texts of imported files follow the program's; `imports` has the name of
each and where it starts. How it lies in the file: `schedlang.plan.file`.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.files.writing import write_bytes
from schedlang.plan.file import Parts, encode, line_of
from schedlang.plan.text import numbers_text, texts
from schedlang.schedule.schedule import MOST_STEPS, Kernel, Schedule, Trial
from schedlang.schedule.stream import repeat

FORMAT = "schedlang.plan/1"


@frozen
class Plan(Schedule):
    """A schedule with its communication, proved for its transport: a runtime may run it as it
    stands.
    """

    #: For a schedule without a flush: the part of every rank that repeats once per update, or else
    #: nothing.
    kernels: tuple[Kernel, ...] = ()
    #: The share of all time that ranks are idle, ideally; the name of its lowering, and those that
    #: were tried. A plan that was read does not know.
    idle: float | None = field(default=None, eq=False, repr=False)
    lowering: str = field(default="", eq=False, repr=False)
    trials: tuple[Trial, ...] = field(default=(), eq=False, repr=False)

    def for_updates(self, updates: int) -> "Plan":
        """The plan of a schedule without a flush for more updates than it shows; ValueError for
        fewer, or too many.
        """
        more = updates - self.layout.updates
        if more < 0 or (more and not self.kernels):
            shown = counted(self.layout.updates, "update")
            raise ValueError(
                f"the plan has {shown}{' or more' if self.kernels else ': no part of it repeats'}"
            )
        if more * sum(kernel.stop - kernel.start for kernel in self.kernels) > MOST_STEPS:
            raise ValueError(f"{updates:,} updates are more than {MOST_STEPS:,} actions")
        return repeat(self, self.kernels, more) if more else self

    def to_json(self) -> dict[str, Any]:
        """The plan as a document."""
        actions, sources = self._lines()
        return self._head() | {"actions": actions, "sources": sources}

    def encode(self) -> bytes:
        """The file that `write_plan` writes."""
        return encode(self._head(), *self._lines())

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the plan; equal digests mean the same plan."""
        lines = (
            self.ranks.lines
            if isinstance(self.ranks, Parts)
            else list(map(line_of, *self._lines()))
        )
        return hashlib.sha256(
            json.dumps(self._head() | {"lines": lines}, sort_keys=True).encode()
        ).hexdigest()

    def _head(self) -> dict[str, Any]:
        """The fields that are not lines."""
        return {
            "format": FORMAT,
            "program": {
                "name": self.name,
                "file": self.source.path,
                "sha256": hashlib.sha256(self.source.text.encode()).hexdigest(),
                "text": self.source.text,
                "imports": [list(file) for file in self.source.imports],
            },
            "params": self.params,
            "ranks": len(self.ranks),
            "pipelines": [asdict(pipeline) for pipeline in self.layout.pipelines],
            "slices": self.layout.slices,
            "updates": self.layout.updates,
            "links": list(self.layout.links),
            "skips": [list(skip) for skip in self.layout.skips],
            "weights": [asdict(rule) for rule in self.weights],
            "kernels": [[kernel.start, kernel.stop] for kernel in self.kernels],
            "placement": list(self.placement),
            "transport": self.transport,
            "costs": self.costs.to_json(),
            "spans": [[span.start, span.end] for span in self.spans],
        }

    def _lines(self) -> tuple[list[str], list[str]]:
        """The fields `actions` and `sources`."""
        return texts(self.ranks), numbers_text([actions.source for actions in self.ranks])


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file; CompileError when it cannot be written."""
    write_bytes(plan.encode(), path)
