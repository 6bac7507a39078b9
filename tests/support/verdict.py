"""What the verifier says of a schedule of ops."""

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.lowering import lower
from schedlang.proof.prove import prove
from schedlang.schedule.schedule import Schedule


def proved(schedule: Schedule) -> Schedule | None:
    """The schedule with its transfers, if it is proved; None if it is refused."""
    try:
        plan = lower(schedule)
        prove(plan)
    except CompileError:
        return None
    return plan
