"""The ops of a rank from all calls of its program at once; see `schedlang.language.recorder`, which
takes them one by one.

What is unusual, and all that is wrong, is left to it, which can say what is wrong.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from operator import gt
from typing import Any

from schedlang.language.recorder import KINDS, Recorder
from schedlang.schedule.kinds import Kind


def record(recorder: Recorder, calls: list[Any], arity: int, overlaps: Mapping[int, int]) -> bool:
    """Record all compute ops of a rank, if they are known to be right.

    `calls` has them in one list: of each its word and place, for an `arity` of 2 its stage, and its
    microbatch. `overlaps` has for each place of an op that overlaps with others that of the first
    of them.
    """
    words, places, *named, microbatches = (
        calls[column :: 2 + arity] for column in range(2 + arity)
    )
    if recorder.sliced or (arity == 1 and len(recorder.stages) != 1):
        return False
    stages = named[0] if named else recorder.stages * len(words)
    if None in microbatches:
        if any(each is not None for each in microbatches):
            return False
        microbatches = _counted(words, stages)
        if not _resolve_owed(words, stages, microbatches):
            return False
    units = min(map(recorder.layout.units, recorder.stages), default=0)
    if not set(stages) <= set(recorder.stages) or (
        words and not 0 <= min(microbatches) <= max(microbatches) < units
    ):
        return False
    if overlaps and {"offload", "reload"} & set(words):
        return False
    kinds = KINDS | ({"B": Kind.I} if recorder.splits_backward else {})
    recorder.actions.extend(
        map(kinds.__getitem__, words), stages, microbatches, places, _groups(places, overlaps)
    )
    return True


def _counted(words: Sequence[str], stages: Sequence[int | None]) -> list[int]:
    """How many of its kind and stage have been before each op: the microbatch that is next."""
    numbers = {op: count() for op in set(zip(words, stages, strict=True))}
    # A backward is one thing whether it is written B or BW.
    numbers |= {("B", stage): each for (word, stage), each in numbers.items() if word == "BW"}
    return list(map(next, map(numbers.__getitem__, zip(words, stages, strict=True))))


def _resolve_owed(words: Sequence[str], stages: list[Any], microbatches: list[int]) -> bool:
    """Give each `W` the stage and microbatch that have waited longest, of its own stage or of all.

    Whether there is one for each, and it is known; it is not where some `W`s name their stage and
    others do not.
    """
    weights, halves = (
        [index for index, each in enumerate(words) if each == word] for word in ("W", "B")
    )
    owing = {stages[index] for index in weights}
    if len(owing) > 1 and None in owing:
        return False
    for stage in owing:
        owed = [index for index in halves if stage in (None, stages[index])]
        owes = [index for index in weights if stages[index] == stage]
        if len(owes) > len(owed) or any(map(gt, owed, owes)):
            return False
        for weight, half in zip(owes, owed, strict=False):
            stages[weight] = stages[half]
            microbatches[weight] = microbatches[half]
    return True


def _groups(places: Sequence[int], overlaps: Mapping[int, int]) -> list[int]:
    """The group of each op: ops that overlap have a number of their own."""
    if not overlaps:
        return [0] * len(places)
    numbers = accumulate(overlaps.get(place) == place for place in places)
    return [
        number if place in overlaps else 0 for place, number in zip(places, numbers, strict=True)
    ]
