"""Reads a plan file: checks each field, and makes the plan, which is not proved again.

A file may come from anywhere: from another version, another program, or an editor. So
`schedlang.plan.proved_again` proves what is read here, where nobody else has done so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from attrs import fields, frozen

from schedlang.diagnostics.source import Source, Span
from schedlang.files.reading import check_is_path, unreadable
from schedlang.on_demand import on_demand
from schedlang.plan.file import (
    Line,
    Parts,
    decode_head,
    line_of,
    plan_error,
)
from schedlang.plan.plan import FORMAT, Plan, WrittenCosts, sha256_of
from schedlang.plan.text import parse_actions
from schedlang.schedule.actions import Actions
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.layout_rules import wrong_with
from schedlang.schedule.schedule import MESSAGE_TYPES, OBJECTIVES, Kernel, WeightRule
from schedlang.schedule.transports import transports

if TYPE_CHECKING:
    from schedlang.plan.other_files import not_a_plan, not_a_plan_file
    from schedlang.schedule.costs import Costs
    from schedlang.schedule.costs.given import costs_of
else:
    costs_of = on_demand("schedlang.schedule.costs.given.costs_of")
    # For files that are no plans.
    not_a_plan = on_demand("schedlang.plan.other_files.not_a_plan")
    not_a_plan_file = on_demand("schedlang.plan.other_files.not_a_plan_file")

T = TypeVar("T")
#: Fields that came to the format later, as they are where a document does not have them.
_LATER = {
    "skips": [],
    "edges": [],
    "frozen": [],
    "models": False,
    "keepers": [],
    "message_type": "",
    "objective": OBJECTIVES[0],
}


def open_plan(path: str | Path) -> Plan:
    """The plan in a file that somebody else has proved, such as another rank of the same run.

    The actions of a rank are read when somebody asks for them. CompileError, now or then, for a
    file that is not as `write_plan` wrote it.
    """
    check_is_path(path)
    # Not proved again: that would take every rank the time of all ranks.
    head, begin = decoded(path, lambda: decode_head(Path(path)))
    reader = Reader(path, head)
    return reader.plan(lambda ranks, spans: reader.parts(ranks, spans, begin))


def decoded(path: str | Path, decode: Callable[[], T]) -> T:
    """What `decode` reads from a file; CompileError if it cannot be read, or is not JSON."""
    try:
        return decode()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise plan_error(path, "not a plan file: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise not_a_plan_file(path, error) from None


@frozen
class Reader:
    """Reads the fields of a document, and checks each."""

    path: str | Path
    document: Any

    def plan(self, read: Callable[[int, int], Sequence[Actions]]) -> Plan:
        """The plan in the document, not yet proved; `read` gives the actions, for a number of
        ranks and a number of spans.
        """
        is_object = isinstance(self.document, dict)
        if not is_object or self.document.get("format") != FORMAT:
            raise not_a_plan(self.path, self.document)
        self.check_texts()
        program = self.field("program", dict)
        source = self.source(program)
        ranks = self.field("ranks", int)
        layout = self.layout(ranks)
        # The actions come last: they are read by the number of spans.
        spans = self.spans(len(source.text))
        actions = read(ranks, len(spans))
        plan = Plan(
            name=program["name"],
            params=self.params(layout),
            lists=self.lists(),
            layout=layout,
            ranks=actions,
            source=source,
            spans=spans,
            weights=self.weights(layout),
            transport=self.transport(),
            message_type=self.choice("message_type", MESSAGE_TYPES),
            objective=self.choice("objective", OBJECTIVES),
            costs=WrittenCosts(self.document.get("costs"), partial(self.costs, layout)),
            kernels=self.kernels(actions),
        )
        unknown = self.document.keys() - {*plan.head(), "lines", "actions", "sources"}
        if unknown:
            self.wrong(f"a plan has no field `{min(unknown)}`")
        return plan

    def params(self, layout: Layout) -> dict[str, int]:
        """The field `params`, whose values of some names are also those of other fields."""
        given = self.field("params", dict)
        params = {
            name: value for name, value in given.items() if not isinstance(value, list)
        }
        if not all(type(value) is int for value in params.values()):
            self.wrong("`params` must be whole numbers, or lists of them")
        per_update = layout.microbatches // layout.updates
        for name, value, where in (
            ("ranks", self.field("ranks", int), "in `ranks`"),
            ("microbatches", per_update, "by `pipelines` and `updates`"),
            ("slices", layout.slices, "in `slices`"),
        ):
            if params.get(name, value) != value:
                self.wrong(
                    f"`{name}` is {params[name]} in `params`, and {value} {where}"
                )
        program = self.field("program", dict)
        text = program["text"]
        # Where the text is none of a program, as a table of torch is none, nothing is declared.
        is_program = re.search(rf"\bschedule\s+{re.escape(program['name'])}\s*{{", text)
        unknown = given.keys() - set(re.findall(r"\bparam\s+(\w+)", text))
        if is_program and unknown:
            self.wrong(
                f"`params` has {min(unknown)!a}, and the `text` of `program` has no such "
                "parameter"
            )
        return params

    def choice(self, name: str, choices: Collection[str]) -> str:
        """A field that came later, and is one of some words where a document has it."""
        value = self.value(name)
        if value not in (_LATER[name], *choices):
            self.wrong(f"`{name}` must be one of {', '.join(choices)}")
        return str(value)

    def lists(self) -> dict[str, tuple[int, ...]]:
        """The lists in the field `params`."""
        lists = {
            name: tuple(value)
            for name, value in self.field("params", dict).items()
            if isinstance(value, list)
        }
        if not all(type(each) is int for value in lists.values() for each in value):
            self.wrong("`params` must be whole numbers, or lists of them")
        return lists

    def layout(self, ranks: int) -> Layout:
        """The fields of the layout: what runs where."""
        models = self.value("models")
        if not isinstance(models, bool):
            self.wrong("`models` must be true or false")
        layout = Layout(
            self.numbers("placement"),
            self.pipelines(),
            self.field("slices", int),
            self.field("updates", int),
            self.numbers("links"),
            self.pairs("skips"),
            self.pairs("edges"),
            self.numbers("frozen"),
            models,
            self.numbers("keepers"),
        )
        wrong = wrong_with(layout, ranks)
        if wrong:
            self.wrong(f"`{wrong.field}`: {wrong.message}")
        return layout

    def pipelines(self) -> tuple[Pipeline, ...]:
        """The field `pipelines`."""
        pipelines: list[Pipeline] = []
        for entry in self.field("pipelines", list):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                self.wrong(
                    "`pipelines` must be objects with a `name`, `start`, `stop` and `microbatches`"
                )
            self.only(entry, Pipeline, "pipelines")
            values = [entry.get(key) for key in ("start", "stop", "microbatches")]
            pipelines.append(
                Pipeline(entry["name"], *self.numbers_in(values, "pipelines"))
            )
        return tuple(pipelines)

    def costs(self, layout: Layout) -> Costs:
        """The field `costs`, which may be empty."""
        # Two checks: of the numbers by themselves, and of how many there are.
        costs = self.check(lambda: costs_of(self.document.get("costs")), "costs")
        self.check(lambda: costs.check(layout), "costs")
        return costs

    def weights(self, layout: Layout) -> tuple[WeightRule, ...]:
        """The field `weights`: a rule for every stage, or nothing."""
        stages = len(layout.placement)
        rules: list[WeightRule] = []
        for entry in self.field("weights", list):
            delay = entry.get("delay") if isinstance(entry, dict) else None
            if type(delay) is not int:
                self.wrong("`weights` must be objects with a `name` and a `delay`")
            self.only(entry, WeightRule, "weights")
            where = f"`weights` of stage {len(rules)}"
            rule = self.check(partial(WeightRule, entry.get("name"), delay), where)
            rules.append(rule)
        # A plan without rules trains with the newest weights, as most do.
        if rules and len(rules) != stages:
            self.wrong(f"`weights` must have a rule for each of the {stages} stages")
        for stage, rule in enumerate(rules):
            if rule != WeightRule() and not layout.trains(stage):
                self.wrong(
                    f"`weights` of stage {stage} are `{rule}`, and it is `frozen`: weights that do "
                    f"not change have one version, `{WeightRule()}`"
                )
        return tuple(rules)

    def only(self, entry: dict[str, Any], kind: type, name: str) -> None:
        """Whether an entry of a field has what its kind has, and nothing else."""
        unknown = entry.keys() - {attribute.name for attribute in fields(kind)}
        if unknown:
            self.wrong(f"an entry of `{name}` has no field `{min(unknown)}`")

    def kernels(self, ranks: Sequence[Actions]) -> tuple[Kernel, ...]:
        """The field `kernels`: for each rank where the part that repeats starts and stops; or
        nothing.
        """
        pairs = self.pairs("kernels")
        # The lengths are looked up only where they are needed: for a part that is read later, that
        # reads it.
        ends = [len(actions) for actions in ranks] if pairs else []
        if len(pairs) != len(ends):
            self.wrong("`kernels` must be a pair of places in the actions of each rank")
        for rank, ((start, stop), end) in enumerate(zip(pairs, ends, strict=True)):
            if not start <= stop <= end:
                self.wrong(
                    "`kernels` must be places in the actions of their rank: that of rank "
                    f"{rank} is {start} to {stop}, it has {end} actions"
                )
        return tuple(Kernel(*pair) for pair in pairs)

    def transport(self) -> str:
        """The field `transport`: the name of a known one."""
        name = self.field("transport", str)
        try:
            transports(name)
        except ValueError as error:
            self.wrong(f"`transport`: {error}")
        return name

    def source(self, program: dict[str, Any]) -> Source:
        """The field `program`: its name and its texts."""
        if not all(
            isinstance(program.get(key), str)
            for key in ("name", "file", "text", "sha256")
        ):
            self.wrong(
                "`program` must hold the texts `name`, `file`, `text` and `sha256`"
            )
        unknown = program.keys() - {"name", "file", "text", "sha256", "imports"}
        if unknown:
            self.wrong(f"`program` has no field {min(unknown)!a}")
        actual = sha256_of(program["text"])
        if program["sha256"] != actual:
            self.wrong(
                f"the `sha256` of `program` is {program['sha256']}, its `text` has {actual}"
            )
        imports = program.get("imports")
        if not isinstance(imports, list) or not all(
            isinstance(file, list) and list(map(type, file)) == [str, int]
            for file in imports
        ):
            self.wrong(
                "`program` must hold `imports`, a list of files and where their texts start"
            )
        files = tuple((path, start) for path, start in imports)
        starts = [0, *(start for _, start in files), len(program["text"])]
        if starts != sorted(starts):
            self.wrong(
                "the `imports` of `program` must start one after the other within its `text`"
            )
        return Source(program["file"], program["text"], files)

    def spans(self, length: int) -> tuple[Span, ...]:
        """The field `spans`, each within the program text."""
        spans = self.pairs("spans")
        for start, end in spans:
            if not start <= end <= length:
                self.wrong(
                    "`spans` must be pairs of places in the program text: "
                    f"{start} to {end} is none, the text has {length} characters"
                )
        return tuple(Span(start, end) for start, end in spans)

    def actions(self, ranks: int, spans: int) -> tuple[Actions, ...]:
        """The fields `actions` and `sources`, which have a line for each rank."""
        texts = self.field("actions", list)
        sources = self.field("sources", list)
        if not all(isinstance(line, str) for line in [*texts, *sources]):
            self.wrong("`actions` and `sources` must be lines of text, one per rank")
        if not len(texts) == len(sources) == ranks:
            self.wrong(f"`actions` and `sources` must have {ranks} lines, one per rank")
        return tuple(
            self.rank(spans, rank, texts[rank], sources[rank]) for rank in range(ranks)
        )

    def parts(self, ranks: int, spans: int, begin: int) -> Parts:
        """The same, read when somebody asks for them, by the field `lines`; in the file, the lines
        of `actions` begin at `begin`.
        """
        lines: list[Line] = []
        for entry in self.field("lines", list):
            if not isinstance(entry, list) or list(map(type, entry)) != [int, int, str]:
                self.wrong(
                    "`lines` must be the lengths of two lines and their hash, for each rank"
                )
            actions, sources = self.numbers_in(entry[:2], "lines")
            lines.append(Line(actions, sources, entry[2]))
        if len(lines) != ranks:
            self.wrong(f"`lines` must have {ranks} entries, one per rank")
        return Parts(Path(self.path), lines, begin, partial(self.rank, spans))

    def rank(self, spans: int, rank: int, text: str, sources: str) -> Actions:
        """The actions of one rank, from its two lines."""
        # Actions name their place in the program by an index of `spans`.
        indices = self.check(
            lambda: list(map(int, sources.split())), f"sources of rank {rank}"
        )
        if indices and not 0 <= min(indices) <= max(indices) < spans:
            self.wrong(f"sources of rank {rank}: not an index of `spans`")
        return self.check(
            lambda: parse_actions(text, indices), f"actions of rank {rank}"
        )

    def check_texts(self) -> None:
        """Whether all texts can be printed: JSON can name characters that are no text."""
        values = list(self.document.items())
        while values:
            name, value = values.pop()
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    self.wrong(f"`{name}` is no text: {error.reason}")
                if "\0" in value:
                    self.wrong(f"`{name}` is no text: it has a character 0")
            elif isinstance(value, dict):
                values += [(name, part) for pair in value.items() for part in pair]
            elif isinstance(value, list):
                values += [(name, part) for part in value if not isinstance(part, int)]

    def check_lines(self) -> None:
        """Whether the field `lines`, which each rank goes by that reads its part alone, is that of
        the actions; a document may be without.
        """
        if "lines" not in self.document:
            return
        texts = self.field("actions", list)
        sources = self.field("sources", list)
        lines = [list(line_of(*both)) for both in zip(texts, sources, strict=True)]
        for rank, (given, actual) in enumerate(
            zip_longest(self.field("lines", list), lines)
        ):
            if given != actual:
                message = (
                    f"`lines` of rank {rank} is {given}, "
                    f"its `actions` and `sources` are {actual}"
                )
                self.wrong(message, help="write it again with `schedc compile -o`")

    def field(self, name: str, kind: type[T]) -> T:
        """A field of the document, which must be of a type."""
        value = self.value(name)
        # For Python, true and false are whole numbers.
        if not isinstance(value, kind) or isinstance(value, bool):
            words = {
                dict: "an object",
                list: "a list",
                int: "a whole number",
                str: "text",
            }
            self.wrong(f"`{name}` must be {words[kind]}")
        return value

    def value(self, name: str) -> Any:
        """The value of a field: traces of earlier runs have plans without the later ones."""
        return self.document.get(name, _LATER.get(name))

    def numbers(self, name: str) -> tuple[int, ...]:
        """A field that is a list of whole numbers from 0."""
        return self.numbers_in(self.value(name), name)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """A field that is a list of pairs of such numbers."""
        pairs = []
        for entry in self.field(name, list):
            pair = self.numbers_in(entry, name)
            if len(pair) != 2:
                self.wrong(f"`{name}` must be pairs of numbers: {[*pair]} is none")
            pairs.append((pair[0], pair[1]))
        return tuple(pairs)

    def numbers_in(self, value: Any, name: str) -> tuple[int, ...]:
        """Whole numbers from 0, in a list that is read of a field."""
        # `type`, since for Python true and false are whole numbers.
        if not isinstance(value, list) or not all(
            type(number) is int and number >= 0 for number in value
        ):
            self.wrong(f"`{name}` must hold whole numbers from 0")
        return tuple(value)

    def check(self, read: Callable[[], T], name: str) -> T:
        """What `read` returns; its ValueError becomes the user's error."""
        try:
            return read()
        except ValueError as error:
            self.wrong(f"{name}: {error}")

    def wrong(self, message: str, help: str | None = None) -> NoReturn:
        """Refuse the file."""
        raise plan_error(self.path, message, help=help)
