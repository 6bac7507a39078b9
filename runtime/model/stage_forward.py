"""The forward of a stage of a model that does more than call its blocks (`forward_record`).

The model's own forward runs, without the blocks of other stages and without what is done in their
gaps, until it comes to the first block of the next stage:

    stage 1 of 3    x = embed(tokens) * 8      left out: x and mask were handed on
                    layers[0](x, mask)         left out
                    layers[1](x, mask)         done
                    layers[2](x, mask)         the forward ends, and the stage hands on x and mask

A fake tensor stands in for a value that the stage does not have. Python may read its shape, if it
read the shape when the forward was recorded. Where a later stage needs the shape of a value and no
more, it is handed on as an empty tensor of shape (0, *shape).
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
    is_before,
    line_of,
    name_of,
    record_forward,
    tensors_in,
    without_cache,
)
from schedlang.runtime.torch_private.fake_tensors import FakeTensors
from schedlang.runtime.torch_private.function_modes import enter, leave
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten

#: In place of an id: a tensor that follows from values by an op that was not recorded.
_NOT_RECORDED = -1


class Elsewhere(nn.Module):
    """Takes the place of a block of another stage. It has the block's attributes, whose tensors are
    on the meta device.
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
    """A forward that is under way.

    `next` is the index of the next event. `ids` are the ids of values by the identity of the
    tensors that have them or stand in for them, all of which are `held`: where one was freed,
    another might be made. `data` are the values that are there, `tensors` also those of which the
    shape is known. In a block, no op is looked at.
    """

    def __init__(self) -> None:
        self.next = 0
        self.ids: dict[int, int] = {}
        self.data: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        self.held: list[Tensor] = []
        self.is_in_block = False

    def stands_for(self, value: int, tensor: Tensor) -> None:
        """A tensor is met that has a value, or stands in for it."""
        self.ids[id(tensor)] = value
        self.held.append(tensor)
        self.tensors[value] = tensor

    def has(self, value: int, tensor: Tensor) -> None:
        """A tensor is met that has a value."""
        self.stands_for(value, tensor)
        self.data[value] = tensor

    def ids_in(self, *values: Any) -> list[int]:
        """The ids of the values among the tensors in containers."""
        found = (self.ids.get(id(tensor)) for tensor in tensors_in(*values))
        return [value for value in found if value is not None]

    def with_data(self, value: Any) -> Any:
        """The same containers, in which each tensor that has an id is the one with its data."""
        leaves, tree = tree_flatten(value)
        found = []
        for leaf in leaves:
            known = self.ids.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if known is None or known == _NOT_RECORDED:
                found.append(leaf)
            else:
                found.append(self.data[known])
        return tree_unflatten(found, tree)


