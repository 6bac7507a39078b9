"""Reading a plan file: every field with its check, every action with its words, and all of it
proved again.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from attrs import frozen

from schedlang.diagnostics.source import Source, Span
from schedlang.files.reading import unreadable
from schedlang.plan.file import Line, Parts, decode_head, plan_error
from schedlang.plan.plan import FORMAT, Plan
from schedlang.proof.prove import prove
from schedlang.schedule.actions import NO_MICROBATCH, OVERLAP, Actions, is_copy, is_transfer
from schedlang.schedule.costs import Costs, costs_of
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout, Pipeline, wrong_skip
from schedlang.schedule.schedule import Kernel, WeightRule
from schedlang.schedule.stream import repeat
from schedlang.schedule.transports import transports

T = TypeVar("T")
_KINDS: dict[str, int] = {kind.name: kind for kind in Kind}
_WORD = re.compile(
    rf"(\d{{1,9}})({'|'.join(sorted(Kind.__members__, key=len, reverse=True))})(\d{{1,9}})?"
)


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, proved again, since a file may come from anywhere; CompileError says what
    is wrong.
    """
    return plan_in(path, _decoded(path, lambda: json.loads(Path(path).read_bytes())))


def open_plan(path: str | Path) -> Plan:
    """The plan in a file, for ranks of a run that another one has proved: a rank's actions are read
    when looked at.

    CompileError for a file that is not as `write_plan` wrote it, here or then.
    """
    head, begin = _decoded(path, lambda: decode_head(Path(path)))
    reader = _Reader(path, head)
    return reader.plan(lambda ranks, spans: reader.parts(ranks, spans, begin))


def _decoded(path: str | Path, decode: Callable[[], T]) -> T:
    """What is in a file; CompileError if it cannot be read, or is not JSON."""
    try:
        return decode()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise plan_error(path, "not a plan file: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise plan_error(
            path, f"not a whole plan file: {error}", help="write it again with `schedc compile -o`"
        ) from None


def plan_in(path: str | Path, document: Any) -> Plan:
    """The plan that a document from a file holds, as `read_plan`."""
    reader = _Reader(path, document)
    plan = reader.plan(reader.actions)
    prove(plan)
    if plan.kernels:
        prove(repeat(plan, plan.kernels, 1))
    return plan


