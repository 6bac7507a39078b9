"""How stages, microbatches and actions are called wherever people read of them.

An action is spelt as in torch's tables: stage, kind, microbatch, `2B3`. A plan numbers the stages
of several pipelines on, and slices through all microbatches. People read these as a program writes
them: stage 3 of a plan may be `up(1)`, and its unit 4, where there are three slices, is `m1.k1`; so
there is `up(1)B3`, and `0F(m1.k1)`. Plan files and torch's tables have the numbers alone
(`schedlang.schedule.actions.word`).
"""

from collections.abc import Sequence
from functools import cached_property

from attrs import frozen

from schedlang.schedule.actions import (
    NO_MICROBATCH,
    OVERLAP,
    Actions,
    is_transfer,
    word,
)
from schedlang.schedule.kinds import OF_STAGE, Kind
from schedlang.schedule.layout import Layout


@frozen
class Names:
    """The names of stages, microbatches and actions of a layout, in messages."""

    layout: Layout

    @cached_property
    def are_numbers(self) -> bool:
        """Whether the names are the numbers of the plan, since there is one pipeline, and no
        slices.
        """
        return len(self.layout.pipelines) == 1 and self.layout.slices == 1

    def stage(self, number: int) -> str:
        """A stage: `2`, or of several pipelines `up(1)`, `lane(0,1)`.

        A number that no stage has, such as that of a skip, is its own name.
        """
        if len(self.layout.pipelines) == 1 or not 0 <= number < len(
            self.layout.placement
        ):
            return str(number)
        pipeline = self.layout.pipeline_of[number]
        stage = number - pipeline.start
        if pipeline.name.endswith(")"):
            # One of several that differ by a number: `lane(0)` has the stages `lane(0,1)`.
            return f"{pipeline.name[:-1]},{stage})"
        return f"{pipeline.name}({stage})"

    def stages(self, numbers: Sequence[int]) -> str:
        """Some stages: `stage 2`, `stages down(0), up(1)`."""
        names = ", ".join(map(self.stage, numbers))
        return f"stage{'s' if len(numbers) > 1 else ''} {names}"

    def microbatch(self, unit: int) -> str:
        """The name of a microbatch, `3`, or of a slice of one, `m1.k2`."""
        slices = self.layout.slices
        return str(unit) if slices == 1 else f"m{unit // slices}.k{unit % slices}"

    def microbatches(self, units: int) -> str:
        """The names of the first so many microbatches or slices: `microbatches 0 to 7`, `slices
        m0.k0 to m3.k1`.
        """
        nouns = "microbatches" if self.layout.slices == 1 else "slices"
        return f"{nouns} {self.microbatch(0)} to {self.microbatch(units - 1)}"

    @property
    def noun(self) -> str:
        """`microbatch`, or `slice` where microbatches are cut."""
        return "microbatch" if self.layout.slices == 1 else "slice"

    def action(self, kind: int, number: int, microbatch: int) -> str:
        """An action: `2SEND_F0`, `up(1)B3`, `0F(m1.k2)`, `0U1`."""
        if self.are_numbers:
            return word(kind, number, microbatch)
        name = f"{self.stage(number)}{Kind(kind).name}"
        if microbatch == NO_MICROBATCH:
            return name
        if kind in OF_STAGE or self.layout.slices == 1:
            return f"{name}{microbatch}"
        return f"{name}({self.microbatch(microbatch)})"

    def of(self, actions: Actions, index: int) -> str:
        """Action `index` of a rank."""
        return self.action(
            actions.kind[index], actions.stage[index], actions.microbatch[index]
        )

    def batch(self, actions: Actions, batch: Sequence[int]) -> str:
        """Actions that are issued as one: `(0SEND_F4;0RECV_B1)`, `(0F4;7B1)OVERLAP_F_B`."""
        names = [self.of(actions, index) for index in batch]
        if len(names) == 1:
            return names[0]
        return f"({';'.join(names)}){'' if is_transfer(actions.kind[batch[0]]) else OVERLAP}"

    def text(self, actions: Actions) -> str:
        """All actions of a rank, separated by blanks."""
        return " ".join(self.batch(actions, batch) for batch in actions.batches())
