"""A model cut into the stages of a plan.

A stage is the whole model, in which the blocks of other stages only pass on what they are given:

    stage 0     model( embedding,     block,         pass through,  pass through )
    stage 1     model( pass through,  pass through,  block,         head         )

So the forward of a stage is the model's own, with what it makes for its blocks, such as masks and
positions; and its weights have the model's own names.
"""

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.wrong_arguments import check_type
from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_plan
from schedlang.runtime.equal_weights import check_memory
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.chains import Part, chain_of
from schedlang.runtime.model.layouts import (
    EvenLayers,
    StageLayout,
    check_layout,
    cuts_of,
)
from schedlang.runtime.model.model_arguments import (
    check_block_costs,
    check_blocks,
    check_input,
    check_model,
    check_rank,
)
from schedlang.runtime.model.partition import Partition, partition
from schedlang.runtime.setup import Tied
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import Value, flatten
from schedlang.schedule.cuts import check_costs
from schedlang.schedule.layout import Layout

if TYPE_CHECKING:
    from schedlang.runtime.model.stage_forward import BetweenBlocks, between_blocks
else:
    between_blocks = on_demand("schedlang.runtime.model.stage_forward.between_blocks")

#: A model's blocks by their names, in the order in which it calls them.
Blocks = dict[str, nn.Module]
#: Modules that are lists of blocks.
_LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential
#: Attributes by which a module's own instance is called, the second one after `Module.compile`.
_CALLED = ("forward", "_compiled_call_impl")


