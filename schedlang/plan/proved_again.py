"""Plans from files that may come from anywhere: each is proved again."""

from pathlib import Path
from typing import Any

from schedlang.files.reading import check_is_path, read_bytes, shown
from schedlang.plan.file import decode
from schedlang.plan.plan import Plan
from schedlang.plan.reader import Reader, decoded
from schedlang.proof.repetition import prove_for_all_updates


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, proved again; CompileError says what is wrong with it, TypeError names
    what is no path.
    """
    check_is_path(path)
    document = decoded(path, lambda: decode(read_bytes(path)))
    return plan_in(shown(path), document)


def plan_in(path: str | Path, document: Any) -> Plan:
    """The plan in a document that was read from a file, proved again; CompileError says what is
    wrong with it.
    """
    reader = Reader(path, document)
    plan = reader.plan(reader.actions)
    prove_for_all_updates(plan, plan.kernels)
    # Of what was changed by hand, this says least: it comes last.
    reader.check_lines()
    return plan
