"""Wrong scripts: every wrong argument is a TypeError or ValueError that says which argument it is,
what was given, and what is wanted; and it comes at once, before any work is done.
"""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang import (
    Builder,
    CompileError,
    Costs,
    Noise,
    Plan,
    Source,
    compile,
    open_plan,
    plot,
    prove,
    read_plan,
    read_source,
    simulate,
    simulate_runs,
    view,
    write_plan,
    write_view,
)
from tests.support.paths import PROGRAMS

FILE = PROGRAMS / "1f1b.sched"
TEXT = FILE.read_text()
WHOLE = "it must be a whole number"
FINITE = "it must be a finite number"
A_PLAN = "it must be a Plan"
A_PATH = "it must be the path of a file"
A_PROGRAM = "it must be a path, the text of a program, or a Source"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile(FILE, {"ranks": 2, "microbatches": 2})


# The call, given a plan on two ranks; the error, and the parts that its message must have.
Mistake = tuple[Callable[[Plan], Any], type[Exception], str, str]

COMPILER: dict[str, Mistake] = {
    "compile: a number": (lambda _: compile(5), TypeError, "`source` is 5", A_PROGRAM),  # type: ignore[arg-type]
    "compile: nothing": (
        lambda _: compile(None),
        TypeError,
        "`source` is None",
        A_PROGRAM,
    ),  # type: ignore[arg-type]
    "compile: a plan": (
        lambda plan: compile(plan),
        TypeError,
        "`source` is a Plan",
        A_PROGRAM,
    ),  # type: ignore[arg-type]
    "compile: an open file": (
        lambda _: compile(StringIO(TEXT)),  # type: ignore[arg-type]
        TypeError,
        "`source` is a StringIO",
        A_PROGRAM,
    ),
    "compile: no such file": (
        lambda _: compile("x.sched"),
        CompileError,
        "cannot read `x.sched`",
        "No such file",
    ),
    "compile: no text": (
        lambda _: compile(""),
        ValueError,
        "`source` is ''",
        A_PROGRAM,
    ),
    "compile: a name that the gallery does not have": (
        lambda _: compile("1f1bb"),
        CompileError,
        "no program of the gallery has this name",
        "there is `1f1b`",
    ),
    "compile: a number for the parameters": (
        lambda _: compile(FILE, 4),  # type: ignore[arg-type]
        TypeError,
        "`params` is 4",
        "a mapping of names to whole numbers",
    ),
    "compile: a list of parameters": (
        lambda _: compile(FILE, ["ranks=4"]),  # type: ignore[arg-type]
        TypeError,
        "`params` is ['ranks=4']",
        "such as {'ranks': 4}",
    ),
    "compile: a parameter as text": (
        lambda _: compile(FILE, {"ranks": "4"}),  # type: ignore[dict-item]
        TypeError,
        "`params['ranks']` is '4'",
        WHOLE,
    ),
    "compile: half a rank": (
        lambda _: compile(FILE, {"ranks": 2.5}),  # type: ignore[dict-item]
        TypeError,
        "`params['ranks']` is 2.5",
        WHOLE,
    ),
    "compile: a truth value": (
        lambda _: compile(FILE, {"ranks": True}),
        TypeError,
        "`params['ranks']` is True",
        WHOLE,
    ),
    "compile: parameters by number": (
        lambda _: compile(FILE, {0: 4}),  # type: ignore[dict-item]
        TypeError,
        "`a name in params` is 0",
        "it must be text",
    ),
    "compile: a parameter that is misspelt": (
        lambda _: compile(FILE, {"rnks": 4}),
        ValueError,
        "the schedule `one_f_one_b` has no parameter `rnks`",
        "there is `ranks`",
    ),
    "compile: a parameter without a value": (
        lambda _: compile(
            "schedule s { param ranks param microbatches = 1 rank r { F(0) B(0) } }"
        ),
        ValueError,
        "the parameter `ranks` has no value",
        "give one",
    ),
    "compile: a number for the costs": (
        lambda _: compile(FILE, costs=1.0),  # type: ignore[arg-type]
        TypeError,
        "`costs` is 1.0",
        "it must be Costs",
    ),
    "compile: a dictionary for the costs": (
        lambda _: compile(FILE, {}, {"forward_times": [1]}),  # type: ignore[arg-type]
        TypeError,
        "`costs` is {'forward_times': [1]}",
        "it must be Costs",
    ),
    "compile: costs of other stages": (
        lambda _: compile(FILE, {"ranks": 2}, Costs(forward_times=(1, 2, 3))),
        ValueError,
        "3 durations of `F` are given",
        "there are 2 stages",
    ),
    "compile: a transport that is not known": (
        lambda _: compile(FILE, transport="mpi"),
        ValueError,
        "there is no transport `mpi`",
        "portable, blocking, gloo, nccl",
    ),
    "compile: a transport that is no text": (
        lambda _: compile(FILE, transport=None),  # type: ignore[arg-type]
        TypeError,
        "`transport` is None",
        "it must be the name of a transport",
    ),
    "compile: a word for a flag": (
        lambda _: compile(FILE, forward_only="yes"),  # type: ignore[arg-type]
        TypeError,
        "`forward_only` is 'yes'",
        "it must be True or False",
    ),
    "compile: an argument that is misspelt": (
        lambda _: compile(FILE, parameters={}),  # type: ignore[call-arg]
        TypeError,
        "parameters",
        "unexpected keyword argument",
    ),
    "simulate: a number": (
        lambda _: simulate(5),
        TypeError,
        "`schedule` is 5",
        A_PROGRAM,
    ),  # type: ignore[arg-type]
    "simulate: parameters of a plan": (
        lambda plan: simulate(plan, params={"ranks": 4}),
        ValueError,
        "`params` are those of a program",
        "`schedule` is one that was compiled",
    ),
    "simulate: costs in another order": (
        lambda plan: simulate(plan, True),  # type: ignore[arg-type]
        TypeError,
        "`costs` is True",
        "it must be Costs",
    ),
    "simulate: a word for a flag": (
        lambda plan: simulate(plan, ideal="no"),  # type: ignore[arg-type]
        TypeError,
        "`ideal` is 'no'",
        "it must be True or False",
    ),
    "simulate: costs of other stages": (
        lambda plan: simulate(plan, Costs(backward_times=(1, 2, 3))),
        ValueError,
        "3 durations of `B` are given",
        "there are 2 stages",
    ),
    "simulate: a transport that is not known": (
        lambda plan: simulate(plan, transport="buffered:0"),
        ValueError,
        "there is no transport `buffered:0`",
        "buffered:k",
    ),
    "simulate_runs: a number for the noise": (
        lambda plan: simulate_runs(plan, 0.1),  # type: ignore[arg-type]
        TypeError,
        "`noise` is 0.1",
        "it must be a Noise",
    ),
    "simulate_runs: none": (
        lambda plan: simulate_runs(plan, Noise(jitter=0.1), runs=0),
        ValueError,
        "`runs` is 0",
        f"{WHOLE} from 1",
    ),
    "simulate_runs: a rank that there is not": (
        lambda plan: simulate_runs(plan, Noise(slow_ranks={2: 1.5})),
        ValueError,
        "there is no rank 2",
        "there are 2",
    ),
    "Noise: per cent": (
        lambda _: Noise(jitter=10),
        ValueError,
        "`jitter` is 10",
        "a part of each duration from 0 to 1",
    ),
    "Noise: a list of ranks": (
        lambda _: Noise(slow_ranks=[3]),  # type: ignore[arg-type]
        TypeError,
        "`slow_ranks` is [3]",
        "such as {3: 1.3}",
    ),
    "prove: a path": (
        lambda _: prove("1f1b.sched"),  # type: ignore[arg-type]
        TypeError,
        "`schedule` is '1f1b.sched'",
        "it must be a Schedule or a Plan",
    ),
    "Costs: a number without stages": (
        lambda _: Costs(forward_times=1),  # type: ignore[arg-type]
        TypeError,
        "`forward_times` is 1",
        "one for all stages or one for each",
    ),
    "Costs: less than no time": (
        lambda _: Costs(forward_times=(-1.0,)),
        ValueError,
        "`forward_times` must be numbers from 0",
        "not (-1.0,)",
    ),
    "Costs: not a number": (
        lambda _: Costs(input_times=(1.0, float("nan"))),
        ValueError,
        "`input_times` must be numbers",
        "not (1.0, nan)",
    ),
    "Costs: without end": (
        lambda _: Costs(weights_bytes=(float("inf"),)),
        ValueError,
        "`weights_bytes` must be numbers",
        "not (inf,)",
    ),
    "Costs: numbers as text": (
        lambda _: Costs(weight_times=("1", "2")),  # type: ignore[arg-type]
        TypeError,
        "`weight_times` is ('1', '2')",
        "it must be numbers",
    ),
    "Costs: text": (
        lambda _: Costs(forward_times="12"),  # type: ignore[arg-type]
        TypeError,
        "`forward_times` is '12'",
        "it must be numbers",
    ),
    "Costs: no numbers": (
        lambda _: Costs(update_times=()),
        ValueError,
        "`update_times` must be numbers",
        "not ()",
    ),
    "Costs: several times of one transfer": (
        lambda _: Costs(p2p_time=(1.0, 2.0)),  # type: ignore[arg-type]
        TypeError,
        "`p2p_time` is (1.0, 2.0)",
        FINITE,
    ),
    "Costs: a transfer that is not a number": (
        lambda _: Costs(p2p_time=float("nan")),
        ValueError,
        "`p2p_time` is nan",
        FINITE,
    ),
    "Costs: half a rank on a node": (
        lambda _: Costs(ranks_per_node=1.5),  # type: ignore[arg-type]
        TypeError,
        "`ranks_per_node` is 1.5",
        "it must be a whole number from 1",
    ),
    "Costs: two times of transfers": (
        lambda _: Costs(p2p_time=1.0, latency_in_node=2.0),
        ValueError,
        "`p2p_time` is the time of every transfer",
        "`latency_in_node` says that they differ",
    ),
    "Costs: a name that is misspelt": (
        lambda _: Costs(forward_time=(1.0,)),  # type: ignore[call-arg]
        TypeError,
        "forward_time",
        "unexpected keyword argument",
    ),
    "Source: the path alone": (
        lambda _: Source("1f1b.sched"),  # type: ignore[call-arg]
        TypeError,
        "text",
        "missing 1 required positional argument",
    ),
    "Source: a file that is not read": (
        lambda _: Source("1f1b.sched", FILE),  # type: ignore[arg-type]
        TypeError,
        "`text` is a PosixPath",
        "`read_source` reads it",
    ),
    "read_source: text of a program": (
        lambda _: read_source(5),  # type: ignore[arg-type]
        TypeError,
        "`path` is 5",
        A_PATH,
    ),
    "read_plan: a plan": (
        lambda plan: read_plan(plan),
        TypeError,
        "`path` is a Plan",
        A_PATH,
    ),  # type: ignore[arg-type]
    "read_plan: a program": (
        lambda _: read_plan(FILE),
        CompileError,
        "1f1b.sched",
        "it is a program, not a plan",
    ),
    "open_plan: nothing": (
        lambda _: open_plan(None),
        TypeError,
        "`path` is None",
        A_PATH,
    ),  # type: ignore[arg-type]
    "write_plan: arguments the other way round": (
        lambda plan: write_plan("plan.json", plan),  # type: ignore[arg-type]
        TypeError,
        "`plan` is 'plan.json'",
        A_PLAN,
    ),
    "write_plan: no path": (
        lambda plan: write_plan(plan, None),  # type: ignore[arg-type]
        TypeError,
        "`path` is None",
        A_PATH,
    ),
    "write_view: no execution": (
        lambda plan: write_view(plan, "plan.svg", "plan.svg"),  # type: ignore[arg-type]
        TypeError,
        "`execution` is 'plan.svg'",
        "it must be an Execution, of `simulate`",
    ),
    "write_view: an ending that is none": (
        lambda plan: write_view(plan, simulate(plan), "plan.gif"),
        ValueError,
        "`plan.gif` must end in",
        ".svg",
    ),
    "plot: a kind that there is not": (
        lambda plan: plot("pie", plan),
        ValueError,
        "`kind` is 'pie': it must be one of",
        "'bubble'",
    ),
    "plot: a parameter that no program has": (
        lambda plan: plot("bubble", "1f1b", depth=3),
        ValueError,
        "no program has a parameter `depth`",
    ),
    "plot: costs that are none": (
        lambda plan: plot("memory", plan, 3),  # type: ignore[arg-type]
        TypeError,
        "`costs`",
    ),
    "plot: no schedule": (
        lambda plan: plot("memory", 3),  # type: ignore[arg-type]
        TypeError,
        "`schedules` is 3",
    ),
    "view: no schedule": (
        lambda plan: view(3),  # type: ignore[arg-type]
        TypeError,
        "`schedules` is 3",
    ),
    "stages_of: a rank that there is not": (
        lambda plan: plan.stages_of(5),
        ValueError,
        "there is no rank 5: the plan is for 2 ranks",
        "each is one process, `torchrun --nproc-per-node 2`",
    ),
    "for_updates: text": (
        lambda plan: plan.for_updates("3"),  # type: ignore[arg-type]
        TypeError,
        "`updates` is '3'",
        WHOLE,
    ),
    "for_updates: of a schedule with a flush": (
        lambda plan: plan.for_updates(3),
        ValueError,
        "the plan has 1 update",
        "no part of it repeats",
    ),
    "for_microbatches: text": (
        lambda plan: plan.for_microbatches("3"),  # type: ignore[arg-type]
        TypeError,
        "`microbatches` is '3'",
        WHOLE,
    ),
    "schedlang: a name that it does not have": (
        lambda _: schedlang.complie,  # type: ignore[attr-defined]
        AttributeError,
        "`schedlang` has no `complie`",
        "there is `compile`",
    ),
}


