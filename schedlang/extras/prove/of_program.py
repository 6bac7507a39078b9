"""Whether a certificate is one of its program: what it takes as it stands, for every n.

`check_certificate` looks at orders, times and figures, and takes the orders as they are. Here they
are read in the text once more, symbolically, as the prover does
(`schedlang.extras.prove.expansion`), and compared for every n; so are stages, edges and
costs, what the program claims, and the transfers that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from attrs import evolve

from schedlang.compiler import ops_of, wrong_ops
from schedlang.diagnostics.arguments import check_params, check_type
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.extras.prove.beside import check_beside
from schedlang.extras.prove.budget import Budget
from schedlang.extras.prove.certificate import setting
from schedlang.extras.prove.check_certificate import Wrong, check
from schedlang.extras.prove.coverage import check_coverage
from schedlang.extras.prove.expansion import Expansion, expand_for_all
from schedlang.extras.prove.figures import Figures, claim_holds
from schedlang.extras.prove.left_out import (
    all_trained,
    computing,
    in_use,
    only_computing,
)
from schedlang.extras.prove.linear import NotLinear, Searched, Undecided, settled
from schedlang.extras.prove.orders import (
    ONCE,
    Batch,
    Orders,
    Pair,
    Piece,
    is_negative,
    minus,
    one_by_one,
    orders_of,
    split,
    times,
    unrolled,
    value,
)
from schedlang.extras.prove.sizes import Sizes
from schedlang.extras.prove.stamps import NoStamps, walked
from schedlang.extras.prove.transfers import NotRepeated, repeated
from schedlang.files.reading import NO_FILE
from schedlang.language import syntax
from schedlang.language.expand import check_text, parameters
from schedlang.language.faults import Fault
from schedlang.language.trees import tree_of
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import transports

#: At how many sizes of each class the orders are compared with those of the compiler as well.
_COMPARED = 3


def what_it_proves(document: Any) -> str:
    """Check a certificate, and that it is one of the program in it, for every n; then say what it
    proves, and by whom. Wrong, with the reason, if it does not hold.
    """
    try:
        check(document)
        return _Program(document).checked()
    except CompileError as error:
        raise Wrong(f"the compiler says: {error.diagnostics[0].message}") from None
    except Searched as error:
        raise Wrong(f"its orders do not follow from the text: {error}") from None
    except Undecided:
        raise Wrong("the text has not one order for all these sizes") from None
    except Fault as fault:
        raise Wrong(f"the program: {fault.message}") from None
    except (NotLinear, NotRepeated, NoStamps, RecursionError) as error:
        raise Wrong(f"its orders cannot be read in the text: {error}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise Wrong(f"it is no certificate: {type(error).__name__}: {error}") from None


def program_of(
    document: Mapping[str, Any],
) -> tuple[Source, syntax.Schedule, Mapping[str, int]]:
    """The program in a certificate, and its parameters; Wrong, or another error, where it is not
    all in the text.
    """
    check_params("params", document["params"])
    check_type("program", document["program"], str, "the text of a program")
    # The text, and never the path of a file: there may be another one tomorrow.
    source = Source(NO_FILE, document["program"])
    tree = tree_of(source)
    is_import = (isinstance(item, syntax.Import) for item in tree.items)
    _hold(not any(is_import), "its text imports files, which may be others tomorrow")
    return source, tree, document["params"]


class _Program:
    """A certificate, and the program in it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.classes: Sequence[Mapping[str, Any]] = document["classes"]
        self.names: Sequence[str] = document["transports"]
        for name in self.names:
            transports(name)
        self.source, self.tree, self.params = program_of(document)
        _hold(
            "microbatches" not in self.params, "`microbatches` is any, and no parameter"
        )
        check_text(self.source, self.tree, {**self.params, "microbatches": 1})
        self.budget = Budget()

    def checked(self) -> str:
        """What is proved, once each class is one of the program; Wrong, or another error, if one is
        not.
        """
        _hold(self.classes and self.names, "it has no sizes, or no transports")
        variants: dict[tuple[int, int], list[bool]] = {}
        for one in self.classes:
            key = one["base"], one["period"]
            _hold(all(type(size) is int and size > 0 for size in key), "no sizes")
            variants.setdefault(key, []).append(one["idle"])
        for key, idle in variants.items():
            of_class = [
                one for one in self.classes if (one["base"], one["period"]) == key
            ]
            schedules = [self.expanded(key, n) for n in range(_COMPARED)]
            # A frozen program is proved twice, once with the backwards that do nothing.
            both = [False, True] if schedules[0].layout.frozen else [False]
            _hold(sorted(idle) == both, "not each class is there as it must be")
            _Class(self, key, schedules).check(of_class)
        return self.proved

    @property
    def proved(self) -> str:
        """What is proved, and by whom, once it is checked."""
        sizes = Sizes(
            progressions=tuple((one["base"], one["period"]) for one in self.classes)
        )
        given = "".join(f", {name} = {value}" for name, value in self.params.items())
        return (
            f"the certificate proves {self.tree.name.text}{given} for {sizes.text()} on "
            f"{', '.join(self.names)}\n"
            "  read in its text by schedc, for all these sizes: orders, stages, edges, costs, "
            "transfers, claims\n"
            "  proved of these by the checker: each op runs once, none waits forever; all times "
            "and figures"
        )

    def expanded(self, key: tuple[int, int], n: int) -> Schedule:
        """The schedule at a size of a class, which the compiler proves as well."""
        base, period = key
        params = {**self.params, "microbatches": base + period * n}
        ranks = parameters(self.tree, {**params, "microbatches": 1})["ranks"]
        self.budget.spend(2 * ranks * params["microbatches"])
        schedule = ops_of(self.source, self.tree, params)
        for name, wrong in wrong_ops(schedule, self.names).items():
            at = f"at {params['microbatches']} microbatches, on `{name}`"
            _hold(not wrong, f"{at}: {wrong[0].message}" if wrong else "")
        return schedule


