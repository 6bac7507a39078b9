"""The reference of Python has every public name, each with its docstring."""

import pytest

import schedlang


@pytest.mark.slow
def test_the_reference_has_all_of_the_compiler() -> None:
    pytest.importorskip("griffe")
    from tools.pages import reference

    sections = reference.SECTIONS["schedlang"].values()
    names = [name for section in sections for name in section]
    assert sorted(names) == sorted(schedlang.__all__)
    page = reference.page()
    for name in names:
        assert f"#### `schedlang.{name}`" in page
    # A class shows its fields, a function its parameters, each its docstring.
    assert "    forward_times: Sequence[" in page
    assert "**`Builder.forward`**" in page
    assert "```text\nsimulate(" in page


def test_the_reference_has_all_of_the_runtime() -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    pytest.importorskip("griffe")
    import schedlang.runtime
    from tools.pages import reference

    sections = reference.SECTIONS["schedlang.runtime"]
    names = [name for section in sections.values() for name in section]
    assert sorted(names) == sorted(schedlang.runtime.__all__)
