"""Views: one picture of an execution, and what each format makes of it."""

import json
import os
import re
import subprocess
import sys
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given

from schedlang import (
    Actions,
    Costs,
    Execution,
    Kind,
    Plan,
    Schedule,
    compile,
    read_source,
    simulate,
)
from schedlang.cli.main import main
from schedlang.extras.difference.difference import rank_differences
from schedlang.lowering import lower
from schedlang.plan.torch_tables import export_table, plan_of, read_table
from schedlang.report.alignment import Change
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.report.views import Part, Picture, lay_out, palette, write_view
from schedlang.report.views.bands import shares
from schedlang.report.views.causes import causes_of
from schedlang.report.views.html import Mark, marks_of, page, page_data
from schedlang.report.views.packing import Ticks
from schedlang.report.views.svg import svg
from schedlang.report.views.terminal import view
from schedlang.report.views.trace import trace
from schedlang.report.views.units import bytes_text, time_text
from schedlang.schedule.actions import is_beside, is_transfer
from schedlang.schedule.costs import UNIT
from schedlang.schedule.kinds import OF_HOPS, OPS
from schedlang.schedule.timeline import Bar
from tests.support.own_needs import needs
from tests.support.paths import DOCS, GALLERY, PROGRAMS, ROOT
from tests.support.strategies import schedules
from tools.pages.pictures import NAMES

GOLDEN = ROOT / "tests" / "golden" / "views"
SVG = "{http://www.w3.org/2000/svg}"
#: Costs at which no op lies on round numbers, and transfers take time.
ODD = Costs(
    forward_times=(1.25,),
    input_times=(1.1,),
    weight_times=(0.7,),
    recompute_times=(1.3,),
    p2p_time=0.3,
    offload_times=(0.9,),
)


def run(name: str, costs: Costs = UNIT, **params: int) -> tuple[Plan, Execution]:
    plan = compile(read_source(PROGRAMS / f"{name}.sched"), params)
    return plan, simulate(plan, costs)


def drawn(name: str, costs: Costs = UNIT, **params: int) -> Picture:
    return lay_out(*run(name, costs, **params))


def check_picture(plan: Schedule, execution: Execution, picture: Picture) -> None:
    """What holds of the picture of any execution."""
    boxes = picture.boxes
    for rank, actions in enumerate(plan.ranks):
        ops = [
            (kind, stage, m)
            for kind, stage, m in zip(
                actions.kind, actions.stage, actions.microbatch, strict=True
            )
        ]
        for row, wanted in ((picture.ops[rank], False), (picture.copies[rank], True)):
            shown = [(box.bar.kind, box.bar.stage, box.bar.microbatch) for box in row]
            assert shown == [
                op
                for op in ops
                if not is_transfer(op[0]) and is_beside(op[0]) == wanted
            ]
            # Weights of several stages may be on their way at once.
            one_by_one = [box.bar for box in row if box.bar.kind not in OF_HOPS]
            assert all(
                before.end <= after.start for before, after in pairwise(one_by_one)
            )
            assert all(box.rank == rank for box in row)
    wanted = {
        (each, box.bar)
        for box in boxes
        for each in needs(plan, box.bar.kind, box.bar.stage, box.bar.microbatch)
    }
    assert len(picture.arrows) == len(wanted)
    for source, target in picture.arrows:
        assert boxes[source].bar.end <= boxes[target].bar.start
    for steps, peak in zip(picture.memory, execution.peak_memory, strict=True):
        assert all(before[0] <= after[0] for before, after in pairwise(steps))
        assert max((amount for _, amount in steps), default=0.0) == peak


@pytest.mark.parametrize("costs", [UNIT, ODD], ids=["unit", "odd"])
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_op_is_one_box_and_every_arrow_goes_forward(
    path: Path, costs: Costs
) -> None:
    plan, execution = run(path.stem, costs)
    picture = lay_out(plan, execution)
    check_picture(plan, execution, picture)
    text = path.read_text().splitlines()
    for rank, row in enumerate(picture.ops):
        where = {
            plan.ranks[rank].word(index): plan.where(rank, index)
            for index in range(len(plan.ranks[rank]))
        }
        for box in row:
            line = picture.lines[box.line]
            assert line.where == where[str(box.bar)]
            if line.where.startswith(str(path)):
                assert line.text == text[int(line.where.rpartition(":")[2]) - 1].strip()


@given(schedules())
def test_random_schedules_have_pictures(schedule: Schedule) -> None:
    plan = Plan.of(lower(schedule))
    execution = simulate(plan)
    check_picture(plan, execution, lay_out(plan, execution))


