"""The command `schedc show`: what each rank does, and what it holds meanwhile."""

import argparse
import json
from textwrap import indent
from typing import Any

from attrs import evolve

from schedlang.cli.inputs import load_compiled, load_with_costs
from schedlang.cli.usage import FINE
from schedlang.plan.plan import Plan
from schedlang.ranks.lifetimes import frees
from schedlang.ranks.shards import shards_figures, shards_text
from schedlang.schedule.findings import edge_text


def show(options: argparse.Namespace) -> int:
    """Print what each rank does."""
    plan = _load(options)
    texts = [_rank_text(plan, rank, options) for rank in range(len(plan.ranks))]
    if options.format == "json":
        print(json.dumps(_document(plan, texts, options)))
        return FINE
    if options.ranks:
        # One line for each rank, for scripts.
        print("\n".join(text.replace("\n", " ") for text in texts))
        return FINE
    # The head of each rank says what its gathers cost.
    figures = _gather_figures(plan, options)
    print(
        f"{plan.title}, from {plan.source.path}, proved for transport {plan.transport}"
    )
    for number in plan.layout.far_edges:
        print(edge_text(plan, number))
    if plan.layout.frozen:
        numbers = ", ".join(map(plan.names.stage, plan.layout.frozen))
        print(f"frozen stages: {numbers}")
    for rank, text in enumerate(texts):
        stages = plan.names.stages(plan.stages_of(rank))
        print(f"\nrank {rank}, {stages}{figures[rank]}")
        print(indent(text, "  "))
    return FINE


def _load(options: argparse.Namespace) -> Plan:
    """The plan that the options name; for what its gathers move, with the costs in the options."""
    if not options.shards:
        plan: Plan = load_compiled(options)
        return plan
    plan, costs = load_with_costs(options)
    return evolve(plan, costs=costs.over(plan.costs))


def _document(
    plan: Plan, texts: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """The same for programs."""
    far = plan.layout.far_edges
    figures = _gather_figures(plan, options)
    ranks = []
    for rank, text in enumerate(texts):
        # With what they free or gather, actions stand in lines that end with it; else each is one.
        actions = text.splitlines() if options.frees or options.shards else text.split()
        entry = {"rank": rank, "stages": list(plan.stages_of(rank)), "actions": actions}
        if figures[rank]:
            entry["gathers"] = figures[rank].removeprefix(": ")
        ranks.append(entry)
    return {
        "schedule": plan.name,
        "params": plan.params,
        "file": plan.source.path,
        "transport": plan.transport,
        "edges": [
            edge_text(plan, number) for number in far if not plan.layout.is_skip(number)
        ],
        "skips": [
            edge_text(plan, number) for number in far if plan.layout.is_skip(number)
        ],
        "frozen": list(plan.layout.frozen),
        "ranks": ranks,
    }


def _rank_text(plan: Plan, rank: int, options: argparse.Namespace) -> str:
    """The actions of a rank, in the form that the options ask for."""
    if options.frees:
        return frees(plan, rank)
    if options.shards:
        return shards_text(plan, rank, options.shards)
    actions = plan.ranks[rank]
    if options.compute:
        actions = actions.compute()
    return plan.names.text(actions)


def _gather_figures(plan: Plan, options: argparse.Namespace) -> list[str]:
    """For each rank how often it gathers sharded weights, if the options ask for that; in bytes
    too, where the costs have those of the weights.
    """
    ranks = range(len(plan.ranks))
    if not options.shards:
        return ["" for _ in ranks]
    sizes = None
    if plan.costs.weights_bytes is not None:
        sizes = plan.costs.bytes_of_weights(len(plan.placement))
    return [f": {shards_figures(plan, rank, options.shards, sizes)}" for rank in ranks]
