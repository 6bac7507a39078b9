"""The boxes of a picture."""

from attrs import frozen

from schedlang.schedule.timeline import Bar


@frozen
class Box:
    """An action as a box in the row of its rank, or below that for a copy to or from the host.

    `label` is the microbatch, `3`, or the slice of one, `3.1`; an optimizer step has `U`. `chunk`
    counts the stages of the rank, and `version` is that of the weights that the op reads. Boxes
    with the same `overlap` above 0 are ops that run as one. `line` is the index of the program's
    line in `Picture.lines`.
    """

    rank: int
    bar: Bar
    label: str
    chunk: int
    version: int
    overlap: int
    line: int
