"""Every feature under every schedule: trained as alone, or refused."""

import re
from pathlib import Path

import pytest

from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
from tests.models.features import FEATURES
from tests.models.rows import read_row, write_row
from tests.models.schedules import MAKERS
from tests.models.verdicts import EQUAL, REFUSED, ROUNDING, outcomes

pytestmark = pytest.mark.processes

#: What `make test` tries: of each family some features, each under schedules that ask most of it.
SOME = {
    "linear layers": ["seq1f1b", "unet_1f1b"],
    "batch norm": ["1f1b_recompute"],
    "new weight norm": ["late_split"],
    "quantization aware": ["pipe_offload"],
    "own linear backward": ["zb_v"],
    "float8 delayed": ["1f1b_recompute"],
    "float8 delayed in one buffer": ["split_recompute"],
    "float8 delayed gradients": ["dualpipe"],
    "reentrant checkpoint": ["zb_h1"],
    "checkpoint without reentry": ["pipedream_2bw", "pipemare"],
    "dropout": ["interleaved_1f1b", "split_recompute"],
    "frozen by the third call": ["1f1b_recompute", "late_split"],
    "frozen by a gradient hook": ["zb_h1", "pipedream"],
    "thawed by the third call": ["zb_v", "weipipe ranks=2 microbatches=4"],
    "function mode around": ["zb_h1"],
    "complex weights": ["zb_v"],
    "counter in a buffer": ["split_recompute"],
    "returned buffer": ["gpipe"],
    "sparse embedding": ["dualpipe"],
    "python random numbers": ["1f1b_recompute"],
    "weight hook": ["zb_h1", "late_split", "diamond"],
    "norms": ["frozen_1f1b", "diamond", "pipemare"],
    "input hook": ["1f1b_recompute"],
    "added loss": ["split_recompute", "late_split"],
    "unused weight": ["chimera"],
    "frozen first stage": ["1f1b"],
    "weights in one memory": ["late_split", "pipemare"],
    "weight in another one": ["pipedream_2bw"],
    "loss of its own": ["1f1b_recompute"],
    "tied embedding": ["interleaved_1f1b"],
    "clipped to a norm": ["dualpipe"],
    "scalar beside": ["zb_v"],
    "views of one": ["pipe_offload"],
    "keyword arguments": ["1f1b_recompute"],
    "gradient scaler": ["dualpipe"],
    "fused adamw": ["pipedream_2bw", "pipemare"],
    "accumulation": ["chimera"],
    "evaluation between": ["1f1b"],
    "autocast around": ["pipedream"],
    "tensor parallel": ["pipe_offload"],
}
#: And those of them that are refused.
REFUSALS = {
    ("python random numbers", "1f1b_recompute"),
    ("tensor parallel", "pipe_offload"),
    ("float8 delayed in one buffer", "split_recompute"),
    ("float8 delayed gradients", "dualpipe"),
    ("checkpoint without reentry", "pipemare"),
    ("frozen by a gradient hook", "pipedream"),
    ("frozen by a gradient hook", "zb_h1"),
    ("frozen by the third call", "1f1b_recompute"),
    ("frozen by the third call", "late_split"),
    ("thawed by the third call", "weipipe ranks=2 microbatches=4"),
}
#: By schedule, the scripts that are refused, beside one that every schedule refuses.
REFUSED_SCRIPTS = {
    "pipedream_2bw": {"frozen between"},
    "weipipe ranks=2 microbatches=4": {
        "cast between",
        "evaluated with swapped memory",
        "gradients added up by hooks",
        "weights from an optimizer",
    },
}


def test_some_features_under_some_schedules(run_ranks: Run, tmp_path: Path) -> None:
    cells = [(name, column) for name, columns in SOME.items() for column in columns]
    verdicts = outcomes(run_ranks, tmp_path, cells)
    wrong = {
        cell: verdict for cell, verdict in verdicts.items() if not verdict.is_right
    }
    assert wrong == {}
    assert {cell for cell in cells if verdicts[cell].kind == REFUSED} == REFUSALS


@pytest.mark.parametrize(
    "column",
    [
        "1f1b",
        "zb_v",
        "1f1b_recompute",
        "pipedream_2bw",
        "weipipe ranks=2 microbatches=4",
    ],
)
def test_scripts_train_as_alone(run_ranks: Run, tmp_path: Path, column: str) -> None:
    scripts = [name for name in FEATURES if FEATURES[name].family == "scripts"]
    verdicts = outcomes(run_ranks, tmp_path, [(name, column) for name in scripts])
    wrong = {
        cell: verdict for cell, verdict in verdicts.items() if not verdict.is_right
    }
    assert wrong == {}
    refused = {name for (name, _), each in verdicts.items() if each.kind == REFUSED}
    assert refused == REFUSED_SCRIPTS.get(column, set()) | {"decay switched on"}