class StageForward(TorchFunctionMode):
    """The forward of the stage with the blocks `own` of a record, which takes the place of the
    forward of `stage`, a copy of the model with these `blocks`.
    """

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
        #: The weights outside of all blocks, by the ids of their values: a module and an attribute.
        self._weights: dict[int, tuple[nn.Module, str]] = {}
        self._run: _Run | None = None
        self._device = torch.device("cpu")
        self._fake = FakeTensors()
        self._takes = [] if is_first else record.handed_on(own.start)
        self._takes_shapes = [] if is_first else record.known_by_shape(own.start)
        self._hands_on = record.handed_on(own.stop)
        self._hands_on_shapes = record.known_by_shape(own.stop)
        for index in own:
            before = partial(self._before, record.blocks[index])
            blocks[index].register_forward_pre_hook(before, with_kwargs=True)
            blocks[index].register_forward_hook(self._after, always_call=True)
        for block in blocks:
            if isinstance(block, Elsewhere):
                block.__dict__["_stage"] = self
        for value, name in record.weights.items():
            self._place_weight(stage, value, name)
        stage.forward = self.forward

    def _place_weight(self, stage: nn.Module, value: int, name: str) -> None:
        """Take a weight outside of all blocks away, if the stage does nothing with it."""
        path, _, own = name.rpartition(".")
        owner = stage.get_submodule(path)
        if not any(map(self._is_done_here, self._record.users_of(value))):
            shape = torch.empty_like(getattr(owner, own), device="meta")
            delattr(owner, own)
            owner.__dict__[own] = shape
        self._weights[value] = owner, own

    def _is_done_here(self, event: Event) -> bool:
        """Whether an op or a block belongs to this stage."""
        was_before = not self._is_first and is_before(event, self._own.start)
        return is_before(event, self._own.stop) and not was_before

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the stage on the model's inputs, or on what the stage before has handed on."""
        run = self._begin(args)
        arguments = args
        if not self._is_first:
            assert self._record.inputs is not None
            arguments = self._in_place_of(run, self._record.inputs)
        output = None
        has_ended = False
        self._run = run
        enter(self)
        try:
            output = self._forward(*arguments, **options)
        except _End:
            has_ended = True
        finally:
            leave(self)
            self._run = None
        if not has_ended and (
            run.next < len(self._record.events)
            or run.ids_in(output) != self._record.output.ids
        ):
            raise self._another_way(run, "its end")
        return run.with_data(output) if self._is_last else self._message(run)

    def _begin(self, args: tuple[Any, ...]) -> _Run:
        run = _Run()
        for value, (owner, name) in self._weights.items():
            weight = getattr(owner, name)
            if isinstance(weight, nn.Parameter):
                run.has(value, weight)
            else:
                run.stands_for(value, weight)
        given = tensors_in(args)
        takes = self._takes
        if self._is_first:
            takes = self._record.input_ids
        count = len(takes) + len(self._takes_shapes)
        if len(given) != count:
            raise PipelineError(
                f"the stage is given {len(given)} tensors, and the model was cut by `inputs` with "
                f"which it takes {count}: a step's microbatches must have as many"
            )
        self._device = given[0].device if given else self._device
        for value, tensor in zip(takes, given, strict=False):
            run.has(value, tensor)
        for value, empty in zip(self._takes_shapes, given[len(takes) :], strict=True):
            shape = empty.shape[1:]
            run.tensors[value] = self._fake.of_value(
                value, shape, empty.dtype, self._device
            )
        return run

    def _message(self, run: _Run) -> Any:
        """What the stage hands on."""
        shapes = [run.tensors[value] for value in self._hands_on_shapes]
        parts = (
            *(run.data[value] for value in self._hands_on),
            *(
                torch.empty((0, *each.shape), dtype=each.dtype, device=self._device)
                for each in shapes
            ),
        )
        return parts if len(parts) != 1 else parts[0]

    def _stand_in(self, run: _Run, value: int) -> Tensor:
        """The tensor of a value, or a fake one, of its shape if that is known."""
        tensor = run.tensors.get(value)
        if tensor is None:
            shape = torch.Size()
            tensor = self._fake.of_value(value, shape, torch.float32, self._device)
        run.stands_for(value, tensor)
        return tensor

    def _in_place_of(self, run: _Run, returned: Returned) -> Any:
        """What stands in for what was given or returned when the forward was recorded."""
        leaves = [
            leaf.value if isinstance(leaf, Constant) else self._stand_in(run, leaf)
            for leaf in returned.leaves
        ]
        return tree_unflatten(leaves, returned.tree)

    def _next(self, run: _Run, called: Any, takes: list[int]) -> Event | None:
        """The event that comes now, or None if it is another one than was recorded."""
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

    def _before(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """A block of this stage is about to run."""
        run = self._run
        if run is None or not leave(self):
            return None
        if self._next(run, name, run.ids_in(args, kwargs)) is None:
            enter(self)
            raise self._another_way(run, f"block `{name}`")
        run.is_in_block = True
        return run.with_data(args), run.with_data(kwargs)

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """A block of this stage has run, or raised an error: then it has no output."""
        run = self._run
        if run is None or not run.is_in_block:
            return None
        run.is_in_block = False
        try:
            if output is not None:
                event = self._record.events[run.next - 1]
                output = self._with_ids(run, event, output, ())
        finally:
            enter(self)
        return output

    def left_out(self, name: str, args: Any, kwargs: Any) -> Any:
        """The forward comes to a block of another stage."""
        run = self._run
        assert run is not None
        event = self._next(run, name, run.ids_in(args, kwargs))
        if event is None:
            raise self._another_way(run, f"block `{name}`")
        if event.place >= self._own.stop:
            raise _End
        return self._in_place_of(run, event.returned)

    def _with_ids(
        self, run: _Run, event: Event, result: Any, written: Sequence[Tensor]
    ) -> Any:
        """What an event returned, whose tensors now have the ids of the record; those that it has
        `written` to are the ones that it was given.
        """
        result = apart(result, run.ids.keys() - {id(each) for each in written})
        tensors = tensors_in(result)
        if len(tensors) != len(event.returned.ids):
            raise PipelineError(
                f"{event} returned {len(tensors)} tensors, and {len(event.returned.ids)} with the "
                "`inputs` that the model was cut by: its way must be the same for all microbatches"
            )
        for value, tensor in zip(event.returned.ids, tensors, strict=True):
            run.has(value, tensor)
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An op in a gap."""
        kwargs = kwargs or {}
        run = self._run
        takes = [] if run is None else run.ids_in(args, kwargs)
        if run is None or not takes:
            return func(*args, **kwargs)
        if func in self._record.readers:
            self._check_read(run, func, takes)
            return func(*args, **kwargs)
        event = self._next(run, func, takes)
        if event is None:
            return self._not_recorded(run, func, takes, args, kwargs)
        given = tensors_in(args, kwargs)
        if self._is_done_here(event):
            args, kwargs = run.with_data((args, kwargs))
            now = tensors_in(args, kwargs)
            written = [now[index] for index, _ in event.changed]
            result = self._with_ids(run, event, func(*args, **kwargs), written)
            for index, value in event.changed:
                run.has(value, now[index])
        else:
            result = self._in_place_of(run, event.returned)
        # What the model holds is what it gave, also where another tensor has the data.
        for index, value in event.changed:
            run.ids[id(given[index])] = value
            run.held.append(given[index])
        return result

    def _check_read(self, run: _Run, func: Any, takes: list[int]) -> None:
        """Raise PipelineError if Python reads the shape of a value that nobody has handed on."""
        for value in takes:
            is_there = value == _NOT_RECORDED or value in run.data
            if not is_there and value not in self._record.reads:
                raise PipelineError(
                    f"the model reads `{name_of(func)}` of a value ({line_of(currentframe())}) of "
                    "which it read none with the `inputs` that it was cut by: its way must be the "
                    "same for all microbatches"
                )

    def _not_recorded(
        self, run: _Run, func: Any, takes: list[int], args: Any, kwargs: Any
    ) -> Any:
        """An op that was not recorded: on fake tensors, models leave out a look at the data, such
        as a search for padding. No block and no recorded op may be given what it returns.
        """
        if not all(value == _NOT_RECORDED or value in run.data for value in takes):
            raise self._another_way(run, f"`{name_of(func)}`")
        args, kwargs = run.with_data((args, kwargs))
        result = apart(func(*args, **kwargs), run.ids.keys())
        for tensor in tensors_in(result):
            run.ids[id(tensor)] = _NOT_RECORDED
            run.held.append(tensor)
        return result


@frozen
class BetweenBlocks:
    """What a model does beside its blocks: the record of a forward, and the names of the weights
    that are in no block.
    """

    record: Record
    outside: frozenset[str]

    def pieces_of(self, name: str, cuts: Sequence[int]) -> list[int]:
        """The pieces of the model that do something with a weight outside of all blocks; the first
        piece, if none does.
        """
        ids = [value for value, own in self.record.weights.items() if own == name]
        # A gap belongs to the block before it, the first one to the first block.
        blocks = {
            event.place if event.is_block else max(event.place - 1, 0)
            for value in ids
            for event in self.record.users_of(value)
        }
        pieces = [
            piece
            for piece, (begin, end) in enumerate(pairwise(cuts))
            if any(begin <= block < end for block in blocks)
        ]
        return pieces or [0]

    def stage(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        own: Mapping[str, nn.Module],
        places: range,
        is_first: bool,
        is_last: bool,
    ) -> nn.Module:
        """A copy of the model that does what belongs to its `own` blocks, those at `places`. Blocks
        are not copied.
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
        in_order = [*theirs.values()]
        StageForward(stage, self.record, in_order, places, is_first, is_last)
        return stage


def between_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    inputs: Any,
    options: Mapping[str, Any],
) -> BetweenBlocks:
    """What a model does beside its blocks, by its forward of `inputs`."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    record = record_forward(model, blocks, given, options)
    in_blocks = {
        id(weight)
        for name in record.blocks
        for weight in model.get_submodule(name).parameters()
    }
    named = model.named_parameters()
    outside = frozenset(name for name, weight in named if id(weight) not in in_blocks)
    return BetweenBlocks(record, outside)
