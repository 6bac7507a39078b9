"""`make measure`: how large the project is, and how much of it one use loads.

Another checkout is measured with `python tools/measure.py FOLDER`: so a change is held against the
commit before.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The folders of the source, apart from tests, benchmarks and the scripts of the site.
SOURCE = ("schedlang", "runtime", "examples", "tools")
#: Compiles 1F1B; its tree is in the cache by then, as when somebody compiles it again.
COMPILE = """
import sys, schedlang
schedlang.compile(sys.argv[1] + "/programs/1f1b.sched", {"ranks": 2, "microbatches": 4})
"""
#: What is loaded, each in an interpreter of its own.
USES = {
    "schedlang.compiler": "import schedlang.compiler",
    "schedlang.plan.reader": "import schedlang.plan.reader",
    "schedlang.runtime.pipeline": "import schedlang.runtime.pipeline",
    "compiling 1f1b": COMPILE,
}
#: One training step of a plain 1F1B, on a process of its own for each rank.
STEP = """
import os, sys, tempfile, torch, torch.distributed as dist
import schedlang
from schedlang.plan.reader import open_plan
from schedlang.runtime.pipeline import Pipeline
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
plan = open_plan(f"{folder}/plan.json")
loss = torch.nn.MSELoss() if rank == 1 else None
pipeline = Pipeline(plan, {rank: torch.nn.Linear(4, 4)}, loss)
pipeline.step(torch.randn(4, 4) if rank == 0 else None, torch.randn(4, 4) if rank == 1 else None)
"""
_LOADED = (
    "\nimport sys\n"
    "files = {getattr(module, '__file__', None) for module in [*sys.modules.values()]}\n"
    "print('files', *filter(None, files), sep=chr(10))\n"
)


def source_files(root: Path) -> Iterator[Path]:
    """The modules of the source; links of a folder into another one are left out."""
    for folder in SOURCE:
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root).parents
            if not any((root / each).is_symlink() for each in inner):
                yield path


def run(root: Path, code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A fresh interpreter that runs `code` on a checkout, and prints the files it has loaded."""
    command = [sys.executable, "-P", "-c", code + _LOADED, *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def loaded(root: Path, process: "subprocess.Popen[str]") -> list[Path]:
    """The modules of the project that an interpreter has loaded."""
    printed, _ = process.communicate(timeout=120)
    _, _, names = printed.partition("files\n")
    paths = {Path(name).resolve() for name in names.splitlines()}
    return sorted(path for path in paths & set(source_files(root.resolve())))


def of_step(root: Path) -> list[Path]:
    """The modules that rank 0 of 2 has loaded after a training step."""
    with tempfile.TemporaryDirectory() as folder:
        plan = f"{folder}/plan.json"
        program = str(root / "programs" / "1f1b.sched")
        compile = (
            "import schedlang; plan = schedlang.compile"
            f"({program!r}, dict(ranks=2, microbatches=4)); schedlang.write_plan(plan, {plan!r})"
        )
        loaded(root, run(root, compile))
        ranks = [run(root, STEP, str(rank), folder) for rank in range(2)]
        first, _ = [loaded(root, rank) for rank in ranks]
        return first


def length(paths: list[Path]) -> int:
    """How many lines some files have."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def naming(texts: dict[Path, str]) -> Counter[str]:
    """For each kind of action, how many files name it."""
    counts: Counter[str] = Counter()
    for text in texts.values():
        counts.update(set(re.findall(r"\bKind\.([A-Z_]+)\b", text)))
    return counts


def report(root: Path) -> Iterator[str]:
    """The lines that are printed."""
    files = list(source_files(root))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    yield "loaded by                             modules   lines"
    loaded(root, run(root, COMPILE, str(root)))
    for name, code in USES.items():
        found = loaded(root, run(root, code, str(root)))
        yield f"{name:36}  {len(found):7} {length(found):7,}"
    found = of_step(root)
    yield f"{'a step of 1F1B on 2 processes':36}  {len(found):7} {length(found):7,}"
    yield ""
    yield "files that name a kind"
    counts = naming(texts)
    yield "  " + ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    yield ""
    yield "room                                  modules   lines"
    rooms: dict[str, list[Path]] = {}
    for path in files:
        folder = path.relative_to(root).parent
        depth = 3 if "extras" in folder.parts else 2
        rooms.setdefault("/".join(folder.parts[:depth]), []).append(path)
    for room, paths in rooms.items():
        yield f"{room:36}  {len(paths):7} {length(paths):7,}"
    yield f"{'all':36}  {len(files):7} {length(files):7,}"
    yield ""
    lines = [line for text in texts.values() for line in text.splitlines() if line]
    written = [line.strip() for line in lines]
    statements = [line for line in written if not line.startswith(("#", '"""'))]
    comments = sum(line.startswith("#") for line in written)
    mean = sum(map(len, statements)) / len(statements)
    share = 100 * comments / len(statements)
    yield f"{mean:.1f} characters a line, {share:.1f} comments a hundred lines"
    stems = Counter(path.stem for path in files if not path.stem.startswith("__"))
    repeated = [f"{stem} {count}" for stem, count in stems.most_common() if count > 1]
    yield f"{len(repeated)} names of modules stand more than once: {', '.join(repeated)}"


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if sys.argv[1:] else ROOT
    if not any(source_files(checkout)):
        sys.exit(f"error: `{checkout}` is no checkout of schedlang")
    for line in report(checkout):
        print(line, flush=True)