def test_what_stands_on_boxes() -> None:
    slices = drawn("seq1f1b", microbatches=2)
    assert [box.label for box in slices.ops[3] if box.bar.kind == Kind.F] == [
        "0.0",
        "0.1",
        "1.0",
        "1.1",
    ]
    stream = drawn("pipedream_2bw")
    assert [box.label for box in stream.ops[3] if box.bar.kind == Kind.U] == [
        "U",
        "U",
        "U",
    ]
    # Delayed by one update: the third update reads what the first has made.
    assert [box.version for box in stream.ops[3] if box.bar.kind == Kind.F] == [
        0
    ] * 8 + [1] * 4
    overlaps = [box.overlap for box in drawn("dualpipe").ops[0]]
    assert [overlaps.count(group) for group in sorted(set(overlaps) - {0})] == [2, 2, 2]
    assert {box.chunk for box in drawn("chimera").ops[0]} == {0, 1}
    assert drawn("zb_h1").title == "zb_h1 (ranks = 4, microbatches = 8)"


def test_kinds_stay_apart_in_grey_print_and_text_is_legible() -> None:
    """In each chunk's shade, also next to any other chunk's: a recomputation is a hatched forward,
    copies lie apart.
    """
    bands = []
    for kind in (Kind.W, Kind.F, Kind.I, Kind.B, Kind.U):
        fills = [palette.fill(kind, chunk, 8) for chunk in range(8)]
        lightness = list(map(palette.luminance, fills))
        assert lightness == sorted(lightness, reverse=True)
        assert kind == Kind.U or len(set(fills)) == 8
        bands.append((lightness[0], lightness[-1]))
        assert all(palette.contrast(fill, palette.ink(fill)) >= 4.5 for fill in fills)
    assert all(darkest > lightest for (_, darkest), (lightest, _) in pairwise(bands))
    assert palette.fill(Kind.R, 0, 1) == palette.fill(Kind.F, 0, 1)
    assert OPS[Kind.R].pattern != OPS[Kind.F].pattern


@pytest.mark.core
def test_kinds_are_told_apart_without_colour_and_letters() -> None:
    """Of one row, by the pattern or by the lightness of all chunks; marks, which take no time, are
    apart by their shape.
    """
    for beside in (False, True):
        kinds = [
            kind for kind in OPS if OPS[kind].is_beside == beside and OPS[kind].cost
        ]
        for kind, other in combinations(kinds, 2):
            if OPS[kind].pattern == OPS[other].pattern:
                fills, others = (
                    [palette.fill(each, chunk, 8) for chunk in range(8)]
                    for each in (kind, other)
                )
                assert all(
                    palette.contrast(a, b) > 1.5 for a in fills for b in others
                ), (kind, other)
    assert OPS[Kind.R].is_hatched
    # A still draws the patterns once letters have no room, and its legend shows what it draws.
    wide, narrow = (
        svg(drawn("zb_h1", microbatches=microbatches), part=Part(width="page"))
        for microbatches in (4, 64)
    )
    assert "<pattern" not in wide
    assert len(set(re.findall(r'<pattern id="([a-z]+)', narrow))) == 2
    for name in re.findall(r'<pattern id="([^"]+)', narrow):
        assert narrow.count(f"url(#{name})") == 2


def test_golden_svg(golden: Callable[[str, Path], None]) -> None:
    golden(svg(drawn("zb_h1", ranks=2, microbatches=2)), GOLDEN / "zb_h1.svg")


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_svg_shows_every_op(path: Path) -> None:
    picture = drawn(path.stem)
    root = ElementTree.fromstring(svg(picture))
    numbers = [
        text.text for group in root.iter(f"{SVG}g") for text in group.iter(f"{SVG}text")
    ]
    # What takes less than a thousandth of all time has no room for a number.
    least = max(box.bar.end for row in picture.ops for box in row) / 1000
    longer = [
        box for row in picture.ops for box in row if box.bar.end - box.bar.start > least
    ]
    # Each has its letter, and where there is no room at all its microbatch alone.
    labels = [picture.names.labels(*box.bar[:3]) for box in longer]
    wanted = Counter(of_op[-1] for of_op in labels)
    shown = Counter(map(str, numbers))
    shortest = {label: of_op[-1] for of_op in labels for label in of_op}
    assert Counter(shortest[label] for label in shown.elements()) == wanted
    is_wide = float(root.attrib["width"]) > 1600
    assert is_wide or not [label for label in shown if label.isdigit()]
    shapes = [
        each for group in root.iter(f"{SVG}g") for each in group.iter(f"{SVG}rect")
    ]
    ops = sum(map(len, picture.ops))
    strips = (
        sum(box.bar.kind != Kind.U for row in picture.ops for box in row)
        if picture.has_versions
        else 0
    )
    assert len(shapes) == ops + sum(map(len, picture.copies)) + strips
    width = float(root.attrib["width"])
    height = float(root.attrib["height"])
    for shape in shapes:
        x, y, wide, high = (
            float(shape.attrib[name]) for name in ("x", "y", "width", "height")
        )
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
    names = [text.text for text in root.iterfind(f"{SVG}text")]
    assert " ".join(names[:2]).startswith(
        (f"{picture.title}: {picture.figures}", f"{picture.title} {picture.figures}")
    )
    assert {f"{kind.name}: {OPS[kind].name}" for kind in picture.kinds} < set(names)


def test_svg_of_many_ops_is_no_wider_than_a_poster() -> None:
    root = ElementTree.fromstring(svg(drawn("1f1b", ranks=2, microbatches=400)))
    assert 3500 < float(root.attrib["width"]) < 4200


