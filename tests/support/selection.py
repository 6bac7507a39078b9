"""Which tests `make test` runs, and which `make large`.

    all tests ─┬─ own     another target of the Makefile runs them: in a browser, in node, for hours
               ├─ core    `make test`
               └─ others  `make large`, whole or in parts; .ci/run runs the part of its commit

The core has some of the cases of each quick function, and some of those tests of a room that start
processes or take seconds. A hash of their names chooses, so they are the same every time, and a new
test needs no list. A test that is marked `core` is always chosen, one that is marked `large` never.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from zlib import crc32

import pytest

#: The core has one in so many of the cases of a function.
SHARE = 8
#: Of a room, which is a folder of tests, it has one in so many of those with one of these markers.
SHARE_OF_SLOW = 24
SLOW = ("processes", "slow")

#: All tests, before `-m` and `--part` choose.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def targets_of(markers: Iterable[str]) -> dict[str, str]:
    """The markers of tests that `make test` and `make large` leave out, and the target that runs
    them. pyproject.toml describes such a marker as `NAME: WHAT; make TARGET`.
    """
    found = [
        re.match(r"(\w+): .*; make (\S+(?: WHAT=\S+)?)$", marker) for marker in markers
    ]
    return {each[1]: each[2] for each in found if each and each[1] != "large"}


def mark(items: Sequence[pytest.Item], own: Iterable[str]) -> None:
    """Mark each test as `own`, if it has a marker that is one of these, or as `core`, or not."""
    families = defaultdict(list)
    for item in items:
        if any(map(item.get_closest_marker, own)):
            item.add_marker("own")
        elif not item.get_closest_marker("large"):
            families[family_of(item)].append(item)
    for family in families.values():
        share = SHARE_OF_SLOW if is_slow(family[0]) else SHARE
        by_hand = sum(1 for item in family if item.get_closest_marker("core"))
        count = max(ceil(len(family) / share), by_hand)
        for item in in_turn(family)[:count]:
            item.add_marker("core")


def in_turn(family: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of a family, the first one for the core first: those that are marked by hand; one
    case of each function; the rest.
    """
    cases: Counter[str] = Counter()
    places = {}
    for item in sorted(family, key=hash_of):
        name = function_of(item)
        places[item] = (
            not item.get_closest_marker("core"),
            cases[name],
            hash_of(item),
        )
        cases[name] += 1
    return sorted(family, key=places.__getitem__)


def function_of(item: pytest.Item) -> str:
    """The name of a test's function, with its file."""
    return item.nodeid.partition("[")[0]


def room_of(item: pytest.Item) -> str:
    """The folder of a test, below the root."""
    return item.nodeid.partition("::")[0].rpartition("/")[0]


def family_of(item: pytest.Item) -> str:
    """The name of the family of a test: that of its function, or of its room."""
    return room_of(item) if is_slow(item) else function_of(item)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test starts processes or takes seconds."""
    return any(map(item.get_closest_marker, SLOW))


def hash_of(item: pytest.Item) -> int:
    """A number for a test that does not depend on the other tests."""
    return crc32(item.nodeid.encode())


def part(text: str) -> tuple[int, int]:
    """The number of a part, from 0, and how many there are: `3/8`, or `11/8`, which is the same."""
    number, count = map(int, text.split("/"))
    return number % count, count


def in_part(item: pytest.Item, number: int, count: int) -> bool:
    """Whether a test is in this part of so many."""
    return hash_of(item) % count == number
