"""Plans of the programs of the gallery."""

from pathlib import Path

from schedlang import Plan, compile, write_plan


def plan_of(name: str, **params: int) -> Plan:
    """The plan of a program, with some of its parameters."""
    return compile(name, params)


def plan_file(folder: Path, name: str, **params: int) -> Path:
    """The same in a file of a folder."""
    path = folder / "plan.json"
    write_plan(plan_of(name, **params), path)
    return path