#: One schedule of each kind: with whole, split and recomputed backwards, and with two pipelines.
OF_EACH_KIND = ("1f1b", "zb_h1", "1f1b_recompute", "chimera")
_CHANGES_BUFFER = r"the forward of stage \d changes its buffer"
_IN_PLACE = r"stage \d changes its input in place"
_OUTPUT_CHANGED = r"the output of stage \d was changed in place while"
_UNLIKE = r"is run again \(R\): does it draw random numbers"
_NOT_BETWEEN = "a tensor of layout torch.sparse_coo cannot pass between ranks"
#: Features that are tried under each of these, and the refusals that there are, as patterns.
TRIED: dict[str, dict[str, str]] = {
    "linear layers": {},
    "weight hook": {},
    "clipping weight hook": {},
    "hook after accumulation": {
        "chimera": "a hook of the weight sees only its own part of the sum"
    },
    "backward hooks": {},
    "backward hook of a stage": {},
    "counter in a buffer": {"chimera": _CHANGES_BUFFER},
    "buffer replaced": {"chimera": _CHANGES_BUFFER},
    "returned buffer": {"chimera": _CHANGES_BUFFER},
    "batch norm": {},
    "new spectral norm": {"chimera": _CHANGES_BUFFER},
    "scalar beside": {},
    "detached input": {},
    "unused weight": {},
    "weight of another stage": dict.fromkeys(
        OF_EACH_KIND,
        r"computes with weights of shape \[8, 8\] that its module does not",
    ),
    "frozen first stage": {},
    "frozen last stage": {},
    "relu in place first": {"1f1b_recompute": _IN_PLACE},
    "first input changed in place": {"1f1b_recompute": _IN_PLACE},
    "complex weights": {},
    "sparse embedding": {},
    "embedding with max norm": {
        "1f1b_recompute": r"a weight of stage \d was changed between the forward",
        "chimera": r"stage \d changes its weight `\S*weight` in place, and the replicas",
    },
    "autocast around": {},
    "checkpoint without reentry": {},
    "reentrant checkpoint": {},
    "python random numbers": {"1f1b_recompute": _UNLIKE},
    "counter in an attribute": {"1f1b_recompute": _UNLIKE},
    "loss that draws": {},
    "loss that counts": {},
    "output in a workspace": dict.fromkeys(OF_EACH_KIND, _OUTPUT_CHANGED),
    "output in a hidden workspace": dict.fromkeys(OF_EACH_KIND, _OUTPUT_CHANGED),
    "weight decayed in the forward": dict.fromkeys(
        OF_EACH_KIND, r"stage \d changes its weight `\S*weight` by `.data`"
    ),
    "sparse between": dict.fromkeys(OF_EACH_KIND, _NOT_BETWEEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_feature_under_schedules_of_each_kind(
    run_ranks: Run, tmp_path: Path, name: str
) -> None:
    cells = [(name, column) for column in OF_EACH_KIND]
    for (_, column), verdict in outcomes(run_ranks, tmp_path, cells).items():
        refusal = TRIED[name].get(column)
        if refusal is None:
            assert verdict.kind in (EQUAL, ROUNDING), (column, verdict)
        else:
            assert verdict.kind == REFUSED, (column, verdict)
            assert re.search(refusal, verdict.words), (column, verdict)


@pytest.mark.slow
def test_an_output_that_is_written_over_within_a_rank(
    run_ranks: Run, tmp_path: Path
) -> None:
    """Where messages go as well, either may be found first."""
    cell = "output in a hidden workspace", "bigmac ranks=2 microbatches=4"
    verdict = outcomes(run_ranks, tmp_path, [cell])[cell]
    assert verdict.kind == REFUSED, verdict


@pytest.mark.models
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_under_every_schedule(
    run_ranks: Run, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.config.getoption("--rows")
    row = read_row(folder, name)
    if row is None:
        verdicts = outcomes(run_ranks, tmp_path, [(name, column) for column in MAKERS])
        row = {column: verdicts[name, column] for column in MAKERS}
        write_row(folder, name, row)
    wrong = {column: verdict for column, verdict in row.items() if not verdict.is_right}
    assert wrong == {}
