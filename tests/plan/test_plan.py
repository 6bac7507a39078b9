"""The plan file: what is written is read back, and nothing else is believed."""

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    CompileError,
    Plan,
    Source,
    compile,
    open_plan,
    read_plan,
    read_source,
    write_plan,
)
from schedlang.plan.proved_again import plan_in
from schedlang.schedule.costs import costs_of
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.tables import rows


@pytest.fixture
def plan() -> Plan:
    text = "schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) F(1) B(0) B(1) U } }"
    return compile(Source("s.sched", text))


def document(plan: Plan) -> Any:
    return json.loads(json.dumps(plan.to_json()))


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_round_trip(path: Path, tmp_path: Path) -> None:
    plan = compile(read_source(path))
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert again.digest == plan.digest
    assert again.where(0, 3) == plan.where(0, 3)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_parts(path: Path, tmp_path: Path) -> None:
    """Each rank's actions by themselves, from a file that is one document of JSON."""
    plan = compile(read_source(path))
    write_plan(plan, tmp_path / "plan.json")
    opened = open_plan(tmp_path / "plan.json")
    assert opened.digest == plan.digest
    for rank in reversed(range(len(plan.ranks))):
        ours = opened.ranks[rank]
        theirs = plan.ranks[rank]
        assert (ours.text(), ours.source) == (theirs.text(), theirs.source)
    found = json.loads((tmp_path / "plan.json").read_text())
    # Where each rank's part stands in the file is said in the file alone.
    del found["lines"]
    assert found == document(plan)
    assert opened.to_json() == plan.to_json()


def test_a_rank_reads_its_part_alone(plan: Plan, tmp_path: Path) -> None:
    """What is wrong with another rank's does not matter to it, and is told by the rank that reads
    the whole.
    """
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    # An action of rank 0 alone; the part of rank 1 is as it was written.
    path.write_text(path.read_text().replace("0F0", "0F9"))
    opened = open_plan(path)
    assert opened.ranks[1] == plan.ranks[1]
    with pytest.raises(
        CompileError, match="the part of rank 0 has changed since it was written"
    ):
        opened.ranks[0]
    with pytest.raises(CompileError, match="no-such-microbatch"):
        read_plan(path)
    path.unlink()
    with pytest.raises(CompileError, match=r"cannot read `\S+`: No such file"):
        opened.ranks[0]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"lines"', '"line"'), "`lines` must be a list"),
        (
            lambda text: text.replace('"lines": [', '"lines": [3,'),
            "`lines` must be the lengths of two lines",
        ),
        (
            lambda text: re.sub(r'"lines": \[\s*\[[^]]*\],', '"lines": [', text),
            "`lines` must have 2 entries",
        ),
        (
            lambda text: text.replace('"slices"', '"slice"'),
            "`slices` must be a whole number",
        ),
        (lambda text: text.replace('"skips"', '"skip"'), "a plan has no field `skip`"),
        (
            lambda text: text.replace('"slices": 1', '"slices": 1, "slices": 2'),
            "`slices` is there twice in one object",
        ),
        (
            lambda text: json.dumps(json.loads(text)),
            "it has no lines of `actions` of its own",
        ),
        (lambda text: text[:100], "not a whole plan file"),
        (lambda text: "[" + text, "not a whole plan file"),
    ],
)
def test_a_damaged_plan_is_not_opened(
    plan: Plan, tmp_path: Path, damage: Callable[[str], str], reason: str
) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CompileError) as caught:
        open_plan(path)
    assert reason in str(caught.value)


def test_where_an_action_comes_from(plan: Plan) -> None:
    plan = compile(read_source(GALLERY[0]))
    assert GALLERY[0].stem == "1f1b"
    assert plan.ranks[0].word(0) == "0F0"
    assert plan.where(0, 0) == f"{GALLERY[0]}:8"


def with_pipeline(document: Any, **fields: Any) -> Any:
    return document | {"pipelines": [document["pipelines"][0] | fields]}


def with_program(document: Any, **fields: Any) -> Any:
    return document | {"program": document["program"] | fields}


def without_params(document: Any) -> Any:
    return document | {"params": {}}


