"""What a model's forward does between its blocks, and which values a cut of it has to hand on.

A model calls its blocks one after the other, and does something before, between and after them,
here called gaps:

    gap 0 │ block 0 │ gap 1 │ block 1 │ gap 2        x = embed(tokens) * 8   mask = tokens != 0
                    ▲                                for layer in layers: x = layer(x, mask)[0]
                    cut 1 hands on x and mask

One forward is recorded on fake tensors, which have shapes and no data. Each value gets an id that
depends on the model's inputs, on what a block returns, or on a weight. What depends on none of
these, such as positions or a causal mask, every stage makes for itself. A gap belongs to the block
before it.

A value that follows from the inputs alone has data, too. The model may look at it, as it does where
the number of its patches is `grid.tolist()`. Each stage then looks at the data of its own
microbatch, so such a value is handed on to all later stages. A look at what a block returns is
refused.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from inspect import currentframe
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.random_state import random_state
from schedlang.runtime.torch_private.fake_tensors import FakeTensors, is_fake
from schedlang.runtime.torch_private.function_modes import (
    enter,
    is_transformed,
    leave,
)
from schedlang.runtime.torch_private.functions import SeesFunctions, functions_seen
from schedlang.runtime.torch_private.leaf_hooks import forward_hooks
from schedlang.runtime.torch_private.pytrees import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)
from schedlang.runtime.torch_private.tensors import changes_of

#: Folders whose frames are not the model's.
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

#: Python's operators that write to their first operand.
_IN_PLACE = frozenset(
    {"__setitem__", "__set__"}
    | {f"__i{each}__" for each in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
    | {f"__i{each}__" for each in ("pow", "and", "or", "xor", "lshift", "rshift")}
)

#: Python asks the right operand of a comparison first where its class is a subclass of the left
#: one's, as that of fake tensors is.
_TURNED_ROUND = {Tensor.gt: Tensor.lt, Tensor.ge: Tensor.le}
_SYMMETRIC = (Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__)

#: What hooks a value, by which a stage that made it sees its gradient.
HOOKS = (Tensor.register_hook, Tensor.retain_grad)

#: How Python asks whether a value has a gradient.
REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

#: In place of what an op returns that takes values without data.
_NO_DATA = object()


@frozen
class Constant:
    """A leaf that is no value with an id."""

    value: Any


@frozen
class Returned:
    """What was given or returned: how it is nested, and for each leaf the id of its value, or what
    else it is.
    """

    tree: TreeSpec
    leaves: tuple[int | Constant, ...]

    @property
    def ids(self) -> list[int]:
        """The ids of the values in it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, int)]


