"""The figures of simulated runs with noise: for programs, and for people."""

from typing import Any

from schedlang.extras.noise.runs import Runs
from schedlang.report.text_table import explained, rounded

#: How many ranks are named that the delay is due to; a table of all is in the document.
_NAMED = 4


def runs_json(runs: Runs) -> dict[str, Any]:
    """The figures of some runs, by the names that scripts rely on; times are in the unit of the
    costs.
    """
    noise = runs.noise
    return {
        "distribution": "lognormal",
        "jitter": noise.jitter,
        "slow_ranks": {str(rank): factor for rank, factor in noise.slow_ranks.items()},
        "slow_links": {
            f"{a}-{b}": factor for (a, b), factor in noise.slow_links.items()
        },
        "seed": noise.seed,
        "runs": len(runs.makespans),
        "makespan": runs.makespan,
        "mean": runs.mean,
        "median": runs.median,
        "percentile_95": runs.percentile(95),
        "worst": runs.worst,
        "delays": {
            "ranks": list(runs.delays.ranks),
            "transfers": runs.delays.transfers,
            "slack": runs.delays.slack,
        },
        "makespans": list(runs.makespans),
    }


def runs_text(runs: Runs) -> str:
    """What the noise is, and a line for each figure, with its meaning."""
    rows = [
        (
            "without noise",
            _number(runs.makespan),
            "the makespan at the costs as they are, and in their unit",
        )
    ]
    if runs.noise.jitter:
        rows += [
            ("mean", _number(runs.mean), _longer(runs, runs.mean)),
            ("median", _number(runs.median), _longer(runs, runs.median)),
            (
                "95th percentile",
                _number(runs.percentile(95)),
                f"{_longer(runs, runs.percentile(95))}: one run in twenty takes longer",
            ),
            ("worst", _number(runs.worst), _longer(runs, runs.worst)),
        ]
    else:
        # All runs are the same.
        rows.append(("with it", _number(runs.mean), _longer(runs, runs.mean)))
    rows.append(("delay", _number(runs.mean - runs.makespan), _due(runs)))
    return "\n".join([_noise_text(runs), *explained(rows)])


def _noise_text(runs: Runs) -> str:
    """What is not as the costs say."""
    noise = runs.noise
    lines = []
    if noise.jitter:
        lines.append(
            f"{len(runs.makespans):,} runs: each op and transfer with a jitter of "
            f"{noise.jitter:.3g} (lognormal, seed {noise.seed})"
        )
    for rank, factor in noise.slow_ranks.items():
        lines.append(f"ops of rank {rank} take {factor:g} times as long")
    for (low, high), factor in noise.slow_links.items():
        lines.append(
            f"transfers between ranks {low} and {high} take {factor:g} times as long"
        )
    return "\n".join(lines)


def _longer(runs: Runs, makespan: float) -> str:
    """How a makespan compares with the one without noise."""
    share = makespan / runs.makespan - 1 if runs.makespan else 0.0
    return f"{abs(share):.1%} {'longer' if share >= 0 else 'shorter'}"


def _due(runs: Runs) -> str:
    """What the delay of the mean is due to, the most first."""
    delays = runs.delays
    ranks = sorted(enumerate(delays.ranks), key=lambda entry: -abs(entry[1]))
    named = ranks[:_NAMED] if len(ranks) > _NAMED + 1 else ranks
    terms = [(f"rank {rank}", delay) for rank, delay in named]
    if rest := ranks[len(named) :]:
        terms.append((f"{len(rest)} other ranks", sum(delay for _, delay in rest)))
    terms += [("transfers", delays.transfers), ("slack", -delays.slack)]
    # What is nothing but rounding is left out.
    least = 1e-9 * max(runs.makespan, 1.0)
    shown = [
        f"{what} {rounded(delay, 3, '+')}"
        for what, delay in terms
        if abs(delay) > least
    ]
    return f"of the mean: {', '.join(shown) or 'none'}"


def _number(value: float) -> str:
    """A number to as many digits as a sample of runs has a use for."""
    return rounded(value, 5)
