"""The TextMate grammar against what the pieces of programs are, by vscode-tmgrammar-test; and the
files of the extension for VS Code.
"""

import json
import random
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from schedlang.cli.command_table import COMMANDS
from schedlang.extras.editor.colours import coloured
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.short_programs import short_programs
from tools.grammars.textmate import SCOPES

VSCODE = ROOT / "editors" / "vscode"
FILES = [*GALLERY, *sorted((PROGRAMS / "lib").glob("*.sched"))]


def test_the_files_of_the_extension() -> None:
    package = json.loads((VSCODE / "package.json").read_text())
    json.loads((VSCODE / "language-configuration.json").read_text())
    # What a package has beside the bundle, which is made as it is packed.
    for name in [*package["files"], package["icon"], "README.md"]:
        assert name == "dist" or (VSCODE / name).exists(), name
    assert package["main"] == "./dist/extension.js"
    script = (VSCODE / "extension.js").read_text()
    for command in package["contributes"]["commands"]:
        assert f'registerCommand("{command["command"]}"' in script
    for name in package["contributes"]["configuration"]["properties"]:
        assert name.removeprefix("schedlang.") in script
    assert {"lsp", "view"} <= COMMANDS.keys()


def expectations(text: str) -> str:
    """A text with what its pieces are below each line, as vscode-tmgrammar-test reads it."""
    pieces = list(coloured(text))
    lines = ['# SYNTAX TEST "source.sched" "what the compiler says"']
    start = 0
    for line in text.split("\n"):
        lines.append(line)
        for begin, end, colour in pieces:
            if start <= begin < start + len(line):
                column = begin - start
                length = end - begin
                mark = (
                    "#" + " " * (column - 1) + "^" * length
                    if column
                    else "# <" + "-" * length
                )
                lines.append(f"{mark} {SCOPES[colour]}")
        start += len(line) + 1
    return "\n".join(lines) + "\n"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Look at the files of a folder with the grammar."""
    command = VSCODE / "node_modules" / ".bin" / "vscode-tmgrammar-test"
    assert command.exists(), "make test-editor installs it"
    grammar = VSCODE / "syntaxes" / "sched.tmLanguage.json"
    return subprocess.run(
        [command, "-g", grammar, f"{folder}/*.sched"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )


@pytest.mark.editors
def test_the_annotated_programs() -> None:
    looked = subprocess.run(
        ["npm", "test", "--silent"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=VSCODE,
    )
    assert looked.returncode == 0, looked.stdout[-5000:] + looked.stderr[-2000:]
    assert looked.stdout.count("✓") == len(list((VSCODE / "tests").glob("*.sched")))


@pytest.mark.editors
def test_every_piece_of_a_program_has_its_scope(tmp_path: Path) -> None:
    texts = {path.stem: path.read_text() for path in FILES}
    short = random.Random(0).sample(list(short_programs()), 100)
    texts |= {source.path.removesuffix(".sched"): source.text for source in short}
    for name, text in texts.items():
        (tmp_path / f"{name}.sched").write_text(expectations(text))
    looked = run(tmp_path)
    assert looked.returncode == 0, looked.stdout[-5000:] + looked.stderr[-2000:]
    assert looked.stdout.count("✓") == len(texts)


@pytest.mark.editors
def test_another_scope_is_noticed(tmp_path: Path) -> None:
    wrong = expectations("let a = 1").replace("variable.other", "keyword.control")
    (tmp_path / "wrong.sched").write_text(wrong)
    looked = run(tmp_path)
    assert looked.returncode != 0
    assert "keyword.control" in looked.stdout


@pytest.mark.editors
def test_the_extension_packs() -> None:
    """Without a warning, and with all that it needs; `make test-editor` has npm install the packer."""
    command = ["npm", "run", "--silent", "package"]
    run = subprocess.run(
        command, cwd=VSCODE, capture_output=True, text=True, timeout=300
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "WARNING" not in said
    with ZipFile(next(VSCODE.glob("schedlang-*.vsix"))) as archive:
        packed = {Path(name).name for name in archive.namelist()}
    assert {"extension.js", "icon.png", "picture.png", "readme.md"} <= packed
    assert "sched.tmLanguage.json" in packed
    assert any(name.startswith("LICENSE") for name in packed)