def test_png(tmp_path: Path) -> None:
    plan, execution = run("zb_v")
    write_view(plan, execution, tmp_path / "zb_v.png")
    content = (tmp_path / "zb_v.png").read_bytes()
    root = ElementTree.fromstring(svg(lay_out(plan, execution)))
    # Where a PNG has its width and its height.
    size = tuple(int.from_bytes(content[start : start + 4]) for start in (16, 20))
    assert content.startswith(b"\x89PNG")
    assert size == tuple(2 * int(root.attrib[name]) for name in ("width", "height"))


def test_png_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["view", str(GALLERY[0]), "-o", str(tmp_path / "view.png")]) == 2
    assert (
        capsys.readouterr().err
        == "error: a PNG needs resvg: pip install 'schedlang[png]'\n"
    )
    assert not list(tmp_path.iterdir())


def test_golden_trace(golden: Callable[[str, Path], None]) -> None:
    text = trace(drawn("1f1b", Costs(p2p_time=0.5), ranks=2, microbatches=2))
    golden(text.replace(str(ROOT), "ROOT"), GOLDEN / "1f1b.json")


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    """A slice per op; every flow begins within its producer's slice and ends at its consumer's
    start.
    """
    picture = drawn(path.stem, ODD)
    events: list[dict[str, Any]] = json.loads(trace(picture))["traceEvents"]
    slices = {
        (each["pid"], each["args"]["action"]): each
        for each in events
        if each["ph"] == "X"
    }
    assert sum(each["ph"] == "X" for each in events) == len(picture.boxes)
    threads = {
        each["tid"]: each["pid"] for each in events if each["name"] == "thread_name"
    }
    assert all(threads[each["tid"]] == pid > 0 for (pid, _), each in slices.items())
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    crossing = [
        (a, b)
        for a, b in picture.arrows
        if picture.boxes[a].rank != picture.boxes[b].rank
    ]
    assert len(starts) == len(ends) == len(crossing)
    for number, start in starts.items():
        source, target = (picture.boxes[box] for box in picture.arrows[number])
        made, needed = (slices[box.rank + 1, str(box.bar)] for box in (source, target))
        assert made["ts"] <= start["ts"] < made["ts"] + made["dur"]
        assert ends[number]["ts"] == needed["ts"] >= made["ts"] + made["dur"]
        assert (start["pid"], ends[number]["pid"]) == (source.rank + 1, target.rank + 1)
    counters = [each for each in events if each["ph"] == "C"]
    assert len(counters) == sum(
        len({time for time, _ in steps}) for steps in picture.memory
    )


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_page_has_everything_in_it(path: Path) -> None:
    picture = drawn(path.stem)
    text = page([picture, picture])
    # The name of SVG's elements is no address that anything is read from.
    assert not re.search(
        r"""(src|href)\s*=|url\((?![#$])|@import|https?://""",
        text.replace("http://www.w3.org/2000/svg", ""),
    )
    data, other = json.loads(element_of(text, "data"))
    assert data == other
    columns = unpacked(data)
    assert sum(columns["ops"]) + sum(columns["copies"]) == len(picture.boxes)
    assert columns["kind"] == [box.bar.kind for box in picture.boxes]
    users = [box for box, count in enumerate(columns["needed"]) for _ in range(count)]
    pairs = zip(columns["needBefore"], users, strict=True)
    assert [(user - before, user) for before, user in pairs] == list(picture.arrows)
    # The page has decimals as they are written, without what a float adds.
    starts = [box.bar.start for box in picture.boxes]
    lengths = [box.bar.end - box.bar.start for box in picture.boxes]
    assert times(data, "start") == pytest.approx(starts)
    assert times(data, "length") == pytest.approx(lengths)
    steps = zip(times(data, "memoryTime"), amounts(data), strict=True)
    expected = [step for steps in picture.memory for step in steps]
    assert np.array(list(steps)) == pytest.approx(np.array(expected))


def element_of(text: str, name: str) -> str:
    found = re.search(
        f'<script type="application/json" id="{name}">(.*?)</script>', text, re.S
    )
    assert found
    return found[1]


def unpacked(data: dict[str, Any]) -> dict[str, list[int]]:
    """What data.js does: bytes, plane by plane, of differences."""
    content = zlib.decompress(b64decode(data["packed"]))
    columns = {}
    at = 0
    for name, count in data["columns"]:
        # First the lowest bytes of all differences, then the next ones.
        planes = [
            content[at + plane * count : at + (plane + 1) * count] for plane in range(4)
        ]
        steps = [
            int.from_bytes(row, "little", signed=True)
            for row in zip(*planes, strict=True)
        ]
        columns[name] = list(accumulate(steps))
        at += 4 * count
    assert at == len(content)
    return columns


def times(data: dict[str, Any], name: str) -> list[float]:
    numerator, denominator = data["tick"]
    return [ticks * numerator / denominator for ticks in unpacked(data)[name]]


def amounts(data: dict[str, Any]) -> list[float]:
    numerator, denominator = data["memoryTick"]
    return [ticks * numerator / denominator for ticks in unpacked(data)["memoryAmount"]]


