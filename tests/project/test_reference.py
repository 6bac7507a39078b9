"""The pages on Python: the reference is that of the docstrings, the examples do what they say."""

import io
import linecache
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import schedlang
from tests.support.paths import DOCS

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def test_the_reference_is_current() -> None:
    pytest.importorskip("griffe")
    from tests.support import reference_page

    assert reference_page.page() == (DOCS / "python.md").read_text(), "run `make reference`"
    names = [name for section in reference_page.SECTIONS["schedlang"].values() for name in section]
    assert sorted(names) == sorted(schedlang.__all__)


def test_the_reference_has_all_of_the_runtime() -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    pytest.importorskip("griffe")
    import schedlang.runtime
    from tests.support import reference_page

    sections = reference_page.SECTIONS["schedlang.runtime"]
    names = [name for section in sections.values() for name in section]
    assert sorted(names) == sorted(schedlang.runtime.__all__)


def test_the_examples_of_building_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    blocks = BLOCK.findall((DOCS / "building.md").read_text())
    assert len(blocks) > 8
    for language, text in blocks:
        if language == "text":
            assert printed.strip() == text.strip()
            continue
        Path("script.py").write_text(text)
        linecache.clearcache()
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(text, "script.py", "exec"), names)
        printed = output.getvalue()
