"""Random schedules that can run, by construction, and an oracle that runs plans its own way."""

from hypothesis import strategies as st

from schedlang.schedule import Actions, Kind, Layout, Pipeline, Schedule
from schedlang.source import Source, Span


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A compute-only schedule: ready ops chosen at random until all are done."""
    ranks = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 5))
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    microbatches = draw(st.integers(1, 3))
    split = {(s, m): draw(st.booleans()) for s in range(stages) for m in range(microbatches)}
    done: set[tuple[str, int, int]] = set()
    programs = tuple(Actions() for _ in range(ranks))
    while ready := _ready(stages, microbatches, split, done):
        word, stage, microbatch = ready[draw(st.integers(0, len(ready) - 1))]
        done.add((word, stage, microbatch))
        programs[placement[stage]].add(Kind[word], stage, microbatch, 0)
    return make_schedule(placement, microbatches, programs)


def make_schedule(placement: tuple[int, ...], microbatches: int, ranks: tuple[Actions, ...]) -> Schedule:
    params = {"ranks": len(ranks), "microbatches": microbatches}
    layout = Layout(placement, (Pipeline("", 0, len(placement), microbatches),))
    return Schedule("random", params, layout, ranks, Source("random.sched", "random"), (Span(0, 6),))


def _ready(
    stages: int, microbatches: int, split: dict[tuple[int, int], bool], done: set[tuple[str, int, int]]
) -> list[tuple[str, int, int]]:
    def backward_done(stage: int, microbatch: int) -> bool:
        return ("B", stage, microbatch) in done or ("I", stage, microbatch) in done

    ready = []
    for s in range(stages):
        for m in range(microbatches):
            if ("F", s, m) not in done and (s == 0 or ("F", s - 1, m) in done):
                ready.append(("F", s, m))
            upstream = ("F", s, m) in done and (s == stages - 1 or backward_done(s + 1, m))
            if upstream and not backward_done(s, m):
                ready.append(("I" if split[s, m] else "B", s, m))
            if ("I", s, m) in done and ("W", s, m) not in done:
                ready.append(("W", s, m))
    return ready


def oracle(schedule: Schedule) -> bool:
    """Whether a plan runs to its end and computes the right gradients, by carrying out its values.

    Written apart from the machine: it visits the ranks round and round, moves one transfer at a time, and looks only
    at the gradients that come out. Sends wait for their receives; a batch moves on when all of it has moved.
    """
    last = len(schedule.placement) - 1
    held: list[dict[tuple[str, int, int], object]] = [{} for _ in schedule.ranks]
    gradients: dict[int, list[object]] = {stage: [] for stage in range(last + 1)}
    programs = [[[a.word(i) for i in batch] for batch in a.batches()] for a in schedule.ranks]
    kinds = [[(a.kind[i], a.stage[i], a.microbatch[i]) for i in range(len(a))] for a in schedule.ranks]
    batches = [list(a.batches()) for a in schedule.ranks]
    at = [0] * len(programs)
    moved: list[set[int]] = [set() for _ in programs]
    sent: set[tuple[int, int, int]] = set()

    def pending(rank: int, source: int, target: int) -> list[int]:
        """What of a rank's current batch is still to move from `source` to `target`, in order."""
        if at[rank] == len(batches[rank]):
            return []
        found = []
        for i in batches[rank][at[rank]]:
            kind, stage, _ = kinds[rank][i]
            if kind < Kind.SEND_F or i in moved[rank]:
                continue
            other = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
            peer = schedule.placement[other] if 0 <= other <= last else None
            ends = (rank, peer) if kind in (Kind.SEND_F, Kind.SEND_B) else (peer, rank)
            if ends == (source, target):
                found.append(i)
        return found

    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            if at[rank] == len(batches[rank]):
                continue
            batch = batches[rank][at[rank]]
            kind, stage, microbatch = kinds[rank][batch[0]]
            if kind < Kind.SEND_F:
                if not _compute(held[rank], gradients, kind, stage, microbatch, last):
                    return False
                at[rank] += 1
                progress = True
                continue
            for i in batch:
                kind, stage, microbatch = kinds[rank][i]
                other = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
                if not 0 <= other <= last or schedule.placement[other] == rank:
                    return False
                peer = schedule.placement[other]
                if kind in (Kind.SEND_F, Kind.SEND_B) and i not in moved[rank]:
                    out, into = pending(rank, rank, peer), pending(peer, rank, peer)
                    if not out or not into or out[0] != i:
                        continue
                    value = held[rank].get(("out" if kind == Kind.SEND_F else "grad", stage, microbatch))
                    wanted = kinds[peer][into[0]]
                    if value is None or (kind, stage, microbatch) in sent:
                        return False
                    sent.add((kind, stage, microbatch))
                    slot = "in" if wanted[0] == Kind.RECV_F else "grad_in"
                    held[peer][slot, wanted[1], wanted[2]] = value
                    moved[rank].add(i)
                    moved[peer].add(into[0])
                    progress = True
            for each in range(len(programs)):
                if at[each] < len(batches[each]) and set(batches[each][at[each]]) <= moved[each]:
                    at[each] += 1
    complete = all(at[rank] == len(batches[rank]) for rank in range(len(programs)))
    expected = {stage: sorted(_gradient(stage, m, last) for m in range(schedule.microbatches)) for stage in gradients}
    return complete and {stage: sorted(map(str, each)) for stage, each in gradients.items()} == expected


def _gradient(stage: int, microbatch: int, last: int) -> str:
    """The one right gradient of a stage for a microbatch, written out."""
    return f"d{stage}({_output(stage, microbatch)}, {_gradient(stage + 1, microbatch, last) if stage < last else 1})"


def _output(stage: int, microbatch: int) -> str:
    return f"f{stage}({_output(stage - 1, microbatch) if stage else microbatch})"


def _compute(held: dict, gradients: dict, kind: int, stage: int, microbatch: int, last: int) -> bool:
    """Carry out one op on the values a rank holds; False when one is missing or an op comes twice."""
    out, grad = ("out", stage, microbatch), ("grad", stage, microbatch)
    if kind == Kind.F:
        given = (
            microbatch if stage == 0 else held.get(("in", stage, microbatch), held.get(("out", stage - 1, microbatch)))
        )
        if given is None or out in held:
            return False
        held[out] = f"f{stage}({given})"
        return True
    if kind in (Kind.B, Kind.I):
        given = (
            1 if stage == last else held.get(("grad_in", stage, microbatch), held.get(("grad", stage + 1, microbatch)))
        )
        if given is None or out not in held or grad in held:
            return False
        held[grad] = f"d{stage}({held[out]}, {given})"
    elif kind == Kind.W and grad not in held:
        return False
    if kind in (Kind.B, Kind.W):
        gradients[stage].append(held[grad])
    return True