def test_a_page_marks_what_differs() -> None:
    """Halves are only in ZB-H1, whole backwards only in 1F1B; nothing differs from itself."""
    before, after = page_data([drawn("1f1b"), drawn("zb_h1")])
    for data, only in ((before, {Kind.B}), (after, {Kind.I, Kind.W})):
        columns = unpacked(data)
        marked = {
            kind
            for kind, mark in zip(columns["kind"], columns["mark"], strict=True)
            if mark
        }
        assert marked == only
        assert set(columns["mark"]) == {Mark.SAME, Mark.ONLY_HERE}
    assert before["figures"] == "makespan 33, 27.3% idle; ops only here: 32, moved: 0"
    assert after["figures"] == "makespan 27, 11.1% idle; ops only here: 64, moved: 0"
    for data in page_data([drawn("1f1b"), drawn("1f1b")]):
        assert not any(unpacked(data)["mark"])
        assert data["figures"].endswith("; ops only here: 0, moved: 0")
    (alone,) = page_data([drawn("1f1b")])
    assert alone["figures"] == "makespan 33, 27.3% idle"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("gpipe", "1f1b"),
        ("chimera", "dualpipe"),
        ("pipe_offload", "1f1b_v"),
        ("gpipe", "zb_v"),
    ],
)
def test_marks_are_those_of_diff(first: str, second: str) -> None:
    """Ranks run their ops in the order of their actions; copies run beside them."""
    plans = [run(name)[0] for name in (first, second)]
    ranks = rank_differences(
        *(
            evolve(plan, ranks=tuple(ops(actions) for actions in plan.ranks))
            for plan in plans
        )
    )
    marks = marks_of(drawn(first), drawn(second))
    for mark, change in ((Mark.MOVED, Change.MOVED), (Mark.SAME, Change.EQUAL)):
        for picture, of_picture in zip(
            (drawn(first), drawn(second)), marks, strict=True
        ):
            of_ops = of_picture[: sum(map(len, picture.ops))]
            assert of_ops.count(mark) == sum(rank.count(change) for rank in ranks)


def ops(actions: Actions) -> Actions:
    """The actions that a rank runs one after the other."""
    return actions.select(lambda kind: not is_transfer(kind) and not is_beside(kind))


@pytest.mark.parametrize("costs", [UNIT, ODD], ids=["unit", "odd"])
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_a_page_knows_the_cause_of_all_idle_time(path: Path, costs: Costs) -> None:
    """Boxes and parts of idle time fill each rank's time; what a box waited for ended before it;
    the critical path goes through boxes that touch.
    """
    picture = drawn(path.stem, costs)
    causes = causes_of(picture)
    busy = [0.0] * len(picture.ops)
    for part in causes.idle:
        busy[part.rank] += part.length
        assert picture.boxes[int(causes.behind[0])]
    for rank, row in enumerate(picture.ops):
        total = busy[rank] + sum(box.bar.end - box.bar.start for box in row)
        assert total == pytest.approx(picture.timeline.makespan)
    for box, maker in enumerate(causes.maker.tolist()):
        if maker >= 0:
            before = picture.boxes[maker].bar
            after = picture.boxes[box].bar
            assert before.end + causes.delay[box] <= after.start + 1e-9
    assert sum(part.length for part, _ in causes.path) == pytest.approx(
        picture.timeline.makespan
    )
    for part, box in causes.path:
        if part.kind in ("op", "copy"):
            assert picture.boxes[box].bar.start == part.start
            assert picture.boxes[box].rank == part.step.rank


def test_a_page_names_no_folders() -> None:
    (data,) = page_data([drawn("1f1b")])
    assert {where for where, _ in data["lines"]} <= {
        f"1f1b.sched:{line}" for line in range(99)
    }


def test_packed_numbers_are_exact_to_nine_digits() -> None:
    values = [np.array([0.1, 0.25, 12345.678901]), np.array([0.0, 2.5])]
    ticks = Ticks.of(values)
    for column in values:
        back = ticks.count(column) * ticks.numerator / ticks.denominator
        assert back == pytest.approx(column, abs=1e-4)
    # 3 and 12 are multiples of 3; times have nine digits, of which 12 has two before the point.
    assert Ticks.of([np.array([3.0, 12.0])]) == Ticks(3.0 * 10**7, 10.0**7)
    assert Ticks.of([np.zeros(2)]).count(np.zeros(1)).tolist() == [0]


@pytest.mark.parametrize(
    ("value", "seconds", "text"),
    [
        (33, None, "33"),
        (33, 1e-6, "33 µs"),
        (33_500, 1e-6, "33.5 ms"),
        (1.25, 1.0, "1.25 s"),
        (0.5, 1e-3, "500 µs"),
        (0, 1e-3, "0 s"),
    ],
)
def test_times_as_people_write_them(
    value: float, seconds: float | None, text: str
) -> None:
    assert time_text(value, seconds) == text


