"""programs/README.md: the programs of the gallery by families, each with what it is good for, its
picture, and its figures at its own defaults.
"""

from collections.abc import Mapping

from schedlang.compiler import compile
from schedlang.diagnostics.source import Source
from schedlang.files.programs import families, path_of, text_of, title
from schedlang.files.reading import read_source
from schedlang.proof.prove import simulate
from schedlang.report.bubbles.account import Account
from schedlang.report.figures import figures
from schedlang.report.views.terminal import draw
from schedlang.schedule.costs import Costs
from tools.pages.tables import table

#: The columns of a picture.
_WIDTH = 118
# How long ops take on a model of one stage, where nobody says anything.
_UNIT = {op: durations[0] for op, durations in Costs().every_duration(1).items()}
_TIMES = (
    f"`F` and `R` take {_UNIT['forward']:g}, a whole backward {_UNIT['backward']:g}, its halves "
    f"{_UNIT['input']:g} and {_UNIT['weight']:g}, a transfer 0"
)
_HEAD = """\
# The gallery

Which published schedules are there, what does each look like, and what is it good for? `schedc gallery` lists them,
`schedc view NAME` draws one, `schedc compare NAME NAME` compares some, and `schedc tune` finds the best one for a model.
`make regenerate` writes this page, from `gallery.txt` and the programs.
"""
_FIGURES = f"""\
## Figures

Those of `schedc simulate`. What some programs are said to gain is in
[published-gains.md](../docs/reports/published-gains.md), beside what is predicted.

Times are in unit costs: on every stage, {_TIMES}; ops that overlap take as long as one after the other; or in those that
the program gives. So makespans and peaks compare between programs that cut the model into as many stages, and
microbatches into as many slices; bubbles always compare.

- **lines**: of the file, comments included
- **ranks x microbatches**: the program's defaults, and its other parameters; the figures are for
  these. A schedule without a flush is shown for a few updates, with the microbatches of all of
  them
- **makespan**: from the first start to the last end, over all ranks
- **bubble over ideal**: idle time / working time, which includes recomputation
- **bubble over makespan**: idle time / all time
- **bubble of span**: idle share of the rank with the longest span, from its own first start to
  its own last end
- **peak activations**: held until the last use, one per stage and microbatch (or slice), on the
  rank with the most
- **weight versions**: kept of each weight, on the rank with the most
"""

_COLUMNS = (
    "program",
    "lines",
    "ranks x microbatches",
    "makespan",
    "bubble over ideal",
    "bubble over makespan",
    "bubble of span",
    "peak activations",
    "weight versions",
)


def gallery() -> str:
    """The page, in Markdown."""
    groups, starters = families()
    uses = {name: use for family in groups for name, use in family.programs.items()}
    parts = [
        _HEAD,
        "## Start with these six\n",
        *(_line(name, uses) for name in starters),
    ]
    for family in groups:
        parts.append(
            f"\n## {family.name}\n\n{family.meaning[0].upper()}{family.meaning[1:]}."
        )
        parts += [_section(name, use) for name, use in family.programs.items()]
    rows = [_row(name, read_source(path_of(name))) for name in uses]
    return "\n".join([*parts, "", _FIGURES, table(_COLUMNS, *rows), ""])


def _line(name: str, uses: Mapping[str, str]) -> str:
    return f"- [{name}](#{name}): {uses[name]}"


def _section(name: str, use: str) -> str:
    """A program with what it is good for, where it comes from, and its picture."""
    plan = compile(read_source(path_of(name)))
    drawn = draw(simulate(plan, ideal=True).timeline, plan.names, _WIDTH)
    return (
        f"\n### {name}\n\n**{use[0].upper()}{use[1:]}.** [{title(text_of(name))}]({name}.sched).\n\n"
        f"```text\n{drawn}\n```"
    )


def _row(name: str, source: Source) -> tuple[str, ...]:
    """The row of a program, a cell for each of `_COLUMNS`."""
    plan = compile(source)
    document = figures(plan, Account(simulate(plan, ideal=True)))
    sizes = [f"{document['ranks']} x {document['microbatches']}"]
    for parameter, value in plan.params.items():
        if parameter not in ("ranks", "microbatches"):
            sizes.append(f"{parameter} {value}")
    bubble = document["bubble"]
    return (
        f"[{name}](#{name})",
        str(source.text.count("\n")),
        ", ".join(sizes),
        f"{document['makespan']:g}",
        f"{bubble['over_ideal']:.1%}",
        f"{bubble['over_makespan']:.1%}",
        f"{bubble['span']:.1%}",
        str(max(document["peak_activations"])),
        str(max(document["versions"])),
    )


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    return {"programs/README.md": gallery()}
