"""The calls of a program that has run, turned into actions: all calls of a rank at once.

A program adds to one list, for each op that it comes to, the op's place in the program, its stage
and its microbatch; None stands for what it leaves open. What is wrong with a call is told of the
first one, and ends the rank's order there.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count

from attrs import define, field

from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.passes.slots import WIDTH
from schedlang.schedule.actions import NO_MICROBATCH, Actions, word
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Stream

#: The flat list of calls, `Sites.width` numbers for each.
Calls = list[int | None]


@define
class Order:
    """The calls of one rank as columns, while what they leave open is found out.

    Once one is found to be wrong, that is the `fault`, and only the calls before it remain.
    """

    rank: int
    layout: Layout
    sites: Sites
    held: tuple[int, ...]
    places: list[int]
    stages: list[int]
    microbatches: list[int]
    fault: Fault | None = None

    def end_with(self, index: int, fault: Fault) -> None:
        """Keep what is wrong with a call; only those before it count from here on."""
        self.fault = fault
        del self.places[index:]
        del self.stages[index:]
        del self.microbatches[index:]

    def word(self, index: int) -> str:
        """The word of a call's op."""
        return self.sites.ops[self.places[index]].word

    def first(self, places: frozenset[int]) -> int | None:
        """The first call from one of some places."""
        return next((index for index, place in enumerate(self.places) if place in places), None)

    def name_microbatches(self) -> None:
        """In a stream, an op names its microbatch."""
        if self.sites.unnumbered and (index := self.first(self.sites.unnumbered)) is not None:
            site = self.sites.ops[self.places[index]]
            message = (
                f"`{site.word}` does not name its microbatch: in `{site.part}` it is counted "
                "from the update's first"
            )
            help = f"write `{site.word}(m)`, or `{site.word}(s, m)`"
            fault = Fault("which-microbatch", message, self.places[index], help)
            self.end_with(index, fault)

    def name_stages(self) -> None:
        """Find the stage of each op: the one it names, or the only one of the rank."""
        if self.sites.nameless:
            if len(self.held) == 1:
                self.stages = [self.held[0] if stage is None else stage for stage in self.stages]
            elif (index := self.first(self.sites.nameless)) is not None:
                held = ", ".join(map(str, self.held)) or "none"
                op = self.word(index)
                message = f"`{op}` does not say which stage: rank {self.rank} holds {held}"
                help = f"write `{op}(s, m)`"
                self.end_with(index, Fault("which-stage", message, self.places[index], help))
        wrong = set(self.stages).difference(self.held, [None])
        if wrong:
            index = next(index for index, stage in enumerate(self.stages) if stage in wrong)
            op = self.word(index)
            place = self.places[index]
            fault = wrong_stage(self.layout, self.rank, op, self.stages[index], place)
            self.end_with(index, fault)

    def count_slices(self, slices: Sequence[int | None]) -> None:
        """Number the slices of all microbatches in one row."""
        most = self.layout.slices
        index = next(
            (
                index
                for index, number in enumerate(slices[: len(self.places)])
                if number is not None and not 0 <= number < most
            ),
            None,
        )
        if index is not None:
            op = self.word(index)
            fault = wrong_slice(self.layout, op, slices[index] or 0, self.places[index])
            self.end_with(index, fault)
        self.microbatches = [
            microbatch if number is None else microbatch * most + number
            for microbatch, number in zip(self.microbatches, slices, strict=False)
        ]

    def count_next(self) -> None:
        """Give each `next` the first microbatch that its op has not done yet on its stage."""
        sites = self.sites
        if not sites.counted:
            return
        if sites.is_mixed:
            numbers = list(self._first_free())
            has_too_many = True
        else:
            # Of each op, how many times it has been called before on its stage.
            stages = [*self.held, None]
            families = set(sites.families.values())
            before = {of: {stage: count().__next__ for stage in stages} for of in families}
            counters = {place: before[of] for place, of in sites.families.items()}
            numbers = [
                counters[place][stage]()
                for place, stage in zip(self.places, self.stages, strict=True)
            ]
            has_too_many = any(
                before[of][stage]() > self.layout.units(stage)
                for stage in self.held
                for of in families - {"W"}
            )
        if len(sites.counted) + len(sites.owing) < len(sites.ops):
            numbers = [
                number if microbatch is None else microbatch
                for microbatch, number in zip(self.microbatches, numbers, strict=True)
            ]
        self.microbatches = numbers
        if has_too_many:
            self._check_counted()

    def _first_free(self) -> Iterator[int]:
        """For each call the first microbatch that is not done, where some are named."""
        families = map(self.sites.families.__getitem__, self.places)
        pairs = zip(families, self.stages, strict=True)
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
        """A `next` is a fault where all microbatches of the stage are done."""
        for index, place in enumerate(self.places):
            number = self.microbatches[index]
            stage = self.stages[index]
            if place in self.sites.counted and number >= self.layout.units(stage):
                message = (
                    f"`{self.word(index)}` of the next microbatch of stage {stage}, "
                    f"all {number} are done"
                )
                self.end_with(index, Fault("nothing-next", message, place))
                return

    def _least_units(self) -> int:
        return min(map(self.layout.units, self.held), default=0)

    def find_owed(self) -> None:
        """Give each `W` that leaves it open the weight gradient that has waited longest."""
        if not self.sites.owing:
            return
        owing = self.sites.owing
        kinds = self.sites.kinds
        halves = self.sites.halves
        owed: dict[int, OrderedDict[int, int]] = {stage: OrderedDict() for stage in self.held}
        waiting = [index for index, place in enumerate(self.places) if place in halves]
        for index in waiting:
            place = self.places[index]
            stage = self.stages[index]
            if kinds[place] == Kind.I:
                owed[stage].setdefault(self.microbatches[index], index)
                continue
            if place not in owing:
                owed[stage].pop(self.microbatches[index], None)
                continue
            named = self.held if self.sites.ops[place].is_bare else (stage,)
            oldest = [(next(iter(owed[one].values())), one) for one in named if owed[one]]
            if not oldest:
                of = "" if self.sites.ops[place].is_bare else f" of stage {stage}"
                message = f"`W`, but no weight gradient{of} is owed here"
                self.end_with(index, Fault("nothing-next", message, place))
                return
            self.stages[index] = min(oldest)[1]
            self.microbatches[index] = owed[self.stages[index]].popitem(last=False)[0]

    def check_microbatches(self) -> None:
        """Microbatches are those of their stage's pipeline; in a stream they run on."""
        microbatches = self.microbatches
        if not microbatches:
            return
        if min(microbatches) >= 0 and max(microbatches) < self._least_units():
            return
        streamed = self.sites.streamed
        units = {stage: self.layout.units(stage) for stage in self.held}
        for index, place in enumerate(self.places):
            microbatch = microbatches[index]
            too_many = microbatch >= units[self.stages[index]] and place not in streamed
            if microbatch < 0 or too_many:
                op = self.word(index)
                fault = wrong_microbatch(self.layout, op, self.stages[index], microbatch, place)
                self.end_with(index, fault)
                return

    def check_copies(self) -> None:
        """A copy to the host is issued alone."""
        copies = self.sites.batched_copies
        if copies and (index := self.first(copies)) is not None:
            op = self.word(index)
            message = f"`{op}` goes on beside what follows by itself: it stands alone"
            self.end_with(index, Fault("overlap", message, self.places[index]))

    def actions(self) -> Actions:
        """The columns of the actions, in one list."""
        if self.sites.updates:
            updates = self.sites.updates
            self.microbatches = [
                NO_MICROBATCH if place in updates else microbatch
                for place, microbatch in zip(self.places, self.microbatches, strict=True)
            ]
        return Actions(
            array("b", bytes(map(self.sites.kinds.__getitem__, self.places))),
            array("i", self.stages),
            array("i", self.microbatches),
            self._groups(),
            array("i", self.places),
        )

    def _groups(self) -> "array[int]":
        """The group of each action: those that are issued together have a number of their own."""
        batches = self.sites.batches
        if not batches:
            return array("i", bytes(array("i").itemsize * len(self.places)))
        firsts = {place for place, first in batches.items() if place == first}
        begins: Iterable[bool] = map(firsts.__contains__, self.places)
        if any(self.sites.ops[place].word == "U" for place in firsts):
            # A bare `U` is one call for each stage of its rank.
            begins = [
                place in firsts and (not self.sites.ops[place].is_bare or stage == self.held[0])
                for place, stage in zip(self.places, self.stages, strict=True)
            ]
        numbers = accumulate(begins)
        return array(
            "i",
            [
                number if place in batches else 0
                for place, number in zip(self.places, numbers, strict=True)
            ],
        )