def test_bytes_as_people_write_them() -> None:
    assert [bytes_text(amount) for amount in (0, 999, 1500, 2.5e9, 3e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
        "3 TB",
    ]


def test_memory_is_in_bytes_where_these_are_known() -> None:
    """Weights are there from the first start on."""
    costs = Costs(activation_bytes=(1e9,), weights_bytes=(3e9,))
    picture = drawn("1f1b", costs)
    _, execution = run("1f1b", costs)
    assert picture.memory_unit == "bytes"
    assert picture.memory[0][0] == (0.0, 3e9)
    peaks = tuple(max(amount for _, amount in steps) for steps in picture.memory)
    assert peaks == execution.peak_bytes
    assert drawn("1f1b").memory_unit == "activations"
    assert drawn("1f1b", Costs(forward_memory=(2.0,))).memory_unit == "amounts"


def test_every_swatch_is_apart_from_every_other() -> None:
    """For who sees all colours and for who lacks one of the three kinds of cones: by the colour,
    or by what is drawn in it.
    """
    ops = [(palette.fill(kind, 0, 1), OPS[kind].pattern) for kind in map(Kind, OPS)]
    swatches = [*ops, *palette.IDLE.values()]
    assert set(palette.IDLE) == set(CAUSES)
    assert {pattern for _, pattern in palette.IDLE.values()} <= set(palette.PATTERNS)
    for (colour, pattern), (other, other_pattern) in combinations(swatches, 2):
        if pattern == other_pattern:
            assert all(distance(sees, colour, other) > 10 for sees in EYES)


#: What an eye makes of linear red, green and blue (Machado et al. 2009, severity 1): all cones, and
#: those of protanopia, deuteranopia and tritanopia.
EYES = [
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
]  # fmt: skip


def distance(eye: Any, colour: str, other: str) -> float:
    """How far apart two colours look: the Euclidean distance in CIELAB."""
    return (
        sum(
            (a - b) ** 2 for a, b in zip(lab(eye, colour), lab(eye, other), strict=True)
        )
        ** 0.5
    )


def lab(eye: Any, colour: str) -> tuple[float, float, float]:
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    seen = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in eye]
    to_xyz = (
        (0.4124, 0.3576, 0.1805),
        (0.2126, 0.7152, 0.0722),
        (0.0193, 0.1192, 0.9505),
    )
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        max(sum(a * b for a, b in zip(row, seen, strict=True)) / whole, 0) ** (1 / 3)
        for row, whole in zip(to_xyz, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_program_text_cannot_end_the_data(tmp_path: Path) -> None:
    program = tmp_path / "</script><b>.sched"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        "schedule s { param ranks = 1 param microbatches = 1 rank r { F(0) B(0) # </script>\n } }"
    )
    plan = compile(read_source(program))
    text = page([lay_out(plan, simulate(plan))])
    # One for each element of the page, and none from the program.
    assert text.count("</script>") == 4


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_terminal(path: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour changes nothing but the colours; rows fit the width; every op is there, or the last
    line says so; labels of neighbours never run together.
    """
    monkeypatch.setenv("COLUMNS", str(columns))
    picture = drawn(path.stem)
    text = view([picture], colour=False)
    coloured = view([picture], colour=True)
    # A block of ops that run as one ends in halves of both colours.
    assert plain(coloured).replace("▀", " ") == text.replace("─", " ")
    assert coloured.count("\x1b[0m") == coloured.count("\x1b[38;5;")
    rows = [line for line in text.splitlines() if "│" in line]
    assert len(rows) == len(picture.ops) * (2 if picture.has_copies else 1)
    assert max(map(len, rows)) <= max(columns, 30)
    words = sum(len(re.findall(r"[A-Z]+[0-9]+", row)) for row in rows)
    complete = words == sum(box.bar.end > box.bar.start for box in picture.boxes)
    assert complete == (not text.endswith("a page zooms, -o NAME.html"))
    # Where a label begins with the number of a stage, a blank or a dash comes before it.
    has_numbers = any(prefix[:1].isdigit() for prefix in picture.names.prefixes)
    if has_numbers and "some labels without stages" not in text:
        stage, behind = "[0-9]+", "[ ─+│]"
    else:
        stage, behind = "[a-z]*", "[A-Za-z ─+·│]"
    word = rf"{stage}[A-Z]+[0-9]+(\.[0-9]+)?"
    assert not [row for row in rows if re.search(rf"{word}(?!([0-9.]|{behind}))", row)]


@pytest.mark.core
def test_several_schedules_in_the_terminal_have_one_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below each other, on one scale of time: ticks of each stand at the same columns."""
    monkeypatch.setenv("COLUMNS", "120")
    pictures = [drawn("1f1b"), drawn("zb_h1"), drawn("dualpipe")]
    text = view(pictures, colour=False)
    heads = [f"{picture.title}: {picture.figures}" for picture in pictures]
    assert [line for line in text.splitlines() if line in heads] == heads
    axes = [line for line in text.splitlines() if line.lstrip().startswith("time ")]
    ticks = [axis.split()[1:] for axis in axes]
    assert ticks[0] == ["0", "5", "10", "15", "20", "25", "30"]
    assert ticks[1] == ticks[2] == ticks[0][:-1]
    assert axes[0].startswith(axes[1].rstrip())
    # A forward of one unit is as wide everywhere; 10 begins at the column of the axis' 10.
    rows = [line for line in text.splitlines() if line.startswith("rank 0")]
    widths = [row.index("F1") - row.index("F0") for row in rows]
    assert len(set(widths)) == 1
    assert axes[0].index("10") - axes[0].index("0") == 10 * widths[0]
    assert text.count("F forward") == 1


def test_ops_that_run_as_one_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    picture = drawn("dualpipe")
    text = view([picture], colour=False)
    groups = Counter(
        (box.rank, box.overlap) for row in picture.ops for box in row if box.overlap
    )
    rows = "".join(line for line in text.splitlines() if line.startswith("rank"))
    assert rows.count("+") == sum(count - 1 for count in groups.values())
    # One block, with both labels before the rest of it.
    assert "dF3+uB1─" in rows
    assert "+ run as one" in text
    assert "+" not in view([drawn("1f1b")], colour=False)
    # Then the forward's colour lies above the backward's.
    forward, backward = (
        palette.terminal_colour(palette.fill(kind, chunk, 2))
        for kind, chunk in ((Kind.F, 0), (Kind.B, 1))
    )
    assert f"\x1b[38;5;{forward};48;5;{backward}m▀" in view([picture], colour=True)


def test_ops_that_run_as_one_are_one_box_that_is_cut() -> None:
    """In a still, each has a part of the box below the other, as long as both, and its label."""
    picture = drawn("dualpipe", ranks=4)
    forward, backward = [box for box in picture.ops[0] if box.overlap][:2]
    assert (forward.start, forward.end) == (backward.start, backward.end)
    assert (forward.start, forward.end) == (forward.bar.start, backward.bar.end)
    assert [(box.part, box.parts) for box in (forward, backward)] == [(0, 2), (1, 2)]
    root = ElementTree.fromstring(svg(picture))
    labels = {text.text: text.attrib for text in root.iter(f"{SVG}text")}
    upper, lower = labels["dF3"], labels["uB1"]
    assert float(upper["y"]) + 10 < float(lower["y"])
    # A window that begins within the box shows both.
    middle = (forward.start + forward.end) / 2
    part = svg(picture, part=Part(ranks=(0,), start=middle + 0.6, end=forward.end))
    assert len(re.findall(r'height="12"', part)) >= 2


@pytest.mark.core
def test_ascii_stands_in_where_the_locale_has_no_more(tmp_path: Path) -> None:
    """Frame, idle time and the rest of an op stay three different characters."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "100"}
    environment |= {"PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    words = ["view", str(PROGRAMS / "1f1b.sched")]
    command = [sys.executable, "-m", "schedlang", *words]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    text = done.stdout.decode("ascii")
    assert "rank 1 |..F0F1F2........B0- F3B1- " in text
    assert "?" not in text


def test_stills_of_several_schedules_have_one_axis_and_one_legend() -> None:
    pictures = [drawn("1f1b"), drawn("dualpipe")]
    root = ElementTree.fromstring(svg(*pictures, part=Part(font="Times", memory=True)))
    assert root.attrib["font-family"].startswith("Times, ")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    titles = [f"{picture.title}: {picture.figures}" for picture in pictures]
    assert [text for text in texts if text in titles] == titles
    assert texts.count("time") == 1
    assert texts.count("F: forward") == 1
    assert texts.count("down(0), up(3)") == 1
    widths = {
        each.attrib["width"]
        for group in root.iter(f"{SVG}g")
        for each in group.iter(f"{SVG}rect")
        if group.attrib["fill"] == palette.fill(Kind.F, 0, 1)
    }
    # A forward that shares its box with a backward is as long as both.
    alone, shared = sorted(map(float, widths))
    assert shared == pytest.approx(3 * alone)
    plain_root = ElementTree.fromstring(svg(*pictures, part=Part(legend=False)))
    assert "F: forward" not in [text.text for text in plain_root.iter(f"{SVG}text")]
    assert float(plain_root.attrib["height"]) < float(root.attrib["height"])


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
@pytest.mark.parametrize("width", ["column", "page"])
def test_a_still_in_a_paper_has_all_text_within_it(path: Path, width: str) -> None:
    """And no paper beside what is drawn: the rows reach the right edge, the legend the lower one."""
    root = ElementTree.fromstring(svg(drawn(path.stem), part=Part(width=width)))
    wide, high = (float(root.attrib[name]) for name in ("width", "height"))
    lowest = 0.0
    for text in root.iter(f"{SVG}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        size = 4.0 if text.get("font-size") == "8" else 5.0
        room = size * len(text.text or "")
        anchor = text.get("text-anchor")
        if anchor == "end":
            assert x - room >= 0
        elif text.get("font-weight") == "600" or (text.text or "")[:2] in ("F:", "B:"):
            assert x + room <= wide
        assert 0 <= y <= high
        lowest = max(lowest, y)
    assert high - lowest <= 12
    rows = [each for each in root.iterfind(f"{SVG}rect") if each.get("stroke")]
    right = max(float(each.attrib["x"]) + float(each.attrib["width"]) for each in rows)
    assert wide - right <= 12


def test_where_ops_are_narrower_than_a_column_there_are_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row of letters, which would be a schedule that nobody has written."""
    monkeypatch.setenv("COLUMNS", "110")
    picture = drawn("interleaved_1f1b", ranks=8, microbatches=32, chunks=4)
    rows = [line for line in view([picture], colour=False).splitlines() if "│" in line]
    assert rows[0] == (
        "rank 0 │F71 B8 ·21 │F33 B67    │F34 B66    │F34 B66    │F33 B67    │F17 B72 ·11│B95 ·5     │"
        "   5% idle"
    )
    for row in rows:
        for cell in row.split("│")[1:-1]:
            assert sum(map(int, re.findall("[0-9]+", cell))) == 100


def test_windows_have_the_unit_of_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    program = str(PROGRAMS / "1f1b.sched")
    assert main(["view", program, "-pmicrobatches=100", "--time-unit", "ms"]) == 0
    head, _, times, *_, note = (
        capsys.readouterr().out.partition("\n\nF forward")[0].splitlines()
    )
    assert head.endswith("makespan 309 ms, 2.9% idle")
    assert times.split() == [
        "time",
        "0",
        "s",
        "61.8",
        "ms",
        "124",
        "ms",
        "185",
        "ms",
        "247",
        "ms",
    ]
    assert note.strip() == "shares in %, of windows of 61.8 ms each"


def test_shares_of_windows() -> None:
    bars = [Bar(Kind.F, 0, 0, 1, 2), Bar(Kind.B, 0, 0, 2, 4), Bar(Kind.F, 0, 1, 5, 6)]
    assert shares(bars, [0, 3, 6]) == [
        [(Kind.F, 33), (Kind.B, 33), (None, 34)],
        [(Kind.F, 33), (Kind.B, 33), (None, 34)],
    ]
    assert shares([], [0, 1]) == [[(None, 100)]]


def test_a_part_of_a_picture() -> None:
    """A window of time and some ranks, in the width that is asked for, with what the ranks hold."""
    picture = drawn("zb_h1")
    part = Part(ranks=(0, 3), start=4, end=10.5, width=700, memory=True)
    root = ElementTree.fromstring(svg(picture, part=part))
    assert root.attrib["width"] == "700"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "zb_h1 (ranks = 4, microbatches = 8): makespan 27, 11.1% idle"
    assert [text for text in texts if text and text.startswith("rank")] == [
        "rank 0",
        "rank 3",
    ]
    assert texts.count("peak 4") == 2
    assert "memory, at most 4 activations" in texts
    ticks = [text.text for text in root.iterfind(f"{SVG}text[@text-anchor='middle']")]
    assert ticks == ["4", "5", "6", "7", "8", "9", "10"]
    shown = [
        box
        for rank in (0, 3)
        for box in picture.ops[rank]
        if box.bar.end > 4 and box.bar.start < 10.5
    ]
    shapes = [
        each for group in root.iter(f"{SVG}g") for each in group.iter(f"{SVG}rect")
    ]
    assert len(shapes) == len(shown)
    assert all(float(shape.attrib["x"]) >= 58 for shape in shapes)


def test_idle_time_in_a_picture_by_its_causes() -> None:
    """All of it, and its causes are those of the figures, each with a pattern of its own."""
    picture = drawn("zb_h1")
    root = ElementTree.fromstring(svg(picture, part=Part(causes=True, width=1068)))
    idle = picture.account.idle
    # Without its left and right side.
    scale = 1000 / picture.timeline.makespan
    drawn_times = {
        group.attrib["fill"]: sum(float(each.attrib["width"]) for each in group) / scale
        for group in root.iter(f"{SVG}g")
        if group.attrib["fill"].startswith("url(#idle-")
    }
    times = {
        f"url(#idle-{cause})": sum(each.length for each in idle if each.cause == cause)
        for cause in {each.cause for each in idle}
    }
    assert drawn_times == pytest.approx(times, rel=1e-3)
    patterns = {f"url(#{each.attrib['id']})" for each in root.iter(f"{SVG}pattern")}
    assert patterns == times.keys()
    names = [text.text for text in root.iterfind(f"{SVG}text")]
    assert [name for name in names if name and name.startswith("idle")] == [
        f"idle: {cause}" for cause in CAUSES if f"url(#idle-{cause})" in times
    ]
    # In a window, no more than what is in it.
    part = Part(ranks=(3,), start=0, end=4, causes=True)
    (group,) = [
        each
        for each in ElementTree.fromstring(svg(picture, part=part)).iter(f"{SVG}g")
        if each.attrib["fill"].startswith("url(")
    ]
    assert len(group) == 1


def test_memory_in_a_picture_is_steps() -> None:
    """Also where it rises and falls at one time."""
    root = ElementTree.fromstring(svg(drawn("1f1b_recompute"), part=Part(memory=True)))
    curves = [each.attrib["d"] for each in root.iterfind(f"{SVG}path[@fill='#c6cbd2']")]
    assert len(curves) == 4
    assert all(re.fullmatch(r"M[\d. ]+([VH][\d.]+)+Z", curve) for curve in curves)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--window", "4..2"], "`4..2` is not A..B with two times"),
        (
            ["--window", "100..200", "-o", "x.svg"],
            "nothing runs in 100..200: the schedule runs in 0..33",
        ),
        (
            ["--ranks", "2..9", "-o", "x.svg"],
            "there is no rank 9, the last one is rank 3",
        ),
        (["--ranks", "a"], "`a` is not numbers of ranks"),
        (["--ranks", "3..1"], "`3..1` names no rank"),
        (["--memory"], "a part is drawn in a file: -o NAME.svg or NAME.png"),
        (["--width", "900", "-o", "x.html"], "a part is drawn in .svg, .pdf and .png"),
    ],
)
def test_wrong_parts(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["view", str(PROGRAMS / "1f1b.sched"), *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_png_in_the_width_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "view.png"
    arguments = [
        "--width",
        "901",
        "--window",
        "0..9",
        "--ranks",
        "1",
        "--memory",
        "--time-unit",
        "ms",
    ]
    assert (
        main(["view", str(PROGRAMS / "1f1b.sched"), *arguments, "-o", str(path)]) == 0
    )
    # Two pixels for one of the drawing, so an odd width is not met.
    assert int.from_bytes(path.read_bytes()[16:20]) in (900, 902)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(PROGRAMS / "1f1b.sched")
    second = str(PROGRAMS / "pipedream_2bw.sched")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["view", first, "--forward-times", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "one_f_one_b (ranks = 4, microbatches = 8): makespan 44, 27.3% idle\n\nrank 0 │F0"
    )
    assert "\x1b" not in shown
    for ending in ("svg", "png", "html", "json"):
        path = tmp_path / f"view.{ending}"
        assert main(["view", second, "--updates", "5", "-o", str(path)]) == 0
        assert capsys.readouterr().out == f"wrote {path}\n"
        assert path.stat().st_size > 1000
    assert main(["compile", first, "-o", str(tmp_path / "plan.json")]) == 0
    assert (
        main(
            [
                "view",
                str(tmp_path / "plan.json"),
                second,
                "-o",
                str(tmp_path / "two.html"),
            ]
        )
        == 0
    )
    assert (
        "<title>one_f_one_b (ranks = 4, microbatches = 8) and pipedream_2bw"
        in (tmp_path / "two.html").read_text()
    )


def test_colour_is_for_terminals_and_not_with_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(PROGRAMS / "1f1b.sched")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["view", program]) == 0
    assert "\x1b[38;5;" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["view", program]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-o", "view.gif"], "`view.gif` must end in .svg, .pdf, .png, .html or .json"),
        (["-o", "view"], "`view` must end in .svg, .pdf, .png, .html or .json"),
        (
            [str(GALLERY[1]), "-o", "view.json"],
            "a trace has one schedule, not 2: a picture has several, NAME.svg or .html",
        ),
        ([str(GALLERY[1]), "--json"], "a trace has one schedule"),
        (
            ["-o", "view.svg", "--width", "poster"],
            "there is no `poster`, there is `column`",
        ),
        (["--updates", "2"], "the plan has 1 update: no part of it repeats"),
    ],
)
def test_wrong_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["view", str(GALLERY[0]), *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_view_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["view", str(GALLERY[0]), "-o", str(tmp_path / "absent" / "view.svg")])
        == 2
    )
    assert "error[unwritable]" in capsys.readouterr().err


