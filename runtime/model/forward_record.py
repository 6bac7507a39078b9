"""What a model's forward does between its blocks, and which values a cut of it has to hand on.

A model calls its blocks one after the other, and does something before, between and after them,
here called gaps:

    gap 0 │ block 0 │ gap 1 │ block 1 │ gap 2        x = embed(tokens) * 8   mask = tokens != 0
                    ▲                                for layer in layers: x = layer(x, mask)[0]
                    cut 1 hands on x and mask

One forward is recorded, on tensors that have shapes and no memory. Every value that depends on the
model's inputs, on what a block returns or on a weight has a number; what depends on none of these,
as positions or a causal mask, any stage makes by itself. A gap belongs to the block before it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private.glue import Shapes
from schedlang.runtime.torch_private.pytrees import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)
from schedlang.runtime.torch_private.tensors import changes_of

#: Folders whose frames are not the model's.
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


@frozen
class Returned:
    """What an op or a block returned: how it is nested, and by leaf the number of a value, or
    whatever else it is.
    """

    tree: TreeSpec
    leaves: tuple["int | Constant", ...]


@frozen
class Constant:
    """A leaf that is no value with a number."""

    value: Any


@frozen
class Event:
    """An op in a gap, or the call of a block: what was called, the numbers of the values among its
    arguments, of those that it made and of those that it changed in place, by argument; its gap, or
    the index of the block; and the line of the model.
    """

    called: Any
    takes: tuple[int, ...]
    returned: Returned
    changed: tuple[tuple[int, int], ...]
    place: int
    is_block: bool
    line: str

    @property
    def makes(self) -> list[int]:
        """The numbers of the values that are there after it."""
        made = [leaf for leaf in self.returned.leaves if isinstance(leaf, int)]
        return [*made, *(number for _, number in self.changed)]

    def __str__(self) -> str:
        what = f"block `{self.called}`" if self.is_block else name_of(self.called)
        return f"{what} ({self.line})"


@define
class Record:
    """A forward: the `blocks` by name in the order of their calls, the numbers of the inputs, what
    was done, the numbers of the values whose shapes or types Python has read, by which functions,
    and what was returned. `weights` are those outside of all blocks, by the number of their value.
    """

    blocks: list[str] = field(factory=list)
    inputs: Returned | None = None
    events: list[Event] = field(factory=list)
    reads: set[int] = field(factory=set)
    reading: list[Any] = field(factory=list)
    returned: Returned | None = None
    weights: dict[int, str] = field(factory=dict)

    def __deepcopy__(self, memo: Any) -> "Record":
        # Copies of a stage go by the same record.
        return self

    @property
    def numbers(self) -> list[int]:
        """Those of the tensors among the inputs."""
        assert self.inputs is not None
        return [leaf for leaf in self.inputs.leaves if isinstance(leaf, int)]

    def is_chain(self) -> bool:
        """Whether each block takes what the one before returned, the first one the one input, and
        nothing else is done with a value.
        """
        if len(self.numbers) != 1 or any(not event.is_block for event in self.events):
            return False
        alone = tree_flatten(None)[1]
        value: tuple[int, ...] = (self.numbers[0],)
        for event in self.events:
            made = tuple(event.makes)
            if event.takes != value or event.returned != Returned(alone, made):
                return False
            value = made
        # A later stage would take the shape of what it is given for that of the inputs.
        reads_inputs = bool(self.reads & {*self.numbers})
        return not reads_inputs and self.returned == Returned(alone, value)

    def handed_on(self, cut: int) -> list[int]:
        """The values that are there before a block and used after: by it, by a later block or in a
        later gap, or returned. A weight is no such value, since its stage has it.
        """
        there = {*self.numbers}
        used: set[int] = set()
        for event in self.events:
            if self.is_before(event, cut):
                there.update(event.makes)
            else:
                used.update(event.takes)
        assert self.returned is not None
        used.update(leaf for leaf in self.returned.leaves if isinstance(leaf, int))
        return sorted(there & used)

    def known_by_shape(self, cut: int) -> list[int]:
        """The values before a block that it is not handed on, but whose shapes Python reads."""
        there = {*self.numbers}
        for event in self.events:
            if self.is_before(event, cut):
                there.update(event.makes)
        return sorted((there & self.reads) - {*self.handed_on(cut)})

    @staticmethod
    def is_before(event: Event, cut: int) -> bool:
        """Whether an event belongs to the blocks before a cut."""
        return event.place < cut + (not event.is_block)

    def users_of(self, number: int) -> list[Event]:
        """The events that take a value."""
        return [event for event in self.events if number in event.takes]


def name_of(function: Any) -> str:
    """The name of an op, as its user writes it."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among some values, from left to right."""
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def record_forward(
    model: nn.Module,
    blocks: Sequence[str],
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Record:
    """Record a forward of a copy of the model, whose weights take no memory.

    PipelineError names the line of the model that cannot be run without numbers, or that calls a
    block again.
    """
    shapes = Shapes()
    device = next(
        (each.device for each in model.parameters() if not each.is_meta),
        torch.device("cpu"),
    )
    memo: dict[int, Any] = {}
    for weight in model.parameters():
        made = nn.Parameter(shapes.of(weight.detach(), device), weight.requires_grad)
        memo[id(weight)] = made
    for buffer in model.buffers():
        memo[id(buffer)] = (
            shapes.of(buffer, device) if buffer.is_meta else buffer.clone()
        )
    whole = copy.deepcopy(model, memo)
    without_cache(whole)
    recorder = _Recorder(whole, blocks)
    leaves, tree = tree_flatten(inputs)
    given = [
        shapes.of(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    arguments = tree_unflatten(given, tree)
    recorder.begin(arguments)
    with torch.no_grad(), shapes.quietly(), recorder:
        output = whole(*arguments, **options)
    recorder.end(output)
    return recorder.record


class _Recorder(TorchFunctionMode):
    """Gives numbers to values while a forward runs."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.record = Record()
        #: The number of each tensor that has one, by identity; all are held, so that none is made
        #: where another was.
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []
        self._next = 0
        self._is_inside = False
        self._weights: dict[int, str] = {}
        of_blocks: dict[int, str] = {}
        for name in names:
            block = model.get_submodule(name)
            for own, weight in block.named_parameters(name):
                of_blocks.setdefault(id(weight), own)
            block.forward = partial(self._call, name, block.forward)
        self._of_blocks = of_blocks
        for name, weight in model.named_parameters():
            if id(weight) not in of_blocks:
                self._weights[id(weight)] = name

    def begin(self, inputs: Any) -> None:
        """Number the inputs."""
        for tensor in tensors_in(inputs):
            self._number(tensor)
        self.record.inputs = self._returned(inputs)

    def end(self, output: Any) -> None:
        """The forward has returned this."""
        self.record.returned = self._returned(output)

    def _number(self, tensor: Tensor) -> int:
        number = self._next
        self._next += 1
        self._numbers[id(tensor)] = number
        self._held.append(tensor)
        return number

    def _numbers_of(self, tensors: Sequence[Tensor]) -> list[int]:
        found = []
        for tensor in tensors:
            name = self._weights.get(id(tensor))
            if name is not None and id(tensor) not in self._numbers:
                self.record.weights[self._number(tensor)] = name
            number = self._numbers.get(id(tensor))
            if number is not None:
                found.append(number)
        return found

    def _returned(self, value: Any) -> Returned:
        leaves, tree = tree_flatten(value)
        found: list[int | Constant] = []
        for leaf in leaves:
            known = isinstance(leaf, Tensor) and id(leaf) in self._numbers
            found.append(self._numbers[id(leaf)] if known else Constant(leaf))
        return Returned(tree, tuple(found))

    def _call(self, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A block is called."""
        if self._is_inside:
            return forward(*args, **kwargs)
        line = line_of(currentframe())
        if name in self.record.blocks:
            raise PipelineError(
                f"the model calls block `{name}` twice ({line}), and each block is called once: "
                "name a block that holds both calls"
            )
        given = tensors_in(args, kwargs)
        takes = tuple(self._numbers_of(given))
        self._is_inside = True
        try:
            result = forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            # It goes by numbers, as the router of experts does: a layer returns what it is given.
            known = [each for each in given if id(each) in self._numbers]
            if not known:
                raise
            result = torch.empty_like(known[0])
        finally:
            self._is_inside = False
        result = apart(result, self._numbers, lambda tensor: tensor.view_as(tensor))
        for tensor in tensors_in(result):
            self._number(tensor)
        place = len(self.record.blocks)
        self.record.blocks.append(name)
        self.record.events.append(
            Event(name, takes, self._returned(result), (), place, True, line)
        )
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        takes = tuple(self._numbers_of(given))
        strays = [
            self._of_blocks[id(each)] for each in given if id(each) in self._of_blocks
        ]
        if not takes and not strays:
            return func(*args, **kwargs)
        versions = [*map(changes_of, given)]
        line = line_of(currentframe())
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            raise PipelineError(
                f"the model does `{name_of(func)}` with a value ({line}) that only one stage has, "
                f"and goes by its numbers ({type(error).__name__}): do so in a block, or hand the "
                "number in as an option"
            ) from error
        made = tensors_in(result)
        changed = [
            index
            for index, (tensor, version) in enumerate(zip(given, versions, strict=True))
            if changes_of(tensor) != version and id(tensor) in self._numbers
        ]
        if not made and not changed:
            self.record.reads.update(takes)
            if func not in self.record.reading:
                self.record.reading.append(func)
            return result
        if strays:
            raise PipelineError(
                f"the model does `{name_of(func)}` with `{strays[0]}` outside of its block "
                f"({line}): all that is done with its tensors must be done in the block itself; "
                "let a module of your own hold it and do so, and name that in `blocks`"
            )
        kept = {id(given[index]) for index in changed}
        result = apart(
            result,
            {key: number for key, number in self._numbers.items() if key not in kept},
            lambda tensor: tensor.view_as(tensor),
        )
        after = [(index, self._number(given[index])) for index in changed]
        for tensor in tensors_in(result):
            if id(tensor) not in kept:
                self._number(tensor)
        place = len(self.record.blocks)
        self.record.events.append(
            Event(func, takes, self._returned(result), tuple(after), place, False, line)
        )
        return result


def without_cache(model: nn.Module) -> None:
    """A model of transformers returns no keys and values, which are for generating alone."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def apart(
    value: Any, known: Mapping[int, Any], alias: Callable[[Tensor], Tensor]
) -> Any:
    """The same value, in which no tensor is one that has a number: each value has a tensor of its
    own, also what `contiguous()` returns of one that is so already.
    """
    leaves, tree = tree_flatten(value)
    if not any(isinstance(leaf, Tensor) and id(leaf) in known for leaf in leaves):
        return value
    return tree_unflatten(
        [
            alias(leaf) if isinstance(leaf, Tensor) and id(leaf) in known else leaf
            for leaf in leaves
        ],
        tree,
    )


def line_of(frame: FrameType | None) -> str:
    """The line of the model that runs now."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OWN)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"
