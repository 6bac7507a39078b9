"""A schedule: which rank holds which stage, and what each rank does, in order.

The one intermediate form. A program expands to a schedule of compute ops; lowering adds sends and
receives; a plan is a lowered schedule that passed the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from attrs import field, frozen

from schedlang.diagnostics.diagnostic import Diagnostic, counted
from schedlang.diagnostics.source import Source, Span
from schedlang.diagnostics.wrong_arguments import check_whole
from schedlang.on_demand import on_demand
from schedlang.schedule.actions import Actions, is_update
from schedlang.schedule.kinds import AWAY, FORWARD, GATHERS, REPEATS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.transports import PORTABLE

if TYPE_CHECKING:
    from schedlang.schedule.columns import Columns, columns_of
    from schedlang.schedule.costs import Costs
    from schedlang.schedule.costs.model import unit_costs
    from schedlang.schedule.naming import Names
else:
    # For whoever asks for all actions or for costs: who runs a plan does not.
    columns_of = on_demand("schedlang.schedule.columns.columns_of")
    unit_costs = on_demand("schedlang.schedule.costs.model.unit_costs")
    # For messages.
    Names = on_demand("schedlang.schedule.naming.Names")

T = TypeVar("T")
S = TypeVar("S", bound="Schedule")

#: For each rank, the time slot of each of its actions.
Slots = tuple[tuple[int, ...], ...]

#: The most actions of one schedule.
MOST_STEPS = 20_000_000


@frozen
class Claim:
    """A claim that a program makes of its schedule with `assert`; about one rank, or about all.

    `statement` is the claim in the program's syntax, see `schedlang.language.claims`. `values` are
    the values of its names at that place of the program.
    """

    statement: Any
    location: int
    rank: int | None
    values: Mapping[str, int]


@frozen
class Pass:
    """A pass of a program: its name in `schedlang.passes`, and its arguments."""

    name: str
    values: tuple[Any, ...]
    location: int


#: What an `objective` can be: figures of a timeline.
OBJECTIVES = ("makespan", "span")
#: The types to which messages may be rounded, each with its bits as a part of 32.
MESSAGE_TYPES = {"bf16": 0.5, "fp16": 0.5}
#: The names of rules by which stages read their weights; a `delay` has its number.
WEIGHT_RULES = ("latest", "stash", "unstashed", "delay")


@frozen
class WeightRule:
    """Which version of its weights a stage reads in the forward, and which in the backward.

    `latest`: the newest in both; a plan is refused where they differ. `stash`: the newest in the
    forward, and the same version in the backward. `unstashed`: the newest in the forward, and
    whatever is newest in the backward. `delay`: for update k, the version after k - `delay`
    updates, in both.
    """

    name: str = "latest"
    delay: int = 0

    def __attrs_post_init__(self) -> None:
        if self.name not in WEIGHT_RULES:
            raise ValueError(f"a rule is one of {', '.join(WEIGHT_RULES)}")
        if self.delay < 0:
            raise ValueError(
                f"weights delayed by {self.delay} updates, it must be 0 or more"
            )
        if self.delay and self.name != "delay":
            raise ValueError(
                f"weights `{self.name}` have a `delay` of {self.delay}: only those of the name "
                "`delay` have one"
            )

    def __str__(self) -> str:
        return f"{self.name}({self.delay})" if self.name == "delay" else self.name

    @property
    def keeps_none(self) -> bool:
        """Whether no older version is kept, because every op reads the newest one."""
        return self.name == "unstashed"


@frozen
class Stream:
    """The ops of a schedule without a flush, per rank: before the first update, and of one
    update.
    """

    warmup: Sequence[Actions]
    steady: Sequence[Actions]


@frozen
class Kernel:
    """The rows `start` up to `stop` of a rank's actions, which repeat once per update."""

    start: int
    stop: int


@frozen
class Trial:
    """A lowering that was tried: its makespan on the transport, or the code of what is wrong with
    it there.
    """

    name: str
    makespan: float | None = None
    wrong: str | None = None

    def __str__(self) -> str:
        outcome = self.wrong if self.makespan is None else f"{self.makespan:.10g}"
        return f"{self.name} {outcome}"


def _costs_of(given: Costs | Callable[[], Costs] | None) -> Costs:
    """The costs that were given, read first if a function was given that reads them; unit costs if
    nothing was given.
    """
    if given is None:
        return unit_costs()
    return given() if callable(given) else given


