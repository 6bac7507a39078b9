"""The best block that repeats, as the text of a program, for any number of microbatches."""

from collections.abc import Iterator
from itertools import groupby
from math import inf

from attrs import frozen

from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.periodic import Block, blocks
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.program_text import at_most, head_of
from schedlang.extras.search.optimize.published import from_gallery
from schedlang.language.head import by_number, head_lines
from schedlang.schedule.exact_text import exact_text
from schedlang.schedule.kinds import Kind

#: Variables of the program for the microbatches of a block.
_NAMES = ("m", "n", "o", "p")
#: The share of the time that is spent on published orders, which serve as hints for blocks.
_SHARE_OF_GALLERY = 0.2


@frozen
class Repeated:
    """A block as a program: its `text`. Every `interval` the block starts again, with the next
    `microbatches`; its last op ends `length` after its first starts. `work` is the busiest rank's
    work for as many microbatches, a lower bound of the interval. Times are in the unit of the
    costs.
    """

    text: str
    microbatches: int
    interval: float
    length: float
    work: float


def best_block(problem: Problem, seconds: float, workers: int = 1) -> Repeated | None:
    """Search for a block of one or a few microbatches within the ranks' memory, for some seconds.
    Return the one with the shortest interval for a microbatch, and among equals the shortest block;
    None if none is found.

    ValueError for a problem without blocks: several pipelines, slices, microbatches of unlike
    costs.
    """
    layout = problem.graph.schedule.layout
    if len(layout.pipelines) > 1 or layout.slices > 1:
        raise ValueError("a block is for one pipeline of whole microbatches")
    instance = Instance.of(problem)
    # If all microbatches are alike, there is one chain for each op.
    if len(instance.chains) != len(set(problem.names)):
        raise ValueError(
            "a block is for microbatches that are alike in what they do and cost"
        )
    order = problem.graph.order
    given = Answer(order, problem.value(order), 0.0, "")
    *_, known = [given, *from_gallery(problem, given, _SHARE_OF_GALLERY * seconds)]
    hint = instance.in_chains(known.orders) if known.value < inf else []
    # Published orders are a good start: many of them repeat.
    found = list(blocks(instance, hint, (1 - _SHARE_OF_GALLERY) * seconds, workers))
    if not found:
        return None
    best = min(
        found, key=lambda block: (block.interval / block.microbatches, block.length)
    )
    first = [chain[0] for chain in instance.chains]
    work = [0.0] * len(problem.limits)
    for node in first:
        work[instance.rank[node]] += problem.graph.time[node]
    return Repeated(
        program_of_block(instance, best),
        best.microbatches,
        float(best.interval * best.unit),
        float(best.length * best.unit),
        max(work) * best.microbatches,
    )


def program_of_block(instance: Instance, block: Block) -> str:
    """The program that repeats a block, with claims about its time and its memory.

    Ops start at the block's times or earlier, so the program ends with the end of the last block or
    earlier. ValueError for several pipelines or slices, which a block of the language cannot have.
    """
    problem = instance.problem
    schedule = problem.graph.schedule
    layout = schedule.layout
    if len(layout.pipelines) > 1 or layout.slices > 1:
        raise ValueError("a block is written for one pipeline of whole microbatches")
    head, words = head_of(
        schedule, {kind for ops in problem.graph.ops for kind, _, _ in ops}
    )
    names = _NAMES[: block.microbatches]
    lines = [f"schedule {schedule.name} {{"]
    for line in head_lines(head, words):
        if line.startswith("require"):
            line = f'require ranks == {head.ranks}, "the block is for this many"'
        lines.append(f"    {line}")
    lines.append(f"    block {', '.join(names)} every {block.interval} {{")
    lines.append(f"        stage s in 0 .. {len(layout.placement)} {{")
    lines += [f"            {row}" for row in _rows(instance, block, words)]
    lines += ["        }", "    }"]
    peak = max(map(problem.graph.peak, block.orders(instance)))
    most = exact_text(at_most(problem.graph.fixed_memory, peak))
    lines.append(f"    assert peak() <= {most}")
    if instance.is_exact:
        repeats = (
            f"((microbatches - 1) / {len(names)})"
            if len(names) > 1
            else "(microbatches - 1)"
        )
        interval = exact_text(block.interval * block.unit)
        length = exact_text(block.length * block.unit)
        lines.append(f"    assert makespan <= {interval} * {repeats} + {length}")
    return "\n".join([*lines, "}", ""])


def _rows(instance: Instance, block: Block, words: dict[int, str]) -> Iterator[str]:
    """The ops of a block, each with its slot by the stage."""
    names = instance.problem.names
    chains = [
        (names[chain[0]][0], starts)
        for chain, starts in zip(instance.chains, block.start, strict=True)
    ]
    chains.sort()
    for kind, of_kind in groupby(chains, key=lambda item: item[0][0]):
        by_stage = [starts for _, starts in of_kind]
        for place, name in enumerate(_NAMES[: block.microbatches]):
            slot = by_number("s", [starts[place] for starts in by_stage])
            yield f"{words[Kind(kind)]}(s, {name}) at {slot}"
