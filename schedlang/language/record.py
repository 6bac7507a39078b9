"""The calls of a program that has run → the actions of its ranks, all calls of a rank at once.

Wherever the program comes to an op, it appends to one list where the op is written (an index into
the program's spans), its stage and its microbatch; None stands for what the program leaves open.
Here each column is completed and checked as a whole. A rank's order ends before its first wrong
call, whatever is wrong with it.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING

import numpy as np
from attrs import define

from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.on_demand import on_demand
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.columns import actions_from
from schedlang.schedule.kinds import OPS
from schedlang.schedule.layout import Layout

if TYPE_CHECKING:
    from schedlang.language.wrong_calls import (
        too_many,
        wrong_microbatch,
        wrong_slice,
        wrong_stage,
    )
    from schedlang.schedule.naming import Names
else:
    # For programs with a mistake.
    too_many = on_demand("schedlang.language.wrong_calls.too_many")
    wrong_microbatch = on_demand("schedlang.language.wrong_calls.wrong_microbatch")
    wrong_slice = on_demand("schedlang.language.wrong_calls.wrong_slice")
    wrong_stage = on_demand("schedlang.language.wrong_calls.wrong_stage")
    Names = on_demand("schedlang.schedule.naming.Names")

#: Columns of a plan have 32 bits. A stream has no last microbatch, but none from here on.
_TOO_LARGE = 2**31

# How columns are completed, one after the other; `.` is None:
#
#     the program    F(next)     F(next)     B(next)     B(next)
#     calls          5 . .       5 . .       7 . .       7 . .
#     stages         5 2 .       5 2 .       7 2 .       7 2 .      the only stage of the rank
#     microbatches   5 2 0       5 2 1       7 2 0       7 2 1      the next ones of each op
#     actions        2F0         2F1         2B0         2B1

#: The flat list of calls, `Sites.width` numbers for each.
Calls = list[int | None]


@define
class Order:
    """The calls of one rank as columns, while their gaps are filled in.

    `held` are the stages of the rank. A wrong call is dropped with all calls after it, and `fault`
    says what is wrong. So the last fault that is set is that of the first wrong call.
    """

    rank: int
    layout: Layout
    sites: Sites
    held: tuple[int, ...]
    locations: list[int]
    stages: list[int]
    microbatches: list[int]
    fault: Fault | None = None

    def end_before(self, index: int, fault: Fault) -> None:
        """Drop a wrong call and all calls after it."""
        self.fault = fault
        del self.locations[index:]
        del self.stages[index:]
        del self.microbatches[index:]

    def word(self, index: int) -> str:
        """The word of a call's op."""
        return self.sites.ops[self.locations[index]].word

    def first(self, locations: frozenset[int]) -> int | None:
        """The first call at one of some locations."""
        # Most programs have no such locations, and a rank may have a million calls.
        if not locations:
            return None
        calls = enumerate(self.locations)
        return next((index for index, location in calls if location in locations), None)

    def name_microbatches(self) -> None:
        """Check that the ops of a stream name their microbatch."""
        index = self.first(self.sites.unnumbered)
        if index is None:
            return
        site = self.sites.ops[self.locations[index]]
        message = (
            f"`{site.word}` does not name its microbatch: in `{site.part}` it is counted from the "
            "update's first"
        )
        help = f"write `{site.word}(m)`, or `{site.word}(s, m)`"
        fault = Fault("which-microbatch", message, self.locations[index], help)
        self.end_before(index, fault)

    def name_stages(self) -> None:
        """Fill in the stage where an op means the only one of its rank, and check all stages."""
        if self.sites.on_only_stage:
            if len(self.held) == 1:
                self.stages = [
                    self.held[0] if stage is None else stage for stage in self.stages
                ]
            elif (index := self.first(self.sites.on_only_stage)) is not None:
                held = ", ".join(map(str, self.held)) or "none"
                op = self.word(index)
                message = (
                    f"`{op}` does not say which stage: rank {self.rank} holds {held}"
                )
                help = f"write `{op}(s, m)`"
                self.end_before(
                    index, Fault("which-stage", message, self.locations[index], help)
                )
        # A set first: it is quick, and most programs have nothing wrong in it.
        wrong = set(self.stages).difference(self.held, [None])
        if wrong:
            index = next(
                index for index, stage in enumerate(self.stages) if stage in wrong
            )
            op = self.word(index)
            location = self.locations[index]
            fault = wrong_stage(
                self.layout, self.rank, op, self.stages[index], location
            )
            self.end_before(index, fault)

    def count_slices(self, slices: Sequence[int | None]) -> None:
        """Check the slices, and number them through all microbatches."""
        most = self.layout.slices
        for index, location in enumerate(self.locations):
            number = slices[index]
            if number is not None and not 0 <= number < most:
                fault = wrong_slice(self.layout, self.word(index), number, location)
                self.end_before(index, fault)
                break
        self.microbatches = [
            microbatch if number is None else microbatch * most + number
            for microbatch, number in zip(self.microbatches, slices, strict=False)
        ]

    def count_next(self) -> None:
        """Fill in each `next`: the first microbatch for which the op was not called before."""
        sites = self.sites
        if not sites.takes_next:
            return
        # Where an op and stage either name all their microbatches or none, `next` is a count. Else
        # those that the program names must be left out.
        if sites.is_mixed:
            numbers = list(self._first_free())
            has_too_many = True
        else:
            # That is how many calls of the op on this stage came before.
            stages = [*self.held, None]
            counted_as = set(sites.counted_as.values())
            # A counter for each kind of op and stage, as a function that gives the next number: one
            # call of it for each of a million ops.
            before = {
                of: {stage: count().__next__ for stage in stages} for of in counted_as
            }
            counters = {
                location: before[of] for location, of in sites.counted_as.items()
            }
            numbers = [
                counters[location][stage]()
                for location, stage in zip(self.locations, self.stages, strict=True)
            ]
            # The counters have gone past what was given out: each is asked once more.
            has_too_many = any(
                before[of][stage]() > self.layout.units(stage)
                for stage in self.held
                for of in counted_as - {"W"}
            )
        if len(sites.takes_next) + len(sites.takes_oldest) < len(sites.ops):
            numbers = [
                number if microbatch is None else microbatch
                for microbatch, number in zip(self.microbatches, numbers, strict=True)
            ]
        self.microbatches = numbers
        if has_too_many:
            self._check_counted()

    def _first_free(self) -> Iterator[int]:
        """The microbatch of each call, where some calls name theirs and others have `next`."""
        counted_as = map(self.sites.counted_as.__getitem__, self.locations)
        pairs = zip(counted_as, self.stages, strict=True)
        taken: dict[tuple[str, int], set[int]] = defaultdict(set)
        first: dict[tuple[str, int], int] = defaultdict(int)
        for pair, microbatch in zip(pairs, self.microbatches, strict=True):
            number = first[pair]
            if microbatch is None:
                while number in taken[pair]:
                    number += 1
                first[pair] = number
            taken[pair].add(number if microbatch is None else microbatch)
            yield number

    def _check_counted(self) -> None:
        """Check that no `next` comes after the last microbatch of its stage."""
        for index, location in enumerate(self.locations):
            number = self.microbatches[index]
            stage = self.stages[index]
            if location in self.sites.takes_next and number >= self.layout.units(stage):
                name = Names(self.layout).stage(stage)
                message = (
                    f"`{self.word(index)}` of the next microbatch of stage {name}, "
                    f"all {number} are done"
                )
                fault = Fault("nothing-next", message, location)
                self.end_before(index, self._with_others(fault, index, number))
                return

    def _with_others(self, fault: Fault, index: int, number: int) -> Fault:
        """The fault for an op after the last microbatch, with what other calls have taken."""
        return too_many(fault, self.sites, self.locations, self.stages, index, number)

    def _least_units(self) -> int:
        """The fewest microbatches, or slices, that any stage of the rank has."""
        return min(map(self.layout.units, self.held), default=0)

    def find_owed(self) -> None:
        """Fill in each `W` that takes the oldest weight gradient owed by its rank or stage."""
        if not self.sites.takes_oldest:
            return
        takes_oldest = self.sites.takes_oldest
        kinds = self.sites.kinds
        halves = self.sites.halves
        ops = self.sites.ops
        of_rank = {location for location in takes_oldest if ops[location].is_bare}
        # The stages and microbatches that are owed, the oldest first: all of the rank, and those of
        # each stage. They are the keys of dictionaries, so that one which a `W` names is found as
        # well as the oldest.
        owed: OrderedDict[tuple[int, int], None] = OrderedDict()
        owed_of: dict[int, OrderedDict[tuple[int, int], None]] = {
            stage: OrderedDict() for stage in self.held
        }
        waiting = [
            index for index, location in enumerate(self.locations) if location in halves
        ]
        for index in waiting:
            location = self.locations[index]
            stage = self.stages[index]
            unit = (stage, self.microbatches[index])
            if OPS[kinds[location]].owes is not None:
                owed.setdefault(unit)
                owed_of[stage].setdefault(unit)
                continue
            if location not in takes_oldest:
                owed.pop(unit, None)
                owed_of[stage].pop(unit, None)
                continue
            oldest = next(iter(owed if location in of_rank else owed_of[stage]), None)
            if oldest is None:
                is_bare = location in of_rank
                of = "" if is_bare else f" of stage {Names(self.layout).stage(stage)}"
                message = f"`W`, but no weight gradient{of} is owed here"
                self.end_before(index, Fault("nothing-next", message, location))
                return
            del owed[oldest]
            del owed_of[oldest[0]][oldest]
            self.stages[index] = oldest[0]
            self.microbatches[index] = oldest[1]

    def check_microbatches(self) -> None:
        """Check that each microbatch is one of its stage's. In a stream they run on into later
        updates.
        """
        microbatches = self.microbatches
        if not microbatches:
            return
        # All right on any stage, as in most programs: nothing to look at one by one.
        if min(microbatches) >= 0 and max(microbatches) < self._least_units():
            return
        streamed = self.sites.streamed
        units = {stage: self.layout.units(stage) for stage in self.held}
        for index, location in enumerate(self.locations):
            microbatch = microbatches[index]
            if location in streamed and microbatch >= _TOO_LARGE:
                op = self.word(index)
                message = (
                    f"`{op}` of microbatch {microbatch:,}: a plan has fewer than 2^31"
                )
                self.end_before(index, Fault("too-large", message, location))
                return
            too_many = (
                microbatch >= units[self.stages[index]] and location not in streamed
            )
            if microbatch < 0 or too_many:
                op = self.word(index)
                fault = wrong_microbatch(
                    self.layout, op, self.stages[index], microbatch, location
                )
                if too_many:
                    number = units[self.stages[index]]
                    fault = self._with_others(fault, index, number)
                self.end_before(index, fault)
                return

    def check_beside(self) -> None:
        """Check that copies and collectives are issued alone, and that no collective stands in a
        stream.
        """
        index = self.first(self.sites.streamed_collectives)
        if index is not None:
            op = self.word(index)
            part = self.sites.ops[self.locations[index]].part
            message = f"`{op}` in `{part}`: a schedule without a flush cannot say when that is"
            help = "leave it out: stages are gathered and summed as `schedc view --shards` shows"
            self.end_before(
                index, Fault("collective", message, self.locations[index], help)
            )
        index = self.first(self.sites.beside_in_batch)
        if index is not None:
            op = self.word(index)
            message = f"`{op}` goes on beside what follows by itself: it stands alone"
            self.end_before(index, Fault("overlap", message, self.locations[index]))

    def actions(self) -> Actions:
        """The actions of the calls."""
        sites = self.sites
        location = np.asarray(array("i", self.locations))
        microbatch = np.asarray(array("i", self.microbatches))
        if sites.of_stage:
            is_of_stage = np.isin(location, list(sites.of_stage))
            microbatch = np.where(is_of_stage, NO_MICROBATCH, microbatch)
        kinds = np.zeros(max(sites.kinds, default=0) + 1, np.int8)
        kinds[list(sites.kinds)] = list(sites.kinds.values())
        stage = np.asarray(array("i", self.stages))
        group = np.asarray(self._groups())
        return actions_from((kinds[location], stage, microbatch, location, group))

    def _groups(self) -> "array[int]":
        """The group of each action: actions that are issued together share a number."""
        batches = self.sites.batches
        if not batches:
            return array("i", bytes(array("i").itemsize * len(self.locations)))
        firsts = {location for location, first in batches.items() if location == first}
        begins: Iterable[bool] = map(firsts.__contains__, self.locations)
        if any(self.sites.ops[location].word == "U" for location in firsts):
            # A bare `U` is one call for each stage of its rank.
            begins = [
                location in firsts
                and (not self.sites.ops[location].is_bare or stage == self.held[0])
                for location, stage in zip(self.locations, self.stages, strict=True)
            ]
        # The group of a call is how many batches have begun by then.
        numbers = accumulate(begins)
        return array(
            "i",
            [
                number if location in batches else 0
                for location, number in zip(self.locations, numbers, strict=True)
            ],
        )


def record(rank: int, layout: Layout, sites: Sites, calls: Calls) -> Order:
    """The order of a rank from the calls of its program, up to the first wrong one."""
    # The flat list with 3 numbers a call: every third from the first on is a location, and so on.
    columns = [calls[column :: sites.width] for column in range(sites.width)]
    held = tuple(layout.stages_of(rank))
    order = Order(rank, layout, sites, held, *columns[:3])  # type: ignore[arg-type]
    # In this order, for each fills in what the next one looks at; a fault cuts the columns, so what
    # is wrong later is not even seen.
    order.name_microbatches()
    order.name_stages()
    if sites.has_slices:
        order.count_slices(columns[3])
    order.count_next()
    order.find_owed()
    order.check_microbatches()
    order.check_beside()
    return order
