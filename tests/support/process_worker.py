"""Runs plans on real gloo processes for `test_processes.py`: imports torch once, then forks the
ranks of each launch.

Reads one line of JSON per launch, `[how, plan files, seconds]`, and answers how many plans each
rank has finished, and for each rank, plan by plan, the largest difference of a gradient from that
of one process. `how` is a transport, whose rules an interpreter of its own follows, or `runtime`
for schedlang's. Ranks that have finished stay until all have, so that those that hang do so for no
other reason.
"""

import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schedlang import read_plan
from schedlang.runtime import Pipeline
from tests.support.skip_models import Skipping

WIDTH = 3
Key = tuple[str, int, int]


def weights(stages: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.double) for _ in range(stages)
    ]


def inputs(plan: Any) -> dict[int, list[torch.Tensor]]:
    """For the first stage of each pipeline, its microbatches."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for each in plan["pipelines"]:
        values = torch.randn(
            each["microbatches"], 2, WIDTH, generator=generator, dtype=torch.double
        )
        found[each["start"]] = list(values)
    return found


def skips(plan: Any) -> dict[int, tuple[int, int]]:
    """The earlier and the later stage of each skip, by its number."""
    pairs = [
        (each["start"] + a, each["start"] + b)
        for each in plan["pipelines"]
        for a, b in plan["skips"]
    ]
    return dict(enumerate(pairs, len(plan["placement"])))


def loss(output: torch.Tensor, target: object = None) -> torch.Tensor:
    return (output**2).sum() / 2


def alone(plan: Any) -> list[torch.Tensor]:
    """The gradients of all stages, by autograd on one process."""
    parameters = [each.requires_grad_() for each in weights(len(plan["placement"]))]
    for pipeline in plan["pipelines"]:
        for value in inputs(plan)[pipeline["start"]]:
            outputs: dict[int, torch.Tensor] = {}
            for stage in range(pipeline["start"], pipeline["stop"]):
                for earlier in (a for a, b in skips(plan).values() if b == stage):
                    value = value + outputs[earlier]
                outputs[stage] = value = value @ parameters[stage]
            loss(value).backward()
    return [each.grad for each in parameters if each.grad is not None]


class Interpreter:
    """Carries out one rank's actions over gloo, as a transport has it; the stages are matrices."""

    def __init__(self, plan: Any, rank: int, transport: str) -> None:
        self.plan = plan
        self.rank = rank
        self.blocks = transport == "blocking"
        self.weights = weights(len(plan["placement"]))
        self.gradients = [torch.zeros(WIDTH, WIDTH, dtype=torch.double) for _ in self.weights]
        self.ends = {each["stop"] - 1 for each in plan["pipelines"]}
        self.inputs = inputs(plan)
        self.skips = skips(plan)
        #: Outputs F of stages, and gradients B of their inputs; and the receives that bring them.
        self.held: dict[Key, torch.Tensor] = {}
        self.coming: dict[Key, dist.Work] = {}
        self.sends: list[dist.Work] = []

    def run(self) -> list[torch.Tensor]:
        for batch in self.batches():
            for action in batch:
                self.act(*action)
            if self.blocks:
                self.finish()
        self.finish()
        return self.gradients

    def finish(self) -> None:
        """Wait for all that is under way; gloo wants one wait for each."""
        for work in [*self.sends, *self.coming.values()]:
            work.wait()
        self.sends = []
        self.coming = {}

    def batches(self) -> Iterator[list[tuple[str, int, int]]]:
        for token in self.plan["actions"][self.rank].split():
            words = [
                re.fullmatch(r"(\d+)([A-Z_]+?)(\d+)", each)
                for each in re.findall(r"\d+[A-Z_]+?\d+", token)
            ]
            yield [(word[2], int(word[1]), int(word[3])) for word in words if word]

    def act(self, word: str, stage: int, microbatch: int) -> None:
        if word == "F":
            self.held["F", stage, microbatch] = self.input(stage, microbatch) @ self.weights[stage]
        if word in ("B", "I"):
            self.held["B", stage, microbatch] = (
                self.output_gradient(stage, microbatch) @ self.weights[stage].T
            )
        if word in ("B", "W"):
            gradient = self.output_gradient(stage, microbatch)
            self.gradients[stage] += self.input(stage, microbatch).T @ gradient
        if "_" in word:
            self.transfer(word, stage, microbatch)

    def input(self, stage: int, microbatch: int) -> torch.Tensor:
        value = (
            self.inputs[stage][microbatch]
            if stage in self.inputs
            else self.value("F", stage - 1, microbatch)
        )
        for number, (earlier, later) in self.skips.items():
            if later == stage:
                value = value + self.by_skip("F", number, earlier, microbatch)
        return value

    def output_gradient(self, stage: int, microbatch: int) -> torch.Tensor:
        value = (
            self.value("F", stage, microbatch)
            if stage in self.ends
            else self.value("B", stage + 1, microbatch)
        )
        for number, (earlier, later) in self.skips.items():
            if earlier == stage:
                value = value + self.by_skip("B", number, later, microbatch)
        return value

    def by_skip(self, what: str, number: int, stage: int, microbatch: int) -> torch.Tensor:
        """What a skip brings: received under its number, or from a stage of this rank."""
        here = self.plan["placement"][stage] == self.rank
        return self.value(what, stage if here else number, microbatch)

    def value(self, *key: Any) -> torch.Tensor:
        if key in self.coming:
            self.coming.pop(key).wait()
        return self.held[key]

    def transfer(self, word: str, stage: int, microbatch: int) -> None:
        what = word[-1]
        step = 1 if word in ("SEND_F", "RECV_B") else -1
        sends = word.startswith("SEND")
        skips = stage in self.skips
        own, other = self.skips[stage][::step] if skips else (stage, stage + step)
        peer = self.plan["placement"][other]
        key = (what, stage if skips else own if sends else other, microbatch)
        if skips and sends:
            self.held[key] = self.held[what, own, microbatch]
        tag = 0 if self.blocks else 1 + ((key[1] << 8) + microbatch) * 2 + (what == "B")
        if word.startswith("SEND"):
            self.sends.append(dist.isend(self.held[key], peer, tag=tag))
        else:
            self.held[key] = torch.full((2, WIDTH), torch.nan, dtype=torch.double)
            self.coming[key] = dist.irecv(self.held[key], peer, tag=tag)


