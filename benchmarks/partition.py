"""Layers of unequal work: how long a step takes by the ways there are to share them out, by
simulation on the same costs: `make bench WHAT=partition`.

All ways but the first take the program of the gallery that is fastest with their split, at its
defaults, of those that train one model with a flush.

- `1F1B`: as many layers in each stage, the embedding and the output beside the first and the last
- `equal`: the same, with the best program
- `ends less`: torchtitan's way, in which the embedding and the output count as a layer each
  (`EvenLayers`)
- `even`: the split of the runtime, whose slowest stage is as fast as can be
- `alternating`: one of layers, placement and order at a time, while the others stay: the way of
  AdaPtis (arXiv 2509.23722), as we read its abstract, on our simulation
- `search`: `schedlang.extras.search.partition.search`, layers and program together
- `solve`: the same, and which rank has which stage, and the order

Models are given by their shapes. A layer takes 2 floating-point operations for each weight and
token, and attention 2 * length * width (causal) or twice that; the half of the backward for the
inputs takes as many, the other one those of the weights (Korthikanti et al. 2022, arXiv 2205.05198,
appendix A); activations take 34 bytes for each token and unit of width (section 4.1, without those
of attention, which is computed in blocks); weights with Adam 16 bytes each. Devices make 400
TFLOP/s of use; a link has 20 us and 50 GB/s.

Without a limit of memory, and within what `1F1B` takes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from time import process_time

from attrs import frozen

from schedlang import Costs, compile, simulate
from schedlang.extras.search.partition import (
    Layer,
    Sizes,
    costs_of_stages,
    gallery,
    search,
    solve,
)
from schedlang.runtime import EvenLayers
from schedlang.runtime.model.layouts.even_layers import sizes_by_number
from schedlang.runtime.model.partition import partition as even_split
from schedlang.schedule.layout import Layout

#: Floating-point operations, and bytes, in a millisecond.
OPERATIONS = 400e9
#: How large messages are is of the layers.
LINKS = Costs(latency_in_node=0.02, bandwidth_in_node=50e6, boundary_bytes=(0.0,))
RANKS = 4
MICROBATCHES = 8
PARAMS = {"ranks": RANKS, "microbatches": MICROBATCHES}
#: From so many programs the placement is opened.
OPENED = 3


def layer(
    name: str,
    weights: float,
    tokens: int,
    width: int,
    *,
    active: float | None = None,
    attention: float = 0.0,
    multiplies: bool = True,
) -> Layer:
    """A layer with so many weights, of which so many are `active` for a token; `attention` is how
    many other tokens one is compared with.
    """
    products = 2.0 * (weights if active is None else active) * tokens * multiplies
    scores = 4.0 * attention * width * tokens
    return Layer(
        forward=(products + scores) / OPERATIONS,
        input=(products + 2 * scores) / OPERATIONS,
        weight=products / OPERATIONS,
        activation_bytes=34.0 * tokens * width if multiplies else 2.0 * tokens * width,
        weights_bytes=16.0 * weights,
        boundary_bytes=2.0 * tokens * width,
        name=name,
    )


def gated(width: int, ffn: int, key_width: int) -> float:
    """The weights of a layer with attention over so many keys, and a gated feed-forward part."""
    return 2 * width * width + 2 * width * key_width + 3 * width * ffn


def large_vocabulary() -> list[Layer]:
    """Llama 3.2 1B: 16 layers, of which the output weighs more than four."""
    tokens = 4096
    width = 2048
    vocabulary = 128256
    each = gated(width, 8192, 512)
    layers = [
        layer(f"layers.{n}", each, tokens, width, attention=2048) for n in range(16)
    ]
    embedding = layer("embedding", vocabulary * width, tokens, width, multiplies=False)
    return [embedding, *layers, layer("head", vocabulary * width, tokens, width)]


def experts_beside_dense() -> list[Layer]:
    """24 layers, every other one with 16 experts, two for each token, as in GLaM."""
    tokens = 4096
    width = 2048
    vocabulary = 32000
    ffn = 8192
    dense = gated(width, ffn, width)
    # Of 16 experts one is in the dense layer's own feed-forward part; two are used for each token.
    sparse = dense + 15 * 3 * width * ffn
    active = dense + 3 * width * ffn
    layers = []
    for n in range(24):
        if n % 2:
            of_experts = {"active": active, "attention": 2048.0}
            layers.append(layer(f"layers.{n}", sparse, tokens, width, **of_experts))
        else:
            layers.append(layer(f"layers.{n}", dense, tokens, width, attention=2048))
    embedding = layer("embedding", vocabulary * width, tokens, width, multiplies=False)
    return [embedding, *layers, layer("head", vocabulary * width, tokens, width)]


def encoder_decoder() -> list[Layer]:
    """12 layers over long inputs, then 12 over short outputs, which also look at the inputs."""
    width = 1024
    vocabulary = 32128
    ffn = 4096
    encoder = 4 * width * width + 2 * width * ffn
    decoder = 8 * width * width + 2 * width * ffn
    first = [
        layer(f"encoder.{n}", encoder, 4096, width, attention=4096) for n in range(12)
    ]
    second = [
        layer(f"decoder.{n}", decoder, 1024, width, attention=4608) for n in range(12)
    ]
    embedding = layer("embedding", vocabulary * width, 4096, width, multiplies=False)
    return [embedding, *first, *second, layer("head", vocabulary * width, 1024, width)]


def tower_in_front() -> list[Layer]:
    """A vision tower of 24 narrow layers over 4 images, and 16 layers of text behind it."""
    narrow = 1024
    patches = 4 * 576
    width = 3072
    tokens = 2048
    vocabulary = 128256
    tower_weights = 12 * narrow * narrow
    tower = [
        layer(f"tower.{n}", tower_weights, patches, narrow, attention=576)
        for n in range(24)
    ]
    weights = gated(width, 8192, 1024)
    layers = [
        layer(f"layers.{n}", weights, tokens, width, attention=1024) for n in range(16)
    ]
    patch = layer("patches", 588 * narrow, patches, narrow)
    projector = layer("projector", narrow * width, patches, width)
    return [
        patch,
        *tower,
        projector,
        *layers,
        layer("head", vocabulary * width, tokens, width),
    ]


MODELS: dict[str, Callable[[], list[Layer]]] = {
    "large vocabulary": large_vocabulary,
    "experts beside dense": experts_beside_dense,
    "encoder and decoder": encoder_decoder,
    "tower in front": tower_in_front,
}


@frozen
class Way:
    """A split under a program, and how long a step takes."""

    program: str
    layout: Layout
    sizes: Sizes
    makespan: float


@cache
def programs() -> dict[str, Layout]:
    """The programs, and where each has its stages."""
    return {
        name: compile(name, params).layout
        for name, params in gallery(RANKS, MICROBATCHES)
    }


@frozen
class Table:
    """The ways for a model, within a capacity in bytes if there is one."""

    layers: Sequence[Layer]
    capacity: float | None = None

    def way(self, program: str, sizes: Sizes) -> Way | None:
        """A program with a split; None where it does not fit."""
        layout = programs()[program]
        costs = costs_of_stages(self.layers, sizes, layout, LINKS)
        execution = simulate(compile(program, PARAMS, costs), costs)
        peaks = execution.peak_bytes
        if (
            self.capacity is not None
            and peaks is not None
            and max(peaks) > self.capacity
        ):
            return None
        return Way(program, layout, sizes, execution.timeline.makespan)

    def best(self, split: Callable[[Layout], Sizes]) -> Way | None:
        """The program that is fastest with a way to split."""
        ways = (
            self.way(program, split(layout)) for program, layout in programs().items()
        )
        return min(filter(None, ways), key=lambda way: way.makespan, default=None)

    def equal(self, layout: Layout) -> Sizes:
        """As many layers in each stage, beside what is before the first and behind the last."""
        return self._by_number(layout, EvenLayers(0, 0))

    def ends_less(self, layout: Layout) -> Sizes:
        """torchtitan's."""
        return self._by_number(layout, EvenLayers(1, 1))

    def _by_number(self, layout: Layout, even: EvenLayers) -> Sizes:
        # What is counted are layers of any list: the names only tell them from the ends.
        ends = {"embedding", "patches", "head"}
        names = [
            own.name if own.name in ends else f"layers.{place}"
            for place, own in enumerate(self.layers)
        ]
        return tuple(sizes_by_number(even, names, layout.pieces))

    def even(self, layout: Layout) -> Sizes:
        """The runtime's."""
        cuts = even_split([own.time for own in self.layers], layout).cuts
        return tuple(end - begin for begin, end in pairwise(cuts))

    def alternating(self) -> Way | None:
        """One thing at a time, from 1F1B with equal stages on, as long as something gets better."""
        best = self.way("1f1b", self.equal(programs()["1f1b"]))
        if best is None:
            return None
        while True:
            # The three kinds of move: layers, then the order on the same placement, then another
            # placement, for which layers are split anew.
            trials = [
                self.way(best.program, sizes) for sizes in _moved(self.layers, best)
            ]
            trials += [
                self.way(program, best.sizes)
                for program, layout in programs().items()
                if layout.placement == best.layout.placement
            ]
            trials += [
                self.way(program, self.even(layout))
                for program, layout in programs().items()
                if layout.placement != best.layout.placement
            ]
            better = min(filter(None, trials), key=lambda way: way.makespan)
            if better.makespan >= best.makespan * (1 - 1e-9):
                return best
            best = better