def record(rank: int, layout: Layout, sites: Sites, calls: Calls) -> Order:
    """The order of a rank from the calls of its program, with what is wrong with the first wrong
    call.
    """
    columns = [calls[column :: sites.width] for column in range(sites.width)]
    held = tuple(layout.stages_of(rank))
    order = Order(rank, layout, sites, held, *columns[:3])  # type: ignore[arg-type]
    order.name_microbatches()
    order.name_stages()
    if sites.has_slices:
        order.count_slices(columns[3])
    order.count_next()
    order.find_owed()
    order.check_microbatches()
    order.check_copies()
    return order


def wrong_stage(layout: Layout, rank: int, op: str, stage: int, place: int) -> Fault:
    """What is wrong with an op of a stage that its rank does not hold."""
    last = len(layout.placement) - 1
    if not 0 <= stage <= last:
        message = f"`{op}` of stage {stage}, there are stages 0 to {last}"
        return Fault("no-such-stage", message, place)
    holder = layout.placement[stage]
    message = f"`{op}` of stage {stage} on rank {rank}, it is on rank {holder}"
    return Fault("not-on-this-rank", message, place)


def wrong_slice(layout: Layout, op: str, number: int, place: int) -> Fault:
    """What is wrong with an op of a slice that no microbatch has."""
    message = f"`{op}` of slice {number}, there are slices 0 to {layout.slices - 1}"
    return Fault("no-such-slice", message, place)


