"""Why an execution takes as long as it does, for all who tell of it: worked out once."""

from functools import cached_property

from attrs import frozen

from schedlang.proof.execution import Execution
from schedlang.report.bubbles.attribution import IdleTime, bubbles
from schedlang.report.bubbles.critical_path import Segment, critical_path
from schedlang.report.bubbles.op_waits import Waits, waits
from schedlang.report.bubbles.reasons import Gaps, Reasons, all_gaps, reasons


@frozen(eq=False)
class Account:
    """What an execution waited for, each part as soon as somebody asks for it."""

    execution: Execution

    @cached_property
    def waits(self) -> Waits:
        """What each op waited for."""
        execution = self.execution
        return waits(execution.schedule, execution.timeline, execution.costs)

    @cached_property
    def path(self) -> list[Segment]:
        """The critical path."""
        return critical_path(self.waits)

    @cached_property
    def gaps(self) -> Gaps:
        """All times in which ranks wait."""
        return all_gaps(self.waits)

    @cached_property
    def behind(self) -> Reasons:
        """What is behind the waits of ranks."""
        return reasons(self.waits, self.gaps)

    @cached_property
    def idle(self) -> IdleTime:
        """The idle time of all ranks, by its causes."""
        return bubbles(self.waits, self.gaps, self.behind, self.execution.costs)
