"""Writes plan files."""

from pathlib import Path

from schedlang.diagnostics.wrong_arguments import check_type
from schedlang.files.reading import check_is_path
from schedlang.files.writing import write_bytes
from schedlang.plan.plan import Plan


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file; CompileError when it cannot be written, TypeError for what is no plan or
    no path.
    """
    check_type("plan", plan, Plan, "a Plan, of `compile` or `read_plan`")
    check_is_path(path)
    write_bytes(plan.encode(), path)