@frozen
class _Reader:
    """Reads the document's fields, each with its check."""

    path: str | Path
    document: Any

    def plan(self, read: Callable[[int, int], Sequence[Actions]]) -> Plan:
        """The plan that the document holds, not yet proved; `read` has the actions, for so many
        ranks and spans.
        """
        if not isinstance(self.document, dict) or "format" not in self.document:
            self.wrong("not a plan file: it has no `format`")
        if self.document["format"] != FORMAT:
            self.wrong(
                f"the format is `{self.document['format']}`, this is a reader of `{FORMAT}`",
                help="compile the program again with this version of schedc",
            )
        program = self.field("program", dict)
        source = self.source(program)
        placement = self.numbers(self.field("placement", list), "placement")
        ranks = self.field("ranks", int)
        if not placement or any(rank >= ranks for rank in placement):
            self.wrong("`placement` must give every stage one of the `ranks`")
        params = self.field("params", dict)
        if not all(isinstance(value, int) for value in params.values()):
            self.wrong("`params` must be whole numbers")
        spans = self.spans(len(source.text))
        actions = read(ranks, len(spans))
        return Plan(
            name=program["name"],
            params=params,
            layout=self.layout(tuple(placement)),
            ranks=actions,
            source=source,
            spans=spans,
            weights=self.weights(len(placement)),
            transport=self.transport(),
            costs=self.costs(len(placement)),
            kernels=self.kernels(actions),
        )

    def layout(self, placement: tuple[int, ...]) -> Layout:
        """The fields of the layout; the microbatches of each pipeline divide into its updates."""
        pipelines = self.pipelines(len(placement))
        updates = self.from_one("updates")
        if any(pipeline.microbatches % updates for pipeline in pipelines):
            self.wrong(f"the microbatches of `pipelines` must divide into {updates} `updates`")
        links = tuple(self.numbers(self.field("links", list), "links"))
        if len(links) not in (0, self.field("ranks", int)):
            self.wrong("`links` must give every rank one")
        return Layout(
            placement, pipelines, self.from_one("slices"), updates, links, self.skips(pipelines)
        )

    def skips(self, pipelines: tuple[Pipeline, ...]) -> tuple[tuple[int, int], ...]:
        """The field `skips`, which plans of before it do not have: stages that all pipelines
        have.
        """
        given = self.field("skips", list) if "skips" in self.document else []
        pairs = [self.numbers(each, "skips") for each in given]
        stages = pipelines[0].stop
        right = all(len(pair) == 2 and not wrong_skip(pair[0], pair[1], stages) for pair in pairs)
        if not right or len(set(map(tuple, pairs))) < len(pairs):
            self.wrong(
                f"`skips` must be pairs of an earlier and a later stage of {stages}, no "
                "neighbours, each once"
            )
        return tuple((earlier, later) for earlier, later in pairs)

    def costs(self, stages: int) -> Costs:
        """The field `costs`, which may be empty."""
        costs = self.check(lambda: costs_of(self.document.get("costs")), "costs")
        self.check(lambda: costs.check(stages), "costs")
        return costs

    def pipelines(self, stages: int) -> tuple[Pipeline, ...]:
        """The field `pipelines`: together they have every stage, in order."""
        found: list[Pipeline] = []
        for each in self.field("pipelines", list):
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                self.wrong(
                    "`pipelines` must be objects with a `name`, `start`, `stop` and `microbatches`"
                )
            numbers = self.numbers(
                [each.get(key) for key in ("start", "stop", "microbatches")], "pipelines"
            )
            found.append(Pipeline(each["name"], *numbers))
        starts = [0, *(each.stop for each in found)]
        if [*(each.start for each in found), stages] != starts or any(
            a >= b for a, b in pairwise(starts)
        ):
            self.wrong(
                f"`pipelines` must divide the {stages} stages of `placement` among them, in order"
            )
        if len({each.stop - each.start for each in found}) > 1:
            self.wrong("`pipelines` must have the same number of stages")
        return tuple(found)

    def from_one(self, name: str) -> int:
        """A field that is a whole number from 1."""
        number = self.field(name, int)
        if number < 1:
            self.wrong(f"`{name}` must be 1 or more")
        return number

    def weights(self, stages: int) -> tuple[WeightRule, ...]:
        """The field `weights`: a rule for every stage, or nothing."""
        rules = self.field("weights", list)
        for rule in rules:
            known = isinstance(rule, dict) and rule.get("name") in ("latest", "stash", "delay")
            if not known or type(rule.get("delay")) is not int or rule["delay"] < 0:
                self.wrong(
                    "`weights` must be rules: a `name` (latest, stash, delay) and a `delay` from 0"
                )
        if rules and len(rules) != stages:
            self.wrong(f"`weights` must have a rule for each of the {stages} stages")
        return tuple(WeightRule(rule["name"], rule["delay"]) for rule in rules)

    def kernels(self, ranks: Sequence[Actions]) -> tuple[Kernel, ...]:
        """The field `kernels`: rows of every rank, or nothing."""
        pairs = [self.numbers(pair, "kernels") for pair in self.field("kernels", list)]
        ends = [len(actions) for actions in ranks] if pairs else []
        if len(pairs) != len(ends) or any(len(pair) != 2 for pair in pairs):
            self.wrong("`kernels` must be a pair of places in the actions of each rank")
        if any(not start <= stop <= end for (start, stop), end in zip(pairs, ends, strict=True)):
            self.wrong("`kernels` must be places in the actions of their rank")
        return tuple(Kernel(*pair) for pair in pairs)

    def transport(self) -> str:
        """The field `transport`: one that there are rules for."""
        name = self.field("transport", str)
        try:
            transports(name)
        except ValueError as error:
            self.wrong(f"`transport`: {error}")
        return name

    def source(self, program: dict[str, Any]) -> Source:
        """The field `program`: its name and its texts."""
        if not all(isinstance(program.get(key), str) for key in ("name", "file", "text")):
            self.wrong("`program` must hold the texts `name`, `file` and `text`")
        match program.get("imports"):
            case [*files] if all(
                isinstance(each, list) and list(map(type, each)) == [str, int] for each in files
            ):
                return Source(
                    program["file"], program["text"], tuple((path, start) for path, start in files)
                )
        self.wrong("`program` must hold `imports`, a list of files and where their texts start")

    def spans(self, length: int) -> tuple[Span, ...]:
        """The field `spans`, each within the program text."""
        spans = [self.numbers(span, "spans") for span in self.field("spans", list)]
        if not all(len(span) == 2 and span[0] <= span[1] <= length for span in spans):
            self.wrong("`spans` must be pairs of places in the program text")
        return tuple(Span(start, end) for start, end in spans)

    def actions(self, ranks: int, spans: int) -> tuple[Actions, ...]:
        """The fields `actions` and `sources`, one line per rank each."""
        texts = self.field("actions", list)
        sources = self.field("sources", list)
        if not all(isinstance(line, str) for line in [*texts, *sources]):
            self.wrong("`actions` and `sources` must be lines of text, one per rank")
        if not len(texts) == len(sources) == ranks:
            self.wrong(f"`actions` and `sources` must have {ranks} lines, one per rank")
        return tuple(
            self.rank(spans, rank, *lines)
            for rank, lines in enumerate(zip(texts, sources, strict=True))
        )

    def parts(self, ranks: int, spans: int, begin: int) -> Parts:
        """The same, read when they are asked for, by the field `lines`; in the file they begin at
        some place.
        """
        lines: list[Line] = []
        for each in self.field("lines", list):
            if not isinstance(each, list) or list(map(type, each)) != [int, int, str]:
                self.wrong("`lines` must be the lengths of two lines and their hash, for each rank")
            actions, sources = self.numbers(each[:2], "lines")
            lines.append(Line(actions, sources, each[2]))
        if len(lines) != ranks:
            self.wrong(f"`lines` must have {ranks} entries, one per rank")
        return Parts(Path(self.path), lines, begin, partial(self.rank, spans))

    def rank(self, spans: int, rank: int, text: str, sources: str) -> Actions:
        """One rank's actions."""
        indices = self.check(lambda: list(map(int, sources.split())), f"sources of rank {rank}")
        if indices and not 0 <= min(indices) <= max(indices) < spans:
            self.wrong(f"sources of rank {rank}: not an index of `spans`")
        return self.check(lambda: parse_actions(text, indices), f"actions of rank {rank}")

    def field(self, name: str, kind: type[T]) -> T:
        """A field of the document that must have a type."""
        value = self.document.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            words = {dict: "an object", list: "a list", int: "a whole number", str: "text"}
            self.wrong(f"`{name}` must be {words[kind]}")
        return value

    def numbers(self, value: Any, name: str) -> list[int]:
        """A list of whole numbers from 0."""
        if not isinstance(value, list) or not all(
            type(each) is int and each >= 0 for each in value
        ):
            self.wrong(f"`{name}` must hold whole numbers from 0")
        return list(value)

    def check(self, read: Callable[[], T], name: str) -> T:
        """What `read` returns; its ValueError becomes the user's error."""
        try:
            return read()
        except ValueError as error:
            self.wrong(f"{name}: {error}")

    def wrong(self, message: str, help: str | None = None) -> NoReturn:
        """Give up."""
        raise plan_error(self.path, message, help=help)


