"""docs/mutation.md from what mutmut found: `python -m tests.support.mutation_page`, see `make mutation`.

`cases/survivors.json` says why survivors are no holes in the tests: each reason has the patterns of
the changes that it is about, as `module.function: the line as it is -> as it became`.
"""

import json
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from datetime import date

from mutmut.mutation.diff_apply import get_diff_for_mutant

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

Do the tests notice if the verifier is wrong? `make mutation` has mutmut change it in one place at a time, and runs the
tests of the compiler against each: a mutant that some test fails on, or never ends on, is killed. Those that mypy
refuses, as `make test` would, need no test. Of the others, which no test has failed on, those are explained of which
there is a reason below why they are no mistake; the rest is open. {not_tried} of both have met no more than the quickest
of their tests. Written on {date}.

{score}

## Survivors

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
            return each["why"]
    return OPEN


def page() -> str:
    found = outcomes()
    score: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, list[str]] = defaultdict(list)
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
        reasons[why].append(f"- `{function(name)}`: `{was}`\n  became `{became}`")
    rows = [
        f"| module | mutants | {' | '.join(COLUMNS)} |",
        f"| --- |{' ---: |' * (1 + len(COLUMNS))}",
    ]
    modules = sorted(path.removesuffix(".py").replace("/", ".") for path in MUTATED)
    rows += [row(f"`{module}`", score[module]) for module in modules]
    rows.append(row("all", sum(score.values(), Counter[str]())))
    listed = "\n\n".join(
        f"{why}:\n\n" + "\n".join(lines) for why, lines in reasons.items()
    )
    return PAGE.format(
        date=date.today(),
        not_tried=not_tried,
        score="\n".join(rows),
        survivors=listed or "None.",
    )


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table."""
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[each]) for each in COLUMNS)} |"


if __name__ == "__main__":
    print(page(), end="")
