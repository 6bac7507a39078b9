"""The door to `schedlang.extras`: its modules by their names, since each may be left out."""

from importlib import import_module
from typing import Any

from schedlang.cli.usage import UsageError


def extra(name: str) -> Any:
    """A module of `schedlang.extras`; UsageError where it was left out."""
    module = f"schedlang.extras.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Not a package that the module itself lacks.
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"this needs `{module}`, which is not installed") from None
