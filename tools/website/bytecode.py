"""Bytecode in place of source, in the archives that the playground loads: Python in a browser takes
half of its start to compile modules. `bytecode.mjs` runs this in the browser's own Python, since
bytecode is of one version.
"""

import sys
import zipfile
from pathlib import Path
from py_compile import PycInvalidationMode, compile
from tempfile import TemporaryDirectory


def loaded() -> set[str]:
    """The source files of all modules that are loaded, as archives name them. Others remain as they
    are, for bytecode is the larger.
    """
    paths = [name.replace(".", "/") for name in sys.modules]
    return {f"{path}{end}" for path in paths for end in (".py", "/__init__.py")}


def with_bytecode(archive: str, modules: set[str]) -> None:
    """Replace these modules of an archive by their bytecode, whose source nobody looks at again."""
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(archive) as before:
            before.extractall(folder)
        for name in modules:
            source = Path(folder) / name
            if source.exists():
                compile(
                    str(source),
                    f"{source}c",
                    name,
                    doraise=True,
                    invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
                )
                source.unlink()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as after:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    after.write(path, path.relative_to(folder))