class _Class:
    """A class of sizes of a program, read in its text."""

    def __init__(
        self, program: _Program, key: tuple[int, int], schedules: Sequence[Schedule]
    ) -> None:
        self.program = program
        self.schedules = schedules
        self.layout = schedules[0].layout
        with settled():
            expansion = expand_for_all(
                program.tree, program.params, *key, program.budget
            )
            orders = orders_of(expansion)
        self.expansion: Expansion = expansion
        self.orders: Orders = in_use(orders, self.layout)

    def check(self, of_class: Sequence[Mapping[str, Any]]) -> None:
        """Wrong, or another error, unless the class of a certificate is that of the program, with
        and without backwards that do nothing.
        """
        costs = self.schedules[0].costs
        has_more = self.expansion.sites.parts or costs.overlap_times or costs.components
        _hold(not has_more, "a certificate has no streams, and no costs of overlap")
        with settled():
            check_coverage(self.with_idle, self.layout)
            check_beside(self.without_idle, self.layout)
            for one in of_class:
                self.check_orders(one)
                if not one["idle"]:
                    self.check_claims(one["figures"])
        self.check_transfers()

    @property
    def with_idle(self) -> Orders:
        """What is computed, and the backwards of frozen stages that do nothing."""
        return computing(self.orders, evolve(self.layout, frozen=()))

    @property
    def without_idle(self) -> Orders:
        """What is computed."""
        return computing(self.orders, self.layout)

    def check_orders(self, one: Mapping[str, Any]) -> None:
        """Wrong unless orders, stages, edges and costs are those of the text, and times those of
        the ideal execution at some sizes.
        """
        orders = self.with_idle if one["idle"] else self.without_idle
        trained = map(all_trained, self.schedules) if one["idle"] else self.schedules
        schedules = list(map(only_computing, trained))
        is_order = [
            _is_order(pieces, order)
            for pieces, order in zip(one["ranks"], orders.ranks, strict=True)
        ]
        _hold(all(is_order), "the orders are not those of the program")
        units = [(units, by_n, 0) for units, by_n in orders.units]
        _hold(list(map(tuple, one["units"])) == units, "its microbatches are others")
        for name, of in setting(schedules).items():
            _hold(one[name] == of, f"its `{name}` are not those of the program")
        for n, schedule in enumerate(schedules):
            starts = [list(_starts(pieces, n)) for pieces in one["ranks"]]
            _hold(starts == walked(schedule), "its times are not those of the program")

    def check_claims(self, figures: Mapping[str, Any]) -> None:
        """Wrong unless what the program claims holds with the figures of a certificate."""
        known = Figures(
            peak=tuple(map(_pair, figures["peak"])),
            versions=(1,) * len(figures["peak"]),
            makespan=_pair(figures["makespan"]),
            work=_pair(figures["work"]),
            span=_pair(figures["span"]),
        )
        for site, claim in self.expansion.claimed:
            is_so = claim_holds(claim, site, known, self.schedules[0])
            _hold(is_so, "a claim of the program does not hold")

    def check_transfers(self) -> None:
        """Wrong unless the transfers that a program writes are right on all the transports."""
        pieces = (piece for pieces in self.orders.ranks for piece in pieces)
        ops = (op for piece in pieces for batch in piece.batches for op in batch)
        if not any(is_transfer(op.kind) for op in ops):
            return
        written = repeated(self.orders, self.schedules)
        for name in self.program.names:
            is_so = written.on(name) == "proved"
            _hold(is_so, f"its transfers are not proved on `{name}`")


