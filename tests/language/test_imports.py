"""Files that programs import: where they are found, and what is said of mistakes in them."""

import json
from pathlib import Path

import pytest

from schedlang import CompileError, compile, read_plan, read_source, write_plan
from schedlang.diagnostics.rendering import to_json, to_text

PROGRAM = """\
schedule s {
    param ranks = 2
    param microbatches = 2
    import "common.sched"
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { B(turned(m)) }
    }
}
"""


def write(folder: Path, **files: str) -> Path:
    """A folder with a program `main.sched` and some files that it imports."""
    for name, text in {"main": PROGRAM, **files}.items():
        (folder / f"{name}.sched").write_text(text)
    return folder / "main.sched"


def refusal(path: Path) -> str:
    with pytest.raises(CompileError) as caught:
        compile(read_source(path))
    return "\n\n".join(map(to_text, caught.value.diagnostics)).replace(
        str(path.parent), "…"
    )


def test_functions_from_a_file_beside_the_program(tmp_path: Path) -> None:
    path = write(
        tmp_path, common="# The last one first.\nfn turned(m) = microbatches - 1 - m\n"
    )
    assert compile(read_source(path)).ranks[1].compute().text() == "1F0 1F1 1B1 1B0"


def test_placements_from_the_gallery(tmp_path: Path) -> None:
    program = PROGRAM.replace("common.sched", "lib/v.sched").replace(
        "F(m)", "F(r, m) F(3 - r, m)"
    )
    program = program.replace("B(turned(m))", "B(3 - r, m) B(r, m)")
    assert compile(read_source(write(tmp_path, main=program))).placement == (0, 1, 1, 0)
    # A file beside the program comes first.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "v.sched").write_text(
        "stage s in 0 .. 4 on if s % 3 == 0 then 0 else 1"
    )
    assert compile(read_source(tmp_path / "main.sched")).source.imports[0][0] == str(
        tmp_path / "lib" / "v.sched"
    )


def test_imports_within_imports_are_taken_once(tmp_path: Path) -> None:
    main = PROGRAM.replace(
        'import "common.sched"', 'import "common.sched" import "last.sched"'
    )
    common = 'import "last.sched" import "main.sched" fn turned(m) = last() - m'
    path = write(
        tmp_path,
        main=main,
        common=common,
        last='import "common.sched" fn last() = microbatches - 1',
    )
    assert compile(read_source(path)).ranks[0].compute().text() == "0F0 0F1 0B1 0B0"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(write(tmp_path)) == (
        "error[import]: there is no file `common.sched` to import\n"
        " --> …/main.sched:4:5\n"
        "  |\n"
        '4 |     import "common.sched"\n'
        "  |     ^^^^^^^^^^^^^^^^^^^^^\n"
        "  |\n"
        "  = help: it is looked for in `…`, then in the gallery"
    )


def test_mistakes_are_shown_in_their_file(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, common="\nfn turned(m) =\n")).startswith(
        "error[syntax]: unexpected end of the file\n --> …/common.sched:2:15\n"
    )
    assert refusal(write(tmp_path, common="")).startswith(
        "error[unknown-name]: no function `turned`"
    )
    assert refusal(write(tmp_path, common="fn turned(m) = microbatches - m\n")) == (
        "error[no-such-microbatch]: `B` of microbatch 2, there are microbatches 0 to 1\n"
        " --> …/main.sched:7:38\n"
        "  |\n"
        "7 |         for m in 0 .. microbatches { B(turned(m)) }\n"
        "  |                                      ^^^^^^^^^^^^\n"
        "  |\n"
        "  = note: here with r = 0, m = 0\n"
        "  = note: and on rank 1"
    )
    assert refusal(write(tmp_path, common="fn turned(m) = m / (m - m)\n")).startswith(
        "error[division-by-zero]: division by zero\n --> …/common.sched:1:16\n"
    )


def test_one_message_about_two_files(tmp_path: Path) -> None:
    path = write(tmp_path, common="\n\nfn turned(m) = m\nparam ranks = 3\n")
    assert refusal(path) == (
        "error[duplicate-name]: `ranks` is already declared\n"
        " --> …/common.sched:4:7\n"
        "  |\n"
        "4 | param ranks = 3\n"
        "  |       ^^^^^\n"
        "  |\n"
        " ::: …/main.sched:2:11\n"
        "  |\n"
        "2 |     param ranks = 2\n"
        "  |           ----- first declared here\n"
        "  |\n"
        "  = help: choose another name: one has the same meaning wherever it is known"
    )
    with pytest.raises(CompileError) as caught:
        compile(read_source(path))
    found = to_json(caught.value.diagnostics[0])
    files = [
        Path(found["file"]).name,
        *(Path(label["file"]).name for label in found["labels"]),
    ]
    assert files == ["common.sched", "common.sched", "main.sched"]


def test_a_whole_program_is_no_import(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, common=PROGRAM)).startswith(
        "error[import]: `common.sched` is a program, not a list of items"
    )


def test_a_plan_knows_the_lines_of_imported_files(tmp_path: Path) -> None:
    rank = PROGRAM[PROGRAM.index("    rank") : -2]
    main = PROGRAM.replace(rank, "")
    path = write(tmp_path, main=main, common=f"fn turned(m) = m\n{rank}")
    write_plan(compile(read_source(path)), tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    assert plan.where(0, 0) == f"{tmp_path}/common.sched:3"
    document = json.loads((tmp_path / "plan.json").read_text())
    for wrong in (None, [3], [["a", "b"]], [["a"]]):
        document["program"]["imports"] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(document))
        with pytest.raises(CompileError, match="`imports`"):
            read_plan(tmp_path / "wrong.json")
