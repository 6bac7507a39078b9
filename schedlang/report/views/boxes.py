"""The boxes of a picture."""

from attrs import frozen

from schedlang.schedule.timeline import Bar


@frozen
class Box:
    """An action as a box in the row of its rank, or below that for a copy to or from the host.

    `label` is the microbatch, `3`, or the slice of one, `3.1`; an optimizer step has `U`. `chunk`
    counts the stages of the rank, and `version` is that of the weights that the op reads. Boxes
    with the same `overlap` above 0 are ops that run as one, and `together` has the bars of all of
    them. `line` is the index of the program's line in `Picture.lines`.
    """

    rank: int
    bar: Bar
    label: str
    chunk: int
    version: int
    overlap: int
    line: int
    together: tuple[Bar, ...] = ()

    # Ops that run as one are one box, which is cut into a part for each of them, below each other:
    #
    #    start                end
    #      ├───────────────────┤
    #      │        F3         │  part 0
    #      ├───────────────────┤
    #      │        B1         │  part 1
    #      └───────────────────┘

    @property
    def start(self) -> float:
        """Where the box begins, with all that runs as one with its op."""
        return (self.together or (self.bar,))[0].start

    @property
    def end(self) -> float:
        """Where the box ends."""
        return (self.together or (self.bar,))[-1].end

    @property
    def parts(self) -> int:
        """Into how many parts the box is cut."""
        return len(self.together) or 1

    @property
    def part(self) -> int:
        """Which of the parts the op is, from above."""
        return self.together.index(self.bar) if self.together else 0
