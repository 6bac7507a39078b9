"""Wrong scripts: every wrong argument is a TypeError or ValueError that says which argument it is,
what was given, and what is wanted; and it comes at once, before any work is done.

`scripts.txt` has a call, and below it the error with the parts that its message must have.
"""

import builtins
import re
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang import (
    Builder,
    CompileError,
    Plan,
    Source,
    compile,
    read_source,
    simulate,
    write_plan,
)
from tests.support.paths import PROGRAMS

FILE = PROGRAMS / "1f1b.sched"
TEXT = FILE.read_text()
#: By the kind of the calls, each call with its error.
MISTAKES: dict[str, list[tuple[str, str]]] = {
    kind: re.findall(r"^(\S.*)\n    (.*)$", calls, re.M)
    for kind, calls in re.findall(
        r"^# (\w+)\n((?:.+\n)+)",
        Path(__file__).with_name("scripts.txt").read_text(),
        re.M,
    )
}


@cache
def plan() -> Plan:
    """A plan on two ranks."""
    return compile(FILE, {"ranks": 2, "microbatches": 2})


def builder(**options: Any) -> Builder:
    """A Builder on two ranks."""
    return Builder(**{"ranks": 2, "microbatches": 4} | options)


def nested(b: Builder, outer: str, inner: str) -> None:
    """One `with` within another."""
    with getattr(b, outer)(), getattr(b, inner)():
        pass


def within(b: Builder, group: str, *methods: str) -> None:
    """Ops within a group."""
    with getattr(b, group)():
        for method in methods:
            getattr(b, method)(0, 0)


def of_compiler() -> dict[str, Any]:
    """The names of calls of the compiler and of a Builder."""
    public = {name: getattr(schedlang, name) for name in schedlang.__all__}
    own = {"schedlang": schedlang, "plan": plan(), "FILE": FILE, "TEXT": TEXT}
    helpers = {"builder": builder, "nested": nested, "within": within}
    return public | own | helpers | {"StringIO": StringIO}


def of_runtime() -> dict[str, Any]:
    """The names of calls of the runtime."""
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    import torch
    from torch import nn

    from schedlang import runtime

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def pipeline(
        plan: Any, stages: Any = None, loss_fn: Any = None, **options: Any
    ) -> Any:
        stages = {0: model()} if stages is None else stages
        return runtime.Pipeline(plan, stages, loss_fn, **options)

    def split(*given: Any, **options: Any) -> Any:
        return runtime.split(model(), *given, **options)

    def generate(*given: Any) -> Any:
        # The arguments are checked before any work, so there need be no pipeline.
        return runtime.Decoding.generate(None, *given)  # type: ignore[arg-type]

    own = {"nn": nn, "runtime": runtime, "model": model}
    own |= {"pipeline": pipeline, "split": split, "generate": generate}
    return of_compiler() | own | {"tokens": torch.ones(2, 3, dtype=torch.long)}


def each(kind: str) -> pytest.MarkDecorator:
    """A test for each call of a kind."""
    calls = [call for call, _ in MISTAKES[kind]]
    return pytest.mark.parametrize(("call", "error"), MISTAKES[kind], ids=calls)


def refuses(call: str, error: str, names: dict[str, Any]) -> None:
    kind, _, told = error.partition(": ")
    expected = CompileError if kind == "CompileError" else getattr(builtins, kind)
    with pytest.raises(expected) as refused:
        eval(call, names)
    message = str(refused.value)
    assert [part for part in told.split(" … ") if part not in message] == [], message


@each("compiler")
def test_of_the_compiler(call: str, error: str) -> None:
    refuses(call, error, of_compiler())


@each("builder")
def test_of_the_builder(call: str, error: str) -> None:
    refuses(call, error, of_compiler())


@each("runtime")
def test_of_the_runtime(call: str, error: str) -> None:
    refuses(call, error, of_runtime())


def test_a_program_is_a_path_a_text_or_a_source(tmp_path: Path) -> None:
    """`compile` and `simulate` take all three, and `simulate` plans and their files."""
    params = {"ranks": 2, "microbatches": 3}
    expected = compile(read_source(FILE), params)
    for program in (str(FILE), FILE, TEXT, Source(str(FILE), TEXT), "1f1b"):
        assert compile(program, params).ranks == expected.ranks
        assert simulate(program, params=params).timeline == simulate(expected).timeline
    write_plan(expected, tmp_path / "plan.json")
    assert simulate(tmp_path / "plan.json").timeline == simulate(expected).timeline
    assert simulate(expected, transport="blocking").transport == "blocking"
