"""Schedules built in Python.

A `Builder` only writes: the ops of each rank become the text of a program, by
`schedlang.python.as_program`, which is compiled and proved as any other. What is wrong is said of
the lines of Python that the ops come from, by `schedlang.python.places`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, repeat
from types import TracebackType
from typing import Any, Literal

from attrs import evolve

from schedlang.compiler import compile
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.diagnostics.waiting_ranks import Stand, Wait
from schedlang.diagnostics.wrong_arguments import (
    check_choice,
    check_type,
    check_whole,
    shown,
)
from schedlang.language.head import Head
from schedlang.language.scopes import is_too_long
from schedlang.plan.plan import Plan
from schedlang.python.as_program import NAMES, Call, Text, program_text
from schedlang.python.places import Script, caller
from schedlang.schedule.actions import is_update
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.exact_text import exact_text
from schedlang.schedule.kinds import OF_STAGE, OPS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout, Pipeline, of_graph
from schedlang.schedule.layout_rules import wrong_with
from schedlang.schedule.schedule import MESSAGE_TYPES, WEIGHT_RULES
from schedlang.schedule.transports import PORTABLE
from schedlang.schedule.wrong_layout import WrongLayout

#: How stages may be placed by a word, as torch names it: rank by rank again and again, or to the
#: last rank and back.
Style = Literal["loop", "v"]

#: The rules by which stages may read their weights that are one word, and all of them for messages.
_WORD_RULES = [name for name in WEIGHT_RULES if name != "delay"]
_RULES = f"{', '.join(map(repr, _WORD_RULES))} or 'delay(1)'"


class Builder:
    """Builds a schedule op by op, each rank's in order; it is proved as a program is.

        with Builder("gpipe", ranks=4, microbatches=8) as b:
            for rank in range(4):
                for m in range(8):
                    b.forward(rank, m)
                for m in range(8):
                    b.backward(rank, m)
        plan = b.plan

    At the end of the `with` block the schedule is compiled, to `plan`; without one, `compile` does
    so, with its options. CompileError names the lines of Python that what is wrong comes from.
    `text()` is the program: its plan is the same, whoever compiles it.

    `microbatches` are those of the batch, of all pipelines. There are `chunks` stages on each rank.
    `placement` says where stage s is: "loop", on rank `s % ranks`, as in interleaved schedules;
    "v", down the ranks and up again; or a list, in which item s is the rank of stage s. Schedules
    with several `pipelines` over the same ranks have in place of it such a list for each, by name:
    `{"down": [0, 1], "up": [1, 0]}`; their microbatches are shared out evenly, and their stages
    numbered on, as in plans. With `models`, they are no replicas of one model: it has the number of
    microbatches of each, `{"actor": 8, "critic": 4}`, of which the first is `microbatches`, and
    they may have different numbers of stages. `slices` is into how many parts of its sequence a
    microbatch is cut; `edges` are pairs of an earlier and a later stage, by which what a stage
    makes goes on, by default to the next one; an edge to the next stage of another pipeline hands
    microbatches over, as in programs, and the pipeline before it has none of its own; `skips` are
    pairs by which something else goes on;
    `frozen` are stages whose weights do not change, of which ops that they have no use for are left
    out; `links[r]` is the link to the host of rank r, by default each has its own; `keepers[r]` is
    the rank that keeps what rank r offloads, by default its host does. `weights` is "latest",
    "stash", "unstashed" or "delay(1)", or a list of these with one for each stage. `message_type`
    is "bf16" or "fp16" where messages between ranks are rounded. `costs` are those of the program:
    times and memory; others, as bytes, are for `compile`.

    Ops take a rank and a microbatch, both counted from 0; a `stage` where the rank holds several;
    and a `slice` where there are slices. TypeError or ValueError names a wrong argument, at once.
    """

    def __init__(
        self,
        name: str = "schedule_in_python",
        *,
        ranks: int,
        microbatches: int,
        chunks: int = 1,
        placement: Style | Sequence[int] = "loop",
        pipelines: Mapping[str, Sequence[int]] | None = None,
        models: Mapping[str, int] | None = None,
        slices: int = 1,
        skips: Sequence[tuple[int, int]] = (),
        edges: Sequence[tuple[int, int]] = (),
        frozen: Sequence[int] = (),
        links: Sequence[int] = (),
        keepers: Sequence[int] = (),
        weights: str | Sequence[str] = "latest",
        message_type: str = "",
        costs: Costs = UNIT,
    ) -> None:
        check_type("name", name, str, "text")
        if not _is_name(name):
            raise ValueError(f"`name` is {name!r}: it must be letters, digits and `_`")
        check_whole("ranks", ranks, 1)
        check_whole("microbatches", microbatches, 1)
        check_whole("chunks", chunks, 1)
        check_whole("slices", slices, 1)
        if pipelines is None:
            # `lines` has the ranks of each pipeline's stages, by its name; the only one has none:
            #
            #     {"": (0, 1, 1, 0)}                       a V on two ranks
            #     {"down": (0, 1), "up": (1, 0)}           two pipelines in opposite directions
            lines = {"": _placement(ranks, chunks, placement)}
        else:
            if chunks > 1 or placement != "loop":
                given = "chunks" if chunks > 1 else "placement"
                raise ValueError(
                    f"`{given}` is given, and `pipelines`: each says where its stages are"
                )
            lines = _pipelines(pipelines)
        stops = list(accumulate(map(len, lines.values())))
        pairs = _pairs("edges", edges)
        stages_frozen = _numbers_in("frozen", "stages, such as [0, 1]", frozen)
        held = tuple(chain(*lines.values()))
        # Edges say which pipelines share the microbatches: those that do not run ahead of others.
        without = tuple(map(Pipeline, lines, [0, *stops], stops, repeat(0)))
        trained = Layout(held, without, edges=pairs, models=models is not None).trained
        counts = _counts(lines, len(trained), microbatches, models)
        all_lines = tuple(map(Pipeline, lines, [0, *stops], stops, counts))
        layout = Layout(
            held,
            all_lines,
            slices,
            links=_numbers_in("links", "the number of each rank's link", links),
            skips=_pairs("skips", skips),
            edges=of_graph(pairs, all_lines, models is not None),
            frozen=tuple(sorted(set(stages_frozen))),
            models=models is not None,
            keepers=_numbers_in("keepers", "a rank for each rank", keepers),
        )
        wrong = wrong_with(layout, ranks, microbatches)
        if wrong:
            raise ValueError(f"{_argument(wrong, lines)}: {wrong.message}")
        check_costs(costs)
        _check_program_costs(costs)
        costs.check(layout)
        rules = _weights(weights, len(layout.placement))
        check_choice("message_type", message_type, ["", *MESSAGE_TYPES])
        self._head = Head(name, ranks, microbatches, layout, rules, costs, message_type)
        self._calls: list[list[Call]] = [[] for _ in range(ranks)]
        # What is wrong with the schedule as a whole is said of the line that makes the Builder.
        self._begin = caller()
        self._part = ""
        self._group = 0
        self._groups = 0
        self._plan: Plan | None = None

    def __repr__(self) -> str:
        head = self._head
        size = f"ranks = {head.ranks}, microbatches = {head.microbatches}"
        return f"<Builder {head.name} ({size}): {sum(map(len, self._calls))} ops>"

    # The ops

    def forward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`F`: the forward of a microbatch."""
        self.op(rank, Kind.F, microbatch, stage=stage, slice=slice)

    def backward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`B`: the whole backward of a microbatch."""
        self.op(rank, Kind.B, microbatch, stage=stage, slice=slice)

    def backward_input(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`I`: the half of a backward that gives the gradients of the inputs."""
        self.op(rank, Kind.I, microbatch, stage=stage, slice=slice)

    def backward_weight(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`W`: the half of a backward that gives the gradients of the weights, after its `I`."""
        self.op(rank, Kind.W, microbatch, stage=stage, slice=slice)

    def recompute(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`R`: the forward once more, since its activations were dropped."""
        self.op(rank, Kind.R, microbatch, stage=stage, slice=slice)

    def update(self, rank: int, *, stage: int | None = None) -> None:
        """`U`: the optimizer's step of a stage, by default of all stages of the rank."""
        self._of_stages(rank, Kind.U, stage)

    def offload(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`offload`: begin to copy a microbatch's activations to the host, or to their keeper."""
        self.op(rank, Kind.OFFLOAD, microbatch, stage=stage, slice=slice)

    def reload(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`reload`: begin to copy them back."""
        self.op(rank, Kind.RELOAD, microbatch, stage=stage, slice=slice)

    def unshard(self, rank: int, *, stage: int | None = None) -> None:
        """`unshard`: begin to gather a stage's weights, by default those of all stages."""
        self._of_stages(rank, Kind.UNSHARD, stage)

    def reshard(self, rank: int, *, stage: int | None = None) -> None:
        """`reshard`: let go of them."""
        self._of_stages(rank, Kind.RESHARD, stage)

    def reduce(self, rank: int, *, stage: int | None = None) -> None:
        """`reduce`: begin to sum a stage's gradients over its replicas."""
        self._of_stages(rank, Kind.REDUCE_GRAD, stage)

    def _of_stages(self, rank: int, kind: Kind, stage: int | None) -> None:
        stages = self._stages_of(rank) if stage is None else [stage]
        for number in stages:
            self.op(rank, kind, stage=number)

    def send_forward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`send F`: send what a forward made to the next stage.

        Who writes one transfer writes all of them; else the compiler does.
        """
        self.op(rank, Kind.SEND_F, microbatch, stage=stage, slice=slice)

    def recv_forward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`recv F`: receive what a forward takes from the stage before."""
        self.op(rank, Kind.RECV_F, microbatch, stage=stage, slice=slice)

    def send_backward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`send B`: send the gradients of a stage's inputs to the stage before."""
        self.op(rank, Kind.SEND_B, microbatch, stage=stage, slice=slice)

    def recv_backward(
        self,
        rank: int,
        microbatch: int,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """`recv B`: receive the gradients of a stage's outputs from the next stage."""
        self.op(rank, Kind.RECV_B, microbatch, stage=stage, slice=slice)

    def op(
        self,
        rank: int,
        kind: Kind | str,
        microbatch: int | None = None,
        *,
        stage: int | None = None,
        slice: int | None = None,
    ) -> None:
        """Any op, by its `Kind` or the name of that: `op(0, "F", 3)` is `forward(0, 3)`.

        `U` and the collectives are of a stage, and of no microbatch.
        """
        if self._plan is not None:
            raise ValueError(
                "the schedule is compiled, it takes no more ops: make another Builder"
            )
        name = kind.name if isinstance(kind, Kind) else kind
        check_choice("kind", name, [Kind(each).name for each in (*OPS, *TRANSFERS)])
        kind = Kind[name]
        own = self._own_stage(rank, stage)
        # The checks of stage, microbatch and slice come first: so an op is wrong at its own line,
        # and not when all is compiled.
        call = Call(
            kind,
            own,
            self._microbatch(kind, own, microbatch),
            self._slice(kind, slice),
            self._group,
            self._part,
            caller(),
        )
        for before in self._calls[rank][-1:] if self._group else ():
            is_mixed = (before.kind in TRANSFERS) != (kind in TRANSFERS)
            if before.group == self._group and is_mixed:
                raise ValueError(
                    "`overlap` is for ops that compute, or for sends and receives: write two"
                )
        self._calls[rank].append(call)

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """The ops that a rank is given within run as one: `with b.overlap(): …`. Sends and receives
        are issued as one batch.
        """
        if self._group:
            raise ValueError("`overlap` stands in `overlap`: they do not nest")
        self._groups += 1
        self._group = self._groups
        try:
            yield
        finally:
            self._group = 0

    #: What an overlap of sends and receives was called before.
    exchange = overlap

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """In a schedule without a flush: ops before the first update."""
        with self._in_part("warmup"):
            yield

    @contextmanager
    def steady(self) -> Iterator[None]:
        """In a schedule without a flush: the ops of one update, which repeat. Microbatches count
        from the update's first.
        """
        with self._in_part("steady"):
            yield

    # The result

    @property
    def plan(self) -> Plan:
        """The plan, from the end of the `with` block on."""
        if self._plan is None:
            raise ValueError(
                "`plan` is there at the end of the `with` block; else call `compile`"
            )
        return self._plan

    def text(self) -> str:
        """The program in the language: `compile(b.text())` gives the plan of `b.compile()`."""
        return self._program().text

    def compile(
        self, costs: Costs = UNIT, forward_only: bool = False, transport: str = PORTABLE
    ) -> Plan:
        """The plan of the schedule, proved; arguments are those of `schedlang.compile`.

        The plan's program is `text()`, by the name of the schedule, and plans that are the same
        are equal, wherever they were built. `Plan.where` names lines of Python, as long as the plan
        is not read from a file. CompileError has all that is wrong, at the lines of Python.
        """
        program = self._program()
        source = Source(f"{self._head.name}.sched", program.text)
        try:
            plan = compile(source, {}, costs, forward_only, transport)
        except CompileError as error:
            raise type(error)(self._in_python(error.diagnostics, program)) from None
        # Spans of the text that are ops, with the lines of the script: an error of the runtime
        # names these.
        lines = {
            index: str(program.places[span.start])
            for index, span in enumerate(plan.spans)
            if span.start in program.places
        }
        return evolve(plan, written_at=lines)

    def __enter__(self) -> "Builder":
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        _: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        if error is None:
            self._plan = self.compile()

    # Checks

    def _stages_of(self, rank: int) -> list[int]:
        check_whole("rank", rank, 0, self._head.ranks - 1)
        return self._head.layout.stages_of(rank)

    def _own_stage(self, rank: int, stage: int | None) -> int:
        """The stage of an op, which must be one of its rank."""
        held = self._stages_of(rank)
        listed = ", ".join(map(str, held))
        if stage is None:
            if len(held) > 1:
                raise ValueError(
                    f"`stage` is not given: rank {rank} holds the stages {listed}"
                )
            return held[0]
        placement = self._head.layout.placement
        check_whole("stage", stage, 0, len(placement) - 1)
        if placement[stage] != rank:
            where = f"that is on rank {placement[stage]}"
            raise ValueError(f"`stage` is {stage}: {where}, rank {rank} holds {listed}")
        return stage

    def _microbatch(self, kind: Kind, stage: int, microbatch: int | None) -> int | None:
        if kind in OF_STAGE:
            if microbatch is not None:
                what = "an update" if is_update(kind) else f"`{OPS[kind].word}`"
                raise ValueError(
                    f"`microbatch` is {shown(microbatch)}: {what} is of none"
                )
            return None
        # In a schedule without a flush they run on into the next update.
        most = (
            None
            if self._part
            else self._head.layout.pipeline_of[stage].microbatches - 1
        )
        check_whole("microbatch", microbatch, 0, most)
        return microbatch

    def _slice(self, kind: Kind, slice: int | None) -> int | None:
        slices = self._head.layout.slices
        if slices == 1 or kind in OF_STAGE:
            if slice is not None:
                raise ValueError(f"`slice` is {shown(slice)}: there are no slices here")
            return None
        check_whole("slice", slice, 0, slices - 1)
        return slice

    @contextmanager
    def _in_part(self, part: str) -> Iterator[None]:
        if self._part:
            raise ValueError(f"`{part}` stands in `{self._part}`: they do not nest")
        self._part = part
        try:
            yield
        finally:
            self._part = ""

    # From the text back to Python

    def _program(self) -> Text:
        return program_text(self._head, self._calls)

    def _in_python(
        self, diagnostics: list[Diagnostic], program: Text
    ) -> list[Diagnostic]:
        """Diagnostics of the text as those of the script. What is not about an op is about the
        Builder; what is said several times of one place is said once.
        """
        places = program.places
        script = Script.of([self._begin, *places.values()])

        def span_of(span: Span) -> Span:
            return script.span(places.get(span.start, self._begin))

        # In a loop, one line of Python makes many ops, which may all be wrong in one way.
        told: dict[tuple[str, Span | None], list[Diagnostic]] = {}
        for diagnostic in diagnostics:
            changed = _moved(diagnostic, script.source, span_of)
            first = changed.labels[0].span if changed.labels else None
            told.setdefault((changed.code, first), []).append(changed)
        merged = []
        for same in told.values():
            more = len(same) - 1
            first_one = same[0]
            merged.append(
                first_one.with_note(f"and {more} more at this line")
                if more
                else first_one
            )
        return merged


def _moved(
    diagnostic: Diagnostic, source: Source, span_of: Callable[[Span], Span]
) -> Diagnostic:
    """A diagnostic at other places."""

    def stand(at: Stand) -> Stand:
        # The loop variables are those of the text.
        return evolve(at, span=span_of(at.span) if at.span else None, variables=())

    def wait(moved: Wait) -> Wait:
        until = stand(moved.until) if moved.until else None
        return evolve(moved, at=stand(moved.at), until=until)

    labels = tuple(
        Label(span_of(label.span), label.text) for label in diagnostic.labels
    )
    moved = evolve(diagnostic, labels=labels, source=source, file=source.path)
    return (
        moved.with_waits(tuple(map(wait, diagnostic.waits)))
        if diagnostic.waits
        else moved
    )


def _is_name(text: str) -> bool:
    """Whether a program can have this name."""
    return re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) is not None


def _placement(
    ranks: int, chunks: int, placement: Style | Sequence[int]
) -> tuple[int, ...]:
    """The rank of each stage."""
    if placement == "loop":
        return tuple(range(ranks)) * chunks
    if placement == "v":
        down = tuple(range(ranks))
        return tuple(
            rank for chunk in range(chunks) for rank in down[:: -1 if chunk % 2 else 1]
        )
    if chunks > 1:
        raise ValueError(
            "`chunks` is given, and a list for `placement`: the list says how many"
        )
    return _numbers_in("placement", "'loop', 'v', or the rank of each stage", placement)


def _numbers_in(name: str, what: str, given: object) -> tuple[int, ...]:
    """The whole numbers of an argument, which must be `what`."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"`{name}` is {shown(given)}: it must be {what}")
    for index, number in enumerate(given):
        check_whole(f"{name}[{index}]", number)
    return tuple(given)


def _pipelines(pipelines: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The ranks of the stages of each pipeline."""
    what = "the ranks of each pipeline's stages, such as {'down': [0, 1], 'up': [1, 0]}"
    check_type("pipelines", pipelines, Mapping, what)
    lines: dict[str, tuple[int, ...]] = {}
    for name, placement in pipelines.items():
        check_type("a name in pipelines", name, str, "text")
        if not _is_name(name):
            raise ValueError(
                f"`pipelines` has {name!r}: a name is letters, digits and `_`"
            )
        if name in NAMES:
            raise ValueError(
                f"`pipelines` has {name!r}: the program has this name for something else"
            )
        where = f"pipelines[{name!r}]"
        lines[name] = _numbers_in(where, "the rank of each stage", placement)
    if not lines:
        raise ValueError(f"`pipelines` is {shown(pipelines)}: it must be {what}")
    return lines


def _counts(
    lines: Mapping[str, tuple[int, ...]],
    trained: int,
    microbatches: int,
    models: Mapping[str, int] | None,
) -> list[int]:
    """The microbatches of each pipeline, so many of which share all of them."""
    if models is None:
        if not trained or microbatches % trained:
            parts = counted(trained, "pipeline")
            raise ValueError(
                f"`microbatches` is {microbatches}: {parts} cannot share them evenly"
            )
        return [microbatches // trained] * len(lines)
    what = (
        "the microbatches of each of the `pipelines`, such as {'actor': 8, 'critic': 4}"
    )
    check_type("models", models, Mapping, what)
    if [*models] != [*lines] or "" in lines:
        raise ValueError(f"`models` is {shown(models)}: it must be {what}")
    for name, count in models.items():
        check_whole(f"models[{name!r}]", count)
    return [*models.values()]


def _pairs(what: str, given: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages."""
    pairs: list[tuple[int, int]] = []
    check_type(what, given, Sequence, "pairs of stages, such as [(0, 3)]")
    for index, pair in enumerate(given):
        name = f"{what}[{index}]"
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"`{name}` is {shown(pair)}: it must be a pair of stages")
        for stage in pair:
            check_whole(name, stage)
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _argument(wrong: WrongLayout, lines: Mapping[str, Sequence[int]]) -> str:
    """The argument, or the item of one, that is wrong with a layout of these pipelines."""
    if "" not in lines and wrong.field == "placement":
        return "`pipelines`"
    if wrong.item is None:
        return f"`{wrong.field}`"
    item = [*lines][wrong.item] if wrong.field == "pipelines" else wrong.item
    return f"`{wrong.field}[{item!r}]`"


def _weights(weights: str | Sequence[str], stages: int) -> list[str]:
    """The rule of each stage."""
    rules = [weights] * stages if isinstance(weights, str) else weights
    check_type("weights", rules, Sequence, "a rule, or one for each stage")
    if len(rules) != stages:
        raise ValueError(
            f"`weights` has {counted(len(rules), 'rule')}: there are {counted(stages, 'stage')}"
        )
    for rule in rules:
        check_type("weights", rule, str, _RULES)
    # As it was written before.
    rules = [re.sub(r"^delay (\d+)$", r"delay(\1)", rule) for rule in rules]
    for rule in rules:
        if rule not in _WORD_RULES and not re.fullmatch(r"delay\(\d{1,9}\)", rule):
            raise ValueError(f"`weights` is {rule!r}: it must be {_RULES}")
    return list(rules)


def _check_program_costs(costs: Costs) -> None:
    """Whether a program can say these costs."""
    for name, given in costs.to_json().items():
        way_out = "give it to `compile`"
        if (
            not name.endswith(("_times", "_time", "_memory"))
            and name != "capacity_bytes"
        ):
            raise ValueError(
                f"`costs` have `{name}`, which a program cannot say: {way_out}"
            )
        if any(is_too_long(exact_text(value)) for value in _numbers(given)):
            raise ValueError(
                f"`costs` have `{name}` {shown(given)}, a number of a program has at most 18 "
                f"digits on each side of its point: {way_out}"
            )


def _numbers(values: Any) -> Iterator[float]:
    """All numbers in nested lists."""
    if isinstance(values, list):
        for value in values:
            yield from _numbers(value)
    else:
        yield values
