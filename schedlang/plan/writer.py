"""Writes a plan file: the text of each rank's actions, and the indices of their spans."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.plan.file import (
    ACTIONS,
    CLOSES,
    END,
    NEXT,
    OPENS,
    SOURCES,
    Line,
    line_of,
)
from schedlang.schedule.actions import NO_MICROBATCH, OVERLAP, Actions, word
from schedlang.schedule.arrays import Ints, is_any
from schedlang.schedule.kinds import TRANSFERS, Kind

#: Texts of one length, which end in zeros: of each row its characters.
Table = NDArray[np.uint8]


def encode(head: dict[str, Any], ranks: Sequence[Actions]) -> bytes:
    """The file of a plan, from the actions and all its other fields."""
    actions, sources = texts_of(ranks)
    lines = list(map(line_of, actions, sources))
    text = json.dumps(head | {"lines": lines}, indent=1)
    # The document goes on where this one ends.
    start = text.removesuffix("\n}").encode() + b","
    return start + ACTIONS + _block(actions) + SOURCES + _block(sources) + END


def _block(lines: Sequence[str]) -> bytes:
    return NEXT.join(OPENS + line.encode() + CLOSES for line in lines)


def lines_of(ranks: Sequence[Actions]) -> Sequence[Line]:
    """The field `lines`."""
    return list(map(line_of, *texts_of(ranks)))


def texts_of(ranks: Sequence[Actions]) -> tuple[list[str], list[str]]:
    """The fields `actions` and `sources`, which have a line for each rank."""
    return texts(ranks), numbers_text([actions.source for actions in ranks])


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
