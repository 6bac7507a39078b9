"""Plans for `nccl-edge` on real processes: a process group of gloo for each direction between two
ranks, made in rounds.
"""

import inspect
import os
import signal
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh

from schedlang import Costs, Source, compile, read_source
from schedlang.plan.plan import Plan
from schedlang.ranks.connections import edges_of, rounds
from schedlang.runtime.parts.edge_wire import EdgeWire, _first_message
from schedlang.schedule.actions import is_send
from tests.runtime.test_gradients import CROSSED, compare, in_one_process
from tests.runtime.test_mesh import of_one_process
from tests.support.models import batch, pipeline, replicated
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.processes

#: With one stage a rank and two, skips, slices, copies to the host, two pipelines, a split backward,
#: transfers of their own in batches, and forwards only.
NAMES = (
    "1f1b",
    "1f1b_explicit",
    "interleaved_1f1b",
    "unet_1f1b",
    "seq1f1b",
    "pipe_offload",
    "dualpipe",
    "zb_v",
    "forward_only",
)


def edge_plan(name: str, ranks: int, microbatches: int) -> Plan:
    """A plan whose receives are posted early, where that is faster."""
    params = {"ranks": ranks, "microbatches": microbatches}
    source = read_source(PROGRAMS / f"{name}.sched")
    return compile(source, params, Costs(p2p_time=0.5), transport="nccl-edge")


def train_by_edges(plans: dict[str, Plan]) -> dict[str, Any]:
    """For each plan the largest differences from one process; and how many sends of the second
    step and evaluation went by edges.
    """
    found = {}
    for name, plan in plans.items():
        with patch.object(
            EdgeWire, "post_send", autospec=True, side_effect=POST_SEND
        ) as sent:
            found[name] = *compare(plan, in_one_process(plan)), sent.call_count
    return found


POST_SEND = EdgeWire.post_send


def test_losses_and_gradients_by_edges_are_those_of_one_process(run_ranks: Run) -> None:
    plans = {name: edge_plan(name, 4, 8) for name in NAMES}
    # Some receives are posted early, and there are other plans too.
    assert {plan.lowering for plan in plans.values()} > {"posted early"}
    for rank, found in enumerate(run_ranks(train_by_edges, 4, plans).results()):
        assert set(found) == set(NAMES)
        for name, (loss, gradient, sent) in found.items():
            assert loss < 1e-12, name
            assert gradient < 1e-12, name
            # The first step finds out shapes, by way of all ranks' group; so does an evaluation.
            sends = sum(map(is_send, plans[name].ranks[rank].kind))
            assert sent >= (0 if name == "forward_only" else sends), name


def in_order() -> float:
    """What becomes of messages that are received in another order than they are sent in."""
    plan = compile(Source("crossed.sched", CROSSED), transport="gloo")
    expected = in_one_process(plan)
    assert compare(plan, expected)[1] < 1e-12
    return compare(evolve(plan, transport="nccl-edge"), expected)[1]


def test_messages_of_an_edge_meet_in_order_and_not_by_tags(run_ranks: Run) -> None:
    """So what comes before its place in the plan would be seen."""
    assert max(run_ranks(in_order, 2).results()) > 1e-3


def groups_made(plans: list[Plan]) -> list[list[Any]]:
    """Which groups each pipeline makes on this rank, one pipeline after the other."""
    found = []
    for plan in plans:
        with patch("torch.distributed.new_group", side_effect=dist.new_group) as made:
            pipeline(plan, replicated(plan))
        found.append([tuple(call.args[0]) for call in made.call_args_list])
    return found


def test_all_ranks_make_the_same_groups_once(run_ranks: Run) -> None:
    first = edge_plan("1f1b", 4, 4)
    second = edge_plan("interleaved_1f1b", 4, 4)
    per_rank = run_ranks(groups_made, 4, [first, first, second]).results()
    assert all(found == per_rank[0] for found in per_rank)
    edges = [edge for each in rounds(edges_of(first.layout)) for edge in each]
    # The second pipeline finds all its groups made; the third one also sends between rank 3 and
    # rank 0, where its second chunk begins.
    assert per_rank[0] == [edges, [], [(0, 3), (3, 0)]]


def split_calls(plan: Plan) -> list[Any]:
    """How `split_group` is called where a process group is bound to a GPU; groups of gloo stand in
    for what it makes.
    """
    world = dist.group.WORLD
    assert world is not None
    calls = []

    def split_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        given = inspect.signature(SPLIT_GROUP).bind(*args, **kwargs).arguments
        assert given["parent_pg"] is world
        calls.append((given["split_ranks"], given["backend"]))
        world.bound_device_id = None
        made = [(ranks, dist.new_group(ranks)) for ranks in given["split_ranks"]]
        world.bound_device_id = torch.device("cuda:0")
        return next((group for ranks, group in made if dist.get_rank() in ranks), None)

    expected = in_one_process(plan)
    world.bound_device_id = torch.device("cuda:0")
    with patch("torch.distributed.split_group", split_group):
        worst = max(compare(plan, expected))
    world.bound_device_id = None
    return [calls, worst]


SPLIT_GROUP = dist.split_group


def test_communicators_are_split_in_rounds(run_ranks: Run) -> None:
    plan = edge_plan("interleaved_1f1b", 4, 4)
    expected = [
        ([list(edge) for edge in edges], "cpu:gloo")
        for edges in rounds(edges_of(plan.layout))
    ]
    assert len(expected) == 4
    for calls, worst in run_ranks(split_calls, 4, plan).results():
        assert calls == expected
        assert worst < 1e-12


def of_replicas(plan: Plan) -> tuple[list[float], Counter[int]]:
    """Differences from one process, where two pipelines stand beside each other; and how many
    groups of how many ranks this one is in.
    """
    of = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "pp"))
    with patch("torch.distributed.new_group", side_effect=dist.new_group) as made:
        worst = of_one_process(of, plan)
    return worst, Counter(len(call.args[0]) for call in made.call_args_list)


def test_pipelines_beside_each_other_have_edges_of_their_own(run_ranks: Run) -> None:
    """The middle rank has two edges each way; the others make two groups of themselves."""
    found = run_ranks(of_replicas, 6, edge_plan("1f1b", 3, 6)).results()
    for process, (worst, made) in enumerate(found):
        assert max(worst) < 1e-12
        assert made == ({2: 4} if process % 3 == 1 else {2: 2, 1: 2})


def ends_in_the_first_message(plan: Plan) -> None:
    """A process that is killed where others wait for it to make a communicator."""

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    what = killed if dist.get_rank() == 2 else _first_message
    with patch("schedlang.runtime.parts.edge_wire._first_message", what):
        pipeline(plan, replicated(plan)).step(*batch(plan, 0))


def test_a_process_that_is_lost_while_communicators_are_made_ends_all(
    run_ranks: Run,
) -> None:
    """At once, and not after the limit of the group that they wait in."""
    outcome = run_ranks(ends_in_the_first_message, 3, edge_plan("1f1b", 3, 3))
    assert outcome.codes == [1, 1, -signal.SIGKILL]
    for log in outcome.logs[:2]:
        assert "rank 2 is gone" in log
    assert outcome.seconds < 30
