"""The actions of ranks as text, and back; see `Actions.text`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schedlang.schedule.actions import (
    NO_MICROBATCH,
    OVERLAP,
    WORD,
    Actions,
    is_beside,
    is_transfer,
    word,
)
from schedlang.schedule.columns import Ints, is_any
from schedlang.schedule.kinds import OF_STAGE, TRANSFERS, Kind

_KINDS: dict[str, int] = {kind.name: kind for kind in Kind}

#: Texts of one length, which end in zeros: of each row its characters.
Table = NDArray[np.uint8]


def texts(ranks: Sequence[Actions]) -> list[str]:
    """The text of each rank's actions."""
    stages = 1 + max(max(actions.stage, default=0) for actions in ranks)
    microbatches = 1 + max(max(actions.microbatch, default=0) for actions in ranks)
    words = _table(
        [word(kind, stage, NO_MICROBATCH) for kind in Kind for stage in range(stages)]
    )
    # The last row is found under NO_MICROBATCH.
    numbers = [*range(microbatches), ""]
    alone = _table([f"{number} " for number in numbers])
    in_group = _table([f"{number}" for number in numbers])
    return [_text(actions, words, stages, alone, in_group) for actions in ranks]


def numbers_text(columns: Sequence[Sequence[int]]) -> list[str]:
    """The numbers of each column, separated by blanks."""
    largest = max(max(column, default=0) for column in columns)
    table = _table([f"{number} " for number in range(1 + largest)])
    return [_joined(table[np.asarray(column)]) for column in columns]


def _text(
    actions: Actions, words: Table, stages: int, alone: Table, in_group: Table
) -> str:
    """The text of a rank, from words for kinds and stages, and microbatches with a blank behind and
    without.
    """
    # Of each action, the texts that it consists of, filled up with zeros to one length; these are
    # dropped at the end. Two transfers that are issued as one:
    #
    #     open   word       microbatch   close
    #      (     0SEND_F        4         ;
    #      .     1RECV_B        1         ) and a blank
    kind = np.asarray(actions.kind)
    group = np.asarray(actions.group)
    microbatch = np.asarray(actions.microbatch)
    which: Ints = (kind - np.int32(1)) * stages + np.asarray(actions.stage)
    if not group.any():
        return _joined(np.concatenate([words[which], alone[microbatch]], axis=1))
    # `goes_on[i]`: action i is in the group of the one before it. With an entry more, so that where
    # a group begins and where it ends are both changes of it:
    #
    #     group      0   1   1   0   2   2   2
    #     goes_on    0   0   1   0   0   1   1   0
    #     begins     0   1   0   0   1   0   0
    #     ends       0   0   1   0   0   0   1
    goes_on = np.zeros(len(group) + 1, bool)
    goes_on[1:-1] = (group[1:] > 0) & (group[1:] == group[:-1])
    begins = goes_on[1:] & ~goes_on[:-1]
    ends = goes_on[:-1] & ~goes_on[1:]
    end = np.where(is_any(kind, *TRANSFERS), 2, 3)
    close = np.where(ends, end, goes_on[1:])
    parts = (
        _OPEN[begins.view(np.int8)],
        words[which],
        in_group[microbatch],
        _CLOSE[close],
    )
    return _joined(np.concatenate(parts, axis=1))


def _table(texts: Sequence[str]) -> Table:
    return np.array(texts, "S").view(np.uint8).reshape(len(texts), -1)


def _joined(rows: Table) -> str:
    """All rows as one text, without the blank at its end."""
    return str(rows[rows != 0].tobytes()[:-1], "ascii")


_OPEN = _table(["", "("])
_CLOSE = _table([" ", ";", ") ", f"){OVERLAP} "])


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
