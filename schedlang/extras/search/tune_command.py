"""`schedc tune`: the program and the parameters that train a model fastest.

What takes time to import is imported by the functions: `schedc --help` loads this file.
"""

import argparse
import sys
from math import inf
from typing import Any

from schedlang.cli.option_values import counts, device, program
from schedlang.cli.options import (
    PARAMS,
    Command,
    Either,
    given,
    more,
    output,
    transport_for,
)
from schedlang.cli.printing import json_text
from schedlang.cli.usage import FINE, USAGE, WRONG, UsageError

#: The options that say something of a model.
_OF_MODEL = ("device", "sequence", "efficiency")

#: Steps that differ by less, relative to their time, are a tie: at the estimated costs of a model;
#: and at measured costs, whose predictions are within so much of the runs in docs/choosing.md.
_OF_ESTIMATES = 0.05
_OF_MEASUREMENTS = 0.01

COMMAND = Command(
    "Which program trains a model fastest, with which parameters?",
    "extras.search.tune_command.tune",
    "1f1b zb_h1 --ranks 4 --batch 32 --costs costs.json --layers 4",
    {
        "files FILE*": given("programs to try; without, all of the gallery", program),
        "--ranks N": given("how many ranks there are", required=True),
        "--batch N": given("how many samples a step has", required=True),
        "costs": Either(
            {
                "--model CONFIG": "a transformer, by its config.json of Hugging Face: its costs "
                "are estimated",
                "--costs FILE...": "measured costs of stages or layers, see docs/costs.md; of one "
                "trace a rank, one --costs for each, or their folder",
            },
            is_required=True,
        ),
        "--device NAME": given("with --model: what it runs on, such as H100", device),
        "--sequence N": "with --model: how many tokens a sample has",
        "--layers N": given(
            "with --costs: how many layers its stages have, one number or 8,8,7: other stages are "
            "tried too",
            counts,
        ),
        "--memory BYTES": "how many bytes a rank may hold, such as 72GB (default: with --model "
        "95 %% of the device's)",
        "--for TIME": given(
            "end after this time, such as 60s, with what is known by then",
            dest="seconds",
        ),
        **output(
            "VIEW",
            "a plot of time against memory to write: NAME.svg, .pdf, .png or .html",
        ),
        **more(
            {
                "--efficiency SHARE": "with --model: the share of the device's operations that is "
                "reached (default: 0.5)",
                "--microbatch N": "samples of a microbatch: those of --costs (default: 1); with "
                "--model, no other sizes",
                "--robust PART": "go by the makespan that 95 of 100 runs stay below, where "
                "durations vary by this part of them, such as 0.1",
                **PARAMS,
                **transport_for("what the plans are proved for", "portable"),
                "--write-costs COSTS": "write what the stages of the best one cost, for --costs of "
                "the other commands",
            }
        ),
    },
)


def tune(options: argparse.Namespace) -> int:
    """Try programs for a training, and print the best."""
    from schedlang.cli.progress import progress
    from schedlang.extras.plots.plot_files import check_plot_path, write_plot
    from schedlang.extras.search.tune.frontier_picture import (
        check_bytes,
        frontier_chart,
    )
    from schedlang.extras.search.tune.tried_programs import read_programs
    from schedlang.extras.search.tune.tuning import tune as search
    from schedlang.extras.search.tune.tuning_text import (
        costs_within,
        tuning_json,
        tuning_text,
    )
    from schedlang.files.documents import write_document

    programs = read_programs(options.files)
    try:
        training, units = _training(options)
        _check_programs(options, programs)
        if options.output:
            check_bytes(training)
            check_plot_path(options.output)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with progress("looking for the fastest program"):
        tuning = search(programs, training, options.seconds or inf)
    wrong = _nothing(tuning, len(programs))
    if options.format == "json":
        document = tuning_json(tuning, units)
        document["command"] = None if wrong else _command(options, tuning)
        print(json_text(document))
    else:
        print(tuning_text(tuning, units))
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return WRONG
    best = tuning.fitting[0].candidate
    if options.write_costs:
        write_document(
            costs_within(best, training.memory).to_json(), options.write_costs
        )
    if options.output:
        try:
            chart = frontier_chart(tuning, units, options.transport)
            write_plot(chart, options.output)
        except ImportError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE
    if options.format != "json":
        _print_best(options, tuning)
    return FINE


def _training(options: argparse.Namespace) -> Any:
    """What is to be trained, and the units of what is told of it; ValueError for what is wrong."""
    from schedlang.extras.search.tune.candidates import Training

    layers, memory, units = _of_model(options) if options.model else _of_costs(options)
    margin = _OF_ESTIMATES if options.model else _OF_MEASUREMENTS
    training = Training(
        layers,
        options.ranks,
        options.batch,
        memory,
        options.params,
        options.transport,
        jitter=options.robust or 0.0,
        margin=margin,
    )
    return training, units


