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

from tests.support.paths import CASES, ROOT

WHY = json.loads((CASES / "survivors.json").read_text())
MUTATED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"][
    "only_mutate"
]
#: What mutmut says of mutants, and the column of the table that it is counted in.
REFUSED = {"caught by type check"}
KILLED = {"killed", "timeout"}
NOT_TRIED = {"not checked"}

PAGE = """# Mutation score of the verifier

Do the tests notice if the verifier is wrong? `make mutation` has mutmut change it in one place at a time, and runs the
tests of the compiler against each: a mutant that some test fails on, or never ends on, is killed. Those that mypy
refuses, as `make test` would, need no test. One that no test has failed on and that has not met all of its tests
counts as not tried. Written on {date}.

{score}

## Survivors

{survivors}
"""


def mutmut(*words: str) -> str:
    return subprocess.run(
        ["mutmut", *words], check=True, capture_output=True, text=True
    ).stdout


def outcomes() -> dict[str, str]:
    """What became of each mutant, by its name: `schedlang.proof.graph.x_walk__mutmut_1`."""
    lines = (
        line.strip().rsplit(": ", 1)
        for line in mutmut("results", "--all", "true").splitlines()
    )
    return {
        name: outcome for name, outcome in (line for line in lines if len(line) == 2)
    }


def change(name: str) -> tuple[str, str]:
    """A mutant's line as it was and as it became."""
    lines = mutmut("show", name).splitlines()
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
    return "Not explained yet"


def page() -> str:
    found = outcomes()
    score: dict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    for name, outcome in found.items():
        module = name.split(".x", 1)[0]
        if outcome in REFUSED:
            score[module]["refused"] += 1
        elif outcome in KILLED:
            score[module]["killed"] += 1
        elif outcome in NOT_TRIED:
            score[module]["not tried"] += 1
        else:
            score[module]["survive"] += 1
            survivors.append((name, *change(name)))
    rows = [
        "| module | mutants | refused by mypy | killed by a test | survive | not tried |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    modules = sorted(path.removesuffix(".py").replace("/", ".") for path in MUTATED)
    total = Counter[str]()
    for module in modules:
        total += score[module]
        rows.append(row(f"`{module}`", score[module]))
    rows.append(row("all", total))
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, was, became in sorted(survivors):
        line = f"- `{function(name)}`: `{was}`\n  became `{became}`"
        reasons[reason(name, was, became)].append(line)
    listed = "\n\n".join(
        f"{why}:\n\n" + "\n".join(lines) for why, lines in reasons.items()
    )
    return PAGE.format(
        date=date.today(), score="\n".join(rows), survivors=listed or "None."
    )


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table."""
    columns = ("refused", "killed", "survive", "not tried")
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[each]) for each in columns)} |"


if __name__ == "__main__":
    print(page(), end="")
