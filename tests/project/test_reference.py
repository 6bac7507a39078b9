"""The reference of Python is that of the docstrings, and has every public name."""

import pytest

import schedlang
from tests.support.paths import DOCS


@pytest.mark.slow
def test_the_reference_is_current() -> None:
    pytest.importorskip("griffe")
    from tests.support import reference_page

    assert reference_page.page() == (DOCS / "python.md").read_text(), (
        "run `make reference`"
    )
    names = [
        name
        for section in reference_page.SECTIONS["schedlang"].values()
        for name in section
    ]
    assert sorted(names) == sorted(schedlang.__all__)


def test_the_reference_has_all_of_the_runtime() -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    pytest.importorskip("griffe")
    import schedlang.runtime
    from tests.support import reference_page

    sections = reference_page.SECTIONS["schedlang.runtime"]
    names = [name for section in sections.values() for name in section]
    assert sorted(names) == sorted(schedlang.runtime.__all__)
