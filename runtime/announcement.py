"""The announcement that the rank of a first stage sends to all other ranks at the start of a step.

Only that rank has the inputs. Other ranks need a few facts about them, which it sends in one
message, or in two if microbatches differ:

    numbers    pipeline and plan, rows, checksums of the batch, the length of the rest, and the form
               if all microbatches are alike
    the rest   a form for each microbatch, and the weights of microbatches and slices in the loss
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

#: The tensor of numbers begins with two numbers that identify the pipeline and the plan.
NAME = 2


@frozen
class Rows:
    """The number of rows of a batch, and of a microbatch; the last microbatch may have fewer. In a
    list of microbatches, each counts as a row.
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
    """The weight of a microbatch's loss in its update, over all replicas, and of a slice's loss in
    its microbatch, where 1.0 is the average. There is an entry for each unit that passes through a
    stage, a microbatch or a slice; or none if all weights are equal.
    """

    of_microbatches: tuple[float, ...] = ()
    of_slices: tuple[float, ...] = ()

    def of(self, unit: int) -> float:
        """The factor of a unit's loss, besides the common scale."""
        return self.of_microbatch(unit) * self.of_slice(unit)

    def of_microbatch(self, unit: int) -> float:
        """The weight of the unit's microbatch."""
        return self.of_microbatches[unit] if self.of_microbatches else 1.0

    def of_slice(self, unit: int) -> float:
        """The weight of the unit in its microbatch."""
        return self.of_slices[unit] if self.of_slices else 1.0


@frozen
class Announcement:
    """Facts about the batch of a step, or of a round of an evaluation.

    `forms` are numbers, one for all microbatches (or slices), or one for each. Equal numbers mean
    inputs of the same shapes and types. `checksums` are those of the inputs and of the targets on
    the rank of the first stage, 0 without any.
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
        """An empty tensor for the rest; None if the numbers say that there is no rest."""
        forms, microbatches, slices = numbers[NAME + 5 : NAME + 8].tolist()
        size = (forms if forms > 1 else 0) + microbatches + slices
        return torch.empty(size, dtype=torch.float64) if size else None

    @classmethod
    def unpack(cls, numbers: Tensor, rest: Tensor | None) -> "Announcement":
        """Build the announcement from the tensors that were received."""
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