def _is_order(pieces: Sequence[Mapping[str, Any]], order: Sequence[Piece]) -> bool:
    """Whether pieces of a certificate are the order of a rank for every n. They are those of the
    text, cut in more parts, or with several rounds as one.
    """
    rest = list(_plain(order))
    for piece in pieces:
        batches = [tuple(map(tuple, batch["ops"])) for batch in piece["batches"]]
        constant, by_n, _ = piece["rounds"]
        rounds = constant, by_n
        if rounds == ONCE:
            taken = _taken_one_by_one(rest, len(batches))
        else:
            taken = _taken_at_once(rest, rounds, len(batches))
        if taken is None or list(map(_written, taken)) != batches:
            return False
    return not rest


def _taken_one_by_one(rest: list[Piece], count: int) -> list[Batch] | None:
    """The next batches of an order, which it loses; None if it has not so many."""
    taken: list[Batch] = []
    while len(taken) < count and rest:
        if rest[0].grows:
            if is_negative(minus(rest[0].rounds, ONCE)):
                return None
            rest[:1] = _plain(split(rest[0], ONCE))
        more = rest[0].batches[: count - len(taken)]
        left = rest[0].batches[len(more) :]
        rest[:1] = [evolve(rest[0], batches=left)] if left else []
        taken += more
    return taken if len(taken) == count else None


def _taken_at_once(rest: list[Piece], rounds: Pair, width: int) -> list[Batch] | None:
    """The batches of the next rounds of an order, which it loses, so many batches as a round; None
    if it has no such rounds.
    """
    if not rest or not rest[0].grows or width % len(rest[0].batches):
        return None
    factor = width // len(rest[0].batches)
    own = times(rounds, factor)
    if is_negative(minus(rest[0].rounds, own)):
        return None
    piece, *left = split(rest[0], own)
    rest[:1] = _plain(left)
    (whole,) = unrolled(piece, factor)
    return list(whole.batches) if whole.rounds == rounds else None


def _plain(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces without those that have nothing; all that do not grow have one round."""
    for piece in pieces:
        plain = piece if piece.grows else one_by_one(piece)
        if plain.batches:
            yield plain


def _written(batch: Batch) -> tuple[tuple[Any, ...], ...]:
    """A batch as a certificate has it."""
    return tuple((Kind(op.kind).name, op.stage, *op.microbatch) for op in batch)


def _starts(pieces: Sequence[Mapping[str, Any]], n: int) -> Iterator[Any]:
    """When the batches of a rank start for some n, in order."""
    for piece in pieces:
        for k in range(value(piece["rounds"], n)):
            for batch in piece["batches"]:
                constant, by_n, by_round = map(_exact, batch["start"])
                yield constant + by_n * n + by_round * k


def _pair(parts: Sequence[Any]) -> Pair:
    """A number of a certificate that is of no round."""
    constant, by_n, _ = map(_exact, parts)
    return constant, by_n


def _exact(part: Any) -> Any:
    """A part of a number: fractions are texts."""
    return part if isinstance(part, int) else Fraction(part)


def _hold(is_so: Any, what: str) -> None:
    if not is_so:
        raise Wrong(what)
