"""`schedc view --actions`: what each rank does, and what it holds meanwhile, as text."""

import argparse
import json
from collections.abc import Iterator
from textwrap import indent
from typing import Any

from attrs import evolve

from schedlang.cli.inputs import check_plan_without_costs, load_to_execute
from schedlang.cli.usage import FINE, UsageError
from schedlang.files.programs import called
from schedlang.files.reading import read_source
from schedlang.plan.plan import Plan
from schedlang.ranks.gather_order import shards_figures, shards_text
from schedlang.ranks.lifetimes import frees
from schedlang.schedule.findings import edge_text

#: The options that ask for actions, each in another form.
FORMS = ("actions", "bare", "compute", "frees", "shards")
#: The options of `schedc view` that mean nothing where no picture is drawn.
_OF_PICTURES = (
    "output",
    "serve",
    "plot",
    "font",
    "no_legend",
    "memory",
    "causes",
    "window",
    "width",
    "time_unit",
    "ideal",
)


def print_actions(options: argparse.Namespace) -> int:
    """Print what each rank does."""
    _check_options(options)
    plan = _load(options)
    ranks = options.ranks or tuple(range(len(plan.ranks)))
    if max(ranks) >= len(plan.ranks):
        raise UsageError(
            f"there is no rank {max(ranks)}: there are ranks 0 to {len(plan.ranks) - 1}"
        )
    texts = {rank: _rank_text(plan, rank, options) for rank in ranks}
    if options.format == "json":
        print(json.dumps(_document(plan, texts, options)))
    elif options.bare:
        print("\n".join(text.replace("\n", " ") for text in texts.values()))
    else:
        print("\n".join(_lines(plan, texts, options)))
    return FINE


def _check_options(options: argparse.Namespace) -> None:
    """UsageError for options of pictures."""
    if options.others:
        raise UsageError("the actions of one schedule are printed at a time")
    for name in _OF_PICTURES:
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for a picture, and --actions prints text"
            )


def _load(options: argparse.Namespace) -> Plan:
    """The plan that the options name; for what its gathers move, with the costs in the options."""
    if options.transport and read_source(options.file).is_plan:
        raise UsageError(
            f"`{options.file}` is a plan, with the transfers of the transport that it was compiled "
            "for: --transport is for a program"
        )
    if not options.shards:
        check_plan_without_costs(options)
    plan: Plan
    plan, costs = load_to_execute(options)
    return evolve(plan, costs=costs.over(plan.costs)) if options.shards else plan


def _lines(
    plan: Plan, texts: dict[int, str], options: argparse.Namespace
) -> Iterator[str]:
    """The lines for people: what the plan is, and the actions of each rank below a head."""
    yield f"{plan.title}, from {called(plan.source.path)}, proved for transport {plan.transport}"
    for number in plan.layout.far_edges:
        yield edge_text(plan, number)
    if plan.layout.frozen:
        numbers = ", ".join(map(plan.names.stage, plan.layout.frozen))
        yield f"frozen stages: {numbers}"
    for rank, text in texts.items():
        stages = plan.names.stages(plan.stages_of(rank))
        # The head of each rank says what its gathers cost.
        yield f"\nrank {rank}, {stages}{_gather_figures(plan, rank, options)}"
        yield indent(text, "  ")


def _document(
    plan: Plan, texts: dict[int, str], options: argparse.Namespace
) -> dict[str, Any]:
    """The same for programs."""
    far = plan.layout.far_edges
    ranks = []
    for rank, text in texts.items():
        # With what they free or gather, actions stand in lines that end with it; else each is one.
        actions = text.splitlines() if options.frees or options.shards else text.split()
        entry = {"rank": rank, "stages": list(plan.stages_of(rank)), "actions": actions}
        if figures := _gather_figures(plan, rank, options):
            entry["gathers"] = figures.removeprefix(": ")
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


def _gather_figures(plan: Plan, rank: int, options: argparse.Namespace) -> str:
    """How often a rank gathers sharded weights, if the options ask for that; in bytes too, where
    the costs have those of the weights.
    """
    if not options.shards:
        return ""
    sizes = None
    if plan.costs.weights_bytes is not None:
        sizes = plan.costs.bytes_of_weights(len(plan.placement))
    return f": {shards_figures(plan, rank, options.shards, sizes)}"
