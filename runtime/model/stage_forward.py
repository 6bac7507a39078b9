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

The model sees fake tensors in place of the integers and masks that the stage has, too, and only ops
and blocks get the data. Otherwise models of transformers would look at a mask, which they do not
when they are traced, and leave it out for a microbatch in which nothing is masked.
"""

import warnings
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from inspect import currentframe
from itertools import pairwise
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.hooks import RemovableHandle

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.forward_record import (
    HOOKS,
    REQUIRES_GRAD,
    Constant,
    Event,
    Record,
    Returned,
    apart,
    in_one_order,
    is_before,
    is_in_each_stage,
    line_of,
    name_of,
    record_forward,
    replace_call,
    tensors_in,
    without_cache,
)
from schedlang.runtime.torch_private.fake_tensors import FakeTensors, is_fake, kept_by
from schedlang.runtime.torch_private.function_modes import enter, leave
from schedlang.runtime.torch_private.functions import SeesFunctions, functions_seen
from schedlang.runtime.torch_private.leaf_hooks import (
    forward_hooks,
    takes_keywords,
    with_hooks_inside,
)
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.values import has_gradient

#: How Python reads the device of a tensor.
_DEVICE = Tensor.device.__get__

#: The attribute of a block with the stages that do its calls, or leave them out.
_STAGES = "_schedlang_stages"

#: Modules whose submodules have no attributes of their own.
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)

#: In place of an id: a tensor that follows from values by an op that was not recorded.
_NOT_RECORDED = -1


def put_in_stage(block: nn.Module, name: str, forward: "StageForward") -> None:
    """Have a stage do the calls of a block, or leave them out, while its forward runs.

    A block of the model itself may be in the stages of several plans.
    """
    if _STAGES not in block.__dict__:
        block.__dict__[_STAGES] = []
        replace_call(block, _call_in_stage)
    block.__dict__[_STAGES].append((forward, name))


def _call_in_stage(
    block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """A block is called, with its hooks."""
    for forward, name in block.__dict__[_STAGES]:
        if forward.is_running:
            return forward.call(name, block, call, args, kwargs)
    # A checkpoint runs the block again, with the arguments that it was given.
    return call(*without_fakes(args), **without_fakes(kwargs))


def leave_out(block: nn.Module) -> None:
    """Make plain attributes of the buffers of a module, and of its submodules without weights: it
    is a copy of a block of another stage, of which models look at attributes. Containers keep their
    submodules, whose number and names models read, too.
    """
    block.__dict__.pop(_STAGES, None)
    for part in [*block.modules()]:
        for name, buffer in [*part.named_buffers(recurse=False)]:
            delattr(part, name)
            part.__dict__[name] = buffer
        if isinstance(part, _CONTAINERS):
            continue
        for name, child in [*part.named_children()]:
            if next(child.parameters(), None) is None:
                delattr(part, name)
                part.__dict__[name] = child


@define
class _Place:
    """Where a stage has a weight: a module and an attribute, and both as a path. The module
    registers its `own`, and for another one it has a tensor in its place that is no weight.
    """

    module: nn.Module
    name: str
    path: str
    is_own: bool

    def get(self) -> Tensor:
        """The weight, or what is in its place."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Have a tensor in place of the weight."""
        if hasattr(self.module, self.name):
            delattr(self.module, self.name)
        self.module.__dict__[self.name] = tensor


def _parameters(
    forward: "StageForward", stand_in: Tensor, recurse: bool = True
) -> Iterator[Tensor]:
    """The weights of a module whose weights are in other stages: one, while the forward runs."""
    if forward.is_running:
        yield stand_in


class _End(BaseException):
    """The forward has come to the first block of the next stage."""


