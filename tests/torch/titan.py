"""Runs of torchtitan on four processes of this machine, and the losses that they print.

The tokenizer and the data are made here, of pages of this repository, in the formats that torchtitan
reads: so nothing is fetched.
"""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from tests.support.paths import DOCS, ROOT

RANKS = 4
STEPS = 5
MICROBATCHES = 8
#: Seconds that a run may take.
LIMIT = 900
#: Of what torchtitan would take by itself, a run has less; and 32 bits for all numbers, so that
#: losses can be compared.
SMALL = {
    "debug.seed": "7",
    "parallelism.pipeline_parallel_degree": str(RANKS),
    "training.local_batch_size": str(MICROBATCHES),
    "training.mixed_precision_param": "float32",
    "training.seq_len": "64",
    "training.steps": str(STEPS),
    "validator.freq": str(STEPS),
    "validator.steps": "1",
}
#: Documents have so many words, and the tokenizer knows so many.
WORDS = 200
KNOWN = 1000

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"(?<!validate )step: +\d+ +loss: +([\d.]+) +grad_norm: +([\d.]+)")
_VALIDATION = re.compile(r"validate step: +\d+ +loss: +([\d.]+)")


@frozen
class Trained:
    """What a run prints: for each step the loss and the norm of all gradients; and what validations
    give.
    """

    losses: list[float]
    norms: list[float]
    validations: list[float]


def write_assets(folder: Path) -> None:
    """A tokenizer and documents, of the pages of the documentation."""
    words = [
        word for page in sorted(DOCS.glob("*.md")) for word in page.read_text().split()
    ]
    special = ["<unk>", "<s>", "</s>"]
    known = special + [word for word, _ in Counter(words).most_common(KNOWN)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for number, token in enumerate(special)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(known)},
            "unk_token": special[0],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": special[1], "eos_token": special[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "documents").mkdir()
    documents = [words[begin : begin + WORDS] for begin in range(0, len(words), WORDS)]
    lines = [json.dumps({"text": " ".join(document)}) + "\n" for document in documents]
    (folder / "documents" / "pages.json").write_text("".join(lines))


def run(
    python: str,
    folder: Path,
    module: str,
    config: str,
    options: Sequence[str],
    validates: bool,
) -> Trained:
    """What a run of a configuration prints, with assets in a folder, and more options; a dot is
    shown for each of its steps.
    """
    documents = str(folder / "documents")
    given = {
        "module": module,
        "config": config,
        "hf_assets_path": str(folder),
        "dump_folder": str(folder / "out"),
        "dataloader.dataset_path": documents,
        "validator.dataloader.dataset": "c4_test",
        "validator.dataloader.dataset_path": documents,
        **SMALL,
    }
    command = [
        "timeout",
        str(LIMIT),
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
    ]
    command += [
        "--nproc-per-node",
        str(RANKS),
        str(Path(__file__).with_name("titan_on_cpu.py")),
    ]
    command += [word for name, value in given.items() for word in (f"--{name}", value)]
    # Every pipeline needs this.
    command += ["--training.disable_cuda_graphs"]
    command += ["--validator.enable"] if validates else []
    command += options
    environment = os.environ | {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(_COLOUR.sub("", line))
            if _STEP.search(lines[-1]):
                print(".", end="", flush=True)
    assert process.returncode == 0, "".join(lines[-60:])
    return read("".join(lines))


def read(text: str) -> Trained:
    """The losses in what a run prints. Ranks without the last stage print -1."""
    steps = _STEP.findall(text)
    return Trained(
        [float(loss) for loss, _ in steps],
        [float(norm) for _, norm in steps],
        [float(loss) for loss in _VALIDATION.findall(text)],
    )


def side_by_side(names: Sequence[str], runs: Sequence[Trained]) -> Iterator[str]:
    """Losses by step: those of the first run, and of the others with the difference from it."""
    yield f"  {'step':>8}" + "".join(f"  {name:>27}" for name in names)
    rows = [
        (str(step + 1), [each.losses[step] for each in runs]) for step in range(STEPS)
    ]
    if runs[0].validations:
        rows.append(("validate", [each.validations[-1] for each in runs]))
    for step, losses in rows:
        first, *others = losses
        cells = [
            f"{first:.5f}",
            *(f"{loss:.5f} ({loss - first:+.5f})" for loss in others),
        ]
        yield f"  {step:>8}" + "".join(f"  {cell:>27}" for cell in cells)
