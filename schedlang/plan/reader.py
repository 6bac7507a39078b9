"""Reads a plan file: checks each field, and makes the plan, which is not proved again.

A file may come from anywhere: from another version, another program, or an editor. So
`schedlang.plan.proved` proves what is read here, where nobody else has done so.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from attrs import fields, frozen

from schedlang.diagnostics.source import Source, Span
from schedlang.files.kinds import FileKind, kind_of_document, kind_of_file
from schedlang.files.reading import check_is_path, unreadable
from schedlang.plan.file import Line, Parts, decode_head, line_of, plan_error
from schedlang.plan.plan import FORMAT, Plan, sha256_of
from schedlang.plan.text import parse_actions
from schedlang.schedule.actions import Actions
from schedlang.schedule.costs import Costs, costs_of
from schedlang.schedule.layout import (
    Layout,
    Pipeline,
    pieces_of,
    without_stage,
    wrong_edge,
    wrong_skip,
)
from schedlang.schedule.schedule import WEIGHT_RULES, Kernel, WeightRule
from schedlang.schedule.transports import transports

T = TypeVar("T")


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
        kind = kind_of_file(path)
        if kind not in (
            FileKind.PLAN,
            FileKind.OBJECT,
            FileKind.DAMAGED,
            FileKind.TEXT,
        ):
            message = f"it is {kind.called}, not a plan"
            raise plan_error(path, message, help=kind.help(path)) from None
        message = f"not a whole plan file: {error}"
        help = "write it again with `schedc compile -o`"
        raise plan_error(path, message, help=help) from None


@frozen
class Reader:
    """Reads the fields of a document, and checks each."""

    path: str | Path
    document: Any

    def plan(self, read: Callable[[int, int], Sequence[Actions]]) -> Plan:
        """The plan in the document, not yet proved; `read` gives the actions, for a number of
        ranks and a number of spans.
        """
        kind = kind_of_document(self.document)
        if kind not in (FileKind.PLAN, FileKind.OBJECT):
            self.wrong(f"it is {kind.called}, not a plan", help=kind.help(self.path))
        if not isinstance(self.document, dict) or "format" not in self.document:
            help = "`schedc compile -o` writes a plan"
            self.wrong("not a plan file: it has no `format`", help=help)
        if self.document["format"] != FORMAT:
            message = f"the format is `{self.document['format']}`, this is a reader of `{FORMAT}`"
            self.wrong(
                message, help="compile the program again with this version of schedc"
            )
        self.check_texts()
        program = self.field("program", dict)
        source = self.source(program)
        ranks = self.field("ranks", int)
        placement = self.placement(ranks)
        layout = self.layout(placement)
        # The actions come last: they are read by the number of spans.
        spans = self.spans(len(source.text))
        actions = read(ranks, len(spans))
        plan = Plan(
            name=program["name"],
            params=self.params(layout),
            layout=layout,
            ranks=actions,
            source=source,
            spans=spans,
            weights=self.weights(layout),
            transport=self.transport(),
            costs=self.costs(layout),
            kernels=self.kernels(actions),
        )
        unknown = self.document.keys() - {*plan.head(), "lines", "actions", "sources"}
        if unknown:
            self.wrong(f"a plan has no field `{min(unknown)}`")
        return plan

    def params(self, layout: Layout) -> dict[str, int]:
        """The field `params`, whose values of some names are also those of other fields."""
        params = self.field("params", dict)
        if not all(type(value) is int for value in params.values()):
            self.wrong("`params` must be whole numbers")
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
        unknown = params.keys() - set(re.findall(r"\bparam\s+(\w+)", text))
        if is_program and unknown:
            self.wrong(
                f"`params` has {min(unknown)!a}, and the `text` of `program` has no such "
                "parameter"
            )
        return params

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The field `placement`: a rank for every stage, and a stage for every rank."""
        placement = self.numbers(self.field("placement", list), "placement")
        message = "`placement` must give every stage one of the `ranks`"
        if not placement:
            self.wrong(f"{message}: there are no stages")
        for stage, rank in enumerate(placement):
            if rank >= ranks:
                self.wrong(
                    f"{message}: stage {stage} is on rank {rank}, there are {ranks} ranks"
                )
        idle = without_stage(placement, ranks)
        if idle:
            self.wrong(f"`placement`: {idle}, there are {ranks} `ranks`")
        return tuple(placement)

    def layout(self, placement: tuple[int, ...]) -> Layout:
        """The fields of the layout: what runs where."""
        models = self.models()
        pipelines = self.pipelines(len(placement), models)
        updates = self.from_one("updates")
        # All updates have as many microbatches.
        if any(pipeline.microbatches % updates for pipeline in pipelines):
            self.wrong(
                f"the microbatches of `pipelines` must divide into {updates} `updates`"
            )
        links = tuple(self.numbers(self.field("links", list), "links"))
        if len(links) not in (0, self.field("ranks", int)):
            self.wrong("`links` must give every rank one")
        slices = self.from_one("slices")
        skips = self.edges(
            "skips", partial(wrong_skip, pipelines=pipelines, models=models)
        )
        edges = self.edges(
            "edges", partial(wrong_edge, pipelines=pipelines, models=models)
        )
        for earlier, later in sorted(set(skips) & set(edges)):
            self.wrong(
                f"from stage {earlier} to stage {later} there is one of `edges` and `skips`"
            )
        frozen = self.frozen(pieces_of(pipelines, models))
        return Layout(
            placement,
            pipelines,
            slices,
            updates,
            links,
            skips,
            edges,
            frozen,
            models,
            self.keepers(),
        )

    def keepers(self) -> tuple[int, ...]:
        """The field `keepers`: none, or a rank for every rank. Plans of older versions do not have
        it.
        """
        if "keepers" not in self.document:
            return ()
        keepers = self.numbers(self.field("keepers", list), "keepers")
        ranks = self.field("ranks", int)
        if keepers and (len(keepers) != ranks or max(keepers) >= ranks):
            self.wrong("`keepers` must give every rank one of the `ranks`, or be empty")
        return tuple(keepers)

    def models(self) -> bool:
        """The field `models`. Plans of older versions do not have it."""
        models = self.document.get("models", False)
        if not isinstance(models, bool):
            self.wrong("`models` must be true or false")
        return models

    def edges(
        self, name: str, wrong_of: Callable[[int, int], str | None]
    ) -> tuple[tuple[int, int], ...]:
        """The field `skips` or `edges`: pairs of stages of the first pipeline.

        Plans of older versions do not have it.
        """
        if name not in self.document:
            return ()
        pairs: dict[tuple[int, int], None] = {}
        for pair in self.field(name, list):
            ends = self.numbers(pair, name)
            if len(ends) != 2:
                self.wrong(
                    f"`{name}` must be pairs of an earlier and a later stage: {ends} is none"
                )
            earlier, later = ends
            is_there = (earlier, later) in pairs
            wrong = "is there twice" if is_there else wrong_of(earlier, later)
            if wrong:
                self.wrong(
                    f"`{name}`: the one from stage {earlier} to stage {later} {wrong}"
                )
            pairs[earlier, later] = None
        return tuple(pairs)

    def frozen(self, stages: int) -> tuple[int, ...]:
        """The field `frozen`: stages of the first pipeline, but not all.

        Plans of older versions do not have it.
        """
        if "frozen" not in self.document:
            return ()
        frozen = self.numbers(self.field("frozen", list), "frozen")
        if (
            frozen != sorted(set(frozen))
            or len(frozen) == stages
            or max(frozen, default=0) >= stages
        ):
            self.wrong(
                f"`frozen` must be some of {stages} stages, in order, but not all of them"
            )
        return tuple(frozen)

    def costs(self, layout: Layout) -> Costs:
        """The field `costs`, which may be empty."""
        # Two checks: of the numbers by themselves, and of how many there are.
        costs = self.check(lambda: costs_of(self.document.get("costs")), "costs")
        self.check(lambda: costs.check(layout), "costs")
        return costs

    def pipelines(self, stages: int, models: bool) -> tuple[Pipeline, ...]:
        """The field `pipelines`: together they have every stage, in order."""
        pipelines: list[Pipeline] = []
        for entry in self.field("pipelines", list):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                self.wrong(
                    "`pipelines` must be objects with a `name`, `start`, `stop` and `microbatches`"
                )
            values = [entry.get(key) for key in ("start", "stop", "microbatches")]
            numbers = self.numbers(values, "pipelines")
            self.only(entry, Pipeline, "pipelines")
            pipelines.append(Pipeline(entry["name"], *numbers))
            if pipelines[-1].microbatches < 1:
                self.wrong(
                    "a pipeline of `pipelines` runs 0 microbatches, it must run 1 or more"
                )
        # Each starts where the one before stops: the first at 0, and the last stops at the end.
        starts = [pipeline.start for pipeline in pipelines]
        stops = [pipeline.stop for pipeline in pipelines]
        bounds = [0, *stops]
        if [*starts, stages] != bounds or any(a >= b for a, b in pairwise(bounds)):
            self.wrong(
                f"`pipelines` must divide the {stages} stages of `placement` among them, in order"
            )
        # Stages of the second pipeline are replicas of those of the first.
        if (
            not models
            and len({pipeline.stop - pipeline.start for pipeline in pipelines}) > 1
        ):
            self.wrong("`pipelines` must have the same number of stages")
        names = [pipeline.name for pipeline in pipelines]
        for name in names:
            is_only = not name and not models and len(names) == 1
            if not is_only and not re.fullmatch(r"[A-Za-z_]\w*(\(\d+\))?", name):
                self.wrong(
                    f"`pipelines` has the `name` {name!a}: it must be a name, such as `down` or "
                    "`lane(1)`; the only pipeline of a plan may have none, `''`"
                )
        if len(set(names)) < len(names):
            self.wrong("`pipelines` must have a `name` each, and two have the same")
        return tuple(pipelines)

    def from_one(self, name: str) -> int:
        """A field that is a whole number from 1."""
        number = self.field(name, int)
        if number < 1:
            self.wrong(f"`{name}` must be 1 or more")
        return number

    def weights(self, layout: Layout) -> tuple[WeightRule, ...]:
        """The field `weights`: a rule for every stage, or nothing."""
        stages = len(layout.placement)
        rules = self.field("weights", list)
        for rule in rules:
            is_known = isinstance(rule, dict) and rule.get("name") in WEIGHT_RULES
            if not is_known or type(rule.get("delay")) is not int or rule["delay"] < 0:
                self.wrong(
                    f"`weights` must be rules: a `name` ({', '.join(WEIGHT_RULES)}) and a `delay` "
                    "from 0"
                )
        # A plan without rules trains with the newest weights, as most do.
        if rules and len(rules) != stages:
            self.wrong(f"`weights` must have a rule for each of the {stages} stages")
        for stage, rule in enumerate(rules):
            if rule["delay"] and rule["name"] != "delay":
                self.wrong(
                    f"`weights` of stage {stage} are `{rule['name']}`, with a `delay` of "
                    f"{rule['delay']}: only those of the name `delay` have one"
                )
            self.only(rule, WeightRule, "weights")
            if rule["name"] != WeightRule().name and not layout.trains(stage):
                self.wrong(
                    f"`weights` of stage {stage} are `{rule['name']}`, and it is `frozen`: weights "
                    f"that do not change have one version, `{WeightRule().name}`"
                )
        return tuple(WeightRule(rule["name"], rule["delay"]) for rule in rules)

    def only(self, entry: dict[str, Any], kind: type, name: str) -> None:
        """Whether an entry of a field has what its kind has, and nothing else."""
        unknown = entry.keys() - {attribute.name for attribute in fields(kind)}
        if unknown:
            self.wrong(f"an entry of `{name}` has no field `{min(unknown)}`")

    def kernels(self, ranks: Sequence[Actions]) -> tuple[Kernel, ...]:
        """The field `kernels`: for each rank where the part that repeats starts and stops; or
        nothing.
        """
        pairs = [self.numbers(pair, "kernels") for pair in self.field("kernels", list)]
        # The lengths are looked up only where they are needed: for a part that is read later, that
        # reads it.
        ends = [len(actions) for actions in ranks] if pairs else []
        if len(pairs) != len(ends) or any(len(pair) != 2 for pair in pairs):
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
        spans = [self.numbers(span, "spans") for span in self.field("spans", list)]
        for span in spans:
            if len(span) != 2 or not span[0] <= span[1] <= length:
                message = "`spans` must be pairs of places in the program text"
                self.wrong(
                    f"{message}: {span} is none, the text has {length} characters"
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
            actions, sources = self.numbers(entry[:2], "lines")
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
        value = self.document.get(name)
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

    def numbers(self, value: Any, name: str) -> list[int]:
        """A list of whole numbers from 0."""
        if not isinstance(value, list):
            self.wrong(f"`{name}` must hold whole numbers from 0")
        # `type`, since for Python true and false are whole numbers.
        if not all(type(number) is int and number >= 0 for number in value):
            self.wrong(f"`{name}` must hold whole numbers from 0")
        return list(value)

    def check(self, read: Callable[[], T], name: str) -> T:
        """What `read` returns; its ValueError becomes the user's error."""
        try:
            return read()
        except ValueError as error:
            self.wrong(f"{name}: {error}")

    def wrong(self, message: str, help: str | None = None) -> NoReturn:
        """Refuse the file."""
        raise plan_error(self.path, message, help=help)
