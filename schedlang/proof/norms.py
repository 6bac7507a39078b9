"""Updates that are clipped by the norm of all gradients: does a rank wait for that norm in vain?

A rank waits for the norm of an update at the first action that needs the update (see
`schedlang.ranks.norms`), until every rank has its own part of it.
"""

import numpy as np

from schedlang.proof.channels import channels_of
from schedlang.proof.graph import NEVER, Graph, Items
from schedlang.ranks.norms import put_off
from schedlang.schedule.actions import Actions, is_update
from schedlang.schedule.kinds import STEPS
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import GLOO, PORTABLE


def why_not(plan: Schedule) -> str | None:
    """Why the updates of a plan cannot be clipped by the norm of all gradients, if so.

    That is seen where every send waits for its receive: what comes to its end there does so on all
    transports.
    """
    if plan.transport != PORTABLE:
        return f"the plan is proved for `{plan.transport}` alone, and must be for all transports"
    if plan.layout.models:
        return "it trains several models, of which each has a norm of its own"
    if len(plan.layout.pipelines) > 1:
        return "its stages have replicas in other pipelines, whose gradients they also wait for"
    for stage, rank in enumerate(plan.placement):
        ops = list(zip(plan.ranks[rank].kind, plan.ranks[rank].stage, strict=True))
        if (
            plan.layout.trains(stage)
            and sum(ops.count((kind, stage)) for kind in STEPS) != plan.layout.updates
        ):
            return f"the plan does not update stage {stage} itself (`U`)"
    return _Norms(plan).explain()


class _Norms:
    """The event graph of a plan in which a rank waits at each batch of transfers for the other
    sides, and for norms. Each batch of actions is an item, and so is the end of each rank.
    """

    # A rank makes its part of the norm with its last `U` of an update, and waits for all parts
    # before the first action that needs the update. In vain, where that closes a circle:
    #
    #     rank 0   …  waits for the norm    F4    SEND_F4
    #                      ▲                         │
    #                      │                         ▼
    #     rank 1   …       │                      RECV_F4   …   U0, its part of the norm
    #                      └────────────────────────────────────┘

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        columns = plan.columns
        rows = np.arange(len(columns))
        self.heads = rows[columns.batch == rows]
        self.items = Items()
        item = np.zeros(len(columns), np.int64)
        item[self.heads] = self.items.add(columns.rank[self.heads], self.heads)
        self.item = item[columns.batch]
        ranks = np.arange(len(plan.ranks))
        self.end = self.items.add(ranks, columns.first[1:])
        #: For each rank the place of its part of each update, its last `U`.
        self.parts = [_last_updates(actions) for actions in plan.ranks]
        self.waits = [_waits(plan, rank) for rank in range(len(plan.ranks))]
        # Both sides of a transfer wait for each other,
        transfers = np.flatnonzero(columns.is_transfer)
        partner = channels_of(plan, GLOO).partner[transfers]
        others = np.where(partner >= 0, self.item[partner], NEVER)
        self.items.wait(self.item[transfers], others, at_begin=True)
        # and who makes an update for the parts of its norm.
        for rank, waits in enumerate(self.waits):
            for index, updates in waits.items():
                self._wait_for_norms(self.item_at(rank, index), updates)
        self.graph: Graph = self.items.graph()

    def item_at(self, rank: int, index: int) -> int:
        """The item of an action of a rank, by its index there, or of its end."""
        row = int(self.plan.columns.first[rank]) + index
        is_end = row == self.plan.columns.first[rank + 1]
        return int(self.end[rank] if is_end else self.item[row])

    def _wait_for_norms(self, item: int, updates: list[int]) -> None:
        """Let an item wait for the parts that all ranks have of some updates."""
        targets = [
            self.item_at(rank, parts[update])
            for update in updates
            for rank, parts in enumerate(self.parts)
            if update in parts
        ]
        self.items.wait(np.full(len(targets), item), np.array(targets, np.int64))

    def explain(self) -> str | None:
        """What a rank waits for in vain, if that is a norm; of several ranks, the first one."""
        if self.graph.is_whole:
            return None
        texts = map(self._explain, range(len(self.plan.ranks)))
        return next((text for text in texts if text is not None), None)

    def _explain(self, rank: int) -> str | None:
        # Nobody waits at its end alone: the norms of all updates but the last are there by then, so
        # who has not made the last one would wait for no norm, but for a transfer, and the plan is
        # proved.
        batches = self.plan.ranks[rank].batches()
        stuck = (
            each for each in batches if not self.is_over(self.item_at(rank, each.start))
        )
        batch = next(stuck, range(0))
        late = (
            (update, other, parts[update])
            for index in batch
            for update in self.waits[rank].get(index, ())
            for other, parts in enumerate(self.parts)
            if update in parts and not self.is_over(self.item_at(other, parts[update]))
        )
        first = next(late, None)
        if first is None:
            return None
        update, other, place = first
        at = batch.start
        return (
            f"before `{self.plan.name_of(rank, at)}` ({self.plan.where(rank, at)}) rank {rank} "
            f"would wait in vain for the norm of update {update}: rank {other} has its part of it "
            f"only after `{self.plan.name_of(other, place)}` ({self.plan.where(other, place)})"
        )

    def is_over(self, item: int) -> bool:
        """Whether an item is ever over."""
        return self.graph.happened(int(self.graph.over[item]))


def _last_updates(actions: Actions) -> dict[int, int]:
    """The index of the last `U` of each update."""
    ops = enumerate(zip(actions.kind, actions.microbatch, strict=True))
    return {max(update, 0): index for index, (kind, update) in ops if is_update(kind)}


def _waits(plan: Schedule, rank: int) -> dict[int, list[int]]:
    """For each action of a rank before which updates are made, these updates."""
    updates = dict[int, list[int]]()
    for place, index in put_off(plan, rank).items():
        update = max(plan.ranks[rank].microbatch[place], 0)
        updates.setdefault(index, []).append(update)
    return updates
