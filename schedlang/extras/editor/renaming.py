"""Another name for what a program declares."""

from __future__ import annotations

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.repair import Edit, Repair
from schedlang.diagnostics.source import Source, Span
from schedlang.extras.editor.analysis import read_with_names
from schedlang.language.grammar import reserved, tokens_of
from schedlang.language.names import check_names
from schedlang.language.symbols import Symbols


def renamed(source: Source, offset: int, name: str) -> list[Span] | str:
    """The places to write another name at, for what stands at a place of a program; or why there
    cannot be one. Each place then means what it meant.
    """
    try:
        whole, tree, symbols = read_with_names(source)
    except CompileError as error:
        return f"the program has mistakes: {error.diagnostics[0].message}"
    symbol = symbols.at(offset)
    if symbol is None:
        return "there is no name of the program here"
    if symbol.place.end > len(source.text):
        path = whole.file(symbol.place.start)[0]
        return (
            f"`{symbol.name}` is declared in `{path}`, which other programs may import"
        )
    tokens = tokens_of(name)
    is_word = (
        len(tokens) == 1
        and tokens[0] == name
        and name.isidentifier()
        and name.isascii()
    )
    if not is_word or tokens[0].type in reserved():
        return f"`{name}` cannot be a name"
    places = [
        span for span in symbols.places_of(symbol) if span.end <= len(source.text)
    ]
    if symbol.name in ("ranks", "microbatches", "slices") and symbol.kind == "param":
        return f"`{symbol.name}` is what the parameter is called in every program"
    repair = Repair("", tuple(Edit(place, name) for place in places))
    # It is tried out: in the renamed program, each use must refer to the same declaration as
    # before, or a name was already taken in some scope.
    new_source = repair.apply(source)
    new_whole, new_tree, new_symbols = read_with_names(new_source)
    wrong = check_names(new_whole, new_tree)
    if len(wrong) > len(check_names(whole, tree)):
        return wrong[0].message
    if _links(new_symbols) != _links(symbols):
        return f"`{name}` would mean something else in some places"
    return places


def _links(symbols: Symbols) -> list[int | None]:
    """What each use refers to, as the number of a declared name: alike for a program with other
    names.
    """
    numbers = {symbol.place: number for number, symbol in enumerate(symbols.declared)}
    return [
        None if use.declared is None else numbers[use.declared] for use in symbols.uses
    ]
