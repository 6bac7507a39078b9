"""Damaged texts: programs and plan files that are no longer what they were are read or refused,
never crashed on.
"""

import json
import re
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from lark import Lark

from schedlang import compile, read_source
from tests.support import fuzzed
from tests.support.paths import GALLERY, ROOT
from tests.support.sizes import examples

TEXTS = [path.read_text() for path in GALLERY]
PLANS = [
    json.dumps(compile(read_source(path), {"ranks": 2, "microbatches": 4}).to_json())
    for path in GALLERY
    if path.stem in ("1f1b_explicit", "dualpipe", "zb_v")
]
#: Numbers at the edges: what is very large must be refused before it is done.
EDGES = ["0", "1", "2", "-1", "7", str(2**31), str(10**12), str(10**40)]
#: In seconds and bytes: far more than any of these texts needs, far less than without a bound.
TIME = timedelta(seconds=20)
MEMORY = 2**30


def damaged(texts: list[str], words: list[str]) -> st.SearchStrategy[str]:
    """One of these texts with a few of its words dropped, doubled, exchanged, or become others."""
    token = re.compile(r"\w+|[^\w\s]+|\s+")

    @st.composite
    def draw_text(draw: st.DrawFn) -> str:
        found = token.findall(draw(st.sampled_from(texts)))
        pool = st.sampled_from(words) | st.sampled_from(found) | st.text(max_size=3)
        for _ in range(draw(st.integers(1, 5))):
            at, to = (draw(st.integers(0, len(found) - 1)) for _ in range(2))
            match draw(
                st.sampled_from(
                    ["drop", "double", "exchange", "other", "other", "insert"]
                )
            ):
                case "drop":
                    found[at] = ""
                case "double":
                    found.insert(to, found[at])
                case "exchange":
                    found[at], found[to] = found[to], found[at]
                case "other":
                    found[at] = draw(pool)
                case "insert":
                    found.insert(at, draw(pool))
        return "".join(found)

    return draw_text()


@examples(120, deadline=TIME)
@given(
    damaged(
        TEXTS,
        [
            *EDGES,
            "{",
            "}",
            "(",
            ")",
            "..",
            "next",
            "rank",
            "stage",
            "let",
            "fn",
            "if",
            "W",
            "F",
            "U",
        ],
    )
)
@pytest.mark.slow
def test_damaged_programs(text: str) -> None:
    fuzzed.program(text.encode())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * MEMORY


GRAMMAR = (ROOT / "grammars" / "sched.lark").read_text()


@examples(40, deadline=TIME)
@given(from_lark(Lark(GRAMMAR, parser="lalr", start="schedule"), start="schedule"))
def test_programs_of_the_grammar(text: str) -> None:
    fuzzed.program(text.encode())


@examples(150, deadline=TIME)
@given(
    damaged(
        PLANS,
        [*EDGES, "null", '"', "[", "]", "{", "}", ",", "0F0", "1RECV_F0", "U", ";"],
    )
)
def test_damaged_plans(text: str) -> None:
    fuzzed.plan(text.encode())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * MEMORY


@examples(100)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    fuzzed.program(data)
    fuzzed.plan(data)


#: Reads a plan twice, and says the second time what Python executes, imports, starts or opens for
#: it.
WATCHED = """
import sys
from schedlang import CompileError, read_plan

def watch(event, arguments):
    acts = event.partition(".")[0] in ("compile", "exec", "import", "open", "os", "pickle", "socket", "subprocess")
    if watching and acts and not (event == "open" and arguments[:2] == (sys.argv[1], "r")):
        print(event, arguments)

watching = False
sys.addaudithook(watch)
for watching in (False, True):
    try:
        read_plan(sys.argv[1])
    except CompileError as error:
        str(error)
"""


@pytest.mark.slow
def test_a_plan_file_is_data(tmp_path: Path) -> None:
    """Reading one executes nothing and opens nothing else, whatever names and texts are in it."""
    for number, text in enumerate(
        [*PLANS, PLANS[0].replace("schedule ", 'schedule import "/etc/passwd" ', 1)]
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        command = [sys.executable, "-c", WATCHED, str(path)]
        assert (
            subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            == ""
        )