@frozen
class Event:
    """An op in a gap, or the call of a block.

    `called` is the function, or the name of the block; `takes` are the ids of the values among its
    arguments. `changed` are the tensors among the arguments that it writes to, by their index, each
    with the id of its new value. `place` is the number of the gap or of the block, `line` the line
    of the model.
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
        """The ids of the values that are there after it."""
        return [*self.returned.ids, *(value for _, value in self.changed)]

    def __str__(self) -> str:
        what = (
            f"block `{self.called}`" if self.is_block else f"`{name_of(self.called)}`"
        )
        return f"{what} ({self.line})"


@define
class Record:
    """A recorded forward.

    `blocks` are the names of the blocks in the order of their calls; a block that is called again
    is there again. `inputs` are the positional and the keyword arguments. `reads` are the values of
    which Python has read the shape or the type, and `readers` the functions that did so. `looks`
    are the values of which Python has read the data, `trained` those that have a gradient where
    Python asked. `draws` are the ops that drew random numbers and took no value, `keepers` the
    forward hooks that only keep what their block returns, by its name and their place. `weights`
    are the weights that a gap uses, those of blocks too, by the ids of their values. `states` are
    the attributes around the blocks that are read in one gap and changed in a later one, with the
    numbers of both; for Python's numbers it is not known where they are read.
    """

    blocks: list[str] = field(factory=list)
    inputs: Returned | None = None
    events: list[Event] = field(factory=list)
    reads: set[int] = field(factory=set)
    readers: list[Any] = field(factory=list)
    looks: set[int] = field(factory=set)
    trained: set[int] = field(factory=set)
    draws: set[Any] = field(factory=set)
    keepers: set[tuple[str, int]] = field(factory=set)
    has_hooks: bool = False
    states: dict[str, tuple[int | None, int]] = field(factory=dict)
    returned: Returned | None = None
    weights: dict[int, str] = field(factory=dict)

    def __deepcopy__(self, memo: Any) -> "Record":
        # Copies of a stage go by the same record.
        return self

    @property
    def input_ids(self) -> list[int]:
        """The ids of the tensors among the inputs."""
        assert self.inputs is not None
        return self.inputs.ids

    @property
    def output(self) -> Returned:
        """What the model has returned."""
        assert self.returned is not None
        return self.returned

    def is_chain(self) -> bool:
        """Whether each block takes what the one before returned, the first one the one input, and
        nothing else is done with a value.
        """
        if len(self.input_ids) != 1 or any(not event.is_block for event in self.events):
            return False
        if self.has_hooks or self.keepers or self.states:
            return False
        if len({*self.blocks}) != len(self.blocks):
            return False
        assert self.inputs is not None
        # In a chain, a later stage gives its input to the model in place of the model's own.
        if (self.reads | self.looks) & {*self.input_ids}:
            return False
        alone = tree_flatten(None)[1]
        if self.inputs.tree != tree_flatten(((None,), {}))[1]:
            return False
        value = Returned(alone, (self.input_ids[0],))
        for event in self.events:
            if [*event.takes] != value.ids or event.returned.tree != alone:
                return False
            value = event.returned
        return self.output == value

    def leave_out_unused_draws(self) -> None:
        """Leave out random numbers that no block takes, and what is made of them alone, as where a
        model makes a part anew in its first forward.
        """
        drawn: set[int] = set()
        for event in self.events:
            if not event.is_block and drawn.issuperset(event.takes):
                drawn.update(event.makes)
        used = {*self.output.ids, *self.looks}
        kept = []
        for event in reversed(self.events):
            is_drawn = not event.is_block and drawn.issuperset(event.makes)
            if not is_drawn or not used.isdisjoint(event.makes):
                kept.append(event)
                used.update(event.takes)
        self.events = kept[::-1]
        self.draws = {
            event.called
            for event in self.events
            if not event.is_block and not event.takes
        }

    def handed_on(self, cut: int) -> list[int]:
        """The values that are there before block `cut`, and are used by it, later, or returned; and
        those that Python looks at, which it does in each stage.

        A weight is no such value: the stages that use it have it.
        """
        used = {*self.output.ids, *self.looks}
        for event in self.events:
            if not is_before(event, cut):
                used.update(event.takes)
        return sorted(self._there(cut) & used)

    def known_by_shape(self, cut: int) -> list[int]:
        """The values before block `cut` that are not handed on, and whose shapes Python reads."""
        return sorted((self._there(cut) & self.reads) - {*self.handed_on(cut)})

    def _there(self, cut: int) -> set[int]:
        """The values that are there before a block."""
        there = {*self.input_ids}
        for event in self.events:
            if is_before(event, cut):
                there.update(event.makes)
        return there

    def users_of(self, value: int) -> list[Event]:
        """The events that take a value."""
        return [event for event in self.events if value in event.takes]


def is_before(event: Event, cut: int) -> bool:
    """Whether an event belongs to the blocks before block `cut`. The gap in front of that block
    does.
    """
    return event.place < cut if event.is_block else event.place <= cut


def name_of(function: Any) -> str:
    """The name of an op, as its user writes it."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def in_one_order(function: Any, takes: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """An op and the values that it takes, the same whichever operand of a comparison Python asks
    first.
    """
    if function in _TURNED_ROUND:
        return _TURNED_ROUND[function], tuple(reversed(takes))
    return function, tuple(sorted(takes) if function in _SYMMETRIC else takes)


def is_in_each_stage(function: Any, given: Sequence[Tensor]) -> bool:
    """Whether an op on values with data is done by each stage: in a loop over rows of integers, as
    in `tolist()`, of which a microbatch may have another number; and in `torch.vmap`, as where
    transformers makes masks, since what that returns is returned by no op.
    """
    is_loop = function is Tensor.unbind and not given[0].is_floating_point()
    return is_loop or is_transformed()


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among some values, from left to right."""
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def written_by(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that an op writes to, by its name: `add_`, `__setitem__`, and what has `out`."""
    name = name_of(function)
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return tensors_in(args[:1] if is_in_place else (), kwargs.get("out"))


def apart(value: Any, known: Collection[int]) -> Any:
    """The same value, in which each tensor that is known by its identity is replaced by a view of
    it: each value has a tensor of its own, also what `contiguous()` returns unchanged.
    """
    leaves, tree = tree_flatten(value)
    found = [
        leaf.view_as(leaf) if isinstance(leaf, Tensor) and id(leaf) in known else leaf
        for leaf in leaves
    ]
    return tree_unflatten(found, tree)


def replace_call(
    module: nn.Module,
    function: Callable[[nn.Module, Callable[..., Any], Any, Any], Any],
) -> None:
    """Have a function do the calls of a module. It is given the module, its own call, which also
    runs its hooks, the arguments and the keyword arguments.
    """
    kind = type(module)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, partial(kind.__call__, module), args, kwargs)

    # Python looks for `__call__` in the class.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def line_of(frame: FrameType | None) -> str:
    """The line of the model that runs now."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_MODEL):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"


def without_cache(model: nn.Module) -> None:
    """Let a model of transformers return no keys and values, which are for generating alone."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that a microbatch stands for: a dictionary has
    keyword arguments, a tuple positional ones, and anything else is one argument.
    """
    if isinstance(inputs, Mapping):
        return (), {**inputs}
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _is_same(
    before: tuple[Sequence[Any], TreeSpec], now: tuple[Sequence[Any], TreeSpec]
) -> bool:
    """Whether containers have what they had before."""
    return before[1] == now[1] and all(
        one is other for one, other in zip(before[0], now[0], strict=True)
    )


def record_forward(
    model: nn.Module,
    blocks: Sequence[str],
    inputs: Any,
    options: Mapping[str, Any],
) -> Record:
    """Record a forward of a copy of the model, whose weights are fake.

    PipelineError where the model fails with these arguments or goes by the data of a value; it
    names the line of the model.
    """
    fake = FakeTensors()
    on_devices = (each.device for each in model.parameters() if not each.is_meta)
    device = next(on_devices, torch.device("cpu"))
    memo: dict[int, Any] = {}
    for weight in model.parameters():
        made = fake.like(weight.detach(), device)
        memo[id(weight)] = nn.Parameter(made, weight.requires_grad)
    for buffer in model.buffers():
        made = fake.like(buffer, device) if buffer.is_meta else buffer.clone()
        memo[id(buffer)] = made
    whole = copy.deepcopy(model, memo)
    without_cache(whole)
    recorder = _Recorder(whole, blocks, fake, device)
    leaves, tree = tree_flatten(arguments_of(inputs))
    given = [
        recorder.given(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = tree_unflatten(given, tree)
    recorder.begin((args, kwargs))
    try:
        with (
            torch.random.fork_rng(),
            torch.compiler.set_stance("force_eager"),
            fake.quietly(),
            functions_seen(),
            recorder,
        ):
            output = whole(*args, **kwargs, **options)
    except PipelineError:
        raise
    except Exception as error:
        lines = [
            f"{frame.filename}:{frame.lineno}, "
            for frame in extract_tb(error.__traceback__)
            if not frame.filename.startswith(_NOT_THE_MODEL)
        ]
        raise PipelineError(
            "the model cannot be cut by these `inputs` and `options`: its forward fails with them "
            f"({''.join(lines[-1:])}{type(error).__name__}: {error})"
        ) from error
    recorder.end(output)
    return recorder.record


class _States:
    """What a model keeps in tensors and numbers around its blocks, from one forward to the next:
    the gaps in which each is first read, and first changed. When a number is read is not known.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        in_blocks = {part for block in blocks for part in block.modules()}
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if module not in in_blocks
        }
        self._before = self._now()
        self._names = {
            id(value): name
            for name, (value, _) in self._before.items()
            if isinstance(value, Tensor)
        }
        self._read: dict[str, int] = {}
        self._changed: dict[str, int] = {}

    def read(self, tensor: Tensor, gap: int) -> None:
        """An op in a gap takes a tensor."""
        name = self._names.get(id(tensor))
        if name is not None:
            self._read.setdefault(name, gap)

    def come_to(self, gap: int) -> None:
        """A gap is at its end."""
        now = self._now()
        for name, (value, changes) in self._before.items():
            found, changes_now = now.get(name, (value, changes))
            is_same = found is value if isinstance(value, Tensor) else found == value
            if not is_same or changes_now != changes:
                self._changed.setdefault(name, gap)

    def changed_later(self) -> dict[str, tuple[int | None, int]]:
        """What was read in one gap and changed in a later one, with both; a number has None for
        the first one.
        """
        numbers = self._before.keys() - self._names.values()
        read = self._read | dict.fromkeys(numbers)
        pairs = {
            name: (read.get(name, gap), gap) for name, gap in self._changed.items()
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _now(self) -> dict[str, tuple[Any, int]]:
        """The tensors and numbers, each with how often it was changed in place."""
        return {
            f"{path}.{name}".lstrip("."): (
                value,
                changes_of(value) if isinstance(value, Tensor) else 0,
            )
            for path, module in self._modules.items()
            for name, value in [*vars(module).items(), *module.named_buffers("", False)]
            if isinstance(value, Tensor) or type(value) in (int, float)
        }


class _Recorder(SeesFunctions):
    """Gives ids to values while a forward runs."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        fake: FakeTensors,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.record = Record()
        self._fake = fake
        self._device = device
        #: The ids of values by the identity of their tensors. All of these are held: where one was
        #: freed, another might be made.
        self._ids: dict[int, int] = {}
        self._held: list[Tensor] = []
        #: The data of values that follow from the inputs alone, by their ids.
        self._data: dict[int, Tensor] = {}
        self._count = 0
        #: The block that is called now, and the ids of what it is given.
        self._block: str | None = None
        self._takes: tuple[int, ...] = ()
        #: What follows from values or weights within a block, by identity, with the block's name.
        self._made_in: dict[int, str] = {}
        #: How many ops blocks have done.
        self._ops = 0
        self._states = _States(model, [model.get_submodule(name) for name in blocks])
        self._weights = {id(weight): name for name, weight in model.named_parameters()}
        for name in blocks:
            replace_call(model.get_submodule(name), partial(self._call, name))

    def given(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of one that the forward is given."""
        made = self._fake.like(tensor, self._device)
        data = None if tensor.is_meta else tensor.detach().to(self._device, copy=True)
        self._new_id(made, data)
        return made

    def begin(self, inputs: Any) -> None:
        """The forward is given these positional and keyword arguments."""
        self.record.inputs = self._returned(inputs)

    def end(self, output: Any) -> None:
        """The forward has returned this."""
        self.record.returned = self._returned(output)
        self._states.come_to(len(self.record.blocks))
        self.record.states = self._states.changed_later()
        self.record.leave_out_unused_draws()

    def _new_id(self, tensor: Tensor, data: Tensor | None = None) -> int:
        """The id of a value that a tensor has from now on; and its data, if they are known."""
        value = self._count
        self._count += 1
        self._ids[id(tensor)] = value
        self._held.append(tensor)
        if data is not None and not is_fake(data):
            self._data[value] = data
            # A block is given the data, and may return it.
            self._ids[id(data)] = value
            self._held.append(data)
        return value

    def _with_data(self, value: Any) -> Any:
        """The same containers, in which values have their data where these are known."""
        leaves, tree = tree_flatten(value)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in self._ids:
                leaves[index] = self._data.get(self._ids[id(leaf)], leaf)
        return tree_unflatten(leaves, tree)

    def _without_data(self, value: Any, given: Sequence[Tensor] = ()) -> Any:
        """The same containers, with fake tensors in place of data; an op that returns the data of
        what it was `given` returns that.
        """
        own = {id(self._with_data(tensor)): tensor for tensor in given}
        leaves, tree = tree_flatten(value)
        for index, leaf in enumerate(leaves):
            if id(leaf) in own:
                leaves[index] = own[id(leaf)]
            elif isinstance(leaf, Tensor) and not is_fake(leaf):
                leaves[index] = self._fake.like(leaf, leaf.device)
        return tree_unflatten(leaves, tree)

    def _with_ids(
        self, result: Any, data: Sequence[Tensor], kept: Collection[int] = ()
    ) -> Any:
        """What an event has returned, with an id for each tensor but those that are `kept`, by
        identity; `data` are its tensors with data, as far as these are known.
        """
        result = apart(result, self._ids.keys() - kept)
        tensors = tensors_in(result)
        known = apart(list(data), self._ids.keys())
        if len(known) != len(tensors):
            known = [None] * len(tensors)
        for tensor, its_data in zip(tensors, known, strict=True):
            if id(tensor) not in kept:
                self._new_id(tensor, its_data)
        return result

    def _ids_of(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        for tensor in tensors:
            self._states.read(tensor, len(self.record.blocks))
            name = self._weights.get(id(tensor))
            if name is not None and id(tensor) not in self._ids:
                self.record.weights[self._new_id(tensor)] = name
            if id(tensor) not in self._ids:
                self._check_is_returned(tensor, "the model")
        found = (self._ids.get(id(tensor)) for tensor in tensors)
        return tuple(value for value in found if value is not None)

    def _returned(self, value: Any) -> Returned:
        leaves, tree = tree_flatten(value)
        found: list[int | Constant] = []
        for leaf in leaves:
            known = self._ids.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if known is None:
                self._check_is_constant(leaf)
            found.append(Constant(leaf) if known is None else known)
        return Returned(tree, tuple(found))

    def _check_is_constant(self, leaf: Any) -> None:
        """PipelineError for a tensor of a block, or an object with values in its attributes."""
        if isinstance(leaf, Tensor):
            self._check_is_returned(leaf, "the model")
        elif any(
            isinstance(each, Tensor) and self._is_traced(each)
            for each in getattr(leaf, "__dict__", {}).values()
        ):
            kind = type(leaf).__name__
            raise PipelineError(
                f"the model hands on a `{kind}`, in which torch finds no tensors: give them in "
                f"tuples, lists or dictionaries, or make it known by "
                f"`torch.export.register_dataclass({kind})`"
            )

    def _call(
        self,
        name: str,
        block: nn.Module,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A block is called, with its hooks."""
        if self._block is not None:
            return call(*args, **kwargs)
        line = line_of(currentframe())
        # Or the mode would see how the states are looked at.
        leave(self)
        self._states.come_to(len(self.record.blocks))
        enter(self)
        takes = self._ids_of(tensors_in(args, kwargs))
        args, kwargs = self._with_data((args, kwargs))
        given = tree_flatten((args, kwargs))
        self._block = name
        self._takes = takes
        try:
            with self._watching_hooks(block):
                made = call(*args, **kwargs)
            result = self._with_ids(self._without_data(made), tensors_in(made))
        finally:
            self._block = None
        if not _is_same(given, tree_flatten((args, kwargs))):
            raise PipelineError(
                f"block `{name}` changes a list or a dictionary that the model gives it ({line}), "
                "which another stage would not see: return what it puts in"
            )
        place = len(self.record.blocks)
        self.record.blocks.append(name)
        event = Event(name, takes, self._returned(result), (), place, True, line)
        self.record.events.append(event)
        return result

    @contextmanager
    def _watching_hooks(self, block: nn.Module) -> Iterator[None]:
        """Find out which forward hooks of a block only keep what it returns."""
        assert self._block is not None
        hooks = forward_hooks(block)
        own = {**hooks}
        for place, (key, hook) in enumerate(own.items()):
            hooks[key] = partial(self._watched, (self._block, place), hook)
        try:
            yield
        finally:
            hooks |= own

    def _watched(
        self, which: tuple[str, int], hook: Callable[..., Any], *args: Any
    ) -> Any:
        before = self._ops
        output = hook(*args)
        if output is None and self._ops == before:
            self.record.keepers.add(which)
        return output

    def _in_block(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op in a block returns: of a block it only counts how its output looks."""
        self._ops += 1
        given = tensors_in(args, kwargs)
        for tensor in given:
            self._check_is_given(func, tensor)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            result = self._on_numbers(func, args, kwargs)
        if any(map(self._is_traced, given)):
            for tensor in [*tensors_in(result), *written_by(func, args, kwargs)]:
                assert self._block is not None
                self._made_in.setdefault(id(tensor), self._block)
                self._held.append(tensor)
        return result

    def _is_traced(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight, or follows from values or weights."""
        known = self._ids, self._weights, self._made_in
        return any(id(tensor) in each for each in known)

    def _check_is_given(self, func: Any, tensor: Tensor) -> None:
        """PipelineError if an op in a block takes what the block neither is given nor makes."""
        if id(tensor) in self._weights:
            return
        value = self._ids.get(id(tensor))
        if value is None:
            self._check_is_returned(tensor, f"block `{self._block}`")
        elif value not in self._takes and id(tensor) not in self._made_in:
            raise PipelineError(
                f"block `{self._block}` takes a value for `{name_of(func)}` "
                f"({line_of(currentframe())}) that the model does not give it, such as one kept in "
                "an attribute: another stage would not have it; give it to the block as an argument"
            )

    def _check_is_returned(self, tensor: Tensor, taker: str) -> None:
        """PipelineError if a tensor follows from values in a block that does not return it, and
        is not that of the `taker`.
        """
        maker = self._made_in.get(id(tensor))
        if maker is not None and maker != self._block:
            raise PipelineError(
                f"block `{maker}` makes a tensor that {taker} uses ({line_of(currentframe())}), "
                "and does not return it, such as one that is kept in an attribute or put into a "
                "list: another stage would not have it; return it from the block, or add a loss "
                "where it is made, by `add_loss`"
            )

    def _on_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op returns where fake tensors are not enough, as where a router sends tokens to
        experts, or a mask selects some: it runs on data, and where these are not known on zeros and
        True. They only count for shapes.
        """
        given = tensors_in(args, kwargs)
        leaves, tree = tree_flatten(self._with_data((args, kwargs)))
        fakes: dict[int, Any] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and is_fake(leaf):
                fill = torch.ones if leaf.dtype == torch.bool else torch.zeros
                numbers = fill(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                fakes[id(numbers)] = leaf
                leaves[index] = numbers
        args, kwargs = tree_unflatten(leaves, tree)
        made, tree = tree_flatten(func(*args, **kwargs))
        result = tree_unflatten([fakes.get(id(each), each) for each in made], tree)
        return self._without_data(result, given)

    def _on_data(self, func: Any, args: Any, kwargs: Any, takes: Sequence[int]) -> Any:
        """What an op in a gap returns where all that it takes has data, or `_NO_DATA`."""
        if not all(value in self._data for value in takes):
            return _NO_DATA
        args, kwargs = self._with_data((args, kwargs))
        try:
            return func(*args, **kwargs)
        except Exception:
            # On fake tensors it may work, as where the op is on another device.
            return _NO_DATA

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._block is not None:
            return self._in_block(func, args, kwargs)
        given = tensors_in(args, kwargs)
        takes = self._ids_of(given)
        if func in HOOKS:
            self.record.has_hooks = True
            return func(*args, **kwargs)
        if not takes:
            return self._without_values(func, args, kwargs)
        if func == REQUIRES_GRAD:
            is_trained = func(*args, **kwargs)
            self.record.trained.update(takes if is_trained else ())
            return is_trained
        if is_in_each_stage(func, given) and self._data.keys() >= {*takes}:
            self.record.looks.update(takes)
            args, kwargs = self._with_data((args, kwargs))
            return func(*args, **kwargs)
        changes = [*map(changes_of, given)]
        on_data = self._on_data(func, args, kwargs, takes)
        has_fakes = on_data is _NO_DATA or any(map(is_fake, given))
        is_look = False
        try:
            if has_fakes:
                result = func(*args, **kwargs)
            else:
                # A tensor that every stage makes, to which a value was written. An op that writes
                # to it has done so, and must not do so again.
                fake_args, fake_kwargs = self._without_data((args, kwargs))
                func(*fake_args, **fake_kwargs)
                result = self._without_data(on_data, given)
        except RuntimeError as error:
            if on_data is _NO_DATA:
                result = self._of_unknown_shape(func, args, kwargs, error)
            else:
                is_look = True
                result = self._without_data(on_data, given)
        written = {id(each) for each in written_by(func, args, kwargs)}
        changed = [
            index
            for index, (tensor, before) in enumerate(zip(given, changes, strict=True))
            if id(tensor) in written
            or (id(tensor) in self._ids and changes_of(tensor) != before)
        ]
        if not tensors_in(result) and not changed:
            self._reads(func, takes, is_look)
            return result
        called, takes = in_one_order(func, takes)
        return self._event(called, takes, given, changed, result, on_data)

    def _event(
        self,
        called: Any,
        takes: tuple[int, ...],
        given: Sequence[Tensor],
        changed: Sequence[int],
        result: Any,
        on_data: Any,
    ) -> Any:
        """Record an op in a gap, which has changed some of what it was given; its result, with
        ids.
        """
        line = line_of(currentframe())
        is_known = on_data is not _NO_DATA
        data = [self._with_data(each) if is_known else None for each in given]
        kept = {id(given[index]) for index in changed}
        after = tuple(
            (index, self._new_id(given[index], data[index])) for index in changed
        )
        result = self._with_ids(result, tensors_in(on_data) if is_known else (), kept)
        place = len(self.record.blocks)
        event = Event(called, takes, self._returned(result), after, place, False, line)
        self.record.events.append(event)
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op in a gap returns that takes no values. Every stage does it by itself, but one
        that draws random numbers, of which all stages must have the same.
        """
        given = tensors_in(args, kwargs)
        before = random_state(self._device)
        made = func(*args, **kwargs)
        now = random_state(self._device)
        if isinstance(kwargs.get("generator"), torch.Generator) and self.record.blocks:
            raise PipelineError(
                f"the model draws by `{name_of(func)}` from a generator of its own behind a block "
                f"({line_of(currentframe())}), and stages that do not come there fall behind: "
                "draw before the first block, or from torch's own random numbers"
            )
        if all(map(torch.equal, before.values(), now.values())):
            return made
        own = {id(each) for each in written_by(func, args, kwargs)}
        changed = [index for index, each in enumerate(given) if id(each) in own]
        result = self._without_data(made, given)
        return self._event(func, (), given, changed, result, made)

    def _of_unknown_shape(
        self, func: Any, args: Any, kwargs: Any, error: RuntimeError
    ) -> Any:
        """What an op returns whose shape depends on data; PipelineError for one that gives Python
        the data of a value of which only the shape is known.
        """
        with suppress(Exception):
            result = self._on_numbers(func, args, kwargs)
            if tensors_in(result) or written_by(func, args, kwargs):
                return result
        raise PipelineError(
            f"the model's `{name_of(func)}` ({line_of(currentframe())}) fails on a value of which "
            f"only the shape is known, as it is in other stages ({type(error).__name__}: {error}); "
            "if it goes by the data, do so in a block, or hand in what it finds as an option"
        ) from error

    def _reads(self, func: Any, takes: Sequence[int], is_look: bool) -> None:
        """Python reads the shapes or types of some values, or looks at their data."""
        if is_look:
            self.record.looks.update(takes)
        else:
            self.record.reads.update(takes)
            if func not in self.record.readers:
                self.record.readers.append(func)