@pytest.mark.parametrize("name", COMPILER)
def test_of_the_compiler(name: str, plan: Plan) -> None:
    refuses(plan, *COMPILER[name])


def refuses(
    plan: Plan, call: Callable[[Plan], Any], error: type[Exception], *parts: str
) -> None:
    with pytest.raises(error) as refused:
        call(plan)
    assert [part for part in parts if part not in str(refused.value)] == [], (
        refused.value
    )


def built(call: Callable[[Builder], Any], **options: Any) -> Callable[[Plan], Any]:
    """A call of a Builder on two ranks."""
    given = {"ranks": 2, "microbatches": 4} | options
    return lambda _: call(Builder(**given))


def nested(outer: str, inner: str) -> Callable[[Builder], Any]:
    """One `with` within another."""

    def call(b: Builder) -> None:
        with getattr(b, outer)(), getattr(b, inner)():
            pass

    return call


def within(group: str, method: str) -> Callable[[Builder], Any]:
    """An op within a group."""

    def call(b: Builder) -> None:
        with getattr(b, group)():
            getattr(b, method)(0, 0)

    return call


BUILDER: dict[str, Mistake] = {
    "no sizes": (
        lambda _: Builder(),  # type: ignore[call-arg]
        TypeError,
        "'ranks' and 'microbatches'",
        "missing 2 required keyword-only arguments",
    ),
    "no ranks": (
        built(repr, ranks=0),
        ValueError,
        "`ranks` is 0",
        "it must be a whole number from 1",
    ),
    "microbatches as text": (
        built(repr, microbatches="8"),
        TypeError,
        "`microbatches` is '8'",
        "it must be a whole number from 1",
    ),
    "a name that is no word": (
        built(repr, name="my schedule"),
        ValueError,
        "`name` is 'my schedule'",
        "it must be letters, digits and `_`",
    ),
    "a placement that is not known": (
        built(repr, placement="zigzag"),
        TypeError,
        "`placement` is 'zigzag'",
        "it must be 'loop', 'v', or the rank of each stage",
    ),
    "a placement on a rank that there is not": (
        built(repr, placement=[0, 2]),
        ValueError,
        "`placement[1]`: stage 1 is on rank 2",
        "there are ranks 0 to 1",
    ),
    "a placement that leaves a rank without a stage": (
        built(repr, placement=[0, 0]),
        ValueError,
        "`placement`",
        "rank 1 holds no stage",
    ),
    "chunks and a list": (
        built(repr, placement=[0, 1], chunks=2),
        ValueError,
        "`chunks` is given, and a list for `placement`",
        "the list says how many",
    ),
    "a placement and pipelines": (
        built(repr, placement="v", pipelines={"down": [0, 1], "up": [1, 0]}),
        ValueError,
        "`placement` is given, and `pipelines`",
        "each says where its stages are",
    ),
    "pipelines that cannot share": (
        built(repr, microbatches=3, pipelines={"down": [0, 1], "up": [1, 0]}),
        ValueError,
        "`microbatches` is 3",
        "2 pipelines cannot share them evenly",
    ),
    "pipelines of different lengths": (
        built(repr, pipelines={"down": [0, 1], "up": [1]}),
        ValueError,
        "`pipelines['up']`: the pipeline has 1 stage",
        "the first one has 2",
    ),
    "a pipeline that is called as a parameter": (
        built(repr, pipelines={"ranks": [0, 1], "up": [1, 0]}),
        ValueError,
        "`pipelines` has 'ranks'",
        "the program has this name for something else",
    ),
    "pipelines without names": (
        built(repr, pipelines=[[0, 1], [1, 0]]),
        TypeError,
        "`pipelines` is [[0, 1], [1, 0]]",
        "such as {'down': [0, 1], 'up': [1, 0]}",
    ),
    "a skip that leads back": (
        built(repr, placement=[0, 1, 0, 1], skips=[(3, 0)]),
        ValueError,
        "`skips[0]`: the skip from stage 3 to stage 0",
        "does not lead forward",
    ),
    "a skip that is no pair": (
        built(repr, skips=[3]),
        TypeError,
        "`skips[0]` is 3",
        "it must be a pair of stages",
    ),
    "links of other ranks": (
        built(repr, links=[0]),
        ValueError,
        "`links`: there must be one for each rank",
        "1 for 2 ranks",
    ),
    "weights that are not known": (
        built(repr, weights="newest"),
        ValueError,
        "`weights` is 'newest'",
        "it must be 'latest', 'stash', 'unstashed' or 'delay 1'",
    ),
    "weights of other stages": (
        built(repr, weights=["stash"]),
        ValueError,
        "`weights` has 1 rule",
        "there are 2 stages",
    ),
    "costs that a program cannot say": (
        built(repr, costs=Costs(activation_bytes=(1.5,))),
        ValueError,
        "`costs` have `activation_bytes`, which a program cannot say",
        "give it to `compile`",
    ),
    "costs of more digits than a program's": (
        built(repr, costs=Costs(forward_times=(1e-20,))),
        ValueError,
        "`costs` have `forward_times` [1e-20]",
        "at most 18 digits",
    ),
    "costs of other stages": (
        built(repr, costs=Costs(forward_times=(1, 2, 3))),
        ValueError,
        "3 durations of `F` are given",
        "there are 2 stages",
    ),
    "a rank that there is not": (
        built(lambda b: b.forward(2, 0)),
        ValueError,
        "`rank` is 2",
        "it must be a whole number from 0 to 1",
    ),
    "a microbatch that there is not": (
        built(lambda b: b.forward(0, 4)),
        ValueError,
        "`microbatch` is 4",
        "it must be a whole number from 0 to 3",
    ),
    "no microbatch": (
        built(lambda b: b.op(0, "F")),
        TypeError,
        "`microbatch` is None",
        "it must be a whole number from 0 to 3",
    ),
    "a kind that is not known": (
        built(lambda b: b.op(0, "X", 0)),
        ValueError,
        "`kind` is 'X'",
        "it must be one of 'F', 'B', 'I', 'W', 'R', 'U'",
    ),
    "no stage where there are two": (
        built(lambda b: b.forward(0, 0), chunks=2),
        ValueError,
        "`stage` is not given",
        "rank 0 holds the stages 0, 2",
    ),
    "a stage of another rank": (
        built(lambda b: b.forward(0, 0, stage=1), chunks=2),
        ValueError,
        "`stage` is 1: that is on rank 1",
        "rank 0 holds 0, 2",
    ),
    "a slice where there are none": (
        built(lambda b: b.forward(0, 0, slice=0)),
        ValueError,
        "`slice` is 0",
        "there are no slices here",
    ),
    "no slice where there are some": (
        built(lambda b: b.forward(0, 0), slices=2),
        TypeError,
        "`slice` is None",
        "it must be a whole number from 0 to 1",
    ),
    "an update of a microbatch": (
        built(lambda b: b.op(0, "U", 0)),
        ValueError,
        "`microbatch` is 0",
        "an update is of none",
    ),
    "a transfer in an overlap": (
        built(within("overlap", "send_forward")),
        ValueError,
        "`overlap` is for ops that compute",
        "sends and receives take `exchange`",
    ),
    "an op in an exchange": (
        built(within("exchange", "forward")),
        ValueError,
        "`exchange` is for sends and receives",
        "ops take `overlap`",
    ),
    "an overlap in an exchange": (
        built(nested("exchange", "overlap")),
        ValueError,
        "`overlap` stands in `exchange`",
        "they do not nest",
    ),
    "a warm-up in the steady part": (
        built(nested("steady", "warmup")),
        ValueError,
        "`warmup` stands in `steady`",
        "they do not nest",
    ),
    "compile: a transport that is not known": (
        built(lambda b: b.compile(transport="mpi")),
        ValueError,
        "there is no transport `mpi`",
        "portable, blocking",
    ),
    "plan: before it is compiled": (
        built(lambda b: b.plan),
        ValueError,
        "`plan` is there at the end of the `with` block",
        "call `compile`",
    ),
}


