"""Every block of code on every page of the documentation is run, in order, as it is printed.

`tests/support/pages.py` says how a page marks its blocks. What trains the example takes long, and is
run by `make pages`. `pytest --update-golden` writes into the pages what their commands print.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedlang import CompileError, compile
from schedlang.cli.main import main
from schedlang.diagnostics.source import Source
from tests.support.pages import Block, Shell, blocks, commands, matches
from tests.support.paths import DOCS, ROOT
from tests.support.ranks import Run
from tools.pages import verification
from tools.pages.__main__ import FROM_RUNS, FROM_SOURCE

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "reports").glob("*.md")),
]
BLOCKS = {page.stem: list(blocks(page)) for page in PAGES}
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
ALL_BLOCKS = [block for of_page in BLOCKS.values() for block in of_page]
LANGUAGES = {
    "sched",
    "sh",
    "console",
    "python",
    "yaml",
    "json",
    "lua",
    "text",
    "toml",
    "mermaid",
}
#: Why a block that installs a package is not run.
INSTALLS = "it installs from a package registry"
#: All that cannot be run here, and why.
ELSEWHERE = {
    "README.md": ["they build an environment, and run all of this"],
    "CONTRIBUTING.md": [
        "they build an environment, and run all of this",
        "it builds an environment of gigabytes, and runs all tests",
        "it builds an environment of gigabytes, and runs all tests",
    ],
    "docs/editor.md": [
        INSTALLS,
        "it needs npm and VS Code",
    ],
    "docs/reports/gpu.md": ["it needs a GPU"],
    "docs/training.md": [
        "two machines",
        "it needs a GPU",
        "machines that come and go",
        "a script of your own",
        "a part of tests/support/accelerate_script.py",
        "a part of tests/support/lightning_script.py",
    ],
    "docs/pictures.md": ["it needs pandas", "it needs matplotlib"],
    "docs/torch.md": ["torchtitan"] * 4,
    "docs/train.md": [INSTALLS],
    "docs/clusters.md": ["a cluster with Slurm"],
}
#: What `make TARGET WHAT=…` takes.
WHATS = {
    "bench": [path.stem for path in (ROOT / "benchmarks").glob("*.py")],
    "explore": re.findall(
        r"^explore-(\w+): \.venv", (ROOT / "Makefile").read_text(), re.M
    ),
    "regenerate": [*FROM_SOURCE, *FROM_RUNS],
}


def test_the_page_of_verdicts_says_what_every_block_has() -> None:
    """Else the page fails once `make explore` has run for half an hour."""
    assert verification.WHAT.keys() == verification.KINDS.keys()


#: The page whose `torchrun` is torch's own: on others, the processes that it would start are forked.
WITH_TORCHRUN = "README"
#: The pages whose every command is a process, as a reader starts it; on others, commands of `schedc`
#: that need no shell run in the process of the test.
IN_PROCESSES = ("README", "tutorial", "commands")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A folder for a page, with the repository's programs."""
    folder = tmp_path / "page"
    folder.mkdir()
    shutil.copytree(ROOT / "programs", folder / "programs")
    return Shell(folder)


def page_parameters() -> Iterator[object]:
    """All pages; those are marked on which a script of the reader's own is started."""
    for name, of_page in BLOCKS.items():
        starts = any(
            block.starts_processes and not block.trains_the_example for block in of_page
        )
        yield pytest.param(name, marks=[pytest.mark.processes] if starts else [])


