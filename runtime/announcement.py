"""What the rank of a first stage tells the other ranks at the start of a step.

It alone has the inputs, and what the others need to know of them goes in one message, or two where
microbatches differ:

    numbers    pipeline and plan, rows, checksums of the batch, how many of the rest ─► which
               form, if all are alike
    the rest   a form for each microbatch, how much each counts, and each slice
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

#: The tensors of numbers have the name of the step's pipeline and plan before them, two numbers.
NAME = 2


@frozen
class Rows:
    """The rows of a batch: all of them, and those of a microbatch, of which the last may have
    fewer. A list of microbatches counts each as a row.
    """

    total: int
    of_microbatch: int
    is_list: bool = False

    def __str__(self) -> str:
        if self.is_list:
            return f"as a list of {self.total} microbatches"
        return f"of {self.total} rows, {self.of_microbatch} a microbatch"


@frozen
class Shares:
    """How much the loss of a microbatch counts beside the others of its update, in all replicas,
    and that of a slice beside the others of its microbatch: 1.0 is as much as they do on average.
    By what passes through a stage, microbatches or slices; empty where all count the same.
    """

    of_microbatches: tuple[float, ...] = ()
    of_slices: tuple[float, ...] = ()

    def of(self, unit: int) -> float:
        """What a loss is to be multiplied by, beside the scale that all have."""
        return self.of_microbatch(unit) * self.of_slice(unit)

    def of_microbatch(self, unit: int) -> float:
        """How much its microbatch counts."""
        return self.of_microbatches[unit] if self.of_microbatches else 1.0

    def of_slice(self, unit: int) -> float:
        """How much it counts in its microbatch."""
        return self.of_slices[unit] if self.of_slices else 1.0


@frozen
class Announcement:
    """What passes through a pipeline in a step, or a round of an evaluation.

    `forms` are numbers: microbatches, or slices, whose inputs have the same shapes and types have
    the same one. There is one for all, or one for each. `checksums` are those of the inputs and of
    the targets that the rank of the first stage was given, 0 where there is none.
    """

    rows: Rows
    forms: tuple[int, ...]
    shares: Shares = Shares()
    checksums: tuple[int, int] = (0, 0)

    def pack(self, name: Tensor) -> list[Tensor]:
        """The tensors to send."""
        shares = self.shares
        rest = [*shares.of_microbatches, *shares.of_slices]
        if len(self.forms) > 1:
            rest = [*self.forms, *rest]
        numbers = [
            self.rows.total,
            self.rows.of_microbatch,
            self.rows.is_list,
            *self.checksums,
            len(self.forms),
            len(shares.of_microbatches),
            len(shares.of_slices),
            self.forms[0],
        ]
        tensors = [torch.cat([name, torch.tensor(numbers)])]
        return [*tensors, torch.tensor(rest, dtype=torch.float64)] if rest else tensors

    @staticmethod
    def first_room() -> Tensor:
        """An empty tensor for the numbers."""
        return torch.empty(NAME + 9, dtype=torch.int64)

    @staticmethod
    def rest_room(numbers: Tensor) -> Tensor | None:
        """An empty tensor for the rest, if numbers say that it comes."""
        forms, microbatches, slices = numbers[NAME + 5 : NAME + 8].tolist()
        size = (forms if forms > 1 else 0) + microbatches + slices
        return torch.empty(size, dtype=torch.float64) if size else None

    @classmethod
    def unpack(cls, numbers: Tensor, rest: Tensor | None) -> "Announcement":
        """What was sent."""
        total, of_microbatch, is_list, *of_batch, forms, microbatches, _, form = (
            numbers[NAME:].tolist()
        )
        numbers_of_forms: tuple[int, ...] = (form,)
        # The rest is sent as doubles, which hold these numbers exactly.
        values: Sequence[float] = () if rest is None else rest.tolist()
        if forms > 1:
            numbers_of_forms = tuple(map(int, values[:forms]))
            values = values[forms:]
        shares = Shares(tuple(values[:microbatches]), tuple(values[microbatches:]))
        rows = Rows(total, of_microbatch, bool(is_list))
        of_inputs, of_targets = of_batch
        return cls(rows, numbers_of_forms, shares, (of_inputs, of_targets))
