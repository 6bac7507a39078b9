"""A schedule: which rank holds which stage, and what each rank does, in order.

The one intermediate form. A program expands to a schedule of compute ops; lowering adds sends and receives;
a plan is a lowered schedule that passed the checks.
"""

import re
from array import array
from collections.abc import Iterator
from enum import IntEnum

from attrs import define, field, frozen

from schedlang.source import Source, Span

#: The kinds of action, by their text in a plan. Torch's action tables spell them the same way: `B` is a whole
#: backward, `I` its input-gradient half, `W` its weight-gradient half; `U` is the optimizer step.
Kind = IntEnum("Kind", "F B I W U SEND_F RECV_F SEND_B RECV_B")

NO_MICROBATCH = -1
_WORD = re.compile(rf"(\d{{1,9}})({'|'.join(sorted(Kind.__members__, key=len, reverse=True))})(\d{{1,9}})?")


_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def counterpart(kind: int, stage: int) -> tuple[Kind, int]:
    """The other end of a transfer: an activation goes from stage s to s + 1, a gradient from s to s - 1."""
    other, distance = _OTHER_END[Kind(kind)]
    return other, stage + distance


def is_transfer(kind: int) -> bool:
    """Whether an action moves a tensor between ranks."""
    return kind >= Kind.SEND_F


def is_send(kind: int) -> bool:
    """Whether an action sends a tensor."""
    return kind in (Kind.SEND_F, Kind.SEND_B)


def word(kind: int, stage: int, microbatch: int) -> str:
    """An action in torch's spelling: `2SEND_F0`, `1B3`, `0U`."""
    return f"{stage}{Kind(kind).name}{'' if microbatch == NO_MICROBATCH else microbatch}"


@define
class Actions:
    """What one rank does, in order, as columns of integers; row i of all columns is action i.

    `group` is 0 for an action issued alone; neighbours that share a number above 0 are issued as one batch.
    `source` is the index of the action's place in `Schedule.spans`.
    """

    kind: "array[int]" = field(factory=lambda: array("b"))
    stage: "array[int]" = field(factory=lambda: array("i"))
    microbatch: "array[int]" = field(factory=lambda: array("i"))
    group: "array[int]" = field(factory=lambda: array("i"))
    source: "array[int]" = field(factory=lambda: array("i"))

    def add(self, kind: int, stage: int, microbatch: int, source: int, group: int = 0) -> None:
        """Append one action."""
        self.kind.append(kind)
        self.stage.append(stage)
        self.microbatch.append(microbatch)
        self.source.append(source)
        self.group.append(group)

    def __len__(self) -> int:
        return len(self.kind)

    def word(self, index: int) -> str:
        """Action `index` in torch's spelling."""
        return word(self.kind[index], self.stage[index], self.microbatch[index])

    def batch(self, index: int) -> range:
        """The actions issued together with action `index`: its group, or itself alone."""
        group, end = self.group[index], index + 1
        if group:
            while end < len(self) and self.group[end] == group:
                end += 1
        return range(index, end)

    def batches(self) -> Iterator[range]:
        """The actions in the order of issue."""
        index = 0
        while index < len(self):
            batch = self.batch(index)
            yield batch
            index = batch.stop

    def text(self) -> str:
        """All actions in torch's spelling, separated by blanks; a batch is `(0SEND_F4;0RECV_B1)`."""
        words = (";".join(map(self.word, batch)) for batch in self.batches())
        return " ".join(f"({each})" if ";" in each else each for each in words)

    def compute(self) -> "Actions":
        """The actions that are not transfers."""
        kept = Actions()
        for row in zip(self.kind, self.stage, self.microbatch, self.source, strict=True):
            if not is_transfer(row[0]):
                kept.add(*row)
        return kept


def parse_actions(text: str, sources: list[int]) -> Actions:
    """The inverse of `Actions.text`; ValueError names the first word that is not an action."""
    actions = Actions()
    group = 0
    for token in text.split():
        batched = token.startswith("(") and token.endswith(")")
        group += batched
        for each in token[1:-1].split(";") if batched else [token]:
            match = _WORD.fullmatch(each)
            if match is None or (match[3] is None) != (match[2] == "U"):
                raise ValueError(f"`{token}` is not an action")
            if len(actions) == len(sources):
                raise ValueError("there are fewer sources than actions")
            kind, microbatch = Kind[match[2]], NO_MICROBATCH if match[3] is None else int(match[3])
            if batched and not is_transfer(kind):
                raise ValueError(f"`{token}` has a compute op in a batch of transfers")
            actions.add(kind, int(match[1]), microbatch, sources[len(actions)], group * batched)
    if len(actions) != len(sources):
        raise ValueError("there are more sources than actions")
    return actions


@frozen
class Schedule:
    """Per-rank actions with the placement and the program they come from.

    `placement[s]` is the rank that holds stage s; `ranks[r]` is what rank r does. `spans[0]` is the schedule's name.
    """

    name: str
    params: dict[str, int]
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[Actions, ...]
    source: Source = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)

    def peer(self, kind: int, stage: int) -> int | None:
        """The rank at the other end of a transfer of `stage`.

        None where there is none to reach: past the first or last stage, or a stage of the same rank.
        """
        other = counterpart(kind, stage)[1]
        if not 0 <= other < len(self.placement) or self.placement[other] == self.placement[stage]:
            return None
        return self.placement[other]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def splits_backward(self) -> bool:
        """Whether any backward is split into its input and weight halves."""
        return any(Kind.W in actions.kind for actions in self.ranks)
