"""Exchanges between two stages of a rank: what a stage takes passes through a group of processes
first, such as tokens on their way to the processes that have their experts.

The module of the stage that takes says how, by a method `exchange`. The plan says when: another
microbatch's op may run meanwhile.

    stage 0    F0 ─────┐                           ┌──► B0
    between            └► exchange F ─┐ ┌─ exchange B
    stage 1                           └► F0 … B0 ──┘
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.graph_leaves import leaves_between
from schedlang.runtime.losses import Added, Taking
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.parts import gpu_copies
from schedlang.runtime.stage import Stage, without_autocast
from schedlang.runtime.values import detached, flatten, has_gradient, leaves_of
from schedlang.schedule.kinds import BETWEEN, Kind

_LOG = logging.getLogger("schedlang.runtime")

#: By stage and microbatch, from an exchange to the one back: its input and its output, as tensors
#: that may have a gradient.
_Graphs = dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]


class Streams(gpu_copies.Streams):
    """The streams of a GPU: that of its ops, and one for exchanges."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.exchanges = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Beside:
    """Runs exchanges: beside the ops where there are streams, and else one after the other."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        #: The events of exchanges that no op has waited for, by kind, stage and microbatch.
        self._ends: dict[tuple[Kind, int, int], Any] = {}

    def run(
        self,
        key: tuple[Kind, int, int],
        call: Callable[[], list[Tensor]],
        read: list[Tensor],
    ) -> list[Tensor]:
        """Run an exchange, which reads some tensors; return the tensors that it made."""
        if self._streams is None:
            return call()
        compute = self._streams.compute
        beside = self._streams.exchanges
        beside.wait_event(compute.record_event())
        with self._streams.run_on(beside):
            made = call()
        # Memory is that of the stream on which it was taken. The other stream may still use it when
        # the tensor is freed, so it is given away only after that.
        _record(read, beside)
        _record(made, compute)
        self._ends[key] = beside.record_event()
        return made

    def wait(self, key: tuple[Kind, int, int]) -> None:
        """Let the ops behind this call wait for an exchange, if there is one."""
        end = self._ends.pop(key, None)
        if end is not None and self._streams is not None:
            self._streams.compute.wait_event(end)


def _record(tensors: Iterable[Tensor], stream: Any) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


class Exchanges(Part):
    """The exchanges of what a stage takes, and of the gradients that come back to it."""

    _stage: Stage

    def __init__(self, beside: Beside, graphs: _Graphs) -> None:
        self.beside = beside
        self._graphs = graphs
        self._is_checked = False

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage

    def exchange_activations(self, microbatch: int) -> None:
        """Exchange what the stage takes of a microbatch, before its forward."""
        stage = self._stage
        exchange = getattr(stage.module, "exchange", None)
        if exchange is None:
            return
        if not torch.is_grad_enabled():
            stage.inputs[microbatch] = exchange(stage.inputs[microbatch])
            return
        value = stage.take_input(microbatch)
        own, _ = flatten(value, "")
        trees = []
        added: list[Added] = []

        def call() -> list[Tensor]:
            what = f"what `exchange` of stage {stage.number} returns"
            with Taking(added):
                tensors, tree = flatten(exchange(value), what)
            trees.append(tree)
            return tensors

        key = Kind.EXCHANGE_F, stage.number, microbatch
        made = self.beside.run(key, call, own)
        if not self._is_checked:
            self._check(own, made, added)
        if any(tensor.requires_grad for tensor in own):
            roots = list(filter(has_gradient, made))
            self._graphs[stage.number, microbatch] = leaves_of(value), roots
        stage.inputs[microbatch] = detached(made, trees[0])

    def _check(self, own: list[Tensor], made: list[Tensor], added: list[Added]) -> None:
        """PipelineError if an exchange has weights or adds losses, which nothing would train."""
        self._is_checked = True
        roots = [tensor for tensor in made if tensor.requires_grad]
        given = set(map(id, own))
        weights = [each for each in leaves_between(roots, ()) if id(each) not in given]
        what = ""
        if weights:
            shapes = ", ".join(f"{list(weight.shape)}" for weight in weights)
            what = f"computes with weights of shape {shapes}"
        elif added:
            what = f"adds the loss `{added[0].name}`"
        if what:
            raise PipelineError(
                f"`exchange` of stage {self._stage.number} {what}, and only a forward can: its "
                "backward passes gradients on, and trains nothing. Move that to the `forward` of "
                "this stage, or of the stage before"
            )

    def exchange_gradients(self, microbatch: int) -> None:
        """Exchange the gradients that come back to the stage, before its backward."""
        stage = self._stage
        following = stage.number + 1
        graph = self._graphs.pop((following, microbatch), None)
        if graph is None:
            return
        leaves, roots = graph
        pairs = zip(roots, stage.gradients[microbatch], strict=True)
        starts = [
            (root, gradient)
            for root, gradient in pairs
            if gradient is not None and root.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found: dict[int, Tensor] = {}

        def call() -> list[Tensor]:
            ends, gradients = zip(*starts, strict=True)
            with without_autocast(stage.device):
                back = torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
            pairs = zip(wanted, back, strict=True)
            found.update((id(leaf), each) for leaf, each in pairs if each is not None)
            return list(found.values())

        if starts and wanted:
            key = Kind.EXCHANGE_B, stage.number, microbatch
            self.beside.run(key, call, [gradient for _, gradient in starts])
        stage.gradients[microbatch] = [found.get(id(leaf)) for leaf in leaves]

    def before_forward(self, run: Forward) -> None:
        """Wait for the exchange of what the forward takes."""
        self.beside.wait((Kind.EXCHANGE_F, self._stage.number, run.microbatch))

    def before_backward(self, run: Backward) -> None:
        """Wait for the exchange of the gradients from which the backward starts."""
        self.beside.wait((Kind.EXCHANGE_B, self._stage.number, run.microbatch))


def of_stages(site: Site) -> Iterator[tuple[int, Exchanges]]:
    """Make the part for each stage with exchanges. PipelineError for a module with a method that
    the plan never calls.
    """
    beside = Beside(Streams(site.device) if site.device.type == "cuda" else None)
    graphs: _Graphs = {}
    lacking = []
    for number, module in site.modules.items():
        takes = bool(site.plan.microbatches_with([Kind.EXCHANGE_F], number))
        has_method = hasattr(module, "exchange")
        if has_method and not takes:
            raise PipelineError(
                f"stage {number} has a method `exchange`, and the plan, which exchanges elsewhere, "
                "has no `exchange F` before its forwards: write it, or rename the method"
            )
        if takes and not has_method:
            lacking.append(number)
        if not site.plan.microbatches_with(BETWEEN, number):
            continue
        yield number, Exchanges(beside, graphs)
    if lacking and site.rank == 0:
        _LOG.warning(
            "%s %s on rank 0: the plan exchanges what the module takes (`exchange F`), and the "
            "module has no method `exchange`, so it takes that as it was made",
            "stage" if len(lacking) == 1 else "stages",
            ", ".join(map(str, lacking)),
        )
