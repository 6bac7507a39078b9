"""Ways in which a training run may go wrong, on 4 real processes: all end, and say why. `make
faults` tries all.
"""

import json
import re
import time
from itertools import product

import pytest

from tests.support.launches import Run, fixtures

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytestmark = pytest.mark.processes

RANKS = 4
SCHEDULES = ("1f1b", "zb_v", "pipedream_2bw", "dualpipe")
#: For each fault, at which points of `fault_worker.py`.
POINTS = {"kill": range(10), "throw": (0, 3, 4, 7), "stall": (0, 7), "shape": (0, 6)}
#: Those of `make test`.
FEW = {
    "kill zb_v 0 3",
    "kill dualpipe 2 7",
    "throw zb_v 2 7",
    "stall pipedream_2bw 1 0",
    "shape dualpipe 3 6",
}
NAMES = [
    f"{what} {schedule} {rank} {point}"
    for what, points in POINTS.items()
    for schedule, rank, point in product(SCHEDULES, range(RANKS), points)
]
CASES = [name if name in FEW else pytest.param(name, marks=pytest.mark.faults) for name in NAMES]
#: The cause that all ranks give: `{rank}` has the fault. Two words of torch's own for shapes, by
#: the loss.
CAUSES = {
    "kill": r"rank {rank} is gone: rank \d lost (?:its connection|the store of the process group) at {place}",
    "throw": r"rank {rank} failed at {place}: ValueError: boom$",
    "stall": r"rank {rank} has made no progress for \d+\.\d s at {place}(?:: rank \d has waited 5 s at {place})?$",
    "shape": r"rank {rank} failed at {place}: (?:the output of stage \d is float64 \[2, 8\] .* but float64 \[3, 8\]"
    r"|RuntimeError: The size of tensor a \(2\) must match .* b \(3\))",
}
#: Seconds in which all end, the time-out of `fault_worker.py`; they take about one, and six for a
#: stall.
LIMIT = 30


worker, run = fixtures("fault_worker.py")


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_at_once_and_say_why(run: Run, case: str) -> None:
    what, schedule, rank, _ = case.split()
    outcome = run(case, RANKS)
    happened = outcome.folder / "fault.json"
    assert happened.exists(), outcome.logs
    assert time.monotonic() - json.loads(happened.read_text()) < LIMIT, outcome.logs
    died = {int(rank)} if what == "kill" else set()
    assert outcome.codes == [-9 if each in died else 1 for each in range(RANKS)], outcome.logs
    place = rf"\S+ \({schedule}\.sched:\d+\)"
    cause = re.compile(rf"(?:stopped|Error): {CAUSES[what].format(rank=rank, place=place)}", re.M)
    living = [log for each, log in enumerate(outcome.logs) if each not in died]
    assert all(cause.search(log) for log in living), outcome.logs
    assert ("ValueError: boom\nand more\n" in outcome.logs[int(rank)]) == (what == "throw")
    check_standings(living, died, place)


def check_standings(living: list[str], died: set[int], place: str) -> None:
    """One rank says where each rank stood, and for whom it waited; where the store died with rank
    0, each its own.
    """
    line = rf"^  rank (\d) (has waited \d+\.\d s for rank \d at {place}|has been |was last seen )"
    found = [re.findall(line, log, re.M) for log in living]
    assert sorted(int(rank) for each in found for rank, _ in each) == [
        each for each in range(RANKS) if each not in died & {0}
    ], living
    assert sum(map(bool, found)) == (len(living) if 0 in died else 1), living
    assert any(what.startswith("has waited") for each in found for _, what in each), living
    assert {
        int(rank) for each in found for rank, what in each if what.startswith("was last")
    } == died - {0}, living
