"""The pictures of docs/pictures.md, docs/generating.md and docs/training.md, as `schedc view` draws
them.
"""

from schedlang import compile, simulate
from schedlang.report.views import lay_out
from schedlang.report.views.svg import svg

NAMES = (
    *("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe"),
    *("decoding", "experts_1f1b"),
)


def files() -> dict[str, str]:
    """The pictures, each by its path in the repository."""
    plans = {name: compile(name) for name in NAMES}
    return {
        f"docs/pictures/{name}.svg": svg(lay_out(plan, simulate(plan)))
        for name, plan in plans.items()
    }
