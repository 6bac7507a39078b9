"""Steps as CUDA graphs: the walk over a step's calls is recorded once, and launched again by one
call.

A small op takes the host longer to launch than the GPU to compute, so the GPU waits for the host. A
graph has all ops of the walk, the messages by NCCL among them, and the host launches it at once:

    steps 1, 2    as usual
    step 3        as usual, on the stream of the capture, for which torch asks
    step 4        the walk is captured, which computes nothing; then launched
    step 5, …     the batch is copied into the tensors that the graph reads; launched

What the host does before and after the walk stays as it is: ranks are told of the batch, parts
begin and end the step, results are taken. So a rank may launch a graph while others walk: their
messages are the same.

Only the work of the GPU is in a graph. So the Python code of stages and losses does not run again,
and where something else follows from it that may differ from step to step, such as another shape,
a frozen weight, a stage in `eval()` or another autocast, steps are as usual again, until three of
them were alike.

The gradients of a graph lie in memory that the next launch writes over. What a script still holds
of them gets memory of its own before that.
"""

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from schedlang.runtime.announcement import Announcement
from schedlang.runtime.batches import Batch
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.watchdog import Watchdog

#: The number of steps as usual, of which the last one runs on the stream of the capture.
_WARM_UP = 3

#: The arguments of a step.
_ARGUMENTS = ("inputs", "targets", "options", "counts", "keywords")

#: The attributes of a stage in which a walk leaves results, by microbatch or by name.
_RESULTS = ("outputs", "extras", "added")


class CapturedSteps:
    """The training steps of a rank on a GPU: the walk is captured once some of them were alike."""

    def __init__(self, stages: Mapping[int, Stage], watchdog: Watchdog) -> None:
        self._stages = [*stages.values()]
        self._modules = [stage.module for stage in self._stages]
        self._watchdog = watchdog
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        #: What the last step looked like, here and by what was announced; and how many steps in a
        #: row have.
        self._look: object = None
        self._announced: object = None
        self._alike = 0
        #: The batch that the graph reads.
        self._own: Batch | None = None
        self._graph: _Graph | None = None
        self._is_capturing = False

    def prepare(self, batch: Batch) -> Batch:
        """Look at the batch of the next step; return it, or that of the graph with its values."""
        tensors, look = self._look_at(batch)
        if look != self._look:
            _check_device(tensors)
            self._look = look
            self._own = None
            self._begin_anew()
        if self._alike < _WARM_UP:
            return batch
        if self._own is None:
            self._own = _copy_of(batch)
        else:
            # An input may require a gradient, as reentrant checkpoints ask for.
            with torch.no_grad():
                for own, given in zip(_tensors_of(self._own), tensors, strict=True):
                    own.copy_(given, non_blocking=True)
        return self._own

    def walk(
        self, announced: Mapping[int, Announcement], walk: Callable[[], None]
    ) -> None:
        """Do what `walk` does: by calling it, or by the graph of an earlier step."""
        # Checksums are those of the batch's values.
        look = [
            (first, each.rows, each.forms, each.shares)
            for first, each in announced.items()
        ]
        if look != self._announced:
            self._announced = look
            self._begin_anew()
        if self._alike == _WARM_UP and self._graph is None:
            self._graph = self._capture(walk)
        if self._graph is not None:
            self._launch(self._graph)
        elif self._alike == _WARM_UP - 1:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                walk()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            walk()
        self._alike = min(self._alike + 1, _WARM_UP)

    def told(self, error: Exception) -> Exception:
        """An error in a step, with what it means for a step that is being captured."""
        if not self._is_capturing:
            return error
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return PipelineError(
            f"the step cannot be captured as a CUDA graph, by {what}. A graph holds no work of the "
            "host: no `.item()`, no branch on a value, no random number of the CPU "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#constraints). Without "
            "`cuda_graphs`, the step is as usual"
        )

    def _begin_anew(self) -> None:
        self._graph = None
        self._alike = 0

    def _look_at(self, batch: Batch) -> tuple[list[Tensor], object]:
        """The tensors of a batch, and all else from which the work of a walk follows."""
        values, tree = tree_flatten([getattr(batch, name) for name in _ARGUMENTS])
        weights = [
            (id(each), each.data_ptr(), each.requires_grad)
            for module in self._modules
            for each in (*module.parameters(), *module.buffers())
        ]
        modes = [each.training for module in self._modules for each in module.modules()]
        is_autocast = torch.is_autocast_enabled("cuda")
        context = is_autocast and torch.get_autocast_dtype("cuda")
        look = tree, [*map(_look_of, values)], weights, modes, context
        return [each for each in values if isinstance(each, Tensor)], look

    def _capture(self, walk: Callable[[], None]) -> "_Graph":
        """Record the work of a walk, without doing it."""
        # Two stages may have the same module.
        weights = [
            *dict.fromkeys(
                each for module in self._modules for each in module.parameters()
            )
        ]
        before = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        gpu = self._watchdog.gpu
        # The marks of a graph would be reached again and again.
        self._watchdog.gpu = None
        # A cast of a weight that was made outside of the graph would never be made again.
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        self._is_capturing = True
        self._record(graph, walk)
        self._is_capturing = False
        torch.clear_autocast_cache()
        self._watchdog.gpu = gpu
        gradients = [
            (weight, weight.grad) for weight in weights if weight.grad is not None
        ]
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
        return _Graph(graph, gradients, self._stages)

    def _record(self, graph: torch.cuda.CUDAGraph, walk: Callable[[], None]) -> None:
        """Let a graph record a walk, as `torch.cuda.graph` does, except that an error in it stays
        the one that is raised.
        """
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                walk()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

    def _launch(self, graph: "_Graph") -> None:
        """Do what the walk does, by a graph."""
        watchdog = self._watchdog
        # Where in its step the GPU is, nobody sees: all that is known is that it needs the others.
        watchdog.action = 0
        watchdog.waits_for = watchdog.processes.others
        graph.launch()
        watchdog.mark()
        watchdog.waits_for = ()


