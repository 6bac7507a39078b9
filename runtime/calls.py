"""A rank's actions as calls, each bound once to all that it needs; a step makes them one after the
other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from schedlang.plan.plan import Plan
from schedlang.ranks.lifetimes import begins, waits
from schedlang.ranks.norms import put_off
from schedlang.ranks.receipts import NEEDS, receipts
from schedlang.ranks.shards import shards
from schedlang.runtime.gradients.clipping import UpdateClip
from schedlang.runtime.gradients.sums import ReplicaSum
from schedlang.runtime.gradients.updates import Updates
from schedlang.runtime.stage.stage import Stage
from schedlang.runtime.transport.exchange import Exchange
from schedlang.runtime.transport.messages import Receive, Send, post_as_one
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.kinds import Kind

#: The index of an action; a call that does it or a part of it; and kind, stage and microbatch of
#: the op that it computes, the send that it begins, or the receive that it waits for.
Call = tuple[int, Callable[[], None], tuple[Kind, int, int] | None]


def prepare(
    rank: int,
    stages: dict[int, Stage],
    exchange: Exchange,
    max_gathered: int | None,
    updates: Sequence[Updates],
    clip: UpdateClip | None,
    plan: Plan,
    sums: Mapping[int, ReplicaSum],
) -> list[Call]:
    """The calls of a step, with the sums over replicas, by stage, and the optimizer steps of those
    within the plan.

    Of a plan without backwards, they evaluate.
    """
    calls = _Calls(plan, rank, stages, exchange, clip)
    calls.place_sums(sums)
    calls.place_updates(updates)
    calls.place_shards(max_gathered)
    return list(calls.of_a_step())


class _Calls:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: dict[int, Stage],
        exchange: Exchange,
        clip: UpdateClip | None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.stages = stages
        self.exchange = exchange
        self.clip = clip
        self.actions = plan.ranks[rank]
        self.sends: dict[int, Send] = {}
        self.receives: dict[int, Receive] = {}
        for index in range(len(self.actions)):
            if is_transfer(self.actions.kind[index]):
                kind, number, microbatch = self.op(index)
                box = stages[plan.layout.stage_of(kind, number)].box(kind, number)
                message = exchange.message(kind, number, microbatch, box)
                if isinstance(message, Send):
                    self.sends[index] = message
                else:
                    self.receives[index] = message
        self.received = {self.op(index): each for index, each in self.receives.items()}
        #: What is done before an action, and after one, or in an op once its message has come.
        self.before: dict[int, list[Callable[[], None]]] = {}
        self.after: dict[int, list[Callable[[], None]]] = {}
        #: What is done once an op has run.
        self.done: dict[int, list[Callable[[], None]]] = {}
        #: How stages are updated; and the updates that are put off to an action.
        self.update: dict[int, Callable[[], None]] = {
            number: stage.update for number, stage in stages.items()
        }
        self.put_off: dict[int, list[int]] = {}
        for update, place in put_off(plan, rank).items() if clip else ():
            self.put_off.setdefault(place, []).append(update)
        self.place_receives()
        self.place_waits()

    def op(self, index: int) -> tuple[Kind, int, int]:
        """An action's kind, stage and microbatch."""
        return (
            Kind(self.actions.kind[index]),
            self.actions.stage[index],
            self.actions.microbatch[index],
        )

    def place_receives(self) -> None:
        """By gloo, receives begin some ops early: it minds no order, and has less to say where they
        come first.
        """
        if not self.exchange.has_batches:
            for receive, place in begins(self.plan, self.rank, early=True).items():
                self.before.setdefault(place, []).append(self.receives[receive].post)

    def place_waits(self) -> None:
        """A send is waited for when it is known to have been received, or the window closes."""
        received = receipts(self.plan, self.rank)
        for send, place in waits(self.plan, self.rank).items():
            self.after.setdefault(received[send], []).append(self.sends[send].complete)
            if place < received[send]:
                self.after.setdefault(place, []).append(self.sends[send].complete_if_posted)

    def place_sums(self, sums: Mapping[int, ReplicaSum]) -> None:
        """Sums of gradients begin when these are whole and are there at the end; of stages with
        updates, before each.

        All replicas of a rank come to them in the same order.
        """
        for number, each in sums.items():
            ops = [index for index, stage in enumerate(self.actions.stage) if stage == number]
            updates = [index for index in ops if self.actions.kind[index] == Kind.U]
            backwards = [index for index in ops if self.actions.kind[index] in (Kind.B, Kind.W)]
            for index in updates:
                self.before.setdefault(index, []).extend([each.begin, each.end])
            if backwards and not updates:
                self.done.setdefault(backwards[-1], []).append(each.begin)
                self.after.setdefault(len(self.actions), []).append(each.end)

    def place_updates(self, updates: Sequence[Updates]) -> None:
        """The sums for optimizer steps of replicas begin as soon as the rank has done its part."""
        for each in updates:
            for index in each.lasts(self.plan, self.rank):
                self.done.setdefault(index, []).append(each.begin)
            self.update |= {stage.number: partial(each.update, stage) for stage in each.stages}

    def place_shards(self, max_gathered: int | None) -> None:
        """The weights of sharded stages are gathered for their ops, of all at once or of so many,
        and let go of.
        """
        sharded = {number: stage.sharded for number, stage in self.stages.items() if stage.sharded}
        found = shards(self.actions, sharded, max_gathered or len(sharded))
        for calls, places in ((self.before, found.before), (self.done, found.after)):
            for index, steps in places.items():
                calls.setdefault(index, []).extend(
                    partial(sharded[stage].do, what) for what, stage in steps
                )

    def of_a_step(self) -> Iterator[Call]:
        """All calls, in order."""
        for batch in self.actions.batches():
            if not is_transfer(self.actions.kind[batch.start]):
                for index in batch:
                    yield from self.compute(index)
            elif self.exchange.has_batches:
                yield batch.start, self.as_one(batch), self.op(batch.start)
                for index in batch:
                    yield from self.others(self.after, index)
            else:
                for index in batch:
                    yield from self.alone(index)
        end = len(self.actions)
        yield from self.late_updates(end, end - 1)
        yield from ((end - 1, call, None) for _, call, _ in self.others(self.after, end))

    def others(self, calls: dict[int, list[Callable[[], None]]], index: int) -> Iterator[Call]:
        """What is done before or after an action."""
        return ((index, call, None) for call in calls.get(index, ()))

    def as_one(self, batch: range) -> Callable[[], None]:
        """Messages that NCCL takes as one: sends first, as they stand in Megatron's batches."""
        messages: list[Send | Receive] = [
            self.sends[index] for index in batch if index in self.sends
        ]
        messages += [self.receives[index] for index in batch if index in self.receives]
        return messages[0].post if len(messages) == 1 else partial(post_as_one, messages)

    def alone(self, index: int) -> Iterator[Call]:
        """A message by gloo."""
        yield from self.others(self.before, index)
        if index in self.sends:
            yield index, self.sends[index].post, self.op(index)
        yield from self.others(self.after, index)

    def compute(self, index: int) -> Iterator[Call]:
        """A compute op, after the waits for what it needs from other ranks."""
        kind, stage, microbatch = op = self.op(index)
        yield from self.late_updates(index, index)
        yield from self.others(self.before, index)
        numbers = self.plan.layout.numbers(NEEDS[kind], stage) if kind in NEEDS else []
        needs = [
            need
            for number in numbers
            if (need := (NEEDS[kind], number, microbatch)) in self.received
        ]
        for need in needs:
            yield index, self.received[need].arrive, need
        if needs:
            yield from self.others(self.after, index)
        if kind == Kind.U and self.clip:
            yield index, partial(self.clip.take, stage, max(microbatch, 0)), None
        else:
            yield index, self.call(*op), op
        yield from self.others(self.done, index)

    def late_updates(self, index: int, stands: int) -> Iterator[Call]:
        """The updates that were put off to an action; the rank stands at an action meanwhile."""
        for update in self.put_off.get(index, ()):
            _, number, microbatch = op = self.op(update)
            assert self.clip is not None
            yield stands, partial(self.clip.apply, number, max(microbatch, 0)), op

    def call(self, kind: Kind, number: int, microbatch: int) -> Callable[[], None]:
        """What an op does."""
        stage = self.stages[number]
        if kind == Kind.U:
            return self.update[number]
        call = {
            Kind.F: stage.evaluate if self.plan.is_forward_only else stage.forward,
            Kind.B: stage.backward,
            Kind.I: stage.backward_input,
            Kind.W: stage.backward_weight,
            Kind.R: stage.recompute,
            Kind.OFFLOAD: stage.offload,
            Kind.RELOAD: stage.reload,
        }[kind]
        return partial(call, microbatch)
