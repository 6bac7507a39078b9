"""docs/reports/mutation.md from what mutmut found, see `make mutation`.

`cases/survivors.json` says why survivors are no holes in the tests: each reason has the patterns of
the changes that it is about, as `module.function: the line as it is -> as it became`.
"""

import json
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from datetime import date

# Installed by `make mutation` alone.
from mutmut.mutation.diff_apply import get_diff_for_mutant  # type: ignore[import-not-found,unused-ignore]

from tests.support.paths import CASES, ROOT

WHY = json.loads((CASES / "survivors.json").read_text())
MUTATED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"][
    "only_mutate"
]
#: The columns of the table, and what mutmut says of the mutants that the first two count.
COLUMNS = ("refused by mypy", "killed by a test", "explained", "open")
REFUSED = {"caught by type check"}
KILLED = {"killed", "timeout"}
#: It has not met all of its tests.
NOT_TRIED = {"not checked", "suspicious"}
#: The reason of a mutant without one.
OPEN = "Not explained yet"

PAGE = """# Mutation score of the verifier

Do the tests notice a mistake in the verifier? `make mutation` lets mutmut change the verifier in one place at a time, and
runs the compiler's tests against each mutant. A mutant is *killed* if a test fails or does not end. mypy *refuses* some, as
`make test` would. A mutant that survives is *explained* if one of the reasons below shows that it is no mistake, and *open*
otherwise. {not_tried} survivors have met only the quickest of their tests. Written on {date}.

{score}

## Why survivors are no mistakes

`tests/cases/survivors.json` has the changes that each reason is about.

{survivors}
"""


def outcomes() -> dict[str, str]:
    """What became of each mutant, by its name: `schedlang.proof.graph.x_walk__mutmut_1`."""
    results = subprocess.run(
        ["mutmut", "results", "--all", "true"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = (line.strip().rsplit(": ", 1) for line in results.stdout.splitlines())
    return {
        name: outcome for name, outcome in (line for line in lines if len(line) == 2)
    }


def change(name: str) -> tuple[str, str]:
    """A mutant's line as it was and as it became."""
    lines = get_diff_for_mutant(name).splitlines()
    # The difference of a mutant has its lines with one sign, and the names of files with three.
    was, became = (
        " ".join(
            line[1:].strip()
            for line in lines
            if line.startswith(sign) and not line.startswith(sign * 3)
        )
        for sign in "-+"
    )
    return was, became


def function(name: str) -> str:
    """The function of a mutant, as `graph.walk` or `standstill.Standstill.release`."""
    module, _, mutant = name.rpartition(".")
    inside = mutant.rpartition("__mutmut_")[0].removeprefix("xǁ").removeprefix("x_")
    return f"{module.rpartition('.')[2]}.{inside.replace('ǁ', '.')}"


def reason(name: str, was: str, became: str) -> str:
    """Why a survivor is no hole in the tests."""
    change = f"{function(name)}: {was} -> {became}"
    for each in WHY:
        if any(re.fullmatch(pattern, change) for pattern in each["changes"]):
            return str(each["why"])
    return OPEN


def page() -> str:
    """The page."""
    found = outcomes()
    score: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    not_tried = 0
    for name, outcome in sorted(found.items()):
        module = score[name.split(".x", 1)[0]]
        if outcome in REFUSED:
            module["refused by mypy"] += 1
            continue
        if outcome in KILLED:
            module["killed by a test"] += 1
            continue
        not_tried += outcome in NOT_TRIED
        was, became = change(name)
        why = reason(name, was, became)
        module["open" if why == OPEN else "explained"] += 1
        reasons[why][function(name)] += 1
    rows = [
        f"| module | mutants | {' | '.join(COLUMNS)} |",
        f"| --- |{' ---: |' * (1 + len(COLUMNS))}",
    ]
    modules = sorted(path.removesuffix(".py").replace("/", ".") for path in MUTATED)
    rows += [row(f"`{module}`", score[module]) for module in modules]
    rows.append(row("all", sum(score.values(), Counter[str]())))
    return written(rows, not_tried, date.today().isoformat(), reasons)


def written(
    rows: list[str], not_tried: int, on: str, reasons: dict[str, Counter[str]]
) -> str:
    """The page, from the rows of its table and the survivors by reason and function."""
    listed = [
        f"- {why}: {counts.total()}, in {', '.join(f'`{name}`' for name in counts)}"
        for why, counts in reasons.items()
    ]
    return PAGE.format(
        date=on,
        not_tried=not_tried,
        score="\n".join(rows),
        survivors="\n".join(listed) or "None.",
    )


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table."""
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[each]) for each in COLUMNS)} |"


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    return {"docs/reports/mutation.md": page()}
