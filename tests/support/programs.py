"""Plans of the programs of the gallery."""

from pathlib import Path

from schedlang import Plan, Source, compile, write_plan
from tests.support.paths import PROGRAMS


def plan_of(name: str, **params: int) -> Plan:
    """The plan of a program, with some of its parameters."""
    return compile(name, params)


def plan_file(folder: Path, name: str, **params: int) -> Path:
    """The same in a file of a folder; messages name its lines as `1f1b.sched:8`."""
    program = PROGRAMS / f"{name}.sched"
    path = folder / "plan.json"
    write_plan(compile(Source(program.name, program.read_text()), params), path)
    return path
