"""The action tables of torch.distributed.pipelining: written from plans, and read as plans."""

from schedlang.plan.torch_tables.export import (
    DIALECTS,
    dialect_of,
    export_table,
)
from schedlang.plan.torch_tables.table_reader import plan_of, read_table

__all__ = ["DIALECTS", "dialect_of", "export_table", "plan_of", "read_table"]
