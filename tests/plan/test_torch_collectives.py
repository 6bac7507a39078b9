"""Gathers and reductions of torch's action tables, where they are more than a plan without any
implies.
"""

import pytest

from schedlang import CompileError, Kind, Plan, Source, compile
from schedlang.plan.torch_tables import DIALECTS, export_table, plan_of, read_table

TWO_SUMS = """schedule two_sums {
    param ranks = 2
    param microbatches = 2
    rank r { F(0)  B(0)  reduce  F(1)  B(1)  reduce }
}
"""


def again(plan: Plan, dialect: str) -> Plan:
    return plan_of(
        read_table(Source("table.csv", export_table(plan, "torch-csv", dialect)))
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_table_keeps_what_a_program_says_of_them(dialect: str) -> None:
    plan = compile("looped_bfs_sharded", {"ranks": 2, "microbatches": 3, "chunks": 3})
    found = again(plan, dialect)
    assert [actions.text() for actions in found.ranks] == [
        actions.text() for actions in plan.ranks
    ]
    assert export_table(found, "torch-csv", dialect) == export_table(
        plan, "torch-csv", dialect
    )
    # Torch gathers by itself where it places the communication.
    assert "UNSHARD" not in export_table(plan, "torch-csv-compute")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_table_that_gathers_once_implies_it(dialect: str) -> None:
    plan = compile("interleaved_1f1b", {"ranks": 2, "microbatches": 4})
    assert Kind.UNSHARD not in again(plan, dialect).ranks[0].kind


def test_torch_has_one_sum_of_each_stage() -> None:
    plan = compile(Source("two_sums.sched", TWO_SUMS))
    with pytest.raises(
        CompileError, match="no second sum of a stage's gradients: `0REDUCE_GRAD`"
    ):
        export_table(plan, "torch-csv")


def test_torchs_own_tables_with_more_stages_than_it_keeps_gathered() -> None:
    """It keeps three stages of a rank gathered, so of four it gathers some again."""
    schedules = pytest.importorskip(
        "torch.distributed.pipelining.schedules",
        reason="torch has these",
        exc_type=ImportError,
    )
    plan = compile("looped_bfs", {"ranks": 1, "microbatches": 1, "chunks": 5})
    computed = export_table(plan, "torch-csv-compute").strip().split(",")
    row = schedules._add_unshard_reshard(
        [schedules._Action.from_str(cell) for cell in computed]
    )
    cells = []
    for action in row:
        cells.append(str(action))
        last = [str(each) for each in row if str(each)[1:2] == "B"][-1]
        if str(action) == last:
            cells += [f"{stage}REDUCE_GRAD" for stage in range(5)]
    table = ",".join(cells)
    found = plan_of(read_table(Source("table.csv", f"{table}\r\n")))
    assert found.ranks[0].text() == table.replace(",", " ")
    assert list(found.ranks[0].kind).count(Kind.UNSHARD) > 5
