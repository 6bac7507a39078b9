"""Which tests the targets of the Makefile run: together all of them, whatever is added."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from attrs import frozen

from tests.support.paths import ROOT
from tests.support.selection import (
    COLLECTED,
    family_of,
    in_part,
    part,
    room_of,
    targets_of,
)


@frozen
class Command:
    """A call of pytest in the Makefile."""

    expression: Expression
    paths: list[Path]

    def takes(self, markers: set[str]) -> bool:
        """Whether it selects tests that have these markers."""
        return self.expression.evaluate(lambda name, **_: name in markers)

    def runs(self, item: pytest.Item) -> bool:
        """Whether it selects this test."""
        return self.takes({marker.name for marker in item.iter_markers()}) and any(
            item.path.is_relative_to(path) for path in self.paths
        )


def commands_of(*targets: str) -> list[Command]:
    """The calls of pytest that make would run for these targets."""
    environment = {
        name: each for name, each in os.environ.items() if not name.startswith("MAKE")
    }
    command = ["make", "--dry-run", "--always-make", *targets]
    recipes = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    ).stdout
    found = []
    for line in re.split(r";|&&|\n", recipes.replace("\\\n", " ")):
        if re.match(r"\s*(\w+=\S+ )?\S+/bin/pytest ", line):
            words = shlex.split(line)
            chosen = Expression.compile(words[words.index("-m") + 1])
            paths = [ROOT / word for word in words if word.startswith("tests")]
            found.append(Command(chosen, paths or [ROOT / "tests"]))
    return found


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests of this run of pytest, also those that it leaves out."""
    return request.config.stash[COLLECTED]


def test_no_test_is_lost(
    collected: list[pytest.Item], pytestconfig: pytest.Config
) -> None:
    """`make test` or `make large` runs it, and of those that hypothesis makes examples for, both;
    or the target of its own.
    """
    (core,) = commands_of("test")
    (large,) = commands_of("large")
    targets = targets_of(pytestconfig.getini("markers"))
    own = [
        command
        for target in targets.values()
        for command in commands_of(*target.split())
    ]
    for item in collected:
        runs = [core.runs(item), large.runs(item)]
        if item.get_closest_marker("own"):
            assert not any(runs), item.nodeid
            assert any(command.runs(item) for command in own), item.nodeid
        else:
            both = bool(item.get_closest_marker("hypothesis")) and core.runs(item)
            assert sum(runs) == 1 + both, item.nodeid


def test_every_target_of_a_marker_runs_it(pytestconfig: pytest.Config) -> None:
    targets = targets_of(pytestconfig.getini("markers"))
    assert targets
    for marker, target in targets.items():
        assert any(
            command.takes({marker, "own", "processes"})
            for command in commands_of(*target.split())
        ), marker


def test_the_core_has_a_test_of_every_room_and_of_every_quick_function(
    collected: list[pytest.Item],
) -> None:
    usual = [
        item
        for item in collected
        if not item.get_closest_marker("own") and not item.get_closest_marker("large")
    ]
    chosen = [item for item in usual if item.get_closest_marker("core")]
    assert {room_of(item) for item in usual} == {room_of(item) for item in chosen}
    families = {family_of(item) for item in usual}
    assert {each for each in families if "::" in each} <= {*map(family_of, chosen)}


def test_parts_have_each_test_once(collected: list[pytest.Item]) -> None:
    parts = [part(f"{number}/7") for number in range(100, 107)]
    for item in collected:
        assert sum(in_part(item, *each) for each in parts) == 1


def selected(path: str, *options: str) -> list[str]:
    """The tests of a folder or file that pytest selects with these options."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", path]
    run = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_pytest_runs_the_part_that_it_is_told() -> None:
    parts = [selected("tests/files", "--part", f"{number}/2") for number in (4, 5)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(selected("tests/files"))


#: Tests that draw plans, models and loops at random, and hold them against another way to decide.
DRAWN = {
    "weights that travel, on every transport, and peaks": (
        "tests/proof/test_transports.py",
        r"test_verdicts_are_those_of_every_interleaving\[\d+-travelling\]",
    ),
    "tensors between stages, of which some have a gradient": (
        "tests/models/test_between.py",
        r"test_a_stage_is_given_gradients_where_it_has_them_alone\[\d+\]",
    ),
    "scalers, overflows, weights that are replaced, losses with weights": (
        "tests/models/test_loops.py",
        r"test_a_loop_trains_as_alone\[\d+\]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "blocks"), DRAWN.values(), ids=DRAWN)
def test_the_core_has_one_block_of_what_is_drawn_and_large_has_more(
    path: str, blocks: str
) -> None:
    core, large = (
        [test for test in selected(path, "-m", chosen) if re.search(blocks, test)]
        for chosen in ("core and not large", "large")
    )
    assert len(core) == 1
    assert len(large) >= 1
