"""How much a proof looks at before it says that it found none. It is no time, so that what is
proved does not depend on the machine.
"""

from typing import ClassVar

from attrs import define

from schedlang.extras.prove.pieces.linear import NotLinear


class Spent(NotLinear):
    """There is no more to be spent."""


@define
class Budget:
    """What may be looked at, and how much has been."""

    #: How many ops of all orders that are made, for sizes and for any n: some minutes' work.
    MOST: ClassVar[int] = 5_000_000

    spent: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether there is nothing left."""
        return self.spent > self.MOST

    def spend(self, ops: int) -> None:
        """Count what is about to be looked at; Spent if it is too much."""
        self.spent += ops
        if self.is_spent:
            message = (
                f"it takes more than {self.MOST:,} ops; prove it for fewer ranks, or for any "
                "number of them with `--for ranks=any`"
            )
            raise Spent(message)