def by_runtime(file: str, plan: Any, rank: int) -> list[torch.Tensor]:
    """The gradients that schedlang's own runtime computes."""
    mine = {}
    for stage, value in enumerate(weights(len(plan["placement"]))):
        mine[stage] = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.double)
        mine[stage].weight = torch.nn.Parameter(value.T.contiguous())
    own = {stage: module for stage, module in mine.items() if plan["placement"][stage] == rank}
    if plan["skips"]:
        later = {stage: [b for a, b in plan["skips"] if a == stage] for stage in own}
        own = {stage: Skipping(module, later=later[stage]) for stage, module in own.items()}
    batch = torch.cat(inputs(plan)[0])
    Pipeline(read_plan(file), own, loss, loss_scale=1.0).step(batch, batch)
    return [
        module.weight.grad.T if module.weight.grad is not None else value
        for module in mine.values()
    ]


def difference(how: str, file: str, rank: int) -> float:
    """The largest difference of a gradient of this rank's stages from that of one process; or
    nothing was run.
    """
    plan = json.loads(Path(file).read_text())
    ours = by_runtime(file, plan, rank) if how == "runtime" else Interpreter(plan, rank, how).run()
    right = alone(plan)
    mine = [stage for stage, holder in enumerate(plan["placement"]) if holder == rank]
    found = [float((ours[s] - right[s]).abs().max() / right[s].abs().max()) for s in mine]
    return max([0.0, *(each if each == each else torch.inf for each in found)])


def rank_main(how: str, files: list[str], rank: int, ranks: int, folder: str, done: int) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", store, timeout=timedelta(seconds=120), rank=rank, world_size=ranks
    )
    dist.barrier()
    os.write(done, b".")
    found = []
    for file in files:
        found.append(difference(how, file, rank))
        if len(files) > 1:
            dist.barrier()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        os.write(done, b".")


def fork(main: partial[None]) -> tuple[int, int]:
    """The process of a rank, and the pipe where it writes a byte when it starts and after each
    plan.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    try:
        main(writes)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    time.sleep(600)
    os._exit(0)


def launch(how: str, files: list[str], seconds: float) -> dict[str, Any]:
    ranks = len(json.loads(Path(files[0]).read_text())["actions"])
    with tempfile.TemporaryDirectory() as folder:
        children = [
            fork(partial(rank_main, how, files, rank, ranks, folder)) for rank in range(ranks)
        ]
        pipes = {pipe: 0 for _, pipe in children}
        limit = time.monotonic() + 60
        started = False
        open_pipes = set(pipes)
        while min(pipes.values()) <= len(files) and open_pipes and time.monotonic() < limit:
            for pipe in select.select(open_pipes, [], [], max(0.0, limit - time.monotonic()))[0]:
                read = os.read(pipe, 1024)
                pipes[pipe] += len(read)
                if not read:
                    open_pipes.discard(pipe)
            if not started and min(pipes.values()):
                started = True
                limit = time.monotonic() + seconds
        alive = len(open_pipes) == ranks
        for child, pipe in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(pipe)
        files_found = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        differences = [
            json.loads(each.read_text()) if each.exists() else [] for each in files_found
        ]
    return {
        "started": started,
        "alive": alive,
        "finished": [n - 1 for n in pipes.values()],
        "differences": differences,
    }


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(launch(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
