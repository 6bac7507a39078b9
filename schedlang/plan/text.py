"""The actions of a rank, read from their text; see `Actions.text`."""

from schedlang.schedule.actions import (
    NO_MICROBATCH,
    OVERLAP,
    WORD,
    Actions,
    is_beside,
    is_transfer,
)
from schedlang.schedule.kinds import OF_STAGE, Kind

_KINDS: dict[str, int] = {kind.name: kind for kind in Kind}


def parse_actions(text: str, sources: list[int]) -> Actions:
    """The actions of a text as `Actions.text` writes it; ValueError names the first word that is
    not an action.
    """
    return _parse_plain(text, sources) or _parse_words(text, sources)


def _parse_plain(text: str, sources: list[int]) -> Actions | None:
    """The actions, if each is issued alone and has a microbatch; else None.

    Most texts are like that, and this takes a fraction of the time of looking at word after word.
    """
    words = WORD.findall(text)
    if len(words) != len(sources) or not words:
        return None
    # What is between the words must be blanks.
    if " ".join(map("".join, words)) != text:
        return None
    stages, kinds, microbatches = zip(*words, strict=True)
    if "" in microbatches:
        return None
    actions = Actions()
    actions.extend(
        map(_KINDS.__getitem__, kinds),
        map(int, stages),
        map(int, microbatches),
        sources,
        [0] * len(sources),
    )
    return actions


def _parse_words(text: str, sources: list[int]) -> Actions:
    """The actions of any text, word by word; ValueError for what is not an action."""
    actions = Actions()
    groups = 0
    for token in text.split():
        in_brackets = token.removesuffix(OVERLAP)
        overlaps = token.endswith(OVERLAP)
        is_group = in_brackets.startswith("(") and in_brackets.endswith(")")
        members = [token]
        group = 0
        if is_group:
            members = in_brackets[1:-1].split(";")
            groups += 1
            group = groups
        for member in members:
            kind, stage, microbatch = _parse_word(member, token)
            # A group is a batch of transfers, or ops that overlap; what goes on beside
            # them stands alone.
            if is_group and (is_transfer(kind) == overlaps or is_beside(kind)):
                raise ValueError(
                    f"`{token}`: transfers are batched alone, compute ops as {OVERLAP}"
                )
            if len(actions) == len(sources):
                raise ValueError("there are fewer sources than actions")
            actions.add(kind, stage, microbatch, sources[len(actions)], group)
    if len(actions) != len(sources):
        raise ValueError("there are more sources than actions")
    return actions


def _parse_word(text: str, token: str) -> tuple[Kind, int, int]:
    """Kind, stage and microbatch of one word; ValueError names the token it stands in."""
    match = WORD.fullmatch(text)
    if match is None:
        raise ValueError(f"`{token}` is not an action")
    stage, name, number = match.groups()
    if number is not None:
        return Kind[name], int(stage), int(number)
    # The only update of a schedule needs no number.
    if Kind[name] in OF_STAGE:
        return Kind[name], int(stage), NO_MICROBATCH
    raise ValueError(f"`{token}` is not an action")