def parse_actions(text: str, sources: list[int]) -> Actions:
    """The inverse of `Actions.text`; ValueError names the first word that is not an action."""
    return _parse_plain(text, sources) or _parse_words(text, sources)


def _parse_plain(text: str, sources: list[int]) -> Actions | None:
    """The actions, if all are alone and have a microbatch, as nearly all texts are."""
    words = _WORD.findall(text)
    if len(words) != len(sources) or not words or " ".join(map("".join, words)) != text:
        return None
    stages, kinds, microbatches = zip(*words, strict=True)
    if "" in microbatches:
        return None
    actions = Actions()
    columns = map(_KINDS.__getitem__, kinds), map(int, stages), map(int, microbatches), sources
    actions.extend(*columns, [0] * len(sources))
    return actions


def _parse_words(text: str, sources: list[int]) -> Actions:
    actions = Actions()
    group = 0
    for token in text.split():
        words = token.removesuffix(OVERLAP)
        overlap = token.endswith(OVERLAP)
        batched = words.startswith("(") and words.endswith(")")
        group += batched
        for each in words[1:-1].split(";") if batched else [token]:
            kind, stage, microbatch = _parse_word(each, token)
            if batched and (is_transfer(kind) == overlap or is_copy(kind)):
                raise ValueError(
                    f"`{token}`: transfers are batched alone, compute ops as {OVERLAP}"
                )
            if len(actions) == len(sources):
                raise ValueError("there are fewer sources than actions")
            actions.add(kind, stage, microbatch, sources[len(actions)], group * batched)
    if len(actions) != len(sources):
        raise ValueError("there are more sources than actions")
    return actions


def _parse_word(text: str, token: str) -> tuple[Kind, int, int]:
    """Kind, stage and microbatch of one word; ValueError names the token it stands in."""
    match = _WORD.fullmatch(text)
    if match is None or (match[3] is None and match[2] != "U"):
        raise ValueError(f"`{token}` is not an action")
    return Kind[match[2]], int(match[1]), NO_MICROBATCH if match[3] is None else int(match[3])