class _Graph:
    """A captured walk."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        gradients: list[tuple[nn.Parameter, Tensor]],
        stages: list[Stage],
    ) -> None:
        self._graph = graph
        self._gradients = gradients
        self._stages = stages
        #: What the walk has left in each stage, whose tensors a launch writes anew.
        self._results = [
            (stage, name, dict(getattr(stage, name)))
            for stage in stages
            for name in _RESULTS
        ]
        #: The gradients that weights were given last, as long as somebody holds them.
        self._given: list[TensorWeakRef] = []

    def launch(self) -> None:
        """Launch it; gradients add up in `.grad`, and stages have the results of the walk."""
        for reference in self._given:
            held = reference()
            if held is not None:
                held.data = held.data.clone()
        self._graph.replay()
        self._given = []
        for weight, gradient in self._gradients:
            if weight.grad is None:
                weight.grad = gradient.detach()
                self._given.append(TensorWeakRef(weight.grad))
            else:
                weight.grad.add_(gradient)
        for stage in self._stages:
            stage.inputs.clear()
        for stage, name, left in self._results:
            box = getattr(stage, name)
            box.clear()
            # Losses are joined in memory of their own.
            are_read = name == "extras" or stage.loss is None
            box.update(_clone(left) if are_read else left)


def _clone(value: Any) -> Any:
    """A value with tensors of its own."""
    values, tree = tree_flatten(value)
    copies = [each.clone() if isinstance(each, Tensor) else each for each in values]
    return tree_unflatten(copies, tree)


def _look_of(value: object) -> object:
    """Of a value among the arguments of a step, all that the work of the step follows from."""
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad


def _check_device(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_cuda:
            raise PipelineError(
                "the pipeline captures its steps (`cuda_graphs`), so all tensors of a batch must "
                f"be on the GPU; one of shape {[*tensor.shape]} is not"
            )


def _tensors_of(batch: Batch) -> list[Tensor]:
    values, _ = tree_flatten([getattr(batch, name) for name in _ARGUMENTS])
    return [each for each in values if isinstance(each, Tensor)]


def _copy_of(batch: Batch) -> Batch:
    """A batch with tensors of its own."""
    values, tree = tree_flatten([getattr(batch, name) for name in _ARGUMENTS])
    copies = [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in values
    ]
    arguments = dict(zip(_ARGUMENTS, tree_unflatten(copies, tree), strict=True))
    return Batch(evaluates=False, **arguments)
