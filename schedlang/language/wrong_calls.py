"""The faults of calls of ops: of stages and microbatches that there are not."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.layout import Layout
from schedlang.schedule.naming import Names


def wrong_stage(layout: Layout, rank: int, op: str, stage: int, location: int) -> Fault:
    """The fault for an op of a stage that the rank does not hold."""
    last = len(layout.placement) - 1
    help: str | None = None
    if not 0 <= stage <= last:
        message = f"`{op}` of stage {stage}, there are stages 0 to {last}"
        condition = "r > 0" if stage < 0 else "r < ranks - 1"
        way_out = f"leave it out where there is no such stage: `if {condition} {{ … }}`"
        if stage < 0 and len(layout.pipelines) > 1:
            # The text says of which pipeline, and where that has no such stage, the number is -1.
            there_are = ", ".join(islice(_names_of_stages(layout), 4))
            message = f"`{op}` of a stage that there is not: there are {there_are}"
            way_out = "each counts its stages from 0, on whichever ranks they are"
        return Fault("no-such-stage", message, location, way_out)
    holder = layout.placement[stage]
    name = Names(layout).stage(stage)
    message = f"`{op}` of stage {name} on rank {rank}, it is on rank {holder}"
    held = layout.placement.count(rank)
    if held > 1 and stage < held:
        help = f"the stage of this rank's chunk c is `stage(c)`: `{op}(stage(c), m)`"
    return Fault("not-on-this-rank", message, location, help)


def _names_of_stages(layout: Layout) -> Iterator[str]:
    """The first and the last stage of each pipeline."""
    names = Names(layout)
    for pipeline in layout.pipelines:
        first = names.stage(pipeline.start)
        last = names.stage(pipeline.stop - 1)
        yield f"`{first}` to `{last}`"


def wrong_slice(layout: Layout, op: str, number: int, location: int) -> Fault:
    """The fault for an op of a slice that does not exist."""
    message = f"`{op}` of slice {number}, there are slices 0 to {layout.slices - 1}"
    return Fault("no-such-slice", message, location)


def wrong_microbatch(
    layout: Layout, op: str, stage: int, number: int, location: int
) -> Fault:
    """The fault for an op of a microbatch that the stage does not have."""
    last = layout.units(stage) // layout.slices - 1
    message = f"`{op}` of microbatch {number // layout.slices}, there are microbatches 0 to {last}"
    return Fault("no-such-microbatch", message, location)


def too_many(
    fault: Fault,
    sites: Sites,
    locations: Sequence[int],
    stages: Sequence[int],
    index: int,
    number: int,
) -> Fault:
    """The fault for the call `index` of a rank, which comes after the last of so many microbatches;
    where another call took some of them, with the help that says so: a steady loop may have
    forgotten its warm-up.
    """
    location = fault.location
    counted_as = sites.counted_as
    by_others = Counter(
        other
        for other, stage in zip(locations[:index], stages[:index], strict=True)
        if stage == stages[index]
        and counted_as[other] == counted_as[location]
        and other != location
    )
    if not by_others:
        return fault
    other, done = by_others.most_common(1)[0]
    return Fault(
        fault.code,
        fault.message,
        location,
        f"{done} of {number} are done before: a loop here runs the others, "
        f"`microbatches - {done}` of them",
        {location: "", other: f"{done} of them are done here"},
    )
