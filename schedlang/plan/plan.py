"""The plan, and its file: one self-describing JSON document, which the compiler writes and the
runtime trusts.

The field `actions` has one line of text for each rank. `sources` has for each action an index into
`spans`, which are ranges of characters of the program text: so any later error can name the line
that an action came from. The texts of imported files follow the program's; `imports` has the path
of each, and where its text starts. How the document lies in the file is in `schedlang.plan.file`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, fields, frozen

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.wrong_arguments import check_whole
from schedlang.on_demand import on_demand
from schedlang.schedule.schedule import MOST_STEPS, OBJECTIVES, Kernel, Schedule, Trial

if TYPE_CHECKING:
    from schedlang.plan.compiled_again import compiled_for
    from schedlang.plan.writer import encode, lines_of, texts_of
    from schedlang.schedule.costs import Costs
    from schedlang.schedule.notebook_views import drawn
    from schedlang.schedule.periods import repeat
else:
    # For other numbers of microbatches.
    compiled_for = on_demand("schedlang.plan.compiled_again.compiled_for")
    # For plans that are written.
    encode = on_demand("schedlang.plan.writer.encode")
    lines_of = on_demand("schedlang.plan.writer.lines_of")
    texts_of = on_demand("schedlang.plan.writer.texts_of")
    # For notebooks, and for plans without a flush.
    drawn = on_demand("schedlang.schedule.notebook_views.drawn")
    repeat = on_demand("schedlang.schedule.periods.repeat")

FORMAT = "schedlang.plan/1"


@frozen
class WrittenCosts:
    """The costs of a plan as its file has them (`document`), which are read when somebody asks for
    them: who runs a plan does not.
    """

    document: Any
    read: Callable[[], Costs] = field(eq=False)

    def __call__(self) -> Costs:
        """The costs; CompileError if the file has none that are possible."""
        return self.read()


@frozen
class Plan(Schedule):
    """A schedule with its communication, proved for its transport: a runtime may run it as it
    stands.
    """

    #: Of a schedule without a flush, the part of each rank that repeats once for every update.
    kernels: tuple[Kernel, ...] = ()
    # What the compiler tells about its work. It is not in the file, so a plan that was read does
    # not know it, and two plans that differ here only are the same plan.
    #: The share of all time that ranks are idle, where no transfer waits for another.
    idle: float | None = field(default=None, eq=False, repr=False)
    #: The name of the lowering, and all that were tried.
    lowering: str = field(default="", eq=False, repr=False)
    trials: tuple[Trial, ...] = field(default=(), eq=False, repr=False)
    #: The claims that do not hold, and the ranks without room: only of a plan in a `ClaimError`.
    wrong: tuple[Diagnostic, ...] = field(default=(), eq=False, repr=False)
    #: The lines of the script that built it (`schedlang.Builder`), by the index of their span.
    written_at: Mapping[int, str] = field(factory=dict, eq=False, repr=False)

    @classmethod
    def of(cls, schedule: Schedule, **others: Any) -> Plan:
        """A schedule that was proved, as a plan, with what the plan has beside it."""
        own = {
            str(each.alias): getattr(schedule, each.name) for each in fields(Schedule)
        }
        return cls(**own | others)

    def where(self, rank: int, index: int) -> str:
        """The line that action `index` of a rank came from, as `file:line`: of the program, or of
        the script that built it.
        """
        line = self.written_at.get(self.ranks[rank].source[index])
        return line or super().where(rank, index)

    def __repr__(self) -> str:
        # Not the ops: of a plan that was opened for one rank, they would be read.
        proved = f"proved for transport {self.transport}"
        return f"<Plan {self.title}, from {self.source.path}, {proved}>"

    def _repr_html_(self) -> str | None:
        return drawn(self)

    def for_updates(self, updates: int) -> Plan:
        """The plan of a schedule without a flush, for more updates than it shows. It needs no new
        proof (docs/transports.md). ValueError for fewer, or for too many, TypeError for no number.
        """
        check_whole("updates", updates)
        more = updates - self.layout.updates
        if not more:
            return self
        shown = counted(self.layout.updates, "update")
        if not self.kernels:
            raise ValueError(f"the plan has {shown}: no part of it repeats")
        if more < 0:
            raise ValueError(f"the plan has {shown} or more")
        actions = sum(kernel.stop - kernel.start for kernel in self.kernels)
        if more * actions > MOST_STEPS:
            raise ValueError(
                f"{updates:,} updates are more than {MOST_STEPS:,} actions"
            )
        return repeat(self, self.kernels, more)

    def for_microbatches(self, microbatches: int) -> Plan:
        """The plan of the same program with another number of microbatches, all else as here: it is
        compiled and proved when it is first asked for.

        `schedc check --for microbatches=any` proves a program for all numbers at once. ValueError
        where the plan is of no program with a parameter `microbatches`; CompileError where the
        program does not take this number, a rank has no room for it, or the program cannot be read
        again; TypeError for no number. Claims that do not hold for this number are warnings.
        """
        check_whole("microbatches", microbatches, 1)
        if "microbatches" not in self.params:
            raise ValueError(
                f"the plan {self.title} is of no program with a parameter `microbatches`"
            )
        if microbatches not in self._family:
            plan: Plan = compiled_for(self, microbatches)
            updates = max(self.layout.updates, plan.layout.updates)
            self._family[microbatches] = plan.for_updates(updates)
        return self._family[microbatches]

    @cached_property
    def _family(self) -> dict[int, Plan]:
        """The plans of the same program so far, by their numbers of microbatches."""
        return {self.params["microbatches"]: self}

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        actions, sources = texts_of(self.ranks)
        return self.head() | {"actions": actions, "sources": sources}

    def encode(self) -> bytes:
        """The content of the file that `write_plan` writes."""
        return encode(self.head(), self.ranks)

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the plan; equal digests mean the same plan."""
        # The file of a plan that was opened has the hash of each line: so no line is read.
        lines = getattr(self.ranks, "lines", None) or lines_of(self.ranks)
        text = json.dumps(self.head() | {"lines": lines}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def head(self) -> dict[str, Any]:
        """All fields of the document but those with a line for each rank."""
        costs = self._costs
        program = {
            "name": self.name,
            "file": self.source.path,
            "sha256": sha256_of(self.source.text),
            "text": self.source.text,
            "imports": [list(file) for file in self.source.imports],
        }
        return {
            "format": FORMAT,
            "program": program,
            "params": self.params
            | {name: list(each) for name, each in self.lists.items()},
            "ranks": len(self.ranks),
            "pipelines": [asdict(pipeline) for pipeline in self.layout.pipelines],
            "slices": self.layout.slices,
            "updates": self.layout.updates,
            "links": list(self.layout.links),
            "skips": [list(skip) for skip in self.layout.skips],
            "edges": [list(edge) for edge in self.layout.edges],
            "frozen": list(self.layout.frozen),
            "models": self.layout.models,
            "keepers": list(self.layout.keepers),
            "weights": [asdict(rule) for rule in self.weights],
            "kernels": [[kernel.start, kernel.stop] for kernel in self.kernels],
            "placement": list(self.placement),
            "transport": self.transport,
            "costs": costs.document
            if isinstance(costs, WrittenCosts)
            else self.costs.to_json(),
            "spans": [[span.start, span.end] for span in self.spans],
            **({"message_type": self.message_type} if self.message_type else {}),
            **(
                {"objective": self.objective} if self.objective != OBJECTIVES[0] else {}
            ),
        }


def sha256_of(text: str) -> str:
    """The hash of a program's text, by which it is known again."""
    return hashlib.sha256(text.encode()).hexdigest()
