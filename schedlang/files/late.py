"""Modules that are imported when something in them is first needed.

What stands at the head of a module is paid for by all who import it: by each rank of a training
that opens its plan, and by each command. A module that few of them need is loaded where it is used.
"""

from importlib import import_module
from typing import Any


def load(module: str) -> Any:
    """A module by its whole name, imported now if nobody has done so before."""
    return import_module(module)
