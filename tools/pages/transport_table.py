"""The table of docs/reports/transport-table.md: what the gallery's programs take on the transports of
GPUs. The text above it is written by hand.

Each program at its own size, compiled for each transport, which chooses its communication there. It
is simulation: the figures are the same on every machine.
"""

from pathlib import Path
from statistics import fmean

from schedlang import Costs, compile, simulate
from schedlang.files.programs import names
from tools.pages.tables import line, with_rows

#: How long a transfer takes, where a forward takes 1.
LATENCIES = (0.25, 1.0)
#: One stream for all, one for each two ranks, and one for each direction.
TRANSPORTS = ("nccl-eager", "nccl", "nccl-edge")

ROOT = Path(__file__).parents[2]
PAGE = "docs/reports/transport-table.md"
TITLE = "The gallery on the transports of GPUs"


def makespans(name: str, latency: float) -> tuple[float, ...]:
    """What a program takes ideally and on each of the transports, by the time of a transfer."""
    costs = Costs(p2p_time=latency)
    plans = [
        compile(name, costs=costs, transport=transport) for transport in TRANSPORTS
    ]
    ideal = simulate(plans[0], costs, ideal=True).timeline.makespan
    return ideal, *(simulate(plan, costs).timeline.makespan for plan in plans)


def row(name: str, of_latencies: list[tuple[float, ...]]) -> str:
    """The row of a program, with its makespans for each latency."""
    return line([name, *(f"{each:g}" for found in of_latencies for each in found)])


def rows() -> list[str]:
    """A row for each program, and one with how far they are from their ideal in the mean."""
    found = {
        name: [makespans(name, latency) for latency in LATENCIES] for name in names()
    }
    means = []
    # For each latency, then for each column.
    for of_programs in zip(*found.values(), strict=True):
        for column in zip(*of_programs, strict=True):
            ideals = [ideal for ideal, *_ in of_programs]
            beyond = [
                makespan / ideal - 1
                for makespan, ideal in zip(column, ideals, strict=True)
            ]
            means.append(f"{fmean(beyond):.1%}")
    return [*map(row, found, found.values()), line(["mean beyond the ideal", *means])]


def files() -> dict[str, str]:
    """The page with its table as it is now."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return {PAGE: with_rows(page, TITLE, rows())}
