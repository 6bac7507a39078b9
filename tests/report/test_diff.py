"""`schedc compare --diff`: with a difference, and what one schedule does, it is known what the other does."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from schedlang import Plan, Schedule, compile
from schedlang.diagnostics.style import PLAIN
from schedlang.extras.difference.difference import (
    Difference,
    differ,
    rank_differences,
    side_of,
)
from schedlang.extras.difference.difference_text import difference_text
from schedlang.extras.difference.document import difference_json
from schedlang.lowering import lower
from schedlang.report.alignment import Change, align
from schedlang.schedule.costs import UNIT
from tests.support.commands import exit_code, line_words, output
from tests.support.damage import changed
from tests.support.paths import GALLERY, GOLDEN, ROOT
from tests.support.sizes import examples
from tests.support.strategies import schedules

PAIRS = {
    "halves": "1f1b zb_h1 --compute",
    "transfers": "1f1b zb_h1 -p microbatches=4",
    "placement": "1f1b_v interleaved_1f1b --compute -p microbatches=4",
    "overlap": "interleaved_1f1b interleaved_overlap --compute",
    "pipelines": "chimera dualpipe --compute",
    "microbatches": "1f1b 1f1b -p ranks=2 -a microbatches=4 -b microbatches=6",
    "ranks": "1f1b interleaved_1f1b --compute -b ranks=2 -p microbatches=4",
    "costs": "gpipe 1f1b --compute -p microbatches=32 --p2p-time 0.2",
}


@pytest.fixture
def diff(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Run the command where the programs are; its exit code and its output."""
    monkeypatch.chdir(ROOT)

    def run(*line: object) -> tuple[int, str]:
        names = {path.stem: f"programs/{path.name}" for path in GALLERY}
        code = exit_code("diff", *(names.get(word, word) for word in line_words(*line)))
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", PAIRS)
def test_text_and_document(
    name: str, diff: Callable[..., Any], golden: Callable[[str, Path], None]
) -> None:
    code, text = diff(PAIRS[name])
    assert code == 1
    golden(text, GOLDEN / "diff" / f"{name}.txt")
    code, text = diff(PAIRS[name], "--json")
    assert code == 1
    # A line for each run, for those who read what changed.
    document = json.loads(text)
    lines = [json.dumps(run) for rank in document["ranks"] for run in rank.pop("runs")]
    golden(
        "\n".join([json.dumps(document, indent=1), *lines, ""]),
        GOLDEN / "diff" / f"{name}.json",
    )


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_a_schedule_does_not_differ_from_itself(
    path: Path, diff: Callable[..., Any]
) -> None:
    code, text = diff(path.stem, path.stem)
    assert code == 0
    assert text.endswith("\n\nequal: all ranks do the same, in the same order\n")
    code, text = diff(path.stem, path.stem, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["equal"]
    assert document["a"] == document["b"]
    assert {run["change"] for rank in document["ranks"] for run in rank["runs"]} == {
        "equal"
    }
    assert {len(rank["runs"]) for rank in document["ranks"]} == {1}


def test_a_plan_and_a_table_of_a_program_are_equal_to_it(
    tmp_path: Path,
    diff: Callable[..., Any],
) -> None:
    plan = str(tmp_path / "plan.json")
    table = str(tmp_path / "table.csv")
    assert exit_code("compile programs/interleaved_1f1b.sched -o", plan) == 0
    output("export", plan, "--to torch-csv -o", table)
    for pair in (
        ("interleaved_1f1b", plan),
        (plan, table),
        (table, "interleaved_1f1b"),
    ):
        assert diff(*pair)[0] == 0
    assert diff(table, "interleaved_1f1b", "-p", "microbatches=4")[0] == 1


def test_what_makes_two_schedules_differ_apart_from_their_order(
    diff: Callable[..., Any],
) -> None:
    """The same actions on another transport, and at other costs that the program has."""
    plan = compile("1f1b")
    for changes, name in (
        ({"transport": "gloo"}, "transport"),
        ({"costs": evolve(UNIT, update_times=(1.0,))}, "costs"),
    ):
        found = differ(
            side_of("a", plan, UNIT), side_of("b", evolve(plan, **changes), UNIT)
        )
        assert not found.is_equal
        assert [setting.name for setting in found.settings] == [name]
        assert all(rank.is_equal for rank in found.ranks)
    found = differ(
        *(side_of("", compile(name), UNIT) for name in ("pipedream_2bw", "unet_1f1b"))
    )
    assert {"weights", "skips"} <= {setting.name for setting in found.settings}


def test_exit_codes(
    tmp_path: Path, diff: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """2 where there are no two schedules to compare, as diff(1) has it."""
    wrong = tmp_path / "wrong.sched"
    wrong.write_text(
        "schedule wrong { param ranks = 1 param microbatches = 1 rank r { B(0) F(0) } }"
    )
    assert exit_code("diff 1f1b", str(wrong)) == 2
    assert "error[order]" in capsys.readouterr().err
    usage = {
        ("1f1b", "gpipe", "-p", "chunks=2"): "no program has a parameter `chunks`",
        (
            "1f1b",
            "gpipe",
            "-p",
            "ranks=2",
            "-b",
            "ranks=3",
        ): "`ranks` has a -p and a -b",
        ("-", "-"): "`-` stands twice",
        ("1f1b",): "--diff compares two schedules",
    }
    for arguments, message in usage.items():
        with pytest.raises(SystemExit) as caught:
            exit_code("diff", *arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_colours(diff: Callable[..., Any]) -> None:
    plain = diff("1f1b", "zb_h1")[1]
    painted = diff("1f1b", "zb_h1", "--color", "always")[1]
    assert "\x1b[31m- 0B0\x1b[0m" in painted
    assert "\x1b[32m+ 0I0 0W0\x1b[0m" in painted
    for code in ("\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"):
        painted = painted.replace(code, "")
    assert painted == plain


orders = st.lists(st.integers(0, 12), unique=True)


@given(orders, orders)
def test_as_few_as_can_be_have_moved(before: list[int], after: list[int]) -> None:
    """Every place is in one run, and what is equal is as long as any common subsequence."""
    runs = align(before, after)
    assert sorted(place for run in runs for place in run.before) == list(
        range(len(before))
    )
    assert [place for run in runs for place in run.after] == list(range(len(after)))
    for run in runs:
        there = [before[place] for place in run.before]
        here = [after[place] for place in run.after]
        assert there == here or not there or not here
        if run.change is Change.REMOVED:
            assert not set(there) & set(after)
        if run.change is Change.ADDED:
            assert not set(here) & set(before)
    equal = [
        before[place]
        for run in runs
        if run.change is Change.EQUAL
        for place in run.before
    ]
    assert len(equal) == longest_common(tuple(before), tuple(after))
    assert equal == [thing for thing in after if thing in equal]


@cache
def longest_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The length of a longest common subsequence, from its definition."""
    if not first or not second:
        return 0
    if first[0] == second[0]:
        return 1 + longest_common(first[1:], second[1:])
    return max(longest_common(first[1:], second), longest_common(first, second[1:]))


@pytest.mark.parametrize("step", [1, -1, 7])
def test_a_hundred_thousand_actions_are_aligned_in_a_moment(step: int) -> None:
    """Equal, turned round and shuffled: by comparisons of all pairs, these would take hours."""
    count = 100_003
    before = range(count)
    after = [place * step % count for place in before]
    runs = align(before, after)
    assert sum(run.size for run in runs) == count
    if step == 1:
        assert [run.change for run in runs] == [Change.EQUAL]


def words(schedule: Schedule, rank: int) -> list[str]:
    """What a rank does, as `schedc view --actions` prints it."""
    return (
        schedule.names.text(schedule.ranks[rank]).split()
        if rank < len(schedule.ranks)
        else []
    )


def members(word: str) -> list[str]:
    """The actions of a word: those between the outer brackets, or it alone."""
    if not word.startswith("("):
        return [word]
    return word[1 : word.rindex(")")].split(";")


def applied(before: list[str], rank: dict[str, Any]) -> list[str]:
    """What a rank of the other schedule does, by the document alone."""
    actions = [action for word in before for action in members(word)]
    after: dict[int, str] = {}
    for run in rank["runs"]:
        taken = actions[slice(*run["a"])]
        if run["change"] == "removed":
            assert taken == run["actions"]
            continue
        named = run["actions"] if run["change"] == "added" else taken
        after.update(zip(range(*run["b"]), named, strict=True))
    batches = {word for word in before if word.startswith("(")}
    batches = (batches - set(rank["apart"])) | set(rank["together"])
    batch_of = {members(word)[0]: word for word in batches}
    found = []
    place = 0
    while place < len(after):
        word = batch_of.get(after[place], after[place])
        assert members(word) == [
            after[each] for each in range(place, place + len(members(word)))
        ]
        found.append(word)
        place += len(members(word))
    return found


def check_difference(before: Plan, after: Plan) -> Difference:
    found = differ(side_of("a", before, UNIT), side_of("b", after, UNIT))
    for rank in json.loads(json.dumps(difference_json(found)))["ranks"]:
        number = rank["rank"]
        assert applied(words(before, number), rank) == words(after, number)
        assert rank["equal"] == (words(before, number) == words(after, number))
    assert difference_text(found, PLAIN)
    return found


def plan_of(schedule: Schedule) -> Plan:
    return Plan.of(lower(schedule))


@examples(50)
@given(schedules(), schedules())
def test_a_difference_applied_to_one_random_schedule_gives_the_other(
    first: Schedule, second: Schedule
) -> None:
    before = plan_of(first)
    after = plan_of(second)
    found = check_difference(before, after)
    back = check_difference(after, before)
    assert found.is_equal == back.is_equal
    assert check_difference(before, before).is_equal


@cache
def compiled(name: str) -> Plan:
    return compile(name)


@examples(40)
@given(st.sampled_from(GALLERY), st.sampled_from(GALLERY))
def test_a_difference_applied_to_one_program_gives_the_other(
    first: Path, second: Path
) -> None:
    check_difference(compiled(first.stem), compiled(second.stem))


@examples(100)
@given(st.sampled_from(GALLERY), st.integers(0, 2**32))
def test_what_was_changed_is_found(path: Path, seed: int) -> None:
    """One action dropped, moved, swapped, made another or issued otherwise, on one rank."""
    plan = compiled(path.stem)
    damaged = changed(plan, random.Random(seed))
    ranks = range(len(plan.ranks))
    # What is doubled is no schedule: in one, an action stands once.
    of_rank = [members(word) for rank in ranks for word in words(damaged, rank)]
    actions = [action for batch in of_rank for action in batch]
    assume(len(set(actions)) == len(actions))
    differing = [rank for rank in ranks if words(plan, rank) != words(damaged, rank)]
    found = rank_differences(plan, damaged)
    assert [each.rank for each in found if not each.is_equal] == differing


@pytest.mark.parametrize("cost", ["cost F(s, m)", "memory F(s, m)"])
def test_costs_by_microbatch_are_lists_in_brackets(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = "rank r { for m in 0 .. 2 { F(m) }  for m in 0 .. 2 { B(m) } }"
    paths = []
    for name, by in (("before", "1"), ("after", "1 + m")):
        path = tmp_path / f"{name}.sched"
        path.write_text(
            f"schedule s {{ param ranks = 2  param microbatches = 2  {cost} = {by}  {order} }}"
        )
        paths.append(str(path))
    assert exit_code("diff", *paths) == 1
    assert "[1,2],[1,2]" in capsys.readouterr().out
