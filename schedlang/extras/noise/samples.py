"""One walk over an event graph for many samples of its durations: every event has a row of times,
one for each sample.

The events, what waits for what, and the rule by which an event happens are those of the graph
(`schedlang.proof.graph`), to the last bit; only durations are multiplied by factors.
"""

from itertools import pairwise

import numpy as np
from attrs import evolve

from schedlang.proof.events import Events
from schedlang.proof.graph import NOTHING, Graph, walk
from schedlang.schedule.arrays import Flags, Floats, Ints


class Samples:
    """The events of a schedule, of which all happen, in an order in which many samples are walked
    at once.

    `factors` are a table with a row for each action of the schedule, for each of its sums and
    gathers, and one more, of ones; and a column for each sample. What an op or a copy takes is
    multiplied by its own factor, the way of a message by that of its receive; ops that overlap have
    that of the first.
    """

    # Events of one level wait for none of each other, so a level is done at once:
    #
    #     level       1     2     3
    #     thread 0    a ─── b ─── c
    #     thread 1    d ─── e ──╯
    #
    # Events stand level after level. Behind the last stands the begin of all, at time 0.

    def __init__(self, events: Events) -> None:
        self.events = events
        graph = events.graph
        count = len(graph.waits)
        # The walk counts the events on the longest way to each.
        level = walk(evolve(graph, takes=np.ones(count), delay=np.zeros(count)))
        self.order = np.argsort(level, kind="stable")
        self.bounds = np.flatnonzero(
            np.diff(level[self.order], prepend=0, append=-1)
        ).tolist()
        #: Where each event stands, and, at NOTHING, the begin of all.
        self.place = np.empty(count + 1, np.int64)
        self.place[self.order] = np.arange(count)
        self.place[NOTHING] = count
        #: What each event waits for, on its own thread and elsewhere; the begin of all for itself.
        self.before = np.append(self.place[graph.before[self.order]], count)
        self.waits = np.append(self.place[graph.waits[self.order]], count)
        self.delay = np.append(graph.delay[self.order], 0.0)[:, np.newaxis]
        self.takes = np.append(graph.takes[self.order], 0.0)[:, np.newaxis]
        #: The rows of their factors.
        self.delay_of = np.append(self._messages()[self.order], NOTHING)
        self.takes_of = np.append(self._actions()[self.order], NOTHING)

    @property
    def take_time(self) -> Flags:
        """Which ops and copies take any time, and the receives of which messages; behind all
        actions, the sums and gathers.
        """
        actions = np.concatenate(
            [self.takes_of[self.takes[:, 0] > 0], self.delay_of[self.delay[:, 0] > 0]]
        )
        take_time = np.zeros(
            len(self.events.schedule.columns) + len(self.events.beside[0]), bool
        )
        take_time[actions[actions != NOTHING]] = True
        return take_time

    def _messages(self) -> Ints:
        """For each event, the receive of the message that it waits for, or NOTHING."""
        # The last one is that of no edge.
        receive = np.append(self.events.receive, NOTHING)
        return receive[self.events.graph.edge]

    def _actions(self) -> Ints:
        """For each event, the row of what takes its time, or NOTHING: of an op or a copy, or
        behind all actions, of a sum or a gather.
        """
        columns = self.events.schedule.columns
        is_head = columns.batch == np.arange(len(columns))
        rows = np.flatnonzero(is_head & ~columns.is_transfer)
        graph = self.events.graph
        actions = np.full(len(graph.waits), NOTHING)
        actions[graph.over[self.events.item[rows]]] = rows
        beside = graph.over[self.events.beside[0]]
        actions[beside] = len(columns) + np.arange(len(beside))
        return actions

    def times(self, factors: Floats) -> Floats:
        """When each event happens in each sample."""
        times = np.zeros((len(self.takes), factors.shape[1]))
        for begin, end in pairwise(self.bounds):
            now = times[begin:end]
            now[:] = self._arrivals(slice(begin, end), times, factors)
            np.maximum(now, times[self.before[begin:end]], out=now)
            # Most events of lanes take no time.
            if self.takes[begin:end].any():
                now += self.takes[begin:end] * factors[self.takes_of[begin:end]]
        return times

    def _arrivals(self, places: slice | Ints, times: Floats, factors: Floats) -> Floats:
        """When what events wait for beside their threads is there."""
        arrivals: Floats = times[self.waits[places]]
        delay = self.delay[places]
        if delay.any():
            arrivals += delay * factors[self.delay_of[places]]
        return arrivals

    def makespans(self, times: Floats, factors: Floats) -> Floats:
        """For each sample, the time from the first start of an op to the last end of one; sums and
        gathers count as well.
        """
        first, last = self._outermost()
        arrivals = self._arrivals(first, times, factors)
        starts = np.maximum(times[self.before[first]], arrivals)
        makespans = times[last].max(axis=0) - starts.min(axis=0)
        return self.events.fixed.numbers(makespans)

    def _outermost(self) -> tuple[Ints, Ints]:
        """The places of the first op of each rank, and of the last; and of all sums and gathers."""
        columns = self.events.schedule.columns
        ops = np.flatnonzero(columns.is_computed)
        is_first = np.diff(columns.rank[ops], prepend=-1) != 0
        is_last = np.append(is_first[1:], True)
        over = self.events.graph.over
        beside = self.events.beside[0]
        firsts, lasts = (
            self.place[over[np.append(self.events.item[ops[which]], beside)]]
            for which in (is_first, is_last)
        )
        return firsts, lasts

    def longer(self, times: Floats, factors: Floats) -> Floats:
        """How much more than at factors of 1 is taken on the chain of events that ends last, in
        each sample: a row for the ops and copies of each rank, and one for the messages, sums and
        gathers.
        """
        columns = self.events.schedule.columns
        ranks = len(self.events.schedule.ranks)
        # What is no action counts with the messages.
        rank = np.append(columns.rank, np.full(len(self.events.beside[0]) + 1, ranks))
        samples = np.arange(factors.shape[1])
        longer = np.zeros((ranks + 1, len(samples)))
        last = self._outermost()[1]
        event = last[times[last].argmax(axis=0)]
        begin_of_all = len(self.takes) - 1
        while (event < begin_of_all).any():
            action = self.takes_of[event]
            more = self.takes[event, 0] * (factors[action, samples] - 1)
            longer[rank[action], samples] += more
            way = self.delay[event, 0] * factors[self.delay_of[event], samples]
            arrival = times[self.waits[event], samples] + way
            # Of two that come at once, the one on its own thread.
            is_late = arrival > times[self.before[event], samples]
            longer[ranks] += np.where(is_late, way - self.delay[event, 0], 0.0)
            event = np.where(is_late, self.waits[event], self.before[event])
        return self.events.fixed.numbers(longer)

    def graph_of(self, factors: Floats) -> Graph:
        """The graph of one sample, by the factors of all actions, and of none."""
        graph = self.events.graph
        takes = graph.takes * factors[self._actions()]
        delay = graph.delay * factors[self._messages()]
        return evolve(graph, takes=takes, delay=delay)
