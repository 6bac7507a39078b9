"""What compiling a large schedule takes, done for all its actions at once.

Structure, communication, proof and times of a schedule as the field writes them need no look at one
action after the other: most of it is arithmetic on columns, and what has an order, one pass over
numbers. Each module here does the work of another one, with the same results: `structure.py` that
of `schedlang.proof.structure`, `co_issue.py` that of `schedlang.lowering.co_issue`, `execution.py`
that of `schedlang.proof.machine`. What is unusual, and all that is wrong, it leaves to these, which
can explain it.
"""

from schedlang.schedule.schedule import Schedule

#: From how many actions on this is worth while: the import of numpy alone takes as long as a small
#: schedule.
LARGE = 2000


def is_large(schedule: Schedule) -> bool:
    """Whether a schedule has so many actions."""
    return sum(map(len, schedule.ranks)) >= LARGE
