"""What a key costs in the playground, in processor time, by piece: `make bench WHAT=playground`.

In this Python, and in that of the browser (Pyodide) as node runs it, from the site that `make site`
has built. What the page itself takes, `make test-browser` prints.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import process_time

from schedlang.extras.editor.playground import answers, begin
from schedlang.files.programs import text_of

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
PROGRAMS = ("1f1b", "interleaved_1f1b", "zb_v")
PARAMS = {"ranks": 8, "microbatches": 32}
ROUNDS = 10

#: Milliseconds that each answer takes, by its name.
Times = dict[str, float]


def measure(name: str, now: Callable[[], float] = process_time) -> Times:
    """The least time of each answer about a program, whose text is another one each time."""
    text = text_of(name)
    best: Times = {}
    for key in range(ROUNDS):
        begun = now()
        for answer in answers(f"{text}# {key}", PARAMS):
            told = (now() - begun) * 1000
            what = answer[2 : answer.index('"', 2)]
            best[what] = min(best.get(what, told), told)
            begun = now()
    return best


def in_the_browser() -> dict[str, Times]:
    """The same in Pyodide."""
    command = [
        "node",
        str(HERE / "playground.mjs"),
        str(BUILD),
        Path(__file__).read_text(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Times] = json.loads(run.stdout)
    return found


def main() -> None:
    """Measure both, and print them side by side."""
    begin()
    native = {name: measure(name) for name in PROGRAMS}
    browser = in_the_browser()
    print(
        "8 x 32, milliseconds of processor time: here, in the browser's Python, ratio"
    )
    for name in PROGRAMS:
        print(name)
        rows = [
            (what, native[name][what], browser[name][what]) for what in native[name]
        ]
        rows.append(("all", sum(native[name].values()), sum(browser[name].values())))
        for what, here, there in rows:
            print(f"  {what:<12} {here:7.1f} {there:7.1f} {there / here:6.2f}")


if __name__ == "__main__":
    main()