class Stages(dict[int, nn.Module]):
    """The stages of a rank by their numbers, as `Pipeline` takes them; `str()` tells how even the
    partition is.

    `tied` are the weights that several stages have, also on other ranks, with their names by stage.
    Those of several models, or of several parts of a graph, are put together by `|`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        partition: Partition,
        names: Sequence[str],
        tied: Tied,
        others: Sequence["Stages"] = (),
    ) -> None:
        super().__init__(stages)
        self.partition = partition
        self.names = tuple(names)
        self.tied = tied
        self._others = tuple(others)

    def __or__(self, other: Any) -> Any:
        """The stages of two parts of a plan; PipelineError where both have one."""
        if not isinstance(other, Stages):
            return super().__or__(other)
        twice = self.keys() & other.keys()
        if twice:
            raise PipelineError(
                f"stage {min(twice)} is in both of the parts that are put together"
            )
        stages = {**self, **other}
        tied = [*self.tied, *other.tied]
        return Stages(stages, self.partition, self.names, tied, [*self._others, other])

    def __repr__(self) -> str:
        # Not that of the modules, which may have many lines.
        parts = [self, *self._others]
        count = sum(part.partition.layout.pieces for part in parts)
        return f"<Stages {', '.join(map(str, self))} of {count}>"

    def __str__(self) -> str:
        own = self.partition.report(self.names)
        return "\n".join([own, *map(str, self._others)])


def split(
    model: nn.Module,
    plan: Plan,
    blocks: Sequence[str] = ("",),
    costs: Sequence[float] | None = None,
    *,
    inputs: Any = None,
    options: Mapping[str, Any] | None = None,
    layout: StageLayout | None = None,
    rank: int | None = None,
    stages: Part | None = None,
) -> Stages:
    """The stages of a rank, by default of this process, with their blocks shared out as evenly as
    can be, or as a `layout` says.

    The model calls its `blocks` one after the other, each once, with what the one before has
    returned as first argument; the first one with the model's own first argument, and what the last
    one returns is the model's output. Whatever else its forward does is done in every stage; in the
    first forward, each stage checks that this is so. `blocks` are names of submodules; that of a
    list of modules stands for all in it, and the model itself may be one: an `nn.Sequential`, or an
    `nn.ModuleList`, which is taken for the same. All weights are in blocks. Blocks are the model's
    own, but for copies of those that have a weight of an earlier stage; they may be on the meta
    device (see `load_model`).

    With `inputs`, a microbatch of the model's (a tuple where it takes several, a dictionary where
    these are keyword arguments), and the `options` of its steps, one forward is recorded on fake
    tensors. Then the stage of the block before does what the model does between two blocks, also
    with weights, a block may be called several times, and `blocks` may be left out
    (`schedlang.runtime.model.forward_record`). The forward may look at the data of what follows
    from the inputs alone. So encoders with decoders, and towers of images, are cut into a chain,
    too. A model of transformers brings inputs along for this, by which it is cut if no `blocks` are
    named.

    A `layout` is one of another trainer: the names of the blocks by stage, where that of a list of
    modules stands for all in it (torchtitan's `module_fqns_per_model_part`; without `blocks`, these
    names are the blocks); letters by stage (Megatron-LM's layout, `E|t*3|(t|)*4,m|L`), or its names
    of layers by stage (`[["embedding", "decoder"], ["decoder", "loss"]]`); or `EvenLayers`. A stage
    may have no blocks: it hands on what it is given. `str()` of what is returned says how even the
    stages are, in weights and costs.

    `stages` says which of the plan's stages the model is cut into, by default all: of a plan of
    several models the name of one, `"teacher"`, and of a graph the numbers of some that are a
    chain, `range(2)`. What is returned for several parts is put together by `|`.

    `costs` are those of the blocks, in any unit, the same on all ranks: measured by `measure`, or
    else the numbers of weights that are multiplied with, all but those of embeddings.
    `schedlang.runtime.model.partition` says what is minimised. Replicas, in plans with two
    pipelines, are the same piece of the model. PipelineError where it cannot be cut; TypeError or
    ValueError names a wrong argument.
    """
    check_model(model)
    check_plan(plan)
    check_blocks(blocks)
    if inputs is not None:
        check_input("inputs", inputs)
    if options is not None:
        check_type(
            "options", options, Mapping, "keyword arguments of the model, by name"
        )
    if costs is not None:
        check_block_costs(costs)
    if layout is not None:
        check_layout(layout)
    if rank is None:
        rank = _own_rank(plan)
    check_rank(rank, plan)
    if plan.layout.slices > 1:
        raise PipelineError(
            "the plan has slices, whose stages take and return more than blocks: build them "
            "yourself"
        )
    if plan.layout.skips:
        raise PipelineError(
            "the plan has skips, whose stages take and return more than blocks: build them yourself"
        )
    chain = chain_of(plan.layout, stages)
    named, between = cut_by(
        model, _named_by(layout, model, blocks), inputs, options or {}
    )
    calls = [*named] if between is None else between.record.blocks
    parts = evolve(
        _partition([named[name] for name in calls], calls, chain.layout, costs, layout),
        first=chain.pieces[0],
    )
    shared = _shared(model, named, calls, parts, between)
    tied = [
        {chain.pieces[piece]: name for piece, name in by_piece.items()}
        for by_piece in shared.values()
    ]
    numbers = chain.stages(plan.layout)
    pieces = {
        stage: numbers[stage] for stage in plan.stages_of(rank) if stage in numbers
    }
    # Two replicas of a piece on one rank are one module. All copies are made before any of them is
    # made a stage, which puts hooks on the model's own blocks.
    modules = {
        piece: _copy_for(model, named, calls, parts, piece, shared, between)
        for piece in pieces.values()
    }
    if between is not None:
        between.check_states(parts.cuts)
        for piece, module in modules.items():
            places = parts.blocks_of(piece)
            is_last = piece == parts.layout.pieces - 1
            between.make_stage(module, places, piece == 0, is_last)
    return Stages(
        {stage: modules[piece] for stage, piece in pieces.items()},
        parts,
        calls,
        tied,
    )


def cut_by(
    model: nn.Module,
    names: Sequence[str],
    inputs: Any,
    options: Mapping[str, Any],
) -> tuple[Blocks, "BetweenBlocks | None"]:
    """The blocks; and what the model does beside them, if that is to be found out and is anything.

    A model of transformers brings inputs along, by which it is cut if no blocks are named.
    """
    are_named = tuple(names) != ("",)
    if inputs is None and not are_named:
        inputs = getattr(model, "dummy_inputs", {}).get("input_ids")
        if inputs is not None:
            try:
                return cut_by(model, names, inputs, options)
            except PipelineError as error:
                raise PipelineError(
                    f"{error}. These are the model's own `dummy_inputs`, since none were given: "
                    "give `inputs`, a microbatch as the script makes it"
                ) from error
    if inputs is None or isinstance(model, nn.ModuleList | nn.Sequential):
        return blocks_of(model, names), None
    blocks = blocks_of(model, names if are_named else found_blocks(model))
    between = between_blocks(model, [*blocks], inputs, options)
    called = [*dict.fromkeys(between.record.blocks)]
    if are_named and called != [*blocks]:
        raise PipelineError(
            f"the model calls the blocks {', '.join(called)}, and `blocks` names "
            f"{', '.join(blocks)}: name those that it calls, in that order, or none"
        )
    is_chain = not between.outside and between.record.is_chain()
    return {name: blocks[name] for name in called}, None if is_chain else between


def _copy_for(
    model: nn.Module,
    blocks: Blocks,
    calls: Sequence[str],
    parts: Partition,
    piece: int,
    shared: Mapping[int, Mapping[int, str]],
    between: "BetweenBlocks | None",
) -> nn.Module:
    """A copy of the model with the blocks of a piece. The first piece that has a weight of several
    pieces keeps the model's own block, and the others have copies of it.
    """
    own = {calls[place] for place in parts.blocks_of(piece)}
    copied = {each for each, by_piece in shared.items() if piece > min(by_piece)}
    if between is None:
        return with_only(model, blocks, own, copied)
    memo = between.left_out(model, own, piece, parts.cuts)
    return _copy_around(model, blocks, own, copied, memo)


def _own_rank(plan: Plan) -> int:
    """The rank of this process, if there are as many as the plan has ranks."""
    way_out = "give `rank`, that of the plan"
    if not dist.is_initialized():
        raise PipelineError(
            f"there is no process group, so this process has no rank: {way_out}"
        )
    if dist.get_rank() >= len(plan.ranks):
        ranks = len(plan.ranks)
        raise PipelineError(
            f"{dist.get_world_size()} processes were started, and the plan has "
            f"{counted(ranks, 'rank')}: start {ranks}, `torchrun --nproc-per-node {ranks}`; or "
            f"where some are replicas of the pipeline, {way_out}"
        )
    return dist.get_rank()


def blocks_of(model: nn.Module, names: Sequence[str]) -> Blocks:
    """The blocks of a model; PipelineError for a name that it does not have, or a block that is
    there twice.
    """
    blocks: Blocks = {}
    for name in [names] if isinstance(names, str) else names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise PipelineError(f"the model has no block `{name}`") from None
        if isinstance(module, _LISTS):
            for child, part in module.named_modules(remove_duplicate=False):
                # Its own children, and not what is in them; `named_children` leaves out a module
                # that is there twice.
                if child and "." not in child:
                    blocks[f"{name}.{child}".lstrip(".")] = part
        elif module is model:
            raise PipelineError(
                f"the model itself, a `{type(model).__name__}`, is no list of blocks: name its "
                "submodules that it calls one after the other as `blocks`, or give `inputs`, a "
                "microbatch, by which they are found; a module that is a whole stage needs no "
                "`split`"
            )
        else:
            blocks[name] = module
    first: dict[int, str] = {}
    for name, module in blocks.items():
        if first.setdefault(id(module), name) != name:
            raise PipelineError(
                f"the blocks `{first[id(module)]}` and `{name}` are one module: they must be two"
            )
    return blocks


def found_blocks(model: nn.Module) -> list[str]:
    """The names of a model's blocks, where nobody names them: what is in its lists of modules, and
    each module beside them, if it has weights or buffers that are saved.
    """
    names: list[str] = []
    modules: set[nn.Module] = set()
    for name, module in _candidates(model, ""):
        # A module that is there under two names is one block.
        if module not in modules and module.state_dict():
            names.append(name)
            modules.add(module)
    return names


def _candidates(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a model's lists of modules, and those beside them, with their names."""
    for child, module in model.named_children():
        name = f"{prefix}{child}"
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            continue
        if isinstance(module, _LISTS):
            yield from (
                (f"{name}.{each}", part) for each, part in module.named_children()
            )
        elif any(isinstance(part, _LISTS) for part in module.modules()):
            yield from _candidates(module, f"{name}.")
        else:
            yield name, module


def _copy_around(
    model: nn.Module,
    blocks: Blocks,
    own: Container[str],
    copied: Container[int],
    memo: dict[int, Any],
) -> nn.Module:
    """A copy of the model that has its `own` blocks themselves, but for those that have a weight
    that is `copied`, by identity; the memo says what else is not copied, and what it has instead.
    """
    for name, block in blocks.items():
        weights = [*block.parameters()]
        if name in own and not any(id(weight) in copied for weight in weights):
            memo[id(block)] = block
            memo |= {id(weight): weight for weight in weights}
    return copy.deepcopy(model, memo)


def with_only(
    model: nn.Module,
    blocks: Blocks,
    kept: Container[str],
    copied: Container[int] = (),
) -> nn.Module:
    """A copy of the model in which all blocks but the kept ones pass on what they are given."""
    memo: dict[int, Any] = {
        id(block): PassThrough(block, name)
        for name, block in blocks.items()
        if name not in kept
    }
    if isinstance(model, nn.ModuleList):
        model = nn.Sequential(*model)
    stage = _copy_around(model, blocks, kept, copied, memo)
    _ChainCheck(stage, {name: stage.get_submodule(name) for name in blocks})
    return stage


def stage_alone(
    model: nn.Module, blocks: Blocks, between: "BetweenBlocks | None", calls: range
) -> nn.Module:
    """The stage that does some calls of blocks. It shares nothing with the model where what it does
    between blocks was recorded.
    """
    if between is None:
        return with_only(model, blocks, [*blocks][calls.start : calls.stop])
    names = between.record.blocks
    own = names[calls.start : calls.stop]
    cuts = (0, calls.start, calls.stop, len(names))
    stage = copy.deepcopy(model, between.left_out(model, own, 1, cuts))
    between.make_stage(stage, calls, calls.start == 0, calls.stop == len(names))
    return stage


class PassThrough(nn.Module):
    """Takes the place of a block of another stage: it returns its first argument.

    It has the attributes of the block that are no modules or tensors, since models read some of
    them.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self._elsewhere = name, {*vars(block)["_parameters"], *vars(block)["_buffers"]}
        for attribute, value in vars(block).items():
            if attribute not in _CALLED:
                self.__dict__.setdefault(attribute, value)

    def __getattr__(self, name: str) -> Any:
        block, tensors = vars(self).get("_elsewhere", ("", ()))
        if name in tensors:
            raise AttributeError(
                f"the model reads `{block}.{name}`, and another stage has this block: all that is "
                "done with its tensors must be done in the block itself; let a module of your own "
                "hold it and do so, and name that in `blocks`"
            )
        return super().__getattr__(name)

    def forward(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return the value that the block would have worked on."""
        return value


class _ChainCheck:
    """Checks in the first forward of a stage that the model calls its blocks one after the other,
    each with what the one before has returned; then removes its hooks.
    """

    def __init__(self, stage: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = list(blocks.values())
        self._names = list(blocks)
        #: How many blocks have been called, what the last one returned, and how often its tensors
        #: had been changed in place by then.
        self._called = 0
        self._value = None
        self._versions = list[int]()
        self._hooks = [
            # Before hooks of the model's own, which every stage has.
            stage.register_forward_pre_hook(self._begin, prepend=True),
            stage.register_forward_hook(self._end),
        ]

    def _begin(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        for index, block in enumerate(self._blocks):
            self._hooks.append(
                block.register_forward_pre_hook(partial(self._before_block, index))
            )
            self._hooks.append(
                block.register_forward_hook(partial(self._after_block, index))
            )
        self._note(0, *given[:1])

    def _note(self, called: int, value: Value = None) -> None:
        self._called = called
        self._value = value
        self._versions = list(map(changes_of, flatten(value, "what is passed on")[0]))

    def _before_block(self, index: int, _: nn.Module, given: tuple[Any, ...]) -> None:
        if index != self._called:
            raise self._error(f"calls block `{self._names[index]}`")
        self._compare(
            f"the model gives block `{self._names[index]}` something else than", given
        )

    def _after_block(
        self, index: int, _: nn.Module, __: tuple[Any, ...], output: Value
    ) -> None:
        self._note(index + 1, output)

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Value) -> None:
        if self._called < len(self._names):
            raise self._error("calls no block")
        self._compare("the model returns something else than", (output,))
        self._value = None
        for hook in self._hooks:
            hook.remove()

    def _error(self, what: str) -> PipelineError:
        names = [*(f"`{name}`" for name in self._names), "the end"]
        when = f"after {names[self._called - 1]}" if self._called else "first"
        return PipelineError(
            f"the model {what} {when}, where `blocks` has {names[self._called]}"
        )

    def _compare(self, what: str, found: tuple[Value, ...]) -> None:
        """Compare with what the block before returned: it must be in the same memory, and nothing
        may have changed it.
        """
        (tensors, tree) = flatten(found[:1], "a value between blocks")
        (ours, own) = flatten((self._value,), "")
        same = tree == own and all(map(_is_same, tensors, ours, self._versions))
        if not same:
            source = (
                f"block `{self._names[self._called - 1]}` returns"
                if self._called
                else "it is given"
            )
            raise PipelineError(
                f"{what} what {source}: all that is done to it must be done in blocks; or give "
                "`inputs`, a microbatch, by which the model is cut between them, too"
            )


def _is_same(given: Tensor, ours: Tensor, version: int) -> bool:
    """Whether a tensor is another one, or a view of all of it, and unchanged since then."""
    is_all_of_it = (
        given.data_ptr() == ours.data_ptr()
        and given.shape == ours.shape
        and given.stride() == ours.stride()
        and given.dtype == ours.dtype
    )
    return is_all_of_it and changes_of(given) == version


def _named_by(
    layout: StageLayout | None, model: nn.Module, blocks: Sequence[str]
) -> Sequence[str]:
    """The names of the blocks: those in the layout, where nothing else names any."""
    is_list = isinstance(model, nn.ModuleList | nn.Sequential)
    if (
        tuple(blocks) != ("",)
        or is_list
        or layout is None
        or isinstance(layout, str | EvenLayers)
    ):
        return blocks
    return list(chain.from_iterable(layout))


def _partition(
    blocks: Sequence[nn.Module],
    names: Sequence[str],
    plan_layout: Layout,
    costs: Sequence[float] | None,
    stage_layout: StageLayout | None,
) -> Partition:
    """The cuts between the calls of blocks."""
    if costs is not None and len(costs) != len(blocks):
        raise PipelineError(
            f"the model has {len(blocks)} blocks, `costs` has {len(costs)}"
        )
    trained = frozenset(
        index for index, block in enumerate(blocks) if _is_trained(block)
    )
    if costs is None:
        costs = _work(blocks, min(trained, default=0))
    try:
        if stage_layout is None:
            cuts = partition(costs, plan_layout, trained).cuts
        else:
            check_costs(costs)
            cuts = cuts_of(stage_layout, names, plan_layout.pieces)
    except ValueError as error:
        raise PipelineError(
            f"`blocks` and `costs` do not cut the model: {error}"
        ) from None
    weights = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    return Partition(plan_layout, tuple(costs), cuts, tuple(weights), trained)


def _shared(
    model: nn.Module,
    blocks: Blocks,
    calls: Sequence[str],
    parts: Partition,
    between: "BetweenBlocks | None",
) -> dict[int, dict[int, str]]:
    """The weights that several pieces of the model have, by identity, with their names by piece;
    PipelineError for a weight that no piece has.
    """
    names: dict[int, dict[int, str]] = {}
    for piece, (begin, end) in enumerate(pairwise(parts.cuts)):
        for called in calls[begin:end]:
            for name, weight in blocks[called].named_parameters(called):
                names.setdefault(id(weight), {}).setdefault(piece, name)
    for name, weight in model.named_parameters():
        for piece in between.pieces_of(name, parts.cuts) if between else ():
            names.setdefault(id(weight), {}).setdefault(piece, name)
        if id(weight) not in names:
            raise PipelineError(
                f"the weight `{name}` is in none of the blocks, so no stage would have it: name "
                "its module in `blocks`, or give `inputs`, a microbatch, by which the forward is "
                "cut between blocks too"
            )
    check_memory(
        {f"`{name}`": weight for name, weight in model.named_parameters()},
        {f"`{name}`": names[id(weight)] for name, weight in model.named_parameters()},
    )
    return {
        each: dict(sorted(by_piece.items()))
        for each, by_piece in names.items()
        if len(by_piece) > 1
    }


def _is_trained(block: nn.Module) -> bool:
    return any(weight.requires_grad for weight in block.parameters())


def _work(blocks: Sequence[nn.Module], first: int) -> list[float]:
    """What each block multiplies in its forward and its backward, which is as much for the
    gradients of the inputs as for those of the weights. A frozen one has none of the latter, and
    before the `first` that is trained there are no gradients at all.
    """
    work = [_multiplications(block) for block in blocks]
    if all(weight.requires_grad for block in blocks for weight in block.parameters()):
        return work
    for index, block in enumerate(blocks):
        work[index] *= (1 + int(index >= first) + _is_trained(block)) / 3
    return work


def _multiplications(block: nn.Module) -> float:
    """The number of weights that an input is multiplied with, and one more: no block costs
    nothing.
    """
    tables = {
        id(module.weight)
        for module in block.modules()
        if isinstance(module, nn.Embedding)
    }
    return 1 + sum(
        weight.numel()
        for weight in block.parameters()
        if weight.ndim > 1 and id(weight) not in tables
    )
