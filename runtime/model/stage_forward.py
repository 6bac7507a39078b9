"""The forward of a stage of a model that does more than call its blocks (`forward_record`).

The model's own forward runs, with the blocks of other stages left out and what is done in their
gaps, until it comes to the first block of the next stage:

    stage 1 of 3    x = embed(tokens) * 8      left out: x and mask are what the stage was handed on
                    layers[0](x, mask)         left out
                    layers[1](x, mask)         done
                    layers[2](x, mask)         the stage returns x and mask, and the forward ends

In place of a value that the stage does not have stands a tensor without numbers. Python may read
its shape, if it did so when the forward was recorded; what a stage needs of a value is often no
more, and is handed on as an empty tensor of shape (0, *shape).
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import currentframe
from itertools import pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.forward_record import (
    Constant,
    Event,
    Record,
    Returned,
    apart,
    line_of,
    name_of,
    record_forward,
    tensors_in,
    without_cache,
)
from schedlang.runtime.torch_private.glue import Shapes, put_back, set_aside
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten


class Elsewhere(nn.Module):
    """Takes the place of a block of another stage. It has the block's attributes, in which tensors
    have shapes and no numbers.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self._name = name
        memo: dict[int, Any] = {}
        for tensor in (*block.parameters(), *block.buffers()):
            shape = torch.empty_like(tensor, device="meta")
            is_weight = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(shape) if is_weight else shape
        # Not a submodule: the stage has none of its weights.
        self.__dict__["_block"] = copy.deepcopy(block, memo)
        self.__dict__["_stage"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would have returned, or the end of the stage's forward."""
        return self.__dict__["_stage"].left_out(self._name, args, kwargs)


class _End(BaseException):
    """The forward has come to the first block of the next stage."""


class _Run:
    """A forward that is under way: which event comes next, the numbers of the tensors that it has
    met, by identity, and by number the tensors that have numbers in them and all.
    """

    def __init__(self) -> None:
        self.next = 0
        self.numbers: dict[int, int] = {}
        self.real: dict[int, Tensor] = {}
        self.all: dict[int, Tensor] = {}
        self.held: list[Tensor] = []
        #: Whether a block runs, in which no op is looked at.
        self.is_in_block = False


class StageForward(TorchFunctionMode):
    """The forward of a stage with the blocks from `first` up to `stop` of those of a record."""

    def __init__(
        self,
        stage: nn.Module,
        record: Record,
        blocks: Sequence[nn.Module],
        own: range,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self._record = record
        self._own = own
        self._is_first = is_first
        self._is_last = is_last
        self._forward = stage.forward
        #: By the number of its value, a weight outside of all blocks, as the attribute of a module.
        self._weights: dict[int, tuple[nn.Module, str]] = {}
        self._run: _Run | None = None
        self._device = torch.device("cpu")
        self._maker = Shapes()
        self._given = [] if is_first else record.handed_on(own.start)
        self._shapes = [] if is_first else record.known_by_shape(own.start)
        self._returns = record.handed_on(own.stop)
        self._returns_shapes = record.known_by_shape(own.stop)
        for index in own:
            before = partial(self._before, record.blocks[index])
            blocks[index].register_forward_pre_hook(before, with_kwargs=True)
            blocks[index].register_forward_hook(self._after, always_call=True)
        for block in blocks:
            if isinstance(block, Elsewhere):
                block.__dict__["_stage"] = self
        for number, name in record.weights.items():
            self._place_weight(stage, number, name)
        stage.forward = self.forward

    def _place_weight(self, stage: nn.Module, number: int, name: str) -> None:
        """Take a weight outside of all blocks away where the stage does nothing with it."""
        path, _, own = name.rpartition(".")
        owner = stage.get_submodule(path)
        weight = getattr(owner, own)
        if not any(map(self._is_done_here, self._record.users_of(number))):
            delattr(owner, own)
            weight = torch.empty_like(weight, device="meta")
            owner.__dict__[own] = weight
        self._weights[number] = owner, own

    def _is_done_here(self, event: Event) -> bool:
        """Whether an op or a block belongs to this stage; a gap belongs to the block before it."""
        if event.is_block:
            return event.place in self._own
        return self._own.start < event.place <= self._own.stop or (
            self._is_first and event.place == 0
        )

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the stage: of inputs, or of what the stage before has handed on."""
        run = self._begin(args)
        arguments = self._arguments(run, args)
        output = None
        self._run = run
        put_back(self)
        try:
            output = self._forward(*arguments, **options)
        except _End:
            pass
        finally:
            set_aside(self)
            self._run = None
        return self._with_numbers(run, output) if self._is_last else self._message(run)

    def _begin(self, args: tuple[Any, ...]) -> _Run:
        run = _Run()
        for number, (owner, name) in self._weights.items():
            weight = getattr(owner, name)
            if isinstance(weight, nn.Parameter):
                self._is_made(run, number, weight)
            else:
                self._note(run, number, weight)
        given = tensors_in(args)
        self._device = given[0].device
        if self._is_first:
            if len(given) != len(self._record.numbers):
                raise PipelineError(
                    f"the model is given {len(given)} tensors, and was cut with "
                    f"{len(self._record.numbers)}: `inputs` of `split` is a microbatch"
                )
            pairs = zip(self._record.numbers, given, strict=True)
            for number, tensor in pairs:
                self._is_made(run, number, tensor)
            return run
        numbers = [*self._given, *self._shapes]
        for number, tensor in zip(numbers, given, strict=True):
            if number in self._given:
                run.real[number] = tensor
            else:
                run.all[number] = self._maker.stand_in(
                    number, tensor.shape[1:], tensor.dtype, self._device
                )
        return run

    def _arguments(self, run: _Run, args: tuple[Any, ...]) -> Any:
        """The model's arguments: in a later stage, what stands for them."""
        if self._is_first:
            return args
        assert self._record.inputs is not None
        return self._in_place_of(run, self._record.inputs)

    @staticmethod
    def _note(run: _Run, number: int, tensor: Tensor) -> None:
        """A tensor has the numbers of a value, or stands in for it."""
        run.numbers[id(tensor)] = number
        run.held.append(tensor)
        run.all[number] = tensor

    def _is_made(self, run: _Run, number: int, tensor: Tensor) -> None:
        """A tensor has the numbers of a value."""
        self._note(run, number, tensor)
        run.real[number] = tensor

    def _stand_in(self, run: _Run, number: int) -> Tensor:
        """The value with a number, or what has its shape at most."""
        tensor = run.real.get(number, run.all.get(number))
        if tensor is None:
            tensor = self._maker.stand_in(
                number, torch.Size(), torch.float32, self._device
            )
        self._note(run, number, tensor)
        return tensor

    def _message(self, run: _Run) -> Any:
        """What is handed on."""
        values = [run.real[number] for number in self._returns]
        shapes = [
            torch.empty(
                (0, *run.all[number].shape),
                dtype=run.all[number].dtype,
                device=self._device,
            )
            for number in self._returns_shapes
        ]
        parts = (*values, *shapes)
        return parts if len(parts) != 1 else parts[0]

    def _with_numbers(self, run: _Run, value: Any) -> Any:
        """A value in which no tensor is a stand-in."""
        leaves, tree = tree_flatten(value)
        found = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                number = run.numbers.get(id(leaf))
                leaf = leaf if number is None else run.real[number]
            found.append(leaf)
        return tree_unflatten(found, tree)

    def _next(self, run: _Run, called: Any, takes: list[int]) -> Event | None:
        """The event that comes now; None where it is another one than was recorded."""
        events = self._record.events
        event = events[run.next] if run.next < len(events) else None
        if event is None or event.called != called or [*event.takes] != takes:
            return None
        run.next += 1
        return event

    def _another_way(self, run: _Run, what: str) -> PipelineError:
        events = self._record.events
        expected = f"to {events[run.next]}" if run.next < len(events) else "to its end"
        return PipelineError(
            f"the model's forward comes to {what} ({line_of(currentframe())}); with the `inputs` "
            f"that it was cut by it came {expected}, or gave it other values: its way must be the "
            "same for all microbatches"
        )

    def _numbers_in(self, run: _Run, *values: Any) -> list[int]:
        found = (run.numbers.get(id(tensor)) for tensor in tensors_in(*values))
        return [number for number in found if number is not None]

    # Blocks of this stage.

    def _before(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        run = self._run
        if run is None or not set_aside(self):
            return None
        if self._next(run, name, self._numbers_in(run, args, kwargs)) is None:
            put_back(self)
            raise self._another_way(run, f"block `{name}`")
        run.is_in_block = True
        return self._with_numbers(run, args), self._with_numbers(run, kwargs)

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        run = self._run
        if run is None or not run.is_in_block:
            return None
        run.is_in_block = False
        try:
            # Without an output, the block has raised an error.
            if output is not None:
                output = self._met(run, self._record.events[run.next - 1], output)
        finally:
            put_back(self)
        return output

    def _met(
        self, run: _Run, event: Event, result: Any, kept: Sequence[Tensor] = ()
    ) -> Any:
        """Give what was made the numbers that it has in the record."""
        ids = {id(tensor) for tensor in kept}
        known = {key: number for key, number in run.numbers.items() if key not in ids}
        result = apart(result, known, lambda tensor: tensor.view_as(tensor))
        numbers = [leaf for leaf in event.returned.leaves if isinstance(leaf, int)]
        tensors = tensors_in(result)
        if len(tensors) != len(numbers):
            raise PipelineError(
                f"{event} returned {len(tensors)} tensors, and {len(numbers)} with the `inputs` "
                "that the model was cut by: its way must be the same for all microbatches"
            )
        for number, tensor in zip(numbers, tensors, strict=True):
            self._is_made(run, number, tensor)
        return result

    # Blocks of other stages.

    def left_out(self, name: str, args: Any, kwargs: Any) -> Any:
        """The forward comes to a block of another stage."""
        run = self._run
        assert run is not None
        event = self._next(run, name, self._numbers_in(run, args, kwargs))
        if event is None:
            raise self._another_way(run, f"block `{name}`")
        if event.place >= self._own.stop:
            raise _End
        return self._in_place_of(run, event.returned)

    def _in_place_of(self, run: _Run, returned: Returned) -> Any:
        """What stands in for what was given or returned in the record."""
        leaves = [
            leaf.value if isinstance(leaf, Constant) else self._stand_in(run, leaf)
            for leaf in returned.leaves
        ]
        return tree_unflatten(leaves, returned.tree)

    # Gaps.

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        run = self._run
        if run is None:
            return func(*args, **kwargs)
        takes = self._numbers_in(run, args, kwargs)
        if not takes:
            return func(*args, **kwargs)
        if func in self._record.reading:
            for number in takes:
                if number not in self._record.reads:
                    raise PipelineError(
                        f"the model reads `{name_of(func)}` of a value "
                        f"({line_of(currentframe())}) of which it read none with the `inputs` "
                        "that it was cut by: its way must be the same for all microbatches"
                    )
            return func(*args, **kwargs)
        event = self._next(run, func, takes)
        given = tensors_in(args, kwargs)
        if event is None:
            # On shapes alone, a model may leave out a look at the numbers.
            if all(number in run.real for number in takes):
                return func(
                    *self._with_numbers(run, args), **self._with_numbers(run, kwargs)
                )
            raise self._another_way(run, f"`{name_of(func)}`")
        if not self._is_done_here(event):
            result = self._in_place_of(run, event.returned)
            for index, number in event.changed:
                run.numbers[id(given[index])] = number
            return result
        args, kwargs = self._with_numbers(run, args), self._with_numbers(run, kwargs)
        now = tensors_in(args, kwargs)
        result = func(*args, **kwargs)
        kept = [now[index] for index, _ in event.changed]
        result = self._met(run, event, result, kept)
        for index, number in event.changed:
            self._is_made(run, number, now[index])
            run.numbers[id(given[index])] = number
        return result


@frozen
class Done:
    """What a model does between its blocks, and the names of its weights outside of them."""

    record: Record
    outside: frozenset[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: Sequence[str],
        inputs: Any,
        options: Mapping[str, Any],
    ) -> "Done":
        """Record a forward of a model with these blocks."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        found = record_forward(model, blocks, given, options)
        in_blocks = {
            id(weight)
            for name in found.blocks
            for weight in model.get_submodule(name).parameters()
        }
        outside = frozenset(
            name
            for name, weight in model.named_parameters()
            if id(weight) not in in_blocks
        )
        return cls(found, outside)

    def is_chain(self, model: nn.Module) -> bool:
        """Whether the model does nothing but to call its blocks, one after the other."""
        return not self.outside and self.record.is_chain()

    def is_outside(self, name: str) -> bool:
        """Whether a weight is in no block."""
        return name in self.outside

    def pieces_of(self, name: str, cuts: Sequence[int]) -> list[int]:
        """The pieces that do something with a weight outside of all blocks; the first one where
        none does.
        """
        numbers = [number for number, own in self.record.weights.items() if own == name]
        places = {
            event.place if event.is_block else max(event.place - 1, 0)
            for number in numbers
            for event in self.record.users_of(number)
        }
        pieces = {
            piece
            for piece, (begin, end) in enumerate(pairwise(cuts))
            for place in places
            if begin <= place < end
        }
        return sorted(pieces) or [0]

    def stage(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        own: Mapping[str, nn.Module],
        places: range,
        is_first: bool,
        is_last: bool,
    ) -> nn.Module:
        """A copy of the model that does what belongs to some of its blocks, which are the model's
        own.
        """
        theirs = {
            name: own[name] if name in own else Elsewhere(block, name)
            for name, block in blocks.items()
        }
        memo: dict[int, Any] = {
            id(block): theirs[name] for name, block in blocks.items()
        }
        stage = copy.deepcopy(model, memo)
        without_cache(stage)
        StageForward(
            stage,
            self.record,
            [*theirs.values()],
            places,
            is_first,
            is_last,
        )
        return stage
