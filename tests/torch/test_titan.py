"""torchtitan trains the same under tables and a runtime of ours as by itself: `make titan`."""

import os
from pathlib import Path

import pytest
from attrs import frozen

from schedlang import compile
from schedlang.plan.torch_tables import export_table
from tests.torch.titan import (
    MICROBATCHES,
    RANKS,
    STEPS,
    Trained,
    run,
    side_by_side,
    write_assets,
)

pytestmark = [pytest.mark.titan, pytest.mark.processes]

#: Losses and norms are printed with five and four digits; they may differ in the last one, and Adam
#: makes more of a difference with every step.
LOSS = 1e-4
NORM = 5e-4
#: A model of torchtitan, and its debug configuration.
LLAMA = ("llama3", "llama3_debugmodel")
DEEPSEEK = ("deepseek_v3", "deepseek_v3_debugmodel")


@frozen
class Way:
    """A way to run torchtitan: with a schedule of torch's, or with the table of a program in its
    place, which needs the schedule for where stages are; and in our runtime, or in torch's.
    """

    name: str
    schedule: str
    program: str | None = None
    is_ours: bool = False
    options: tuple[str, ...] = ()


@frozen
class Comparison:
    """Ways to train a model, all of which are to train the same."""

    model: tuple[str, str]
    ways: list[Way]
    #: Torch's own evaluation ends in an error where stages are in a V.
    validates: bool = True
    #: One that does not: torch's zero-bubble schedules leave out a weight (docs/torch.md).
    other: Way | None = None


COMPARED = {
    "Llama 3, in loops": Comparison(
        LLAMA,
        [
            Way("torchtitan, Interleaved1F1B", "Interleaved1F1B"),
            Way("its runtime, our table", "Interleaved1F1B", "interleaved_1f1b"),
            Way("our runtime", "Interleaved1F1B", is_ours=True),
            Way(
                "our interleaved_zb", "Interleaved1F1B", "interleaved_zb", is_ours=True
            ),
        ],
    ),
    "Llama 3, in a V": Comparison(
        LLAMA,
        [
            Way("its runtime, our 1f1b_v", "ZBVZeroBubble", "1f1b_v"),
            Way("our runtime, ZBVZeroBubble", "ZBVZeroBubble", is_ours=True),
            Way("our runtime, our v_half", "ZBVZeroBubble", "v_half", is_ours=True),
        ],
        validates=False,
        other=Way(
            "torchtitan, ZBVZeroBubble",
            "ZBVZeroBubble",
            options=("activation-checkpoint:none",),
        ),
    ),
    "DeepSeek-V3, in loops": Comparison(
        DEEPSEEK,
        [
            Way("torchtitan, Interleaved1F1B", "Interleaved1F1B"),
            Way("its runtime, our table", "Interleaved1F1B", "interleaved_1f1b"),
            Way("our runtime", "Interleaved1F1B", is_ours=True),
        ],
    ),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    write_assets(folder)
    return folder


def trained(way: Way, comparison: Comparison, folder: Path) -> Trained:
    module, config = comparison.model
    options = ["--parallelism.pipeline_parallel_schedule", way.schedule]
    if way.is_ours:
        config = f"{module}.{config}"
        module = "schedlang.torch.titan"
    if way.program is not None:
        chunks = {"chunks": 2} if way.program.startswith("interleaved") else {}
        plan = compile(
            way.program, {"ranks": RANKS, "microbatches": MICROBATCHES} | chunks
        )
        table = folder / f"{way.program}.csv"
        table.write_text(export_table(plan, "torch-csv-compute"), newline="")
        options += ["--parallelism.pipeline_parallel_schedule_csv", str(table)]
    options += way.options
    print(f"\n{way.name} ", end="", flush=True)
    return run(
        os.environ["TITAN_PYTHON"],
        folder,
        module,
        config,
        options,
        comparison.validates,
    )


@pytest.mark.parametrize("title", COMPARED)
def test_losses_are_those_of_torchtitan(title: str, assets: Path) -> None:
    comparison = COMPARED[title]
    ways = comparison.ways
    runs = [trained(way, comparison, assets) for way in ways]
    if comparison.other is not None:
        ways = [*ways, comparison.other]
        runs.append(trained(comparison.other, comparison, assets))
    print(f"\n\n{title}")
    print("\n".join(side_by_side([way.name for way in ways], runs)))
    first = runs[0]
    # Losses that do not fall would say little.
    assert first.losses[-1] < 0.9 * first.losses[0]
    assert len(first.losses) == STEPS
    for way, each in zip(ways[1:], runs[1:], strict=True):
        is_same = (
            each.losses == pytest.approx(first.losses, rel=0, abs=LOSS)
            and each.norms == pytest.approx(first.norms, rel=0, abs=NORM)
            and each.validations == pytest.approx(first.validations, rel=0, abs=LOSS)
        )
        assert is_same == (way is not comparison.other), (way.name, first, each)