def wrong_microbatch(layout: Layout, op: str, stage: int, number: int, place: int) -> Fault:
    """What is wrong with an op of a microbatch that its stage does not have."""
    last = layout.units(stage) // layout.slices - 1
    message = f"`{op}` of microbatch {number // layout.slices}, there are microbatches 0 to {last}"
    return Fault("no-such-microbatch", message, place)


def make_stream(sites: Sites, orders: Sequence[Actions]) -> Stream | None:
    """The stream that a program with a `steady` part describes."""
    if not sites.parts:
        return None
    if "steady" not in sites.parts:
        raise Fault("missing-part", "rank 0 has no `steady`, which other ranks have", 0)
    for actions in orders:
        for index, place in enumerate(actions.source):
            if not sites.ops[place].part:
                message = f"`{actions.word(index)}` stands outside of `warmup` and `steady`"
                raise Fault("steady", message, place)
    return Stream(_of_part(sites, orders, "warmup"), _of_part(sites, orders, "steady"))


def _of_part(sites: Sites, orders: Sequence[Actions], part: str) -> tuple[Actions, ...]:
    """The actions of all ranks that stand in a part of the program."""
    chosen = []
    for actions in orders:
        rows = [
            index for index, place in enumerate(actions.source) if sites.ops[place].part == part
        ]
        columns = actions.kind, actions.stage, actions.microbatch, actions.group, actions.source
        picked = [array(column.typecode, map(column.__getitem__, rows)) for column in columns]
        chosen.append(Actions(*picked))
    return tuple(chosen)


#: The row of an action in a building block: its slot, its columns, and which call it was.
Row = tuple[int, int, int, int, int, int]


@define
class Drawing:
    """The ops of one rank in a building block, each at its slot."""

    rank: int
    rows: list[Row] = field(factory=list)

    def sort(self) -> None:
        """Put the ops in the order of their slots; what takes no time comes first in its slot."""
        self.rows.sort(key=lambda row: (row[0], WIDTH[row[1]] > 0))

    def actions(self) -> Actions:
        """The actions in the order of their slots; two in one slot are a fault."""
        actions = Actions()
        free = 0
        for slot, kind, stage, microbatch, place, _ in self.rows:
            if slot < free:
                message = (
                    f"`{actions.word(len(actions) - 1)}` and `{word(kind, stage, microbatch)}` "
                    f"collide on rank {self.rank} in slot {slot}"
                )
                raise Fault("collision", message, place)
            free = slot + WIDTH[kind]
            actions.add(kind, stage, microbatch, place)
        return actions


def draw(
    drawings: list[Drawing], layout: Layout, sites: Sites, calls: list[int], offset: int
) -> None:
    """Add the ops of one repeat of a building block to the drawings of the ranks that do them.

    A call also has its slot, which counts from the offset of the repeat. In the last repeats,
    microbatches beyond the last one of a pipeline have no ops.
    """
    width = sites.width + 1
    for index in range(0, len(calls), width):
        place, stage, microbatch, *slices, slot = calls[index : index + width]
        op = sites.ops[place].word
        if slot < 0:
            raise Fault("block", f"`{op}` at slot {slot}, a block's slots count from 0", place)
        if not 0 <= stage < len(layout.placement):
            raise wrong_stage(layout, 0, op, stage, place)
        if microbatch >= layout.pipeline_of[stage].microbatches:
            continue
        for number in slices:
            if not 0 <= number < layout.slices:
                raise wrong_slice(layout, op, number, place)
            microbatch = microbatch * layout.slices + number
        if microbatch < 0:
            raise wrong_microbatch(layout, op, stage, microbatch, place)
        drawing = drawings[layout.placement[stage]]
        kind = sites.kinds[place]
        drawing.rows.append((slot + offset, kind, int(stage), int(microbatch), place, index))