@pytest.mark.parametrize("name", list(page_parameters()))
@pytest.mark.slow
def test_the_blocks_of_a_page(
    name: str, shell: Shell, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def torchrun(command: list[str]) -> tuple[int, str]:
        # It needs torch, which is not there for all tests.
        from tests.support.training import run_torchrun

        run_ranks = request.getfixturevalue("run_ranks")
        return run_torchrun(run_ranks, tmp_path, shell.folder, command)

    shell.stays = name not in IN_PROCESSES
    if name != WITH_TORCHRUN:
        shell.torchrun = torchrun
    updates = request.config.getoption("--update-golden")
    follow(name, shell, lambda block: not block.trains_the_example, updates)


@pytest.mark.processes
@pytest.mark.pages
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, of_page in BLOCKS.items()
        if any(each.trains_the_example for each in of_page)
    ],
)
def test_the_blocks_that_train_the_example(name: str, shell: Shell) -> None:
    follow(name, shell, lambda block: True)


@pytest.mark.processes
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            block, id=block.where, marks=[pytest.mark.pages] if block.is_slow else []
        )
        for block in ALL_BLOCKS
        if block.ranks
    ],
)
def test_the_parts_of_scripts(part: Block, run_ranks: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    # Here, so that the pages are tested without torch, too; and ranks are forked with all imported.
    from tests.support.page_scripts import run_part

    assert part.ranks
    outcome = run_ranks(
        run_part, part.ranks, part.text, part.where, part.given, tmp_path
    )
    assert outcome.results() == [None] * part.ranks


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tools of the environment that `make demo` makes, in a copy of the repository."""
    clone = tmp_path_factory.mktemp("clone")
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        text=True,
    )
    for name in listed.split("\0")[:-1]:
        source = ROOT / name
        if source.exists() or source.is_symlink():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, clone / name, follow_symlinks=False)
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}")
    # As a shell has it that nobody has activated an environment in.
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("MAKE")
    }
    made = subprocess.run(
        ["make", "demo", f"PYTHON={python}"],
        cwd=clone,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert not made.returncode, made.stdout + made.stderr
    assert "Both schedules compute what one process computes." in made.stdout
    return clone / ".venv" / "bin"


@pytest.mark.newcomer
@pytest.mark.parametrize("name", ["README", "tutorial", "train"])
def test_a_newcomer_follows_the_pages(name: str, demo: Path, tmp_path: Path) -> None:
    """All that these pages print, in the environment that `make demo` alone has made."""
    folder = tmp_path / name
    folder.mkdir()
    shutil.copytree(ROOT / "programs", folder / "programs")
    shell = Shell(folder, demo)
    for block in BLOCKS[name]:
        if block.elsewhere == INSTALLS:
            check_commands(block, shell, block.text)
    follow(name, shell, lambda block: True)


def follow(
    name: str, shell: Shell, runs: Callable[[Block], bool], updates: bool = False
) -> None:
    """Do what a page says, block by block."""
    for block in BLOCKS[name]:
        if block.elsewhere or block.ranks or not runs(block):
            continue
        if block.starts_processes:
            pytest.importorskip(
                "torch", reason="the runtime needs torch", exc_type=ImportError
            )
        if block.file:
            write_file(block, shell.folder / block.file)
        if block.language == "sched":
            check_program(block)
        elif block.language == "python" and not block.file:
            (shell.folder / "block.py").write_text(block.text)
            check_commands(block, shell, "python block.py")
        elif block.language == "sh":
            check_commands(block, shell, block.text)
        elif block.language == "console":
            check_console(block, shell, updates)


def write_file(block: Block, path: Path) -> None:
    """Write the file that a block shows, or add the part of it that the block shows."""
    before = path.read_text() if "more" in block.words else ""
    path.write_text(before + block.text)


def check_program(block: Block) -> None:
    """A program compiles, unless the page says that it is wrong."""
    error = None
    try:
        compile(Source(block.file or "page.sched", block.text))
    except CompileError as caught:
        error = caught
    assert (error is not None) == ("wrong" in block.words), f"{block.where}: {error}"


def check_commands(block: Block, shell: Shell, text: str) -> None:
    """Commands succeed."""
    code, output = shell.run(text)
    assert code == 0, f"{block.where}: {output}"


def check_console(block: Block, shell: Shell, updates: bool) -> None:
    """Commands print what the page shows; where that is an error, or a difference, they fail."""
    for command, shown in commands(block):
        code, output = shell.run(command)
        differs = command.endswith("--diff") and "\nequal: " not in output
        assert code == ("error[" in output or differs), (
            f"{block.where}: `{command}` gives {code}: {output}"
        )
        if updates and not matches(output, shown):
            text = block.page.read_text(encoding="utf-8")
            before = f"$ {command}\n{shown}"
            assert text.count(before) == 1
            block.page.write_text(
                text.replace(before, f"$ {command}\n{output}"), encoding="utf-8"
            )
        else:
            assert matches(output, shown), (
                f"{block.where}: `{command}` prints\n{output}"
            )


def test_the_training_page_shows_the_whole_script() -> None:
    """In its order, and nothing else; blank lines between the parts do not count."""
    shown = [block.text for block in BLOCKS["train"] if block.file == "train.py"]
    script = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
    assert [line for line in "".join(shown).splitlines() if line] == [
        line for line in script.splitlines() if line
    ]


def test_every_block_says_what_it_is() -> None:
    assert [
        block.where for block in ALL_BLOCKS if block.language not in LANGUAGES
    ] == []
    elsewhere: dict[str, list[str]] = {}
    for block in ALL_BLOCKS:
        if block.elsewhere:
            page = block.page.relative_to(ROOT).as_posix()
            elsewhere.setdefault(page, []).append(block.elsewhere)
    assert elsewhere == ELSEWHERE


@pytest.mark.parametrize("name", BLOCKS)
def test_commands_within_the_text_have_these_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`schedc view --frees`, and the targets of `make`."""
    text = re.sub(r"^ *```.*?^ *```$", "", TEXTS[name], flags=re.M | re.S)
    helps: dict[str, str] = {}
    for span in re.findall(r"`([^`]+)`", text):
        command = re.match(r"schedc ([a-z-]+)", span.replace("\n", " "))
        if command:
            if command[1] not in helps:
                with pytest.raises(SystemExit) as ended:
                    main([command[1], "--help", "all"])
                assert ended.value.code == 0, f"{name}: `{span}`"
                helps[command[1]] = capsys.readouterr().out
            for option in re.findall(r"(?<!\S)\[?(--?[a-z][a-z0-9-]*)", span):
                assert re.search(rf"{option}\b", helps[command[1]]), f"{name}: `{span}`"
        target = re.match(r"make ([a-z-]+)(?: WHAT=([\w-]+))?", span.replace("\n", " "))
        if target:
            assert f"\n{target[1]}:" in (ROOT / "Makefile").read_text(), (
                f"{name}: `{span}`"
            )
        if target and target[2]:
            assert target[2] in WHATS[target[1]], f"{name}: `{span}`"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_what_it_answers(page: Path) -> None:
    """Its title or its first paragraph asks a question."""
    title, paragraph, *_ = TEXTS[page.stem].split("\n\n")
    assert "?" in title + paragraph


@pytest.mark.parametrize("name", BLOCKS)
def test_links_lead_somewhere(name: str) -> None:
    page = next(page for page in PAGES if page.stem == name)
    text = re.sub(r"^ *```.*?^ *```$", "", TEXTS[name], flags=re.M | re.S)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{name}: {link}"
        if anchor:
            headings = re.findall(
                r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M
            )
            anchors = {
                re.sub(r"[^\w -]", "", each).lower().replace(" ", "-")
                for each in headings
            }
            assert anchor in anchors, f"{name}: {link}"


def test_what_a_page_shows_must_be_what_is_printed() -> None:
    assert matches("a 1\nb\n", "a 1\nb\n")
    assert matches("a 1\nb\n", "a …\nb\n")
    assert matches("noise\nmore\na\n", "…\na\n")
    assert matches("a\n", "…\na\n")
    assert not matches("a 1\nb\n", "a 2\nb\n")
    assert not matches("a 1\nb\n", "a …\n")
    assert not matches("ab\n", "a.\n")
