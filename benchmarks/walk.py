"""What an action costs by itself: `make bench WHAT=walk`.

The first rank of 1F1B walks its plan with stages that compute nothing and a wire that leads
nowhere. What remains is the walk, with all that it does for boxes and messages.
"""

from pathlib import Path
from statistics import median
from time import process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import compile, read_source
from schedlang.runtime.announcement import Rows
from schedlang.runtime.calls import prepare
from schedlang.runtime.exchange import Exchange, Given
from schedlang.runtime.stage import Stage, StagePlan
from schedlang.runtime.values import ValueSpec
from schedlang.runtime.wire import InFlight

PROGRAMS = Path(__file__).parent.parent / "programs"
ROUNDS = 20
STEPS = 50


class Idle(Stage):
    """A stage that passes the same tensor on."""

    tensor = torch.zeros(1, requires_grad=True)

    def forward(self, microbatch: int) -> None:
        """An output without a model."""
        self.inputs.pop(microbatch)
        self.outputs[microbatch] = self.tensor

    def backward(self, microbatch: int) -> None:
        """A backward without a graph."""
        self.gradients.pop(microbatch)


class Nowhere:
    """A wire without an end."""

    is_by_edge = False

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Gone."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> None:
        """There."""

    post_send = send
    post_receive = receive

    def wait(self, in_flight: InFlight, peer: int) -> None:
        """Done."""

    def send_object(self, sent: object, peer: int, tag: int) -> InFlight:
        """Gone."""
        return []


def main() -> None:
    """Print the time per action."""
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1
    )
    plan = compile(
        read_source(PROGRAMS / "1f1b.sched"), {"ranks": 4, "microbatches": 16}
    )
    stage = Idle(StagePlan(0, ends_backward=True), nn.Identity(), torch.device("cpu"))
    exchange = Exchange(plan, 0, 0, torch.device("cpu"), Nowhere(), None)  # type: ignore[arg-type]
    inputs = Given(False, Rows(16, 1), [ValueSpec.of([torch.zeros(1)], None)])
    calls = prepare(plan, 0, {0: stage}, exchange, [])
    found = []
    for _ in range(ROUNDS):
        start = process_time()
        for _ in range(STEPS):
            stage.inputs.update(dict.fromkeys(range(16), Idle.tensor))
            exchange.begin({0: inputs})
            for _, call, _ in calls:
                call()
            exchange.end()
        found.append((process_time() - start) / STEPS / len(plan.ranks[0]))
    print(f"{median(found) * 1e6:.1f} us per action, {len(plan.ranks[0])} actions")


if __name__ == "__main__":
    main()
