"""Actions: what a rank does, as columns of integers that read as words."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import define, field

from schedlang.schedule.kinds import OPS, SENDS, TRANSFERS, WAITS, Kind, op_of

#: What an action does: its kind, the number of its stage or transfer, and its microbatch.
Action = tuple[int, int, int]

NO_MICROBATCH = -1
#: What the text of ops that overlap ends with.
OVERLAP = "OVERLAP_F_B"

_SENDS = frozenset(SENDS.values())
_NAMES: dict[int, str] = {kind: kind.name for kind in Kind}
# The longest names first, or `RECV_F` would be found as `R` and a rest.
_LONGEST_FIRST = sorted(
    (_NAMES[kind] for kind in (*OPS, *TRANSFERS)), key=len, reverse=True
)
#: An action of a plan in torch's spelling, as `word` writes it: stage, kind and microbatch.
WORD = re.compile(rf"(\d{{1,9}})({'|'.join(_LONGEST_FIRST)})(\d{{1,9}})?")


def counterpart(kind: int, number: int, stages: int) -> tuple[Kind, int]:
    """The kind and number of the other end of a transfer, with so many stages.

    An activation goes from stage s to s + 1, a gradient from s to s - 1. Far edges have numbers
    behind those of the stages, the same at both ends (see `schedlang.schedule.layout`).
    """
    transfer = TRANSFERS[kind]
    return transfer.other_end, number + (transfer.distance if number < stages else 0)


def is_transfer(kind: int) -> bool:
    """Whether an action moves a tensor between ranks."""
    return kind in TRANSFERS


def is_background(kind: int) -> bool:
    """Whether an action is an op of a microbatch that its rank runs beside others, such as a copy
    of activations to the host.
    """
    return op_of(kind).is_background


def is_copy(kind: int) -> bool:
    """Whether an action copies activations to the host or another rank, or back."""
    return op_of(kind).is_copy


def is_collective(kind: int) -> bool:
    """Whether an action is about a whole stage and its replicas: a gather of weights, its end, or a
    sum of gradients.
    """
    return op_of(kind).is_collective


def is_update(kind: int) -> bool:
    """Whether an action is an optimizer step."""
    return op_of(kind).is_update


def is_beside(kind: int) -> bool:
    """Whether a rank goes on while an action is under way, and does not compute it: a copy, or a
    collective.
    """
    return op_of(kind).is_beside


def is_send(kind: int) -> bool:
    """Whether an action sends a tensor."""
    return kind in _SENDS


def is_wait(kind: int) -> bool:
    """Whether an action only waits for a send."""
    return kind in WAITS.values()


def word(kind: int, stage: int, microbatch: int) -> str:
    """An action in torch's spelling: `2SEND_F0`, `1B3`, `0U`."""
    return f"{stage}{_NAMES[kind]}{'' if microbatch == NO_MICROBATCH else microbatch}"


#: How many actions a `repr` shows.
SHOWN = 8


def first_words(first: Iterable[str], number: int) -> str:
    """The first `SHOWN` of a number of actions, in a `repr`."""
    more = f" … {number} in all" if number > SHOWN else ""
    return " ".join(first) + more


@define
class Actions:
    """What one rank does, in order, as columns of integers; row i of all columns is action i.

    A transfer along a far edge has the number of that edge as its `stage` (see
    `schedlang.schedule.layout`). `group` is 0 for an action that is issued alone. Neighbours with
    the same number above 0 are issued as one: a batch of transfers, or ops that overlap. `source`
    is the index of the action's place in `Schedule.spans`.
    """

    kind: "array[int]" = field(factory=lambda: array("b"))
    stage: "array[int]" = field(factory=lambda: array("i"))
    microbatch: "array[int]" = field(factory=lambda: array("i"))
    group: "array[int]" = field(factory=lambda: array("i"))
    source: "array[int]" = field(factory=lambda: array("i"))

    def add(
        self, kind: int, stage: int, microbatch: int, source: int, group: int = 0
    ) -> None:
        """Append one action."""
        self.kind.append(kind)
        self.stage.append(stage)
        self.microbatch.append(microbatch)
        self.source.append(source)
        self.group.append(group)

    def extend(
        self,
        kinds: Iterable[int],
        stages: Iterable[int],
        microbatches: Iterable[int],
        sources: Iterable[int],
        groups: Iterable[int],
    ) -> None:
        """Append actions, by their columns."""
        self.kind.extend(kinds)
        self.stage.extend(stages)
        self.microbatch.extend(microbatches)
        self.source.extend(sources)
        self.group.extend(groups)

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        first = map(self.word, range(min(len(self), SHOWN)))
        return f"<Actions {first_words(first, len(self))}>"

    def row(self, index: int) -> tuple[int, int, int, int, int]:
        """Action `index` as `add` takes it."""
        return (
            self.kind[index],
            self.stage[index],
            self.microbatch[index],
            self.source[index],
            self.group[index],
        )

    def at(self, index: int) -> Action:
        """What action `index` does."""
        return self.kind[index], self.stage[index], self.microbatch[index]

    def each(self) -> Iterator[Action]:
        """What each action does, in order."""
        return zip(self.kind, self.stage, self.microbatch, strict=True)

    def word(self, index: int) -> str:
        """Action `index` in torch's spelling."""
        return word(*self.at(index))

    def batch(self, index: int) -> range:
        """The actions issued together with action `index`: its group, or itself alone."""
        group = self.group[index]
        end = index + 1
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

    def issued_as(self, batches: Iterable[Sequence[int]]) -> "Actions":
        """Some of the actions, by their indices, in other batches or in another order.

        A batch gets a number that depends only on its neighbours, so that what repeats is numbered
        alike.
        """
        issued = Actions()
        before = 0
        for batch in filter(len, batches):
            # Two batches that are neighbours need numbers that differ, and no more than that: so
            # numbers go to and fro between 1 and 2, and what repeats has the same ones each time.
            #
            #    batches    F0   (s;r)  (s;r)   B0   (s;r)
            #    numbers    0    1 1    2 2     0    1 1
            before = 0 if len(batch) == 1 else 2 if before == 1 else 1
            for index in batch:
                issued.add(*self.row(index)[:4], before)
        return issued

    def text(self) -> str:
        """All actions in torch's spelling, separated by blanks.

        A batch of transfers is `(0SEND_F4;0RECV_B1)`, ops that overlap are `(0F4;7B1)OVERLAP_F_B`.
        """
        return " ".join(map(self.batch_text, self.batches()))

    def batch_text(self, batch: range) -> str:
        """Actions that are issued together, as `text` has them."""
        if len(batch) == 1:
            return self.word(batch.start)
        text = ";".join(map(self.word, batch))
        return f"({text}){'' if is_transfer(self.kind[batch.start]) else OVERLAP}"

    def compute(self) -> "Actions":
        """The actions that are not transfers."""
        return self.select(lambda kind: not is_transfer(kind))

    def without_collectives(self) -> "Actions":
        """The actions of microbatches, and optimizer steps."""
        return self.select(lambda kind: not is_collective(kind))

    def select(self, keeps: Callable[[int], bool]) -> "Actions":
        """The actions of the kinds for which `keeps` is true. What is left of a batch stays a
        batch.
        """
        return self.issued_as(
            [index for index in batch if keeps(self.kind[index])]
            for batch in self.batches()
        )