@frozen
class Schedule:
    """Per-rank actions with their layout and the program they come from.

    `ranks[r]` is what rank r does. `spans[0]` is the schedule's name; `claims` are the program's,
    checked by `compile`; `warnings` are about the program as well. `weights` has the rule of
    each stage, or none where all read the latest. Ops that were drawn at time slots have them in
    `slots`, per rank and action, until the schedule is squeezed. It is to run on a `transport`.
    The `passes` of the program have yet to change it.
    Messages between ranks are rounded to `message_type`, if it is one of `MESSAGE_TYPES`.
    `costs` are those that the program or its user gave, or a function that reads them: who runs a
    plan never asks for its costs. Passes minimise the `objective`, a property of a timeline.
    """

    name: str
    params: dict[str, int]
    layout: Layout
    ranks: Sequence[Actions]
    source: Source = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    weights: tuple[WeightRule, ...] = ()
    slots: Slots | None = None
    stream: Stream | None = None
    claims: tuple[Claim, ...] = field(default=(), eq=False, repr=False)
    passes: tuple[Pass, ...] = field(default=(), eq=False, repr=False)
    warnings: tuple[Diagnostic, ...] = field(default=(), eq=False, repr=False)
    _costs: Costs | Callable[[], Costs] | None = field(default=None, eq=_costs_of)
    transport: str = PORTABLE
    objective: str = OBJECTIVES[0]
    message_type: str = ""
    #: The parameters that are lists.
    lists: dict[str, tuple[int, ...]] = field(factory=dict)

    def __repr__(self) -> str:
        return f"<Schedule {self.title}, from {self.source.path}>"

    @property
    def title(self) -> str:
        """Its name and its parameters."""
        values = self.params | {name: list(value) for name, value in self.lists.items()}
        params = ", ".join(f"{name} = {value}" for name, value in values.items())
        return f"{self.name} ({params})"

    @property
    def costs(self) -> Costs:
        """The costs that the program or its user gave."""
        return _costs_of(self._costs)

    @cached_property
    def columns(self) -> Columns:
        """All actions as numpy columns."""
        return columns_of(self.ranks)

    @cached_property
    def _found(self) -> dict[object, Any]:
        """The results of functions of the schedule, by function (see `once`)."""
        return {}

    @cached_property
    def names(self) -> Names:
        """The names of stages, microbatches and actions in messages."""
        return Names(self.layout)

    def name_of(self, rank: int, index: int) -> str:
        """The name of action `index` of a rank in messages: `2B3`, `up(1)B3`, `0F(m1.k2)`."""
        return self.names.of(self.ranks[rank], index)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.layout.placement

    @property
    def microbatches(self) -> int:
        """The microbatches of all pipelines."""
        return self.layout.microbatches

    def weights_of(self, stage: int) -> WeightRule:
        """The rule by which a stage reads its weights."""
        return self.weights[stage] if self.weights else WeightRule()

    def version_read(self, stage: int, microbatch: int, done: int) -> int:
        """The version of the weights that a stage's forward reads, once `done` updates of the stage
        are done.
        """
        # By `delay(1)`, forwards read what there was one update ago, even where the rank has done
        # more by now; by the other rules, what is there:
        #
        #     update     0    1    2    3
        #     version    0    0    1    2
        rule = self.weights_of(stage)
        if rule.name == "delay":
            return max(self.layout.update_of(stage, microbatch) - rule.delay, 0)
        return done

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose forward is recomputed before their backward."""
        return self._with(*REPEATS)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose activations are on the host, or on another rank,
        between forward and backward.
        """
        return self._with(*AWAY)

    def _with(self, *wanted: Kind) -> frozenset[tuple[int, int]]:
        """The stages and microbatches that have an action of the kinds."""
        rows = self.columns.where(*wanted)
        stages = self.columns.stage[rows].tolist()
        return frozenset(
            zip(stages, self.columns.microbatch[rows].tolist(), strict=True)
        )

    def microbatches_with(self, kinds: Container[int], stage: int) -> set[int]:
        """The microbatches for which a stage has an action of some kinds."""
        actions = self.ranks[self.placement[stage]]
        rows = actions.each()
        return {
            microbatch
            for kind, holder, microbatch in rows
            if kind in kinds and holder == stage
        }

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether this is an inference: there are only forwards, their transfers, and gathers."""
        return all(kinds <= FORWARD | GATHERS for kinds in self._kinds())

    @cached_property
    def has_updates(self) -> bool:
        """Whether there are optimizer steps."""
        return any(any(map(is_update, kinds)) for kinds in self._kinds())

    def _kinds(self) -> Iterator[set[int]]:
        """The kinds of action, rank by rank, so that a caller can stop early: a plan that was
        opened for one rank would have to read the others.
        """
        if hasattr(self.ranks, "columns"):
            yield set(np.flatnonzero(np.bincount(self.columns.kind)).tolist())
        else:
            yield from (set(actions.kind) for actions in self.ranks)

    def peer(self, kind: int, number: int) -> int | None:
        """See `Layout.peer`."""
        return self.layout.peer(kind, number)

    def peer_of(self, rank: int, index: int) -> int | None:
        """`peer` of a transfer, action `index` of a rank."""
        actions = self.ranks[rank]
        return self.layout.peer(actions.kind[index], actions.stage[index])

    def other_end(self, rank: int, index: int) -> tuple[Kind, int, int]:
        """The other end of a transfer, action `index` of a rank: its kind, number and
        microbatch.
        """
        kind, number, microbatch = self.ranks[rank].at(index)
        return *self.layout.counterpart(kind, number), microbatch

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order; ValueError for a rank that there is not."""
        count = len(self.ranks)
        check_whole("rank", rank, 0)
        if rank >= count:
            raise ValueError(
                f"there is no rank {rank}: the plan is for {counted(count, 'rank')}, and each is "
                f"one process, `torchrun --nproc-per-node {count}`"
            )
        return self.layout.stages_of(rank)

    def where(self, rank: int, index: int) -> str:
        """The program line that action `index` of a rank came from, as `file:line`."""
        return self.source.where(self.spans[self.ranks[rank].source[index]].start)


def once(find: Callable[[S], T]) -> Callable[[S], T]:
    """Let a schedule remember the result of a function of it.

    So the schedule itself is only data, and the module that knows how derives a fact from it once.
    """

    @wraps(find)
    def remembered(schedule: S) -> T:
        if find not in schedule._found:
            schedule._found[find] = find(schedule)
        found: T = schedule._found[find]
        return found

    return remembered
