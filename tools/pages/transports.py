"""docs/reports/transport-table.md: what the gallery's programs take on the transports of GPUs.

Each program at its own size, compiled for each transport, which chooses its communication there. It
is simulation: the figures are the same on every machine.
"""

from statistics import fmean

from schedlang import Costs, compile, simulate
from schedlang.files.programs import names

#: How long a transfer takes, where a forward takes 1.
LATENCIES = (0.25, 1.0)
#: One stream for all, one for each two ranks, and one for each direction.
TRANSPORTS = ("nccl-eager", "nccl", "nccl-edge")

HEAD = """\
# The gallery on the transports of GPUs

`make regenerate WHAT=transports` writes this page. Makespans by simulation, at unit costs: a forward takes 1,
a whole backward 2; a transfer takes 0.25 on the left and 1 on the right. Each program has its
default size, and for each transport the communication that the compiler chooses for it at these
costs ([transports](../transports.md)).

- **ideal**: what crosses ranks is there one transfer after the end of the op that made it
- **nccl-eager**: one stream for all transfers of a rank
- **nccl**: one for single transfers with each other rank, and one for batches
- **nccl-edge**: one for sends to each other rank, and one for receives from it

Where two messages of one moment go the same way, as DualPipe's do behind overlapped ops, an edge
has them one after the other; a batch is counted as if they took no longer than one.
"""


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
    return _line(
        [name, *(f"{makespan:g}" for found in of_latencies for makespan in found)]
    )


def page() -> str:
    """The page, in Markdown."""
    columns = [
        f"{what}, {latency:g}"
        for latency in LATENCIES
        for what in ("ideal", *TRANSPORTS)
    ]
    lines = [
        HEAD,
        _line(["program", *columns]),
        _line(["---", *["---:"] * len(columns)]),
    ]
    found = {
        name: [makespans(name, latency) for latency in LATENCIES] for name in names()
    }
    lines += [row(name, of_latencies) for name, of_latencies in found.items()]
    means = []
    # For each latency, then for each column: how far the programs are from their ideal in the mean.
    for of_programs in zip(*found.values(), strict=True):
        for column in zip(*of_programs, strict=True):
            ideals = [ideal for ideal, *_ in of_programs]
            beyond = [
                makespan / ideal - 1
                for makespan, ideal in zip(column, ideals, strict=True)
            ]
            means.append(f"{fmean(beyond):.1%}")
    lines.append(_line(["mean beyond the ideal", *means]))
    return "\n".join([*lines, ""])


def _line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    return {"docs/reports/transport-table.md": page()}
