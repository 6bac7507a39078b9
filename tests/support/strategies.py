"""Random schedules that can run, by construction, and an oracle that runs plans its own way."""

from collections.abc import Container, Iterable
from functools import cache
from itertools import pairwise

from attrs import evolve
from hypothesis import strategies as st

from schedlang.diagnostics.source import Source, Span
from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.schedule import Schedule
from tests.support.graph import (
    far_edges,
    handovers,
    has_after,
    has_before,
    is_near,
    pieces,
    runs_ahead,
)
from tests.support.own_collectives import EVENTS, Begun, are_in_place
from tests.support.own_needs import HOPS
from tests.support.own_order import are_exchanged


@st.composite
def schedules(
    draw: st.DrawFn, may_skip: bool = True, may_freeze: bool = True
) -> Schedule:
    """A compute-only schedule, whose stages may be a graph, have skips, be frozen, or be those of
    several models: ready ops chosen at random until all are done.
    """
    ranks = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 5))
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    microbatches = draw(st.integers(1, 3))
    pipelines = (Pipeline("", 0, stages, microbatches),)
    if stages > 1 and may_skip and draw(st.integers(0, 2)) == 0:
        pipelines = draw(models(stages, microbatches))
    counts = [
        each.microbatches for each in pipelines for _ in range(each.start, each.stop)
    ]
    # Whether the backward of a stage and microbatch comes in two halves.
    split = {
        (s, m): draw(st.booleans()) for s in range(stages) for m in range(counts[s])
    }
    starts = {each.start for each in pipelines}
    # What a skip may lead between: stages with as many microbatches, and no neighbours of one
    # model.
    pairs = [
        (earlier, later)
        for later in range(stages)
        for earlier in range(later)
        if counts[earlier] == counts[later] and (earlier < later - 1 or later in starts)
    ]
    edges: tuple[tuple[int, int], ...] = ()
    if stages > 1 and may_skip and draw(st.integers(0, 2)) == 0:
        near = [(stage - 1, stage) for stage in range(1, stages) if stage not in starts]
        if pairs or near:
            edges = tuple(
                draw(
                    st.lists(
                        st.sampled_from(pairs + near),
                        unique=True,
                        min_size=1,
                        max_size=6,
                    )
                )
            )
        pairs = [pair for pair in pairs if pair not in edges]
    skips = (
        tuple(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)))
        if pairs and may_skip
        else ()
    )
    layout = Layout(
        placement, pipelines, skips=skips, edges=edges, models=len(pipelines) > 1
    )
    all_edges = far_edges(layout)
    all_edges += [
        (stage, stage + 1) for stage in range(stages) if is_near(layout, stage)
    ]
    trained = [
        stage for stage in range(stages) if not may_freeze or draw(st.integers(0, 3))
    ]
    # At least one, or the plan would be an inference.
    trained = trained or [draw(st.integers(0, stages - 1))]
    behind = trained_before(stages, all_edges, trained)
    done: set[tuple[str, int, int]] = set()
    programs = tuple(Actions() for _ in range(ranks))
    # Always an op that can run now, so the order can run on one process, and the plan on its ranks.
    while ready := _ready(all_edges, counts, split, trained, behind, done):
        word, stage, microbatch = ready[draw(st.integers(0, len(ready) - 1))]
        done.add((word, stage, microbatch))
        programs[placement[stage]].add(Kind[word], stage, microbatch, 0)
    frozen = tuple(stage for stage in range(stages) if stage not in trained)
    schedule = make_schedule(placement, microbatches, programs, skips, frozen, edges)
    return evolve(schedule, layout=evolve(layout, frozen=frozen))


@st.composite
def models(draw: st.DrawFn, stages: int, microbatches: int) -> tuple[Pipeline, ...]:
    """Several models of so many stages together, the first with so many microbatches."""
    cuts = sorted(draw(st.sets(st.integers(1, stages - 1), min_size=1, max_size=2)))
    bounds = list(pairwise([0, *cuts, stages]))
    counts = [microbatches, *(draw(st.integers(1, 3)) for _ in cuts)]
    return tuple(
        Pipeline(f"model{number}", start, stop, count)
        for number, ((start, stop), count) in enumerate(
            zip(bounds, counts, strict=True)
        )
    )


def trained_before(
    stages: int, edges: Iterable[tuple[int, int]], trained: Container[int]
) -> list[bool]:
    """For each stage whether it is trained, or one before it."""
    edges = list(edges)
    found: list[bool] = []
    for stage in range(stages):
        found.append(stage in trained or any(found[a] for a, b in edges if b == stage))
    return found