def test_the_pages_have_all_pictures() -> None:
    names = ("pictures.md", "generating.md", "training.md")
    pages = [(DOCS / name).read_text() for name in names]
    shown = re.findall(r"\(pictures/(\w+)\.svg\)", "\n".join(pages))
    assert shown == [*NAMES]
    drawn = {path.stem for path in (DOCS / "pictures").glob("*.svg")} - {"logo"}
    assert sorted(drawn) == sorted(NAMES)


def test_nothing_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of 0, as when only the order matters."""
    program = str(PROGRAMS / "1f1b.sched")
    zero = ["--forward-times", "0", "--backward-times", "0"]
    for ending in ("svg", "png", "html", "json"):
        assert (
            main(["view", program, *zero, "-o", str(tmp_path / f"view.{ending}")]) == 0
        )
    capsys.readouterr()
    assert main(["view", program, *zero]) == 0
    assert "makespan 0, 0.0% idle\n\nrank 0 ││   0% idle\n" in capsys.readouterr().out


def test_a_table_of_torch(tmp_path: Path) -> None:
    """A table has an op in each cell; a picture keeps its rows once, and not all of a long one."""
    plan, _ = run("1f1b", microbatches=64)
    table = tmp_path / "table.csv"
    table.write_text(export_table(plan, "torch-csv-compute"))
    imported = plan_of(read_table(read_source(table)), "portable")
    lines = lay_out(imported, simulate(imported)).lines
    assert [line.where for line in lines] == [
        f"{table}:{line}" for line in (1, 2, 3, 4)
    ]
    assert [len(line.text) for line in lines] == [120] * 4