def _of_model(options: argparse.Namespace) -> Any:
    """The layers of a model on a device, for each size of microbatch; how many bytes a rank may
    hold; and the units.
    """
    from schedlang.extras.search.tune.decoder_config import read_decoder
    from schedlang.extras.search.tune.layer_sources import (
        EFFICIENCY,
        layers_of_model,
        powers_of_two,
    )
    from schedlang.extras.search.tune.tuning_text import Units, gigabytes
    from schedlang.schedule.costs.devices import DEVICES

    wanted = {
        "device": f"--device, one of {', '.join(DEVICES)}",
        "sequence": "--sequence, how many tokens a sample has",
    }
    missing = [
        words for name, words in wanted.items() if getattr(options, name) is None
    ]
    if missing:
        raise ValueError(f"--model needs {'; and '.join(missing)}")
    if options.layers:
        raise ValueError("--layers says what --costs has; a --model says it itself")
    device = DEVICES[options.device]
    memory = options.memory or device.room
    sizes = [options.microbatch] if options.microbatch else powers_of_two(options.batch)
    model = read_decoder(options.model)
    efficiency = options.efficiency or EFFICIENCY
    layers = layers_of_model(
        model,
        device,
        options.sequence,
        sizes,
        memory,
        efficiency,
        options.ranks,
    )
    if not layers:
        raise ValueError(
            f"one layer's activations of a microbatch of {sizes[0]} x {options.sequence:,} "
            f"tokens are more than the {gigabytes(memory)} of a rank: take fewer tokens"
        )
    assumed = _assumed(model, device, options.sequence, efficiency, memory)
    return layers, memory, Units(True, options.sequence, model, assumed)


def _assumed(
    model: Any, device: Any, sequence: int, efficiency: float, memory: float
) -> dict[str, str]:
    """What the costs of a model rest on, beside its configuration."""
    from schedlang.extras.search.tune.tuning_text import gigabytes

    rate = f"{device.flops / 1e12:,.0f} TFLOP/s of {device.name}"
    room = f"{gigabytes(memory)} of {gigabytes(device.memory)}"
    inside = f"{device.bandwidth_in_node / 1e9:,.0f} GB/s"
    between = f"{device.bandwidth_between_nodes / 1e9:,.4g} GB/s"
    assumed = {
        "a sample": f"{sequence:,} tokens",
        "numbers": "16 bits; a parameter has 16 bytes, with its gradient and Adam's state",
        "operations": f"{efficiency:.0%} of the {rate}",
        "memory": f"{room} for weights, activations and messages",
        "links": f"{inside} between the {device.per_node} ranks of a node, {between} to others",
    }
    if model.experts:
        assumed["experts"] = "each has as many tokens as any other"
    return assumed


def _of_costs(options: argparse.Namespace) -> Any:
    """The same of measured costs: there is one size of microbatch, that which was measured."""
    from schedlang.extras.search.tune.layer_sources import layers_of_costs
    from schedlang.extras.search.tune.tuning_text import Units
    from schedlang.schedule.costs import read_costs

    given = [name for name in _OF_MODEL if getattr(options, name) is not None]
    if given:
        raise ValueError(f"--{given[0]} is for --model; --costs has been measured")
    costs = read_costs(*options.costs)
    memory = options.memory or inf
    if options.memory is None and costs.capacity_bytes is not None:
        memory = min(costs.capacity_bytes)
    layers = [layers_of_costs(costs, options.microbatch or 1, options.layers)]
    if memory < inf and layers[0].costs.bytes(layers[0].count) is None:
        raise ValueError(
            f"--memory says how many bytes there are, `{options.costs[0]}` not how many are held: "
            "add `activation_bytes` and `weights_bytes`"
        )
    return layers, memory, Units(seconds=False)


def _check_programs(options: argparse.Namespace, programs: Any) -> None:
    """ValueError for what is no program, and for a parameter that none has."""
    from schedlang.extras.search.tune.tried_programs import SIZES

    for each in programs:
        if each.source.is_plan:
            raise ValueError(f"`{each.word}` is no program: tune tries programs")
    known = {*SIZES, *(name for each in programs for name in each.parameters)}
    unknown = options.params.keys() - known
    if unknown:
        raise ValueError(f"no program has a parameter `{min(unknown)}`")


def _nothing(tuning: Any, programs: int) -> str | None:
    """Why there is no best candidate of so many programs, if there is none."""
    from schedlang.extras.search.tune.tuning_text import gigabytes

    if tuning.fitting:
        return None
    training = tuning.training
    if len(tuning.unlike) == programs:
        return "no program can stand in for another one: each is for something else, as told above"
    if not tuning.candidates:
        sizes = ", ".join(str(layers.samples) for layers in training.layers)
        return (
            f"no program takes a batch of {training.batch} on {training.ranks} ranks, with "
            f"{sizes or 'no'} samples in a microbatch, of a model of {training.layers[0].count} "
            "layers: it does not divide, or their `require` refuses it"
        )
    if tuning.least_bytes > training.memory:
        return (
            f"nothing fits into {gigabytes(training.memory)}: a rank holds at least "
            f"{gigabytes(tuning.least_bytes)}; take more ranks"
        )
    if not tuning.results and not tuning.is_cut_off:
        return (
            "no candidate compiles: `schedc check FILE --for microbatches=1..16` says at which "
            "sizes a program does, and why not at others"
        )
    if tuning.is_cut_off:
        return "the time was over before any was known to fit: give more with --for"
    return f"no program has a plan within {gigabytes(training.memory)}"


def _command(options: argparse.Namespace, tuning: Any) -> str:
    """The command that compiles the best candidate."""
    from schedlang.extras.search.tune.tuning_text import command_of

    best = tuning.fitting[0].candidate
    return command_of(best, options.transport, options.write_costs, "plan.json")


def _print_best(options: argparse.Namespace, tuning: Any) -> None:
    """Print how the best candidate is compiled, and what was written."""
    best = tuning.fitting[0].candidate
    print(f"\nthe fastest: {_command(options, tuning)}")
    print(f"  layers by stage: {' '.join(map(str, best.shares))}")
    if not options.write_costs:
        print(
            "  --write-costs FILE writes what its stages cost, for --costs of that command"
        )
    for written in filter(None, (options.write_costs, options.output)):
        print(f"wrote {written}")
