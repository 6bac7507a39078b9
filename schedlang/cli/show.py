"""The command `schedc show`: what each rank does, and when it holds what."""

import argparse
from textwrap import indent

from schedlang.cli.given import UsageError, load
from schedlang.plan.plan import Plan
from schedlang.ranks.lifetimes import frees
from schedlang.ranks.shards import shards_figures, shards_text
from schedlang.schedule.costs import read_costs
from schedlang.schedule.findings import skip_text


def show(options: argparse.Namespace) -> int:
    """Print what each rank does."""
    plan = load(options)
    texts = [_shown(plan, rank, options) for rank in range(len(plan.ranks))]
    if options.ranks:
        print("\n".join(text.replace("\n", " ") for text in texts))
        return 0
    figures = _of_shards(plan, options)
    params = ", ".join(f"{name} = {value}" for name, value in plan.params.items())
    print(f"{plan.name} ({params}), from {plan.source.path}, proved for transport {plan.transport}")
    for number in plan.layout.skip_stages:
        print(skip_text(plan, number))
    for rank, text in enumerate(texts):
        stages = ", ".join(map(str, plan.stages_of(rank)))
        print(
            f"\nrank {rank}, stage{'s' if ',' in stages else ''} {stages}{figures[rank]}\n"
            + indent(text, "  ")
        )
    return 0


def _shown(plan: Plan, rank: int, options: argparse.Namespace) -> str:
    """The actions of a rank in the form that is asked for."""
    if options.frees:
        return frees(plan, rank)
    if options.shards:
        return shards_text(plan, rank, options.shards)
    return (plan.ranks[rank].compute() if options.compute else plan.ranks[rank]).text()


def _of_shards(plan: Plan, options: argparse.Namespace) -> list[str]:
    """What each rank's gathers cost, if they are asked for; in bytes too, where costs have those of
    the weights.
    """
    if not options.shards:
        if options.costs:
            raise UsageError("--costs is for --shards")
        return [""] * len(plan.ranks)
    costs = read_costs(options.costs) if options.costs else plan.costs
    try:
        sizes = None if costs.weights_bytes is None else costs.bytes_of_weights(len(plan.placement))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return [
        f": {shards_figures(plan, rank, options.shards, sizes)}" for rank in range(len(plan.ranks))
    ]
