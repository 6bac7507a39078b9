"""What is being done, for whoever waits for it: the compiler says it, and a command shows it."""

from attrs import define


@define
class Activity:
    """What is being done; and if that is known, how much of it is done, of how much in all."""

    what: str = ""
    done: int = 0
    total: int = 0


#: The one of this process, which another thread may look at.
CURRENT = Activity()


def doing(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done from now on; it costs next to nothing."""
    CURRENT.what = what
    CURRENT.done = done
    CURRENT.total = total
