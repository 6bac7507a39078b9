"""Forwards and backwards that the plan overlaps: they alternate, component by component
(`schedlang.runtime.components`), or as the module's own method `overlapped` says.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.ranks.overlaps import overlapped_pairs
from schedlang.runtime.components import (
    Components,
    OverlappedBackward,
    OverlappedForward,
    overlapped_of,
)
from schedlang.runtime.door import Rank, Site
from schedlang.runtime.part import Backward, Forward, Part, Together, parts_by_stage
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.schedule.kinds import Kind

_LOG = logging.getLogger("schedlang.runtime")


class Overlaps(Part):
    """The forwards of a stage during which a backward runs, and its backwards that run during a
    forward: those of the `overlapped` microbatches. `own` is the module's method for such a pair,
    if it has one.
    """

    _stage: Stage

    def __init__(
        self, overlapped: Container[int], own: Callable[..., Any] | None = None
    ) -> None:
        self._overlapped = overlapped
        self._own = own
        #: Whether a forward and a backward have ever alternated.
        self.has_taken_turns = own is not None
        #: The backward that runs during the current forward, and the forward's components.
        self._beside: OverlappedBackward | None = None
        self._running: Components | None = None
        #: The components of forwards whose graph was cut, from F (or R) to the backward.
        self._components: dict[int, Components] = {}

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage

    def overlap(
        self,
        forward: Callable[[int], None],
        microbatch: int,
        backward: OverlappedBackward,
    ) -> None:
        """Run F, and during it components of the backward of another microbatch, on this stage or
        on another one of the rank.
        """
        self._beside = backward
        try:
            forward(microbatch)
        finally:
            self._beside = None
        self.has_taken_turns = self.has_taken_turns or backward.has_begun

    def overlapped_backward(self, microbatch: int) -> OverlappedBackward:
        """B or I as an object that runs one component at a time."""
        components = self._components.get(microbatch)
        count = 1 if components is None else len(components.ends) + 1
        return OverlappedBackward(self._pieces(microbatch), count)

    def backward(self, microbatch: int) -> None:
        """Run B or I alone."""
        for _ in self._pieces(microbatch):
            pass

    def before_forward(self, run: Forward) -> None:
        """Cut the graph where components end, if this microbatch's backward will be overlapped. Let
        the backward that runs during this forward advance at these ends.
        """
        components = None
        if run.has_graph and run.microbatch in self._overlapped:
            in_place = self._stage.works_in_place
            components = Components(True, in_place, run.added)
        self._running = components
        if self._beside is not None:
            run.is_overlapped = True
            # The backward of this forward may be whole. Its components are still found, since the
            # other backward advances at the end of each.
            components = Components() if components is None else components
            if self._own is None:
                components.at_end = self._beside.advance
            else:
                run.call = partial(self._call, self._own, self._beside)
            beside = self._beside.beside(run, self._stage.device)
            run.contexts = [*run.contexts, beside]
        if components is not None:
            run.contexts = [*run.contexts, components]

    def _call(
        self,
        overlapped: Callable[..., Any],
        backward: OverlappedBackward,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        forward = OverlappedForward(arguments, options)
        return overlapped(forward=forward, backward=backward)

    def recorded(self, run: Forward) -> None:
        """Keep the components of a graph that was cut. A module that marks no ends of components
        has a whole backward.
        """
        components = self._running
        if components is None:
            return
        self._running = None
        components.total = run.total
        if components.ends:
            self._components[run.microbatch] = components
            run.made = [made for end in components.ends for made in end.made]

    def _pieces(self, microbatch: int) -> Iterator[None]:
        """A generator that runs a backward and pauses after each component."""
        stage = self._stage
        run = stage.begin_backward(microbatch)

        # A generator must not pause inside a context, since another microbatch's forward runs
        # between two components.
        def walk_inside(
            roots: Sequence[Tensor],
            gradients: Sequence[Tensor],
            leaves: Sequence[Tensor],
        ) -> Sequence[Tensor | None]:
            with stage.surroundings(run):
                return run.walk(roots, gradients, leaves)

        components = self._components.pop(microbatch, None)
        if components is None:
            run.computed = walk_inside(*run.starts(), run.leaves)
            yield
        else:
            for computed in self._walk_back(components, run, walk_inside):
                run.computed = computed
                yield
        stage.end_backward(run)

    def _walk_back(
        self, components: Components, run: Backward, walk: Any
    ) -> Iterator[Sequence[Tensor | None]]:
        starts = zip(*run.starts(), strict=True)
        scale = self._stage.scale_of(run.microbatch)
        return components.walk_back(starts, run.leaves, walk, scale)


class Turns(Part):
    """The forwards and backwards of a rank that alternate. Sharded stages do not, since FSDP ends a
    backward when autograd returns, and gathers all weights of a forward at once. Rank 0 logs after
    the first step which stages did not alternate.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._overlaps = parts_by_stage(Overlaps, rank.site.parts)
        self._is_first = rank.site.rank == 0

    def pairs(self, plan: Plan, rank: int) -> Mapping[int, Together]:
        """Each forward that alternates with a backward, by its index."""
        actions = plan.ranks[rank]
        found = {}
        for first, second in overlapped_pairs(actions).items():
            stages = actions.stage[first], actions.stage[second]
            modules = self._rank.site.modules
            if any(is_sharded(modules[stage]) for stage in stages):
                continue
            forward = self._rank.stages[stages[0]].ops[Kind.F, stages[0]]
            pair = _Pair(
                partial(self._overlaps[stages[0]].overlap, forward),
                self._overlaps[stages[1]].overlapped_backward,
                actions.microbatch[first],
                actions.microbatch[second],
            )
            found[first] = Together(second, pair.begin, pair.end)
        return found

    def end_step(self) -> None:
        """Log the stages that did not alternate, once."""
        if not self._is_first:
            return
        self._is_first = False
        others = [
            str(number)
            for number in sorted(_stages(0, self._rank.exchange.plan))
            if not self._overlaps[number].has_taken_turns
        ]
        if others:
            _LOG.warning(
                "%s %s on rank 0: forwards and backwards that the plan overlaps run one after the "
                "other, since the module neither says where its components end (end_component) nor "
                "has a method `overlapped`",
                "stage" if len(others) == 1 else "stages",
                ", ".join(others),
            )