def make_schedule(
    placement: tuple[int, ...],
    microbatches: int,
    ranks: tuple[Actions, ...],
    skips: tuple[tuple[int, int], ...] = (),
    frozen: tuple[int, ...] = (),
    edges: tuple[tuple[int, int], ...] = (),
) -> Schedule:
    params = {"ranks": len(ranks), "microbatches": microbatches}
    whole = Pipeline("", 0, len(placement), microbatches)
    layout = Layout(placement, (whole,), skips=skips, edges=edges, frozen=frozen)
    return Schedule(
        "random", params, layout, ranks, Source("random.sched", "random"), (Span(0, 6),)
    )


def _ready(
    edges: list[tuple[int, int]],
    counts: list[int],
    split: dict[tuple[int, int], bool],
    trained: Container[int],
    behind: list[bool],
    done: set[tuple[str, int, int]],
) -> list[tuple[str, int, int]]:
    def backward_done(stage: int, microbatch: int) -> bool:
        return ("B", stage, microbatch) in done or ("I", stage, microbatch) in done

    ready = []
    for s in range(len(behind)):
        for m in range(counts[s]):
            if ("F", s, m) not in done and all(
                ("F", a, m) in done for a, b in edges if b == s
            ):
                ready.append(("F", s, m))
            upstream = ("F", s, m) in done and all(
                backward_done(b, m) for a, b in edges if a == s
            )
            if upstream and not backward_done(s, m) and behind[s]:
                is_half = split[s, m] or s not in trained
                ready.append(("I" if is_half else "B", s, m))
            if ("I", s, m) in done and ("W", s, m) not in done and s in trained:
                ready.append(("W", s, m))
    return ready


def oracle(schedule: Schedule) -> bool:
    """Whether a plan runs to its end and computes the right gradients, by carrying out its values."""
    return are_in_place(schedule) and _Oracle(schedule).run()


