"""What loop variables are at an op. Only messages need them, so they are found by running the
program once more.
"""

import inspect
from collections.abc import Collection

from attrs import define, field, frozen

from schedlang.diagnostics.source import Span
from schedlang.diagnostics.waits import Values
from schedlang.language import syntax
from schedlang.language.codegen import variable
from schedlang.language.recorder import Call, Recorder
from schedlang.schedule.schedule import Recorded


@frozen
class Notes:
    """The values at `wanted` ops; an op that a wrong program records twice has two."""

    tree: syntax.Schedule
    spans: list[Span]
    wanted: Collection[Recorded]
    values: dict[Recorded, list[Values]] = field(factory=dict)

    def note(self, op: Recorded) -> None:
        """Note what the loop variables are now, in the function of the program that is running."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "program":
            frame = frame.f_back
        assert frame is not None
        names = loop_variables(self.tree, self.spans[op[0]])
        values = tuple((name, int(frame.f_locals[variable(name)])) for name in names)
        self.values.setdefault(op, []).append(values)


def loop_variables(tree: syntax.Schedule, place: Span) -> list[str]:
    """The variables of the loops around a place of the program."""
    names: list[str] = []
    for node in syntax.walk(tree):
        if node.span.start <= place.start and place.end <= node.span.end:
            match node:
                case syntax.For(name) | syntax.Row(name):
                    names.append(name.text)
                case syntax.Repeated(microbatches):
                    names += [each.text for each in microbatches]
    return names


@define
class NotingRecorder(Recorder):
    """A recorder that also notes the values at the ops that are wanted."""

    notes: Notes = field(kw_only=True)

    def op(self, call: Call) -> None:
        """Record a compute op."""
        before = len(self.actions)
        super().op(call)
        self.note_from(before)

    def transfer(self, call: Call) -> None:
        """Record a send or a receive."""
        before = len(self.actions)
        super().transfer(call)
        self.note_from(before)

    def note_from(self, index: int) -> None:
        """Note the values at the actions from an index on."""
        for _, stage, microbatch, place, _ in map(
            self.actions.row, range(index, len(self.actions))
        ):
            if (place, stage, microbatch) in self.notes.wanted:
                self.notes.note((place, stage, microbatch))