def _moved(layers: Sequence[Layer], way: Way) -> Iterator[Sizes]:
    """The splits with a layer less in the slowest stage, and more in a neighbour."""
    times = []
    begin = 0
    for size in way.sizes:
        times.append(sum(own.time for own in layers[begin : begin + size]))
        begin += size
    slowest = max(range(len(times)), key=times.__getitem__)
    for neighbour in (slowest - 1, slowest + 1):
        if 0 <= neighbour < len(times) and way.sizes[slowest] > 1:
            sizes = list(way.sizes)
            sizes[slowest] -= 1
            sizes[neighbour] += 1
            yield tuple(sizes)


def row(model: str, table: Table) -> str:
    """The line of a model: milliseconds by each way."""
    layers = table.layers
    start = process_time()
    candidates = [(name, PARAMS) for name in programs()]
    fits = search(layers, candidates, LINKS, table.capacity)
    solution = solve(layers, fits[:OPENED], LINKS, table.capacity) if fits else None
    took = process_time() - start
    ways = [
        table.way("1f1b", table.equal(programs()["1f1b"])),
        table.best(table.equal),
        table.best(table.ends_less),
        table.best(table.even),
        table.alternating(),
    ]
    steps = [way and way.makespan for way in ways]
    steps += [fits[0].makespan if fits else None, solution and solution.makespan]
    cells = "".join(
        f"{'-':>12}" if step is None else f"{step:>12.1f}" for step in steps
    )
    what = (
        f"{fits[0].program}, {' '.join(map(str, fits[0].sizes))}"
        if fits
        else "nothing fits"
    )
    return f"{model:<21}{cells} {took:>5.0f} s  {what}"


def memory_of_1f1b(layers: Sequence[Layer]) -> float:
    """The bytes of its fullest rank, with equal stages."""
    layout = programs()["1f1b"]
    costs = costs_of_stages(layers, Table(layers).equal(layout), layout, LINKS)
    return max(simulate(compile("1f1b", PARAMS, costs), costs).peak_bytes or (0.0,))


def main() -> None:
    """Print both tables."""
    ways = ("1F1B", "equal", "ends less", "even", "alternating", "search", "solve")
    heads = "".join(f"{way:>12}" for way in ways)
    for is_limited in (False, True):
        limit = (
            "within the memory of 1F1B" if is_limited else "without a limit of memory"
        )
        print(f"\n{RANKS} ranks, {MICROBATCHES} microbatches, {limit}")
        print(
            f"{'step, ms':<21}{heads}     cpu  program and layers by stage of `search`"
        )
        for model, make in MODELS.items():
            layers = make()
            capacity = memory_of_1f1b(layers) if is_limited else None
            print(row(model, Table(layers, capacity)), flush=True)


if __name__ == "__main__":
    main()