@pytest.mark.parametrize("name", BUILDER)
def test_of_the_builder(name: str, plan: Plan) -> None:
    refuses(plan, *BUILDER[name])


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def runtime() -> Any:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    import schedlang.runtime

    return schedlang.runtime


def pipeline(plan: Any, stages: Any = None, loss_fn: Any = None, **options: Any) -> Any:
    return runtime().Pipeline(
        plan, {0: model()} if stages is None else stages, loss_fn, **options
    )


def decoding(plan: Any, new_cache: Any = dict, *given: Any) -> Any:
    return runtime().Decoding(plan, {0: model()}, new_cache, *given)


def generate(*given: Any) -> Any:
    """The arguments are checked before any work, so there need be no pipeline."""
    return runtime().Decoding.generate(None, *given)


def tokens() -> Any:
    """Two rows of three tokens."""
    runtime()
    import torch

    return torch.ones(2, 3, dtype=torch.long)


def runtime_module(name: str) -> Any:
    """A class of `torch.nn`."""
    runtime()
    from torch import nn

    return getattr(nn, name)


def split(*given: Any, **options: Any) -> Any:
    return runtime().split(model(), *given, **options)


RUNTIME: dict[str, Mistake] = {
    "Pipeline: a path for the plan": (
        lambda _: pipeline("plan.json"),
        TypeError,
        "`plan` is 'plan.json'",
        "`read_plan(path)` reads one",
    ),
    "Pipeline: a program for the plan": (
        lambda _: pipeline(read_source(FILE)),
        TypeError,
        "`plan` is a Source",
        "`compile(program)` makes one",
    ),
    "Pipeline: a list of stages": (
        lambda plan: pipeline(plan, [model()]),
        TypeError,
        "`stages` is [",
        "a mapping of stages to modules, such as {0: module}",
    ),
    "Pipeline: a weight without a shape": (
        lambda plan: pipeline(plan, {0: runtime_module("LazyLinear")(4)}),
        ValueError,
        "`stages[0]` has a weight `weight` without a shape",
        "run the model once on a microbatch",
    ),
    "Pipeline: a module for the stages": (
        lambda plan: pipeline(plan, model()),
        TypeError,
        "`stages` is a Sequential",
        "a mapping of stages to modules",
    ),
    "Pipeline: a stage that is no module": (
        lambda plan: pipeline(plan, {0: lambda x: x}),
        TypeError,
        "`stages[0]` is a function",
        "it must be a module of torch",
    ),
    "Pipeline: the class of a stage": (
        lambda plan: pipeline(plan, {0: type(model())}),
        TypeError,
        "`stages[0]` is the class Sequential",
        "it must be a module of torch",
    ),
    "Pipeline: stages by name": (
        lambda plan: pipeline(plan, {"0": model()}),
        TypeError,
        "`a stage in stages` is '0'",
        "it must be a whole number from 0",
    ),
    "Pipeline: a loss that is no function": (
        lambda plan: pipeline(plan, loss_fn="mse"),
        TypeError,
        "`loss_fn` is 'mse'",
        "it must be a function of output and targets",
    ),
    "Pipeline: the class of a loss": (
        lambda plan: pipeline(plan, loss_fn=type(model())),
        TypeError,
        "`loss_fn` is the class Sequential",
        "an instance, such as Sequential()",
    ),
    "Pipeline: what skips a batch, as text": (
        lambda plan: pipeline(plan, skip_if="nan"),
        TypeError,
        "`skip_if` is 'nan'",
        "it must be a type of exceptions, several in a tuple, or a function of the losses",
    ),
    "Pipeline: a name for the mesh": (
        lambda plan: pipeline(plan, mesh="pp"),
        TypeError,
        "`mesh` is 'pp'",
        "it must be a DeviceMesh",
    ),
    "Pipeline: a type as text": (
        lambda plan: pipeline(plan, transfer_dtype="bfloat16"),
        TypeError,
        "`transfer_dtype` is 'bfloat16'",
        "it must be a dtype of torch",
    ),
    "Pipeline: one optimizer": (
        lambda plan: pipeline(plan, optimizers=[1]),
        TypeError,
        "`optimizers` is [1]",
        "a mapping of stages to optimizers",
    ),
    "Pipeline: tied weights by name": (
        lambda plan: pipeline(plan, tied="weight"),
        TypeError,
        "`tied` is 'weight'",
        "a list of the names by stage",
    ),
    "Pipeline: no time": (
        lambda plan: pipeline(plan, timeout=0),
        ValueError,
        "`timeout` is 0",
        "it must be a finite number above 0",
    ),
    "Pipeline: a time as text": (
        lambda plan: pipeline(plan, timeout="60"),
        TypeError,
        "`timeout` is '60'",
        FINITE,
    ),
    "Pipeline: a scale that is no number": (
        lambda plan: pipeline(plan, loss_scale=float("nan")),
        ValueError,
        "`loss_scale` is nan",
        FINITE,
    ),
    "Pipeline: a word that is not known": (
        lambda plan: pipeline(plan, verify="sometimes"),
        ValueError,
        "`verify` is 'sometimes'",
        "it must be one of 'first', 'always', 'never'",
    ),
    "Pipeline: three dimensions": (
        lambda plan: pipeline(plan, batch_dim=(0, 1, 2)),
        ValueError,
        "`batch_dim` is (0, 1, 2)",
        "a pair of those of inputs and targets",
    ),
    "Pipeline: one length for all slices": (
        lambda plan: pipeline(plan, slice_lengths=512),
        TypeError,
        "`slice_lengths` is 512",
        "the lengths of slices, such as [512, 256, 256], or a function that gives them",
    ),
    "Pipeline: an empty slice": (
        lambda plan: pipeline(plan, slice_lengths=[512, 0]),
        ValueError,
        "`slice_lengths[1]` is 0",
    ),
    "Pipeline: an argument that is misspelt": (
        lambda plan: pipeline(plan, loss_function=print),
        TypeError,
        "loss_function",
        "unexpected keyword argument",
    ),
    "Standby: a plan for the others of all": (
        lambda plan: runtime().Standby(plan, plan, {0: model()}),
        TypeError,
        "`left` is a Plan",
        "a mapping of ranks to the plans for the others",
    ),
    "Standby: a path for the plan of the others": (
        lambda plan: runtime().Standby(plan, {1: "plan.json"}, {0: model()}),
        TypeError,
        "`left[1]` is 'plan.json'",
        A_PLAN,
    ),
    "Standby: a rank that the plan has not": (
        lambda plan: runtime().Standby(plan, {2: plan}, {0: model()}),
        ValueError,
        "`a rank in left` is 2",
        "",
    ),
    "Decoding: a path for the plan": (
        lambda _: decoding("plan.json"),
        TypeError,
        "`plan` is 'plan.json'",
        A_PLAN,
    ),
    "Decoding: a cache in place of a function": (
        lambda plan: decoding(plan, {"cache": {}}),
        TypeError,
        "`new_cache` is {'cache': {}}",
        "it must be a function of the prompts of a group",
    ),
    "Decoding: the name of a rule": (
        lambda plan: decoding(plan, dict, "greedy"),
        TypeError,
        "`choose` is 'greedy'",
        "it must be a function of what the last stage returns",
    ),
    "Decoding: one tensor for all groups": (
        lambda _: generate(tokens(), 5),
        TypeError,
        "`prompts` is a Tensor",
        "it must be a list of tensors of tokens",
    ),
    "Decoding: a text in place of its tokens": (
        lambda _: generate(["a text"], 5),
        TypeError,
        "`prompts[0]` is 'a text'",
        "tensors of tokens",
    ),
    "Decoding: a prompt without rows": (
        lambda _: generate([tokens()[0]], 5),
        ValueError,
        "`prompts[0]` has the shape [3]",
        "(rows, length)",
    ),
    "Decoding: no token": (
        lambda _: generate([tokens()], 0),
        ValueError,
        "`max_tokens` is 0",
        "a whole number from 1",
    ),
    "Decoding: the end as a text": (
        lambda _: generate([tokens()], 1, "</s>"),
        TypeError,
        "`end` is '</s>'",
        WHOLE,
    ),
    "split: a path for the plan": (
        lambda _: split("plan.json", rank=0),
        TypeError,
        "`plan` is 'plan.json'",
        A_PLAN,
    ),
    "split: plan and model the other way round": (
        lambda plan: runtime().split(plan, model(), rank=0),
        TypeError,
        "`model` is a Plan",
        "it must be a module of torch",
    ),
    "split: a rank that the plan does not have": (
        lambda plan: split(plan, rank=5),
        ValueError,
        "`rank` is 5",
        "it must be a whole number from 0 to 1",
    ),
    "split: a rank as text": (
        lambda plan: split(plan, rank="0"),
        TypeError,
        "`rank` is '0'",
        WHOLE,
    ),
    "split: blocks by number": (
        lambda plan: split(plan, [0, 1], rank=0),
        TypeError,
        "`blocks[0]` is 0",
        "names of submodules",
    ),
    "split: modules for blocks": (
        lambda plan: split(plan, model(), rank=0),
        TypeError,
        "`blocks[0]` is a Linear",
        "names of submodules",
    ),
    "split: costs as text": (
        lambda plan: split(plan, costs=["1", "2"], rank=0),
        TypeError,
        "`costs[0]` is '1'",
        "numbers, one for each block",
    ),
    "split: costs that are no number": (
        lambda plan: split(plan, costs=[1.0, float("nan")], rank=0),
        ValueError,
        "`costs[1]` is nan",
        FINITE,
    ),
    "split: names of blocks without stages": (
        lambda plan: split(plan, layout=["0", "1"], rank=0),
        TypeError,
        "`layout[0]` is '0'",
        "the names of the blocks of a stage",
    ),
    "split: numbers of blocks by stage": (
        lambda plan: split(plan, layout=[2, 2], rank=0),
        TypeError,
        "`layout[0]` is 2",
        "names by stage, such as [['embedding'], ['layers', 'head']]",
    ),
    "EvenLayers: a share of a layer": (
        lambda _: runtime().EvenLayers(first_stage_less=0.5),
        TypeError,
        "`first_stage_less` is 0.5",
        WHOLE,
    ),
    "measure: a shape for the input": (
        lambda _: runtime().measure(model(), (4, 2)),
        TypeError,
        "`input` is a tuple that holds a int",
        "it must be a tensor",
    ),
    "measure: no input": (
        lambda _: runtime().measure(model(), ()),
        ValueError,
        "`input` has no tensors",
        "it must be a microbatch",
    ),
    "load_model: a module for the stages": (
        lambda _: runtime().load_model("model", model()),
        TypeError,
        "`stages` is a Sequential",
        "such as {0: module}",
    ),
    "load_model: no folder": (
        lambda _: runtime().load_model(None, {0: model()}),
        TypeError,
        "`folder` is None",
        "it must be the path of a folder",
    ),
    "load_optimizers: one optimizer": (
        lambda _: runtime().load_optimizers("model", {0: model()}, 5),
        TypeError,
        "`optimizers` is 5",
        "such as [optimizer]",
    ),
}


@pytest.mark.parametrize("name", RUNTIME)
def test_of_the_runtime(name: str, plan: Plan) -> None:
    refuses(plan, *RUNTIME[name])


def test_a_program_is_a_path_a_text_or_a_source(tmp_path: Path) -> None:
    """`compile` and `simulate` take all three, and `simulate` plans and their files."""
    params = {"ranks": 2, "microbatches": 3}
    expected = compile(read_source(FILE), params)
    for program in (str(FILE), FILE, TEXT, Source(str(FILE), TEXT), "1f1b"):
        assert compile(program, params).ranks == expected.ranks
        assert simulate(program, params=params).timeline == simulate(expected).timeline
    write_plan(expected, tmp_path / "plan.json")
    assert simulate(tmp_path / "plan.json").timeline == simulate(expected).timeline
    assert simulate(expected, transport="blocking").transport == "blocking"