class _Run:
    """A forward that is under way.

    `next` is the index of the next event, `called` the number of blocks that were called. `ids` are
    the ids of values by the identity of the tensors that have them or stand in for them, all of
    which are `held`: where one was freed, another might be made. `data` are the values that are
    there, `tensors` also those of which the shape is known.
    """

    def __init__(self, fake: FakeTensors) -> None:
        self.fake = fake
        self.has_grad = torch.is_grad_enabled()
        self.next = 0
        self.called = 0
        self.ids: dict[int, int] = {}
        self.data: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        self.held: list[Tensor] = []

    def stands_for(self, value: int, tensor: Tensor) -> None:
        """A tensor is met that has a value, or stands in for it."""
        self.ids[id(tensor)] = value
        self.held.append(tensor)
        self.tensors[value] = tensor

    def has(self, value: int, tensor: Tensor) -> Tensor:
        """A tensor is met that has a value; returned is the one that the model sees."""
        self.data[value] = tensor
        self.stands_for(value, tensor)
        if has_gradient(tensor):
            return tensor
        seen = self.fake.in_place_of(tensor)
        self.stands_for(value, seen)
        return seen

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


def is_in_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` is under way."""
    frame = currentframe()
    while frame is not None:
        names = frame.f_code.co_varnames[:1]
        if any(isinstance(frame.f_locals.get(name), FunctionCtx) for name in names):
            return True
        frame = frame.f_back
    return False


def without_fakes(value: Any) -> Any:
    """The same, in which tensors have data in place of the fake ones that stand in for them."""
    leaves, tree = tree_flatten(value)
    found = [kept_by(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(found, tree)


class StageForward(SeesFunctions):
    """The forward of the stage that does the calls `own` of a record's blocks. It takes the place
    of the forward of `stage`, a copy of the model.
    """

    def __init__(
        self,
        stage: nn.Module,
        record: Record,
        own: range,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self._record = record
        self._own = own
        self._is_first = is_first
        self._is_last = is_last
        self._forward = with_hooks_inside(stage)
        self._run: _Run | None = None
        self._device = torch.device("cpu")
        self._fake = FakeTensors()
        self._takes = [] if is_first else record.handed_on(own.start)
        self._takes_shapes = [] if is_first else record.known_by_shape(own.start)
        self._hands_on = record.handed_on(own.stop)
        self._hands_on_shapes = record.known_by_shape(own.stop)
        own_names = {record.blocks[place] for place in own}
        blocks = {name: stage.get_submodule(name) for name in record.blocks}
        in_blocks = {part for block in blocks.values() for part in block.modules()}
        self._around = [part for part in stage.modules() if part not in in_blocks]
        #: The places of each weight that a gap of any stage uses, by the id of its value.
        self._weights = self._place_weights(stage, [blocks[name] for name in own_names])
        for name, block in blocks.items():
            if name not in own_names:
                leave_out(block)
            put_in_stage(block, name, self)
        stage.forward = self.forward
        assert record.inputs is not None
        leaves = record.inputs.leaves
        #: The names of the model's inputs, if it takes them as keyword arguments.
        self._names: list[str] = [*tree_unflatten(leaves, record.inputs.tree)[1]]

    def _place_weights(
        self, stage: nn.Module, own: Sequence[nn.Module]
    ) -> dict[int, list["_Place"]]:
        """Take all weights away but those of its own blocks, and those that its gaps use; the
        places of each weight that a gap of any stage uses, the one that registers it first.
        """
        own_modules = {id(part) for block in own for part in block.modules()}
        places: dict[int, list[_Place]] = {}
        for path, module in stage.named_modules():
            for name, weight in module.named_parameters(path, recurse=False):
                is_own = id(module) in own_modules
                place = _Place(module, name.rpartition(".")[2], name, is_own)
                places.setdefault(id(weight), []).append(place)
        by_path = {place.path: each for each in places.values() for place in each}
        found = {}
        for value, name in self._record.weights.items():
            of_weight = by_path[name]
            is_used = any(map(self._is_done_here, self._record.users_of(value)))
            of_weight.sort(key=lambda place: (not place.is_own, place.path != name))
            of_weight[0].is_own |= is_used
            found[value] = of_weight
        first = {module: next(module.parameters(), None) for module in stage.modules()}
        for of_weight in places.values():
            stand_in = torch.empty_like(of_weight[0].get(), device="meta")
            for place in of_weight:
                if not place.is_own:
                    place.put(stand_in)
        for module, weight in first.items():
            if weight is not None and next(module.parameters(), None) is None:
                # Models ask the first weight of a part for its type and its device.
                stand_in = torch.empty_like(weight, device="meta")
                module.__dict__["parameters"] = partial(_parameters, self, stand_in)
        return found

    def _is_done_here(self, event: Event) -> bool:
        """Whether an op or a block belongs to this stage."""
        was_before = not self._is_first and is_before(event, self._own.start)
        return is_before(event, self._own.stop) and not was_before

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the stage on the model's inputs, or on what the stage before has handed on."""
        assert self._record.inputs is not None
        kwargs: dict[str, Any] = {}
        if self._is_first and self._names:
            kwargs = self._in_order(*args)
            args = ()
        run = self._begin(args, kwargs)
        args, kwargs = self._in_place_of(run, self._record.inputs)
        output = None
        has_ended = False
        self._run = run
        kept = self._tensors_in_attributes()
        enter(self)
        try:
            with functions_seen():
                output = self._forward(*args, **kwargs, **options)
        except _End:
            has_ended = True
        finally:
            leave(self)
            self._run = None
            self._take_fakes_out(kept)
        if not has_ended and (
            run.next < len(self._record.events)
            or run.ids_in(output) != self._record.output.ids
        ):
            raise self._another_way(run, "its end")
        return run.with_data(output) if self._is_last else self._message(run)

    def _tensors_in_attributes(self) -> dict[tuple[int, str], Tensor]:
        """The buffers and other tensors that modules around the blocks have, by the module's index
        and their names.
        """
        return {
            (index, name): tensor
            for index, module in enumerate(self._around)
            for name, tensor in [
                *vars(module).items(),
                *module.named_buffers(recurse=False),
            ]
            if isinstance(tensor, Tensor)
        }

    def _take_fakes_out(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Where the model has set an attribute to a fake tensor, such as a buffer to an average,
        have the data in its place, or what was there `before`.
        """
        for (index, name), tensor in self._tensors_in_attributes().items():
            if not is_fake(tensor):
                continue
            data = kept_by(tensor)
            known = before.get((index, name)) if is_fake(data) else data
            setattr(self._around[index], name, known)

    def _in_order(self, inputs: Any) -> dict[str, Any]:
        """The model's keyword arguments, in the order in which they were recorded."""
        if not isinstance(inputs, Mapping) or {*inputs} != {*self._names}:
            raise PipelineError(
                f"the model was cut by `inputs` that are a dictionary of {', '.join(self._names)}: "
                "a step's inputs must be one, too"
            )
        return {name: inputs[name] for name in self._names}

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Run:
        run = _Run(self._fake)
        given = tensors_in(args, kwargs)
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
        for value, (first, *others) in self._weights.items():
            weight = first.get()
            if not first.is_own:
                run.stands_for(value, weight)
                continue
            run.has(value, weight)
            for place in others:
                if not place.is_own:
                    place.put(weight)
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
        if event is None or (event.called, event.takes) != in_one_order(called, takes):
            return None
        run.next += 1
        run.called += event.is_block
        return event

    def _another_way(self, run: _Run, what: str) -> PipelineError:
        events = self._record.events
        expected = f"to {events[run.next]}" if run.next < len(events) else "to its end"
        return PipelineError(
            f"the model's forward comes to {what} ({line_of(currentframe())}); with the `inputs` "
            f"that it was cut by it came {expected}, or gave it other values: its way must be the "
            "same for all microbatches"
        )

    @property
    def is_running(self) -> bool:
        """Whether a forward is under way."""
        return self._run is not None

    def call(
        self,
        name: str,
        block: nn.Module,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The forward comes to a block."""
        run = self._run
        assert run is not None
        if not leave(self):
            # It is called by another block.
            return call(*args, **kwargs)
        try:
            event = self._next(run, name, run.ids_in(args, kwargs))
            if event is None:
                raise self._another_way(run, f"block `{name}`")
            if event.place in self._own:
                output = call(*run.with_data(args), **run.with_data(kwargs))
                return self._with_ids(run, event, output, ())
            return self._leave_out(run, event, block, args, kwargs)
        finally:
            enter(self)

    def _leave_out(
        self, run: _Run, event: Event, block: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """What stands in for what a call of another stage returns, or the end of the forward.

        Hooks that keep what a block returns, for the model's own forward, keep what stands in.
        """
        if event.place >= self._own.stop:
            raise _End
        self._check_graph(run, event)
        output = self._in_place_of(run, event.returned)
        for place, (number, hook) in enumerate(forward_hooks(block).items()):
            if (event.called, place) in self._record.keepers:
                more = (kwargs,) if takes_keywords(block, number) else ()
                hook(block, args, *more, output)
        return output

    def _check_graph(self, run: _Run, event: Event) -> None:
        """PipelineError where what is left out lies within a function of `torch.autograd` that is
        given a function: it would take what stands in for its own.
        """
        if run.has_grad and not torch.is_grad_enabled() and is_in_function():
            raise PipelineError(
                f"the model calls {event} within a reentrant checkpoint or another function of "
                "`torch.autograd`, which would cut the graph of a value that the stage is handed: "
                "use a checkpoint with `use_reentrant=False`"
            )

    def _with_ids(
        self, run: _Run, event: Event, result: Any, written: Sequence[Tensor]
    ) -> Any:
        """What an event returned, whose tensors now have the ids of the record; those that it has
        `written` to are the ones that it was given.
        """
        result = apart(result, run.ids.keys() - {id(each) for each in written})
        leaves, tree = tree_flatten(result)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != len(event.returned.ids):
            raise PipelineError(
                f"{event} returned {len(places)} tensors, and {len(event.returned.ids)} with the "
                "`inputs` that the model was cut by: its way must be the same for all microbatches"
            )
        for value, place in zip(event.returned.ids, places, strict=True):
            leaves[place] = run.has(value, leaves[place])
        return tree_unflatten(leaves, tree)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An op in a gap."""
        kwargs = kwargs or {}
        run = self._run
        if func == _DEVICE and args[0].is_meta:
            # A weight of another stage: models ask it on which device they are.
            return self._device
        takes = [] if run is None else run.ids_in(args, kwargs)
        if run is None or not (takes or self._draws(run, func)):
            return func(*args, **kwargs)
        if func in HOOKS:
            return self._hook(run, func, takes, args, kwargs)
        if func == REQUIRES_GRAD and takes[0] not in run.data:
            return run.has_grad and takes[0] in self._record.trained
        given = tensors_in(args, kwargs)
        if is_in_each_stage(func, given) and self._record.looks >= {*takes}:
            args, kwargs = run.with_data((args, kwargs))
            return func(*args, **kwargs)
        if func in self._record.readers:
            self._check_read(run, func, takes)
            return func(*args, **kwargs)
        event = self._next(run, func, takes)
        if event is None:
            return self._not_recorded(run, func, takes, args, kwargs)
        if self._is_done_here(event):
            args, kwargs = run.with_data((args, kwargs))
            now = tensors_in(args, kwargs)
            written = [now[index] for index, _ in event.changed]
            result = self._with_ids(run, event, func(*args, **kwargs), written)
            for index, value in event.changed:
                run.has(value, now[index])
        else:
            self._check_graph(run, event)
            result = self._in_place_of(run, event.returned)
        # What the model holds is what it gave, also where another tensor has the data.
        for index, value in event.changed:
            run.ids[id(given[index])] = value
            run.held.append(given[index])
        return result

    def _draws(self, run: _Run, func: Any) -> bool:
        """Whether an op that takes no value is the next event: it draws random numbers."""
        events = self._record.events
        return (
            func in self._record.draws
            and run.next < len(events)
            and (events[run.next].called, events[run.next].takes) == (func, ())
        )

    def _hook(
        self, run: _Run, func: Any, takes: list[int], args: Any, kwargs: Any
    ) -> Any:
        """A value is hooked by the stage that makes it, since it has the whole gradient."""
        is_early = run.called <= self._own.start and not self._is_first
        if is_early or run.called > self._own.stop:
            return RemovableHandle(OrderedDict())
        if takes[0] not in run.data or takes[0] in self._takes:
            raise PipelineError(
                f"the model calls `{name_of(func)}` of a value that an earlier stage makes "
                f"({line_of(currentframe())}), whose gradient is not whole here: call it before "
                "the next block"
            )
        return func(*args, **kwargs)

    def _check_read(self, run: _Run, func: Any, takes: list[int]) -> None:
        """Raise PipelineError if Python reads the shape of a value that nobody has handed on."""
        for value in takes:
            is_there = value == _NOT_RECORDED or value in run.data
            is_known = value in self._record.reads or value in self._weights
            if not is_there and not is_known:
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
        """The pieces of the model that use a weight outside of its block; if none does, and it is
        in no block, the first piece.
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
        return pieces or [0] * (name in self.outside)

    def check_states(self, cuts: Sequence[int]) -> None:
        """PipelineError for a tensor around the blocks that one piece changes, and an earlier one
        reads; a warning of a number that an earlier one may read.
        """
        ends = cuts[1:]
        for name, (read, changed) in self.record.states.items():
            writer = bisect_left(ends, changed)
            behind = (
                f"the model changes its `{name}` behind block "
                f"`{self.record.blocks[changed - 1]}`"
            )
            if read is None and writer > 0:
                warnings.warn(
                    f"{behind}, which earlier stages do not see: if they read it, change it before "
                    "the first block",
                    stacklevel=3,
                )
            elif read is not None and bisect_left(ends, read) < writer:
                raise PipelineError(
                    f"{behind}, and reads it before, in an earlier stage, which would not see the "
                    "change in the next forward: change it before the first block, or keep what is "
                    "read and changed in one block"
                )

    def left_out(
        self, model: nn.Module, own: Container[str], piece: int, cuts: Sequence[int]
    ) -> dict[int, Any]:
        """What stands for the weights that a piece of the model does not have, and for the buffers
        of its other blocks, in a copy of the model: by identity, tensors on the meta device.
        """
        blocks = {name: model.get_submodule(name) for name in self.record.blocks}
        own_blocks = [block for name, block in blocks.items() if name in own]
        kept = {id(each) for block in own_blocks for each in block.parameters()}
        named = dict(model.named_parameters())
        for name in {*self.record.weights.values(), *self.outside}:
            if piece in self.pieces_of(name, cuts):
                kept.add(id(named[name]))
        memo: dict[int, Any] = {}
        for weight in model.parameters():
            if id(weight) not in kept:
                shape = torch.empty_like(weight, device="meta")
                # As a weight it goes through a copy of the model, and then it is taken away.
                memo[id(weight)] = nn.Parameter(shape, weight.requires_grad)
        for name, block in blocks.items():
            for buffer in block.buffers() if name not in own else ():
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        return memo

    def make_stage(
        self, module: nn.Module, places: range, is_first: bool, is_last: bool
    ) -> None:
        """Make a copy of the model a stage, which does the calls of blocks at `places`."""
        without_cache(module)
        StageForward(module, self.record, places, is_first, is_last)


def between_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    inputs: Any,
    options: Mapping[str, Any],
) -> BetweenBlocks:
    """What a model does beside its blocks, by its forward of `inputs`."""
    record = record_forward(model, blocks, inputs, options)
    in_blocks = {
        id(weight)
        for name in record.blocks
        for weight in model.get_submodule(name).parameters()
    }
    named = model.named_parameters()
    outside = frozenset(name for name, weight in named if id(weight) not in in_blocks)
    return BetweenBlocks(record, outside)