#: What is changed in the document of a plan, and what is said of it.
DAMAGED = rows(
    r"""
[] | not a plan file: it has no `format`
{} | not a plan file: it has no `format`
plan(format='schedlang.plan/2') | the format is `schedlang.plan/2`
plan(format=None) | the format is `None`
plan(program=3) | `program` must be an object
plan(program={'name': 's'}) | `program` must hold the texts
plan(ranks='2') | `ranks` must be a whole number
plan(ranks=True) | `ranks` must be a whole number
plan(ranks=3) | `placement`: rank 2 holds no stage
plan(ranks=10 ** 12) | rank 2 holds no stage, like 999999999997 other ranks
plan(actions=d['actions'][:1]) | must have 2 lines
pipeline(microbatches=2.5) | `pipelines` must hold whole numbers
pipeline(microbatches=1) | `microbatches` is 2 in `params`, and 1 by `pipelines` and `updates`
without_params(pipeline(microbatches=10 ** 12)) | missing-op
without_params(pipeline(microbatches=10 ** 30)) | missing-op
without_params(pipeline(microbatches=1)) | no-such-microbatch
pipeline(microbatches=0) | `pipelines`: the pipeline runs 0 microbatches
plan(params={'ranks': 4}) | `ranks` is 4 in `params`, and 2 in `ranks`
plan(params={'slices': 3}) | `slices` is 3 in `params`, and 1 in `slices`
plan(params={'ranks': True}) | `params` must be whole numbers
plan(params={'chunks': 7}) | `params` has 'chunks', and the `text` of `program` has no such parameter
plan(params={'': 7}) | `params` has '', and the `text`
pipeline(name='\x00') | `pipelines` is no text
pipeline(name='a\nb') | the `name` 'a\nb' must be
pipeline(name='1F0') | `pipelines`: the `name` '1F0' must be
pipeline(rank=1) | of `pipelines` has no field `rank`
plan(models=True) | `pipelines`: the `name` '' must be
program(file='a\x00') | `program` is no text
program(size=1) | `program` has no field 'size'
plan(weights=[{'name': 'latest', 'delay': 0, 'on': 1}] * 2) | an entry of `weights` has no field `on`
plan(frozen=[0], weights=[{'name': 'stash', 'delay': 0}] * 2) | `weights` of stage 0 are `stash`, and it is `frozen`
plan(costs={'gather_memory': [-1]}) | costs: `gather_memory` must be numbers from 0
plan(costs={'p2p_time': 10 ** 400}) | it must be a finite number
pipeline(start=1) | `pipelines`: they must divide the 2 stages
pipeline(stop=3) | `pipelines`: they must divide the 2 stages
pipeline(name=None) | `pipelines` must be objects
plan(pipelines=[]) | `pipelines`: they must divide the 2 stages
plan(slices=0) | `slices`: it is 0, it must be 1 or more
plan(slices=2) | missing-op
plan(updates=2) | `microbatches` is 2 in `params`, and 1 by `pipelines`
without_params(plan(updates=2)) | stage 0 never makes update 1, others do
plan(updates=10 ** 30) | do not divide into
plan(links=[0]) | `links`: there must be one for each rank: 1 for 2 ranks
plan(kernels=[[0, 9], [0, 0]]) | in the plan of 2 updates
plan(kernels=[[0, 0], [0, 10]]) | that of rank 1 is 0 to 10, it has 9
plan(kernels=[[0, 0]]) | `kernels` must be a pair of places
plan(weights=[{'name': 'latest', 'delay': 1}] * 2) | `weights` of stage 0: weights `latest` have a `delay` of 1
plan(weights=[{'name': 'latest', 'delay': 0}, {'name': 'stash', 'delay': 2}]) | `weights` of stage 1: weights `stash` have a `delay` of 2
plan(weights=[{'name': 'latest', 'delay': 0}]) | `weights` must have a rule for each of the 2 stages
plan(kernel=[]) | a plan has no field `kernel`
program(text=d['program']['text'] + ' ') | the `sha256` of `program` is
program(sha256='0') | the `sha256` of `program` is 0, its `text` has
program(sha256=None) | `program` must hold the texts
program(imports=[['a.sched', 10 ** 6]]) | the `imports` of `program` must start one after the other
program(imports=[['a.sched', 9], ['b.sched', 8]]) | the `imports` of `program` must start one after the other
program(name='\ud800') | `program` is no text: surrogates not allowed
pipeline(name='\udfff') | `pipelines` is no text
plan(params={'\ud800': 2}) | `params` is no text
plan(transport='\ud800') | `transport` is no text
plan(costs={'\ud800': [1]}) | `costs` is no text
plan(costs={'forward_times': [float('nan')]}) | `NaN` is no number
plan(pipelines=[{'name': 'a', 'start': 0, 'stop': 1, 'microbatches': 1}, {'name': 'a', 'start': 1, 'stop': 2, 'microbatches': 1}]) | `pipelines`: two have the `name` 'a'
plan(lines=[[1, 1, 'x']] * 2) | `lines` of rank 0 is [1, 1, 'x'], its
plan(lines=[]) | `lines` of rank 0 is None, its `actions`
plan(lines=3) | `lines` must be a list
plan(skips=[[0, 1]]) | `skips`: the skip from stage 0 to stage 1 leads to the next stage, which gets what
plan(skips=[[1]]) | `skips` must be pairs
plan(frozen=[0, 1]) | `frozen`: all stages are frozen
plan(frozen=[2]) | `frozen`: there is no stage 2, there are stages 0 to 1
plan(frozen=[0]) | stage 0 needs no gradients: it is frozen
plan(skips=[1]) | `skips` must hold whole numbers
plan(skips=1) | `skips` must be a list
plan(placement=[0, 5]) | `placement`: stage 1 is on rank 5, there are ranks 0 to 1
plan(placement=[0, -1]) | `placement` must hold whole numbers from 0
plan(placement=[1, 0]) | stage 0 is on rank 1
plan(placement=[]) | `placement`: there are no stages
plan(params={'ranks': '2'}) | `params` must be whole numbers
plan(spans=[[0, 10 ** 9]]) | `spans` must be pairs of places
plan(spans=[[1]]) | `spans` must be pairs of numbers
plan(spans=[]) | not an index of `spans`
plan(transport=None) | `transport` must be text
plan(transport='mpi') | `transport`: there is no transport `mpi`
plan(costs=None) | costs: it must be an object
plan(costs={'forward_times': [-1]}) | costs: `forward_times` must be numbers from 0
plan(costs={'input_memory': [1, 2, 3]}) | 3 memories of `I` are given, there are 2 stages
plan(actions=None) | `actions` must be a list
plan(actions=[1, 2]) | must be lines of text
plan(actions=[d['actions'][0] + ' 0F9x', d['actions'][1]]) | `0F9x` is not an action
plan(actions=[d['actions'][0] + ' 0F1', d['actions'][1]]) | fewer sources than actions
plan(actions=[d['actions'][0][:-3], d['actions'][1]]) | more sources than actions
plan(actions=[d['actions'][0].replace('0F0 0S', '(0F0;0S'), '']) | is not an action
plan(actions=['(0F0;0SEND_F0)', ''], sources=['1 1', '']) | transfers are batched alone
plan(sources=['x', '']) | sources of rank 0
plan(sources=[d['sources'][0], '-' + d['sources'][1]]) | sources of rank 1
plan(actions=[d['actions'][0].replace('0F0 0SEND_F0', '0SEND_F0 0F0'), d['actions'][1]]) | order
"""
)


