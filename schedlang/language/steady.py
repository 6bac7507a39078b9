"""Programs without a flush: their ops stand in a `warmup` and a `steady` part."""

from collections.abc import Sequence

import numpy as np

from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.actions import Actions
from schedlang.schedule.columns import actions_of, columns_of
from schedlang.schedule.layout import Layout
from schedlang.schedule.naming import Names
from schedlang.schedule.schedule import Stream


def make_stream(layout: Layout, sites: Sites, orders: Sequence[Actions]) -> Stream:
    """The stream of a program that has parts; a fault if it has no `steady`."""
    if "steady" not in sites.parts:
        help = "in a schedule with a flush, write the ops of `warmup` before the others"
        raise Fault("missing-part", "there is a `warmup`, but no `steady`", 0, help)
    columns = columns_of(orders)
    parts = {location: site.part for location, site in sites.ops.items()}
    outside = [location for location, part in parts.items() if not part]
    wrong = np.flatnonzero(np.isin(columns.source, outside))
    if len(wrong):
        rank, index = columns.place(int(wrong[0]))
        name = Names(layout).of(orders[rank], index)
        message = f"`{name}` stands outside of `warmup` and `steady`"
        raise Fault("steady", message, int(columns.source[wrong[0]]))

    def of_part(name: str) -> Sequence[Actions]:
        locations = [location for location, part in parts.items() if part == name]
        rows = np.flatnonzero(np.isin(columns.source, locations))
        return actions_of(len(orders), columns.taken(rows))

    return Stream(of_part("warmup"), of_part("steady"))
