"""The names of programs, and the values of their `let`s."""

from pathlib import Path

import pytest

from schedlang import Source, read_source
from schedlang.language.loading import load
from schedlang.language.names import FIGURES
from schedlang.language.scopes import BUILTINS
from schedlang.language.symbols import Symbols, symbols_of
from schedlang.language.variables import values_of_lets
from tests.support.paths import GALLERY


def symbols(text: str) -> Symbols:
    source = Source("s.sched", text)
    return symbols_of(*load(source), len(text))


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_use_is_known_where_it_stands(path: Path) -> None:
    """What is known at a place is worked out from the blocks; what a name is, by the check of
    names.
    """
    source = read_source(path)
    whole, tree = load(source)
    end = len(source.text)
    found = symbols_of(whole, tree, end)
    assert len({symbol.place for symbol in found.declared}) == len(found.declared)
    for use in found.uses:
        name = whole.text[use.place.start : use.place.end]
        symbol = found.declared_at(use.declared)
        if symbol is None:
            assert name in FIGURES
            continue
        assert symbol.name == name
        assert use.place in found.places_of(symbol)
        if use.place.end <= end:
            assert found.at(use.place.start) is symbol
            known = found.known_at(use.place.start)
            assert symbol in known
            # Of one name, no two are known anywhere.
            assert len({each.name for each in known}) == len(known)
    used = {use.place for use in found.uses}
    assert len(used) == len(found.uses)
    assert not BUILTINS.keys() & {symbol.name for symbol in found.declared}


def test_names_of_a_program_that_is_wrong() -> None:
    text = "schedule s { param ranks = 2 rank r { let a = ranks + b  F(a) } let c = a }"
    found = symbols(text)
    assert [symbol.name for symbol in found.declared] == ["ranks", "r", "a", "c"]
    uses = [text[use.place.start : use.place.end] for use in found.uses]
    assert uses == ["ranks", "a"]


def test_values_of_lets() -> None:
    text = """schedule s {
        param ranks = 3 param microbatches = 4 let all = 2.5 * ranks
        rank r { let a = r + 1 for m in 0 .. microbatches { if r < 2 { let b = m * r F(m) } else { F(m) } } }
    }"""
    items, ranks = values_of_lets(load(Source("s.sched", text))[1], {"microbatches": 5})
    assert items == {text.index("all"): (7.5, 7.5)}
    a = text.index("a = r")
    b = text.index("b = m")
    assert ranks == [{a: (1, 1), b: (0, 0)}, {a: (2, 2), b: (0, 4)}, {a: (3, 3)}]
