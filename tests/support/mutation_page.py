"""docs/mutation.md from what mutmut found: `python -m tests.support.mutation_page`, see `make mutation`.

`cases/survivors.json` says why a survivor is not a hole in the tests, by its line as it is and as
it became.
"""

import json
import subprocess
import tomllib
from collections import Counter, defaultdict
from datetime import date

from tests.support.paths import CASES, ROOT

WHY = json.loads((CASES / "survivors.json").read_text())
MUTATED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]
KILLED = "killed"
TIMEOUT = "timeout"
NOT_TRIED = "not checked"

PAGE = """# Mutation score of the verifier

Do the tests notice if the verifier is wrong? `make mutation` has mutmut change it in one place at a time, and runs the
tests of the compiler against each: a mutant that some test fails on, or never ends on, is killed. Written on {date}.

{score}

## Survivors

{survivors}
"""


def mutmut(*words: str) -> str:
    return subprocess.run(["mutmut", *words], check=True, capture_output=True, text=True).stdout


def outcomes() -> dict[str, str]:
    """What became of each mutant, by its name: `schedlang.proof.graph.x_walk__mutmut_1`."""
    lines = (
        line.strip().rsplit(": ", 1) for line in mutmut("results", "--all", "true").splitlines()
    )
    return {name: outcome for name, outcome in (line for line in lines if len(line) == 2)}


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


def page() -> str:
    found = outcomes()
    score: dict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    for name, outcome in found.items():
        module = name.split(".x", 1)[0]
        score[module][outcome] += 1
        if outcome not in (KILLED, TIMEOUT, NOT_TRIED):
            survivors.append((module, *change(name)))
    rows = [
        "| module | mutants | killed | survive | not tried |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for module in sorted(path.removesuffix(".py").replace("/", ".") for path in MUTATED):
        counts = score[module]
        if not counts:
            rows.append(f"| `{module}` | | | | all |")
            continue
        killed = counts[KILLED] + counts[TIMEOUT]
        tried = counts.total() - counts[NOT_TRIED]
        rows.append(f"| `{module}` | {tried} | {killed} | {tried - killed} | {counts[NOT_TRIED]} |")
    reasons: dict[str, list[str]] = defaultdict(list)
    for module, was, became in sorted(survivors):
        why = WHY.get(f"{was} -> {became}", "not explained yet")
        reasons[why].append(f"- `{module}`: `{was}`\n  became `{became}`")
    listed = "\n\n".join(f"{why}:\n\n" + "\n".join(lines) for why, lines in reasons.items())
    return PAGE.format(date=date.today(), score="\n".join(rows), survivors=listed or "None.")


if __name__ == "__main__":
    print(page(), end="")