class _Pair:
    """A forward and a backward that alternate, in two calls: the forward with components of the
    backward, and then the rest of the backward.
    """

    def __init__(
        self,
        overlap: Callable[[int, OverlappedBackward], None],
        overlapped_backward: Callable[[int], OverlappedBackward],
        forward: int,
        backward: int,
    ) -> None:
        self._overlap = overlap
        self._overlapped_backward = overlapped_backward
        self._forward = forward
        self._backward = backward
        self._rest: OverlappedBackward | None = None

    def begin(self) -> None:
        """Run the forward, and during it components of the backward."""
        self._rest = self._overlapped_backward(self._backward)
        self._overlap(self._forward, self._rest)

    def end(self) -> None:
        """Run the rest of the backward."""
        assert self._rest is not None
        self._rest.finish()
        self._rest = None


def of_stages(site: Site) -> Iterator[tuple[int, Overlaps]]:
    """Make the part for stages with a forward or a backward that the plan overlaps."""
    forwards = _stages(site.rank, site.plan)
    for number, module in site.modules.items():
        backwards = site.followed(partial(_backwards, site.rank, number))
        if number not in forwards and not backwards:
            continue
        own = overlapped_of(module, number) if number in forwards else None
        yield number, Overlaps(() if is_sharded(module) else backwards, own)


def _stages(rank: int, plan: Plan) -> set[int]:
    """The stages of a rank with a forward that overlaps a backward."""
    actions = plan.ranks[rank]
    return {actions.stage[index] for index in overlapped_pairs(actions)}


def _backwards(rank: int, stage: int, plan: Plan) -> set[int]:
    """The microbatches of a stage whose backward overlaps a forward."""
    actions = plan.ranks[rank]
    return {
        actions.microbatch[index]
        for index in overlapped_pairs(actions).values()
        if actions.stage[index] == stage
    }


def of_rank(rank: Rank) -> Iterator[Turns]:
    """Make the part for the pairs of this rank."""
    yield Turns(rank)
