"""The ops of a stage by itself, without a pipeline."""

from schedlang.runtime.stage import Stage
from schedlang.schedule.kinds import Kind


def do(stage: Stage, kind: Kind, microbatch: int) -> None:
    """One op of a stage, as a plan has it."""
    stage.ops[kind, stage.number](microbatch)


def weight_half(stage: Stage, microbatch: int) -> None:
    """W."""
    do(stage, Kind.W, microbatch)