@pytest.mark.parametrize(("change", "reason"), DAMAGED)
def test_a_damaged_plan_is_refused_with_its_reason(
    plan: Plan, tmp_path: Path, change: str, reason: str
) -> None:
    d = document(plan)
    names = {
        "d": d,
        "plan": lambda **fields: d | fields,
        "pipeline": partial(with_pipeline, d),
        "program": partial(with_program, d),
        "without_params": without_params,
    }
    (tmp_path / "plan.json").write_text(json.dumps(eval(change, names)))
    with pytest.raises(CompileError) as caught:
        read_plan(tmp_path / "plan.json")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        (
            [[2, 0], [1, 2], [2, 3]],
            "`edges`: the edge from stage 2 to stage 0 does not lead forward",
        ),
        (
            [[2, 2], [1, 2], [2, 3]],
            "`edges`: the edge from stage 2 to stage 2 does not lead forward",
        ),
        (
            [[0, 9], [1, 2], [2, 3]],
            "`edges`: the edge from stage 0 to stage 9 leads to no stage",
        ),
        (
            [[0, 2], [0, 2], [2, 3]],
            "`edges`: the edge from stage 0 to stage 2 is there already",
        ),
        (
            [[0, 2, 3]],
            "`edges` must be pairs of numbers: [0, 2, 3] is none",
        ),
        ([[0, -2]], "`edges` must hold whole numbers from 0"),
        ([[True, False]], "`edges` must hold whole numbers from 0"),
        ({}, "`edges` must be a list"),
        # What is wrong by what the plan does with them has the line of the program.
        ([], "two_encoders.sched:14"),
        ([[1, 2], [2, 3]], "two_encoders.sched:14"),
        ([[0, 2], [1, 2]], "`2SEND_F0` has no other rank to reach"),
        ([[0, 1], [1, 2], [2, 3]], "`4SEND_F0` on rank 0: there are stages 0 to 3"),
        ([[0, 3], [1, 2], [2, 3]], "4 is the edge from stage 0 to stage 3"),
        ([[0, 2], [0, 3], [1, 2], [2, 3]], "`3F0` on rank 3 runs before `5RECV_F0`"),
        ([[0, 1], [0, 2], [1, 2], [2, 3]], "`1F0` on rank 1 runs before `1RECV_F0`"),
    ],
)
def test_damaged_edges_are_refused_with_their_reason(
    tmp_path: Path, edges: Any, reason: str
) -> None:
    plan = compile("two_encoders", {"microbatches": 2})
    (tmp_path / "plan.json").write_text(json.dumps(document(plan) | {"edges": edges}))
    with pytest.raises(CompileError) as caught:
        read_plan(tmp_path / "plan.json")
    assert reason in str(caught.value)


