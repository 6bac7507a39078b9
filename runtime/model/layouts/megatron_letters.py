"""Letters, as in Megatron-LM's `--pipeline-model-parallel-layout`: `E|t*3|(t|)*4,m|L`.

`E` is the embedding, or all blocks before the layers; `t` a layer; `m` a layer of a second list,
which predicts further tokens; `L` the output and the loss, or all blocks after the layers. Stages
have `|` between them. `x*3` is `xxx`, also of what is in parentheses. Commas and blanks are for the
reader.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby, pairwise

from attrs import define, field, frozen

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.layouts.layer_blocks import lists_of

#: What the letters mean, in the order in which a model has them.
_MEANINGS = {
    "E": "the embedding",
    "t": "layers",
    "m": "layers of a second list",
    "L": "the output",
}
#: What Megatron-LM calls the same where a layout is a list of the layers of each stage.
_LETTER_OF = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_NEXT_STAGE = "|"
_COSMETIC = ", "
#: More would be a mistake of writing: the largest models have hundreds of layers.
_MOST = 100_000
_DIGITS = 9


@frozen
class _Letter:
    """A letter, or `|`, and its place in the text."""

    letter: str
    place: int


def letters_of_names(
    layout: Sequence[Sequence[str]], blocks: Sequence[str]
) -> str | None:
    """A layout of Megatron-LM's names for layers by stage, `[["embedding", "decoder"], …]`, in
    letters; None for names of blocks.
    """
    names = [name for of_stage in layout for name in of_stage]
    if not names or not set(names) <= _LETTER_OF.keys():
        return None
    # A model may call its own blocks so: then each is named once.
    known = {*blocks, *(block.rpartition(".")[0] for block in blocks)}
    if set(names) <= known and len(set(names)) == len(names):
        return None
    stages = ("".join(_LETTER_OF[name] for name in of_stage) for of_stage in layout)
    return _NEXT_STAGE.join(stages)


def sizes_by_letters(layout: str, blocks: Sequence[str]) -> list[int]:
    """How many blocks each stage has, by letters.

    PipelineError for a text that is no layout, or one of other layers than `blocks` has.
    """
    letters = _Parser(layout).letters()
    lists = lists_of(blocks)
    if len(lists) > 2:
        raise PipelineError(
            f"`layout` has letters for two lists of layers, `blocks` has {len(lists)}: give the "
            "names of the blocks by stage"
        )
    between = blocks[lists[0].stop : lists[-1].start]
    if between:
        raise PipelineError(
            f"`layout` has no letter for `{between[0]}`, between two lists of layers: give the "
            "names of the blocks by stage"
        )
    numbers = {
        "E": 1,
        "t": len(lists[0]),
        "m": len(lists[1]) if len(lists) > 1 else 0,
        "L": 1,
    }
    _check(layout, letters, numbers)
    blocks_of = {"E": lists[0].start, "t": 1, "m": 1, "L": len(blocks) - lists[-1].stop}
    stages = [0]
    for each in letters:
        if each.letter == _NEXT_STAGE:
            stages.append(0)
        else:
            stages[-1] += blocks_of[each.letter]
    return stages


def _check(layout: str, letters: Sequence[_Letter], numbers: dict[str, int]) -> None:
    """PipelineError unless there are so many of each letter, in the order of the model."""
    order = list(_MEANINGS)
    blocks = [each for each in letters if each.letter != _NEXT_STAGE]
    for before, after in pairwise(blocks):
        if order.index(before.letter) > order.index(after.letter):
            what = f"`{after.letter}` behind `{before.letter}`: they come as E, t, m, L"
            raise _error(layout, after.place, what)
    places = {
        letter: [each.place for each in of_letter]
        for letter, of_letter in groupby(blocks, lambda each: each.letter)
    }
    for letter, meaning in _MEANINGS.items():
        given = places.get(letter, [])
        number = numbers[letter]
        if len(given) != number:
            # Where the first one is that is too much, or the next one would be.
            behind = [
                each.place
                for each in blocks
                if order.index(each.letter) > order.index(letter)
            ]
            place = [*given[number:], *behind, len(layout)][0]
            what = f"{len(given)} `{letter}`, {meaning}, where the model has {number}"
            raise _error(layout, place, what)


@define
class _Parser:
    """Reads a layout from left to right; PipelineError for what is none."""

    text: str
    #: What is left to read: the characters that mean something, with their places.
    rest: deque[_Letter] = field(init=False)

    def __attrs_post_init__(self) -> None:
        every = (_Letter(letter, place) for place, letter in enumerate(self.text))
        self.rest = deque(each for each in every if each.letter not in _COSMETIC)

    def letters(self) -> list[_Letter]:
        """All letters, with what is multiplied written out."""
        read: list[_Letter] = []
        while self.rest:
            read += (
                self.group() if self.rest[0].letter == "(" else self.multiplied_letter()
            )
        return read

    def group(self) -> list[_Letter]:
        """What is in parentheses, as often as the number behind them says."""
        start = self.rest.popleft()
        letters: list[_Letter] = []
        while self.rest and self.rest[0].letter != ")":
            letters += self.multiplied_letter()
        if not self.rest:
            raise self.error(start.place, "`(` without a `)` behind it")
        self.rest.popleft()
        if not self.is_next("*"):
            raise self.error(
                start.place, "a group without `*` and a number behind it: `(tt|)*4`"
            )
        return self.multiplied(letters)

    def multiplied_letter(self) -> list[_Letter]:
        """One letter, or the end of a stage, as often as the number behind it says."""
        letter = self.rest.popleft()
        if letter.letter not in (*_MEANINGS, _NEXT_STAGE):
            there_is = ", ".join(
                f"{each} ({meaning})" for each, meaning in _MEANINGS.items()
            )
            what = f"`{letter.letter}`, where there is {there_is}, `|`, and `(t|)*3`"
            raise self.error(letter.place, what)
        return self.multiplied([letter]) if self.is_next("*") else [letter]

    def multiplied(self, letters: list[_Letter]) -> list[_Letter]:
        """Letters as often as is said by the number behind the `*` that comes next."""
        start = self.rest.popleft()
        digits = ""
        while self.rest and self.rest[0].letter.isdecimal():
            digits += self.rest.popleft().letter
        if not digits:
            raise self.error(start.place, "`*` without a number behind it")
        # A number may have more digits than Python reads.
        if len(digits) > _DIGITS or len(letters) * int(digits) > _MOST:
            raise self.error(start.place, f"more than {_MOST:,} letters")
        return letters * int(digits)

    def is_next(self, letter: str) -> bool:
        """Whether a letter comes next."""
        return bool(self.rest) and self.rest[0].letter == letter

    def error(self, place: int, what: str) -> PipelineError:
        return _error(self.text, place, what)


def _error(layout: str, place: int, what: str) -> PipelineError:
    """What is wrong with a layout, and where."""
    return PipelineError(f"`layout` has {what}\n  {layout}\n  {' ' * place}^")