class _Oracle:
    """Carries out a plan on values that are hashes of what they were made from, and looks at the
    gradients.

    Written apart from the machine: it visits the ranks round and round and moves one transfer at a
    time. Sends wait for their receives; a batch is over when all of it has moved; ops that overlap
    see nothing of each other.
    """

    def __init__(self, schedule: Schedule) -> None:
        # What a rank holds is by a word and a stage or skip and a unit: `out` and `grad` are made
        # by its own ops, `in` and `grad_in` have been received, `again` was recomputed, `away` and
        # `back` are copies.
        self.layout = schedule.layout
        self.rows = [[a.row(i)[:3] for i in range(len(a))] for a in schedule.ranks]
        self.batches = [list(a.batches()) for a in schedule.ranks]
        # By rank: the batch that it has come to, what it holds, and which of its transfers have
        # moved.
        self.at = [0] * len(self.rows)
        self.held: list[dict[tuple[str, int, int], int]] = [{} for _ in self.rows]
        self.moved: list[set[int]] = [set() for _ in self.rows]
        self.sent: set[tuple[int, int, int]] = set()
        self.begun = Begun(schedule)
        self.gradients: list[tuple[int, int, int]] = []
        kinds = {row[0] for rank in self.rows for row in rank}
        gathers = {Kind.UNSHARD, Kind.RESHARD, *HOPS}
        forward = {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.EXCHANGE_F}
        self.forward_only = kinds <= {*forward, *gathers}
        self.schedule = schedule
        # The version of its weights that each forward has read, and that of each update; by stage,
        # how many updates it has made, and how many gradients of its weights.
        self.version: dict[tuple[int, int], int] = {}
        self.by_update: dict[tuple[int, int], int] = {}
        self.done = [0] * len(schedule.placement)
        self.made = [0] * len(schedule.placement)
        self.updates = Kind.U in kinds
        self.recomputed = {
            row[1:] for rank in self.rows for row in rank if row[0] == Kind.R
        }
        self.offloads = [
            row[1:] for rank in self.rows for row in rank if row[0] == Kind.OFFLOAD
        ]
        layout = self.layout
        stages = len(self.layout.placement)
        #: The earlier and the later stage of each far edge, by its number.
        self.skips = dict(enumerate(far_edges(layout), stages))
        #: What brings gradients back: where pipelines run ahead of others, only the edges between
        #: neighbours.
        self.returning = {} if handovers(layout) else self.skips
        edges = [*self.returning.values()]
        edges += [(a, a + 1) for a in range(stages) if is_near(layout, a)]
        self.trained = {
            stage
            for stage in range(stages)
            if self.replicas(stage)[0] not in layout.frozen
            and not runs_ahead(layout, stage)
        }
        self.behind = trained_before(stages, edges, self.trained)
        self.right_output = cache(self._right_output)
        self.right_gradient = cache(self._right_gradient)
        self.peer = cache(self._peer)
        self.reloads = [
            row[1:] for rank in self.rows for row in rank if row[0] == Kind.RELOAD
        ]

    def run(self) -> bool:
        if not are_exchanged(self.schedule):
            return False
        # Round and round, as long as any rank gets on: where none does, the plan is stuck or done.
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.rows)):
                if self.at[rank] < len(self.batches[rank]):
                    moves = self.visit(rank)
                    if moves is None:
                        return False
                    progress |= moves
            progress |= self.begun.meet()
        if any(
            at < len(batches) for at, batches in zip(self.at, self.batches, strict=True)
        ):
            return False
        if any(self.begun.open):
            return False
        units = [
            (s, u)
            for s in range(len(self.layout.placement))
            for u in range(self.layout.units(s))
        ]
        if any(
            self.updates and self.done[s] != self.layout.updates for s in self.trained
        ):
            return False
        # The gradient of a version comes to the weights by an update.
        if not self.updates and any(
            rule.name != "latest" for rule in self.schedule.weights
        ):
            return False
        if sorted(self.offloads) != sorted(self.reloads) or self.recomputed & set(
            self.offloads
        ):
            return False
        keepers = self.layout.keepers
        holders = {self.layout.placement[stage] for stage, _ in self.offloads}
        if keepers and any(keepers[rank] == rank for rank in holders):
            return False
        # What has no backward shows in no gradient.
        held = [
            self.held[self.layout.placement[s]].get(("out", s, u)) for s, u in units
        ]
        if held != [self.right_output(s, u) for s, u in units]:
            return False
        if self.forward_only:
            return True
        right = [
            (s, u, self.right_gradient(s, u)) for s, u in units if s in self.trained
        ]
        has_all = all(
            ("grad", s, u) in self.held[self.layout.placement[s]]
            for s, u in units
            if self.behind[s]
        )
        return has_all and sorted(self.gradients) == sorted(right)

    def visit(self, rank: int) -> bool | None:
        """Whether a rank gets on; None when it does something wrong."""
        batch = self.batches[rank][self.at[rank]]
        if self.rows[rank][batch.start][0] < Kind.SEND_F:
            # Ops that overlap see what was there before all of them.
            before = dict(self.held[rank])
            if len(batch) > 1 and self.changes_what_is_read(
                [self.rows[rank][i] for i in batch]
            ):
                return None
            if self.waits_for_replicas(rank, batch):
                return False
            if any(self.begun.keep(rank, *self.rows[rank][i][:3]) for i in batch):
                return False
            if len(batch) > 1 and any(
                self.rows[rank][i][0] in (Kind.OFFLOAD, Kind.RELOAD) for i in batch
            ):
                return None
            if not all(self.compute(rank, before, *self.rows[rank][i]) for i in batch):
                return None
            self.at[rank] += 1
            return True
        progress = False
        for i in batch:
            peer = self.peer(rank, i)
            if peer is None:
                return None
            if (
                self.rows[rank][i][0] in (Kind.SEND_F, Kind.SEND_B)
                and i not in self.moved[rank]
            ):
                moves = self.move(rank, i, peer)
                if moves is None:
                    return None
                progress |= moves
        if set(batch) <= self.moved[rank]:
            self.at[rank] += 1
            return True
        return progress

    def changes_what_is_read(self, rows: list[tuple[int, int, int]]) -> bool:
        """Whether one of some ops is an update of a module that another one runs."""
        updated = {self.replicas(s)[0] for kind, s, _ in rows if kind == Kind.U}
        return any(
            kind != Kind.U and self.replicas(s)[0] in updated for kind, s, _ in rows
        )

    def _peer(self, rank: int, i: int) -> int | None:
        kind, number, _ = self.rows[rank][i]
        later = kind in (Kind.SEND_F, Kind.RECV_B)
        stage, other = self.skips.get(number, ())[:: 1 if later else -1] or (
            number,
            number + (1 if later else -1),
        )
        if stage >= len(self.layout.placement) or self.layout.placement[stage] != rank:
            return None
        if number not in self.skips and not is_near(self.layout, min(stage, other)):
            return None
        if self.layout.placement[other] == rank:
            return None
        if kind in (Kind.SEND_B, Kind.RECV_B):
            if not self.behind[other if kind == Kind.SEND_B else stage]:
                return None
        elif number not in self.skips and not self.follows(max(stage, other)):
            return None
        return self.layout.placement[other]

    def move(self, rank: int, i: int, peer: int) -> bool | None:
        """Hand a value to the rank that stands at its receive."""
        mine = [
            j
            for j in self.pending(rank)
            if self.is_send(rank, j) and self.peer(rank, j) == peer
        ]
        theirs = [
            j
            for j in self.pending(peer)
            if not self.is_send(peer, j) and self.peer(peer, j) == rank
        ]
        # In order: the first send that waits meets the first receive that waits, whatever they are
        # of.
        if not theirs or mine[0] != i:
            return False
        kind, number, unit = self.rows[rank][i]
        stage = (
            self.skips[number][kind == Kind.SEND_B] if number in self.skips else number
        )
        value = self.held[rank].get(
            ("out" if kind == Kind.SEND_F else "grad", stage, unit)
        )
        if value is not None and number in self.skips:
            value = hash(("by skip", number, value))
        if value is None or self.rows[rank][i] in self.sent:
            return None
        wanted = self.rows[peer][theirs[0]]
        self.held[peer][
            "in" if wanted[0] == Kind.RECV_F else "grad_in", wanted[1], wanted[2]
        ] = value
        self.sent.add(self.rows[rank][i])
        self.moved[rank].add(i)
        self.moved[peer].add(theirs[0])
        return True

    def pending(self, rank: int) -> list[int]:
        if self.at[rank] == len(self.batches[rank]):
            return []
        batch = self.batches[rank][self.at[rank]]
        return [
            i
            for i in batch
            if self.rows[rank][i][0] >= Kind.SEND_F and i not in self.moved[rank]
        ]

    def is_send(self, rank: int, i: int) -> bool:
        return self.rows[rank][i][0] in (Kind.SEND_F, Kind.SEND_B)

    def compute(
        self,
        rank: int,
        held: dict[tuple[str, int, int], int],
        kind: int,
        s: int,
        u: int,
    ) -> bool:
        """Carry out one op on the values a rank held before; False when one is missing, or the op
        comes twice.
        """
        new = self.held[rank]
        if (
            s >= len(self.layout.placement)
            or self.layout.placement[s] != rank
            or u >= self.layout.units(s)
        ):
            return False
        if kind in (*EVENTS, *HOPS):
            self.begun.begin(rank, kind, s, u)
        if kind in (*EVENTS, *HOPS, Kind.RESHARD):
            return True
        first = self.is_first(s)
        last = self.is_last(s)
        if s not in self.trained and kind in (Kind.B, Kind.W, Kind.U):
            return False
        if kind != Kind.F and not self.behind[s]:
            return False
        slices = self.layout.slices
        if kind == Kind.U:
            return self.update(rank, s, max(u, 0))
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            source, target = (
                ("out", "away") if kind == Kind.OFFLOAD else ("away", "back")
            )
            if (source, s, u) not in held or (target, s, u) in new:
                return False
            new[target, s, u] = held[source, s, u]
            return True
        if not self.reads(kind, s, u):
            return False
        if kind == Kind.F:
            # A microbatch of inputs is its own number.
            value = u if first else held.get(("in", s, u), held.get(("out", s - 1, u)))
            if not first and not self.follows(s):
                value = 0
            skipped = [
                self.by_skip(held, "in", "out", k, a, u)
                for k, (a, b) in self.skips.items()
                if b == s
            ]
            # What a slice takes from the one before it in its microbatch; the first one takes
            # nothing.
            state = held.get(("out", s, u - 1)) if u % slices else 0
            if None in (value, state, *skipped) or ("out", s, u) in new:
                return False
            new["out", s, u] = hash(
                ("f", s, value, *skipped, state, self.version[s, u])
            )
        elif kind == Kind.R:
            if ("out", s, u) not in held or ("again", s, u) in new:
                return False
            new["again", s, u] = held["out", s, u]
        elif kind in (Kind.B, Kind.I):
            kept = (
                "again"
                if (s, u) in self.recomputed
                else "back"
                if (s, u) in self.offloads
                else "out"
            )
            value = held.get((kept, s, u))
            gradient = (
                1 if last else held.get(("grad_in", s, u), held.get(("grad", s + 1, u)))
            )
            if not last and not is_near(self.layout, s):
                gradient = 0
            skipped = [
                self.by_skip(held, "grad_in", "grad", k, b, u)
                for k, (a, b) in self.returning.items()
                if a == s
            ]
            # Gradients come back along slices from the last to the first.
            state = held.get(("grad", s, u + 1)) if (u + 1) % slices else 0
            if None in (value, gradient, *skipped, state) or ("grad", s, u) in new:
                return False
            new["grad", s, u] = hash(("d", s, value, gradient, *skipped, state))
        elif kind == Kind.W and ("grad", s, u) not in held:
            return False
        if kind in (Kind.B, Kind.W):
            self.gradients.append((s, u, new["grad", s, u]))
            self.made[s] += 1
        return True

    def by_skip(
        self,
        held: dict[tuple[str, int, int], int],
        received: str,
        made: str,
        k: int,
        s: int,
        u: int,
    ) -> int | None:
        """What a skip brings from stage s: received, or made on the same rank."""
        value = held.get((made, s, u))
        return held.get(
            (received, k, u), None if value is None else hash(("by skip", k, value))
        )

    def reads(self, kind: int, s: int, u: int) -> bool:
        """Whether an op can read the weights that it must, and its gradient goes into the right
        update.
        """
        rule = self.schedule.weights_of(s)
        done = self.done[s]
        update = u * self.layout.updates // self.layout.units(s)
        if kind == Kind.F:
            version = max(update - rule.delay, 0) if rule.name == "delay" else done
            self.version.setdefault((s, u), version)
            # Where each reads what is there, forwards of one update may read different versions.
            piece = (s, u) if rule.name == "unstashed" else self.replicas(s)[0]
            return (
                version <= done
                and self.by_update.setdefault((piece, update), version) == version
            )
        # `latest` keeps one version only: a backward after an update would read other weights than
        # its forward has. `unstashed` wants that, but no recomputation with other weights.
        repeats = rule.name == "latest" or (rule.name == "unstashed" and kind == Kind.R)
        fresh = not repeats or self.version.get((s, u)) == done
        return fresh and (kind not in (Kind.B, Kind.W) or update == done)

    def update(self, rank: int, s: int, number: int) -> bool:
        """Apply an update: it is the next one, and has the gradients of all its microbatches, also
        of replicas here.
        """
        here = [
            each for each in self.replicas(s) if self.layout.placement[each] == rank
        ]
        complete = self.has_gradients(s, number, exactly=True) and all(
            self.has_gradients(each, number) for each in here
        )
        self.done[s] += 1
        return complete and number == self.done[s] - 1

    def replicas(self, s: int) -> list[int]:
        return pieces(self.layout, s)

    def has_gradients(self, s: int, number: int, exactly: bool = False) -> bool:
        """Whether the gradients up to an update are there, and if asked so no others."""
        wanted = (number + 1) * self.layout.units(s) // self.layout.updates
        made = self.made[s]
        return made == wanted if exactly else made >= wanted

    def waits_for_replicas(self, rank: int, batch: range) -> bool:
        """Whether an update lacks gradients of replicas on other ranks."""
        return any(
            not self.has_gradients(each, max(u, 0))
            for kind, s, u in (self.rows[rank][i] for i in batch)
            if kind == Kind.U
            for each in self.replicas(s)
            if self.layout.placement[each] != rank
        )

    def is_first(self, stage: int) -> bool:
        return not has_before(self.layout, stage)

    def is_last(self, stage: int) -> bool:
        if handovers(self.layout):
            return not is_near(self.layout, stage)
        return not has_after(self.layout, stage)

    def follows(self, stage: int) -> bool:
        """Whether a stage takes the output of the one before it."""
        return is_near(self.layout, stage - 1) and stage not in handovers(self.layout)

    def _right_output(self, s: int, u: int) -> int:
        value = u if self.is_first(s) else 0
        if self.follows(s):
            value = self.right_output(s - 1, u)
        skipped = [
            hash(("by skip", k, self.right_output(a, u)))
            for k, (a, b) in self.skips.items()
            if b == s
        ]
        state = self.right_output(s, u - 1) if u % self.layout.slices else 0
        return hash(("f", s, value, *skipped, state, self.version.get((s, u), -1)))

    def _right_gradient(self, s: int, u: int) -> int:
        gradient = 1 if self.is_last(s) else 0
        if is_near(self.layout, s):
            gradient = self.right_gradient(s + 1, u)
        skipped = [
            hash(("by skip", k, self.right_gradient(b, u)))
            for k, (a, b) in self.returning.items()
            if a == s
        ]
        state = self.right_gradient(s, u + 1) if (u + 1) % self.layout.slices else 0
        return hash(("d", s, self.right_output(s, u), gradient, *skipped, state))
