"""A rank's actions as calls, each bound once to all that it needs; a step makes them one after the
other. Steps may follow several plans, whose calls share stages, messages and parts.

One compute op becomes, in this order:

    calls before it        of parts, and receives that begin early
    waits                  for the messages that it needs
    calls once they came   waits for sends that these messages show to be received
    the op itself
    calls after it         of parts

Of two ops that a part makes side by side, both are waited for first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.ranks.receipts import begins, receipts, waits
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.messages import Receive, Send
from schedlang.runtime.part import Op, Part, Together, When
from schedlang.runtime.stage import Stage
from schedlang.schedule.actions import is_collective, is_transfer
from schedlang.schedule.kinds import AWAITS, Kind

if TYPE_CHECKING:
    from schedlang.runtime.message_batches import post_as_one
else:
    # For batches of several messages, on GPUs.
    post_as_one = on_demand("schedlang.runtime.message_batches.post_as_one")

#: The index of an action; a call that does it or a part of it; and where the call is to be
#: recorded, the op that it computes, the send that it begins, or the receive that it waits for.
Call = tuple[int, Callable[[], None], Op | None]


def prepare(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    exchange: Exchange,
    parts: Sequence[Part],
    warm_up: int = 0,
) -> list[Call]:
    """The calls of a step of one rank. Of a plan without backwards, they evaluate.

    Those of its `warm_up`, the actions before this index, begin no receive of a later one.
    """
    return list(_Walk(plan, rank, stages, exchange, parts, warm_up).calls())


class _Walk:
    """The actions of a rank, and what is called before and after each of them, by index."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        exchange: Exchange,
        parts: Sequence[Part],
        warm_up: int,
    ) -> None:
        self.plan = plan
        self.warm_up = warm_up
        self.rank = rank
        self.exchange = exchange
        self.actions = plan.ranks[rank]
        self.ops: dict[tuple[Kind, int], Callable[[int], None]] = {}
        for number, stage in stages.items():
            self.ops |= stage.ops
            if plan.is_forward_only:
                self.ops[Kind.F, number] = stage.evaluate
        #: Ops that a part makes side by side, by the index of the first one.
        self.pairs: dict[int, Together] = {}
        # What the calls of an op are made of, by the index of the action that they stand beside;
        # behind the last action is the end of the step. `begun` are receives that begin there,
        # `once_arrived` waits for sends that an arrived message shows to be received.
        self.begun: dict[int, list[Callable[[], None]]] = {}
        self.before: dict[int, list[tuple[Callable[[], None], Op | None]]] = {}
        self.once_arrived: dict[int, list[Callable[[], None]]] = {}
        self.after: dict[int, list[Callable[[], None]]] = {}
        #: Ops that are recorded elsewhere than at their own place.
        self.put_off: set[Op] = set()
        self.sends: dict[int, Send] = {}
        self.receives: dict[int, Receive] = {}
        self._make_messages(stages)
        self._place_messages()
        self._place_parts(
            list(chain(parts, *(stage.parts for stage in stages.values())))
        )

    def op(self, index: int) -> Op:
        """An action's kind, stage and microbatch."""
        return (
            Kind(self.actions.kind[index]),
            self.actions.stage[index],
            self.actions.microbatch[index],
        )

    def _make_messages(self, stages: Mapping[int, Stage]) -> None:
        boxes = {
            key: box for stage in stages.values() for key, box in stage.boxes.items()
        }
        for index in range(len(self.actions)):
            if is_transfer(self.actions.kind[index]):
                kind, number, microbatch = self.op(index)
                message = self.exchange.message(
                    kind, number, microbatch, boxes[kind, number]
                )
                if isinstance(message, Send):
                    self.sends[index] = message
                else:
                    self.receives[index] = message
        self.received = {
            self.op(index): receive for index, receive in self.receives.items()
        }

    def _place_messages(self) -> None:
        # With gloo, receives begin some ops early: it matches messages by tags, not by order, and a
        # message takes less time if its receive has begun.
        if not self.exchange.has_batches:
            early = self.exchange.has_tags
            for receive, place in begins(self.plan, self.rank, early).items():
                if receive >= self.warm_up:
                    place = max(place, self.warm_up)
                self.begun.setdefault(place, []).append(self.receives[receive].post)
        # The rank waits for a send once it is known to have been received, or at the end of its
        # window.
        received = receipts(self.plan, self.rank)
        for send, place in waits(self.plan, self.rank).items():
            message = self.sends[send]
            self.once_arrived.setdefault(received[send], []).append(message.complete)
            # The window ends before any message shows that the send was received, so the rank may
            # have to wait there. In a first step, the peer begins its receive only where it needs
            # the message, so a wait here could deadlock: then the rank waits at the later place.
            if place < received[send]:
                self.once_arrived.setdefault(place, []).append(
                    message.complete_if_posted
                )

    def _place_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.ops |= part.ops
            self.pairs |= part.pairs(self.plan, self.rank)
            for extra in part.calls(self.plan, self.rank):
                if extra.when is When.BEFORE:
                    self.before.setdefault(extra.index, []).append(
                        (extra.call, extra.op)
                    )
                else:
                    self.after.setdefault(extra.index, []).append(extra.call)
                if extra.op is not None:
                    self.put_off.add(extra.op)

    def calls(self) -> Iterator[Call]:
        """All calls, in order."""
        for batch in self.actions.batches():
            if not is_transfer(self.actions.kind[batch.start]):
                yield from self._ops(batch)
            elif self.exchange.has_batches:
                yield batch.start, self._as_one(batch), self.op(batch.start)
                for index in batch:
                    yield from self._once_arrived(index)
            else:
                for index in batch:
                    yield from self._transfer(index)
        # Calls at the end of the step count as part of the last action.
        end = len(self.actions)
        for calls in (
            self._begun(end),
            self._before(end),
            self._once_arrived(end),
            self._after(end),
        ):
            yield from ((end - 1, call, op) for _, call, op in calls)

    def _begun(self, index: int) -> Iterator[Call]:
        """The receives that begin at this index."""
        return ((index, call, None) for call in self.begun.get(index, ()))

    def _before(self, index: int) -> Iterator[Call]:
        return ((index, call, op) for call, op in self.before.get(index, ()))

    def _once_arrived(self, index: int) -> Iterator[Call]:
        return ((index, call, None) for call in self.once_arrived.get(index, ()))

    def _after(self, index: int) -> Iterator[Call]:
        return ((index, call, None) for call in self.after.get(index, ()))

    def _as_one(self, batch: range) -> Callable[[], None]:
        """A call that posts a batch of messages by NCCL: sends first, as in Megatron's batches."""
        messages: list[Send | Receive] = [
            self.sends[index] for index in batch if index in self.sends
        ]
        messages += [self.receives[index] for index in batch if index in self.receives]
        return (
            messages[0].post if len(messages) == 1 else partial(post_as_one, messages)
        )

    def _transfer(self, index: int) -> Iterator[Call]:
        """A single message: a send begins here; a receive has begun, and the op that needs it
        waits.
        """
        yield from self._begun(index)
        yield from self._before(index)
        if index in self.sends:
            yield index, self.sends[index].post, self.op(index)
        yield from self._once_arrived(index)

    def _ops(self, batch: range) -> Iterator[Call]:
        """The compute ops of a batch: pairs run at the same time, others one after the other."""
        firsts = [index for index in batch if index in self.pairs]
        for first in firsts:
            pair = self.pairs[first]
            yield from self._begun(first)
            yield from self._arrived(first)
            yield from self._arrived(pair.second)
            yield first, pair.begin, self.op(first)
            # These receives are for later ops, so they need no memory while the first op runs.
            yield from self._begun(pair.second)
            yield pair.second, pair.end, self.op(pair.second)
            yield from self._after(first)
            yield from self._after(pair.second)
        together = {*firsts, *(self.pairs[first].second for first in firsts)}
        for index in batch:
            if index not in together:
                yield from self._compute(index)

    def _compute(self, index: int) -> Iterator[Call]:
        """A compute op, after the waits for the messages that it needs."""
        kind, stage, microbatch = op = self.op(index)
        yield from self._begun(index)
        yield from self._arrived(index)
        # The argument of an update is its number, 0 if it is the only one of a step.
        argument = max(microbatch, 0)
        if not is_collective(kind):
            call = partial(self.ops[kind, stage], argument)
            yield index, call, None if op in self.put_off else op
        elif (kind, stage) in self.ops:
            yield index, partial(self.ops[kind, stage], argument), None
        # Without an op of a part, the stage is not sharded, and a collective does nothing.
        yield from self._after(index)

    def _arrived(self, index: int) -> Iterator[Call]:
        """The calls before a compute op; the last ones are the waits for the messages that it
        needs.
        """
        kind, stage, microbatch = self.op(index)
        yield from self._before(index)
        numbers = (
            self.plan.layout.numbers(AWAITS[kind], stage) if kind in AWAITS else []
        )
        messages = [(AWAITS[kind], number, microbatch) for number in numbers]
        # Values from a stage of the same rank are no messages.
        messages = [message for message in messages if message in self.received]
        for message in messages:
            yield index, self.received[message].arrive, message
        # Only an arrived message shows that earlier sends were received.
        if messages:
            yield from self._once_arrived(index)
