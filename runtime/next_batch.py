"""The next batch of a step from the iterators of the ranks, which all of them take together: where
one has ended, or has met a bad batch, all ranks know.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import Processes
from schedlang.runtime.wire import Wire

_LOG = logging.getLogger("schedlang.runtime")

#: What a rank has of a batch: no iterator, a batch, the end of its iterator, or an exception that
#: says that the batch is bad.
_NOTHING, _BATCH, _END, _BAD = range(4)


class NextBatch:
    """The arguments of the next step; none if there is no batch, or if all skip it."""

    def __init__(
        self, batches: Iterator[Any] | None, exceptions: tuple[type[Exception], ...]
    ) -> None:
        self.arguments: dict[str, Any] = {}
        self.has_ended = False
        self.is_bad = False
        self._state = _NOTHING
        if batches is None:
            return
        if not hasattr(batches, "__next__"):
            raise PipelineError(
                f"`train_batch` is given a {type(batches).__name__}: it must be an iterator, "
                "`iter(…)`, which is made once before the steps"
            )
        self._state = _BATCH
        try:
            self.arguments = _arguments(next(batches))
        except StopIteration:
            self._state = _END
        except exceptions as error:
            _LOG.warning("the batch is skipped: %s: %s", type(error).__name__, error)
            self._state = _BAD

    def agree(self, wire: Wire, processes: Processes) -> None:
        """Find out what the other ranks have; PipelineError where some have a batch and others have
        come to their end.
        """
        ranks = processes.all
        states = torch.zeros(len(ranks), dtype=torch.int64)
        states[ranks.index(dist.get_rank())] = self._state
        wire.reduce(states, dist.ReduceOp.SUM)
        replicas = processes.replicas
        wire.end_sum(wire.begin_sum(states, replicas), replicas)
        having: dict[int, list[str]] = {}
        for rank, state in zip(ranks, states.tolist(), strict=True):
            having.setdefault(state, []).append(processes.name(rank))
        at_end = having.get(_END, [])
        others = [*having.get(_BATCH, []), *having.get(_BAD, [])]
        if at_end and others:
            raise PipelineError(
                f"the iterator of {' and '.join(at_end)} has ended, and that of "
                f"{' and '.join(others)} has another batch: all must have as many batches"
            )
        if not at_end and not others:
            raise PipelineError(
                "no rank has given an iterator to `train_batch`: those of the first and the last "
                "stage need one"
            )
        self.has_ended = bool(at_end)
        self.is_bad = _BAD in having


def _arguments(batch: Any) -> dict[str, Any]:
    """The arguments of a step that a batch stands for: a pair, or a dictionary of them."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return {"inputs": inputs, "targets": targets}
    if isinstance(batch, Mapping) and "inputs" in batch:
        return dict(batch)
    found = (
        f"a dictionary of {[*batch]}"
        if isinstance(batch, Mapping)
        else f"a {type(batch).__name__}"
    )
    if isinstance(batch, tuple | list):
        found += f" of {len(batch)}"
    raise PipelineError(
        f"the iterator gives {found}: a batch is a pair of inputs and targets, or a dictionary of "
        "`inputs`, `targets`, and what else `step` takes"
    )