def test_an_edge_is_no_skip_as_well(tmp_path: Path) -> None:
    plan = compile("two_encoders", {"microbatches": 2})
    (tmp_path / "plan.json").write_text(
        json.dumps(document(plan) | {"skips": [[0, 2]]})
    )
    with pytest.raises(
        CompileError, match="the skip from stage 0 to stage 2 is there already"
    ):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"format": ', b"\xff\xfe", b"[" * 100_000, b"null", b"3"]
)
def test_what_is_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(CompileError, match=r"not a (whole )?plan"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("schedule s { param ranks = 1 }", "a program"),
        ("0F0,0B0", "an action table of torch"),
        ('{"traceEvents": []}', "a trace"),
        ('{"forward_times": [1, 2]}', "a file of costs"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, content: str, kind: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    for read in (read_plan, open_plan):
        with pytest.raises(CompileError, match=f"it is {kind}, not a plan"):
            read(tmp_path / "plan.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@examples(200)
@given(
    st.sampled_from(
        [
            "program",
            "params",
            "ranks",
            "pipelines",
            "slices",
            "skips",
            "edges",
            "frozen",
            "placement",
            "costs",
            "spans",
            "actions",
            "sources",
        ]
    ),
    JSON,
)
def test_any_value_in_any_field_is_answered(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    plan = compile(
        Source(
            "s.sched",
            "schedule s { param ranks = 1 param microbatches = 1 rank r { F(0) B(0) } }",
        )
    )
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(document(plan) | {name: value}))
    try:
        again = read_plan(path)
    except CompileError:
        return
    # Whatever was written there is refused, or changes nothing of what is done.
    assert [each.text() for each in again.ranks] == ["0F0 0B0"]


#: What may stand in a place of a document where something else should.
ODD: list[Any] = [
    0,
    1,
    2,
    3,
    -1,
    True,
    None,
    "",
    "x",
    "\0",
    "stash",
    [],
    [0],
    {},
    1.5,
    10**30,
]


def with_something_odd(whole: Any, rng: Random) -> Any:
    """A document with another value in one place, or with one more field or entry."""
    changed = copy.deepcopy(whole)
    within = changed
    while True:
        keys = list(within) if isinstance(within, dict) else list(range(len(within)))
        if not keys or rng.random() < 0.1:
            break
        key = rng.choice(keys)
        if not isinstance(within[key], dict | list) or rng.random() < 0.2:
            within[key] = rng.choice(ODD)
            return changed
        within = within[key]
    if isinstance(within, dict):
        within[rng.choice(["x", "delay", "name", "forward_memory"])] = rng.choice(ODD)
    else:
        within.append(rng.choice(ODD))
    return changed


@pytest.mark.parametrize(
    "name", ["zb_h1", "pipedream_2bw", "distillation", "two_encoders"]
)
def test_what_is_read_is_all_that_the_file_says(name: str) -> None:
    """Nothing in a file is passed over: it is refused, or it is in the plan."""
    plan = compile(name, {"ranks": 3, "microbatches": 3})
    whole = document(plan)
    rng = Random(name)
    accepted = 0
    for _ in range(150):
        changed = with_something_odd(whole, rng)
        try:
            again = document(plan_in("plan.json", changed))
        except CompileError:
            continue
        accepted += 1
        assert with_full_costs(again) == with_full_costs(changed)
    assert accepted


def with_full_costs(whole: Any) -> str:
    """A document as text, in which true is not 1; costs are as the compiler writes them."""
    costs = costs_of(whole.get("costs")).to_json()
    older = {"models": False, "keepers": [], "skips": [], "edges": [], "frozen": []}
    return json.dumps({**older, **whole, "costs": costs}, sort_keys=True)


def test_a_plan_that_cannot_be_written_leaves_nothing(
    plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(
        CompileError, match="cannot be written: No such file or directory"
    ):
        write_plan(plan, tmp_path / "absent" / "plan.json")
    (tmp_path / "directory").mkdir()
    with pytest.raises(CompileError, match="cannot be written: Is a directory"):
        write_plan(plan, tmp_path / "directory")
    assert [each.name for each in tmp_path.iterdir()] == ["directory"]
