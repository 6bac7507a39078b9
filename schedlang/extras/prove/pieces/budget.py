"""A limit for the work of a proof. It counts ops and not seconds, so what is proved does not depend
on the machine.
"""

from typing import ClassVar

from attrs import define

from schedlang.extras.prove.pieces.linear import NotLinear


class Spent(NotLinear):
    """The budget is used up."""


@define
class Budget:
    """The number of ops that a proof has generated so far, and its limit."""

    #: The most ops to generate in all orders, symbolic ones included: a few minutes of work.
    MOST: ClassVar[int] = 5_000_000

    spent: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether the limit is reached."""
        return self.spent > self.MOST

    def spend(self, ops: int) -> None:
        """Count ops that are about to be generated; Spent if they exceed the limit."""
        self.spent += ops
        if self.is_spent:
            message = (
                f"it takes more than {self.MOST:,} ops; prove it for fewer ranks, or for any "
                "number of them with `--for ranks=any`"
            )
            raise Spent(message)
