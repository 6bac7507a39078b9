"""Text to train on that every machine with Python has: the source of Python's standard library, as
bytes.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

#: Enough for hours of training a small model, and read in a moment.
_BYTES = 4_000_000


def read_corpus() -> Tensor:
    """The text, a vector of bytes; OSError where the standard library has no source."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_BYTES]
    if len(text) < 1000:
        raise OSError(f"there is no text to train on: `{folder}` has no Python source")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(
    corpus: Tensor, rows: int, length: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows of `length` bytes from random places, and for each byte the one that follows; the same
    for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - length, (rows, 1), generator=generator)
    places = starts + torch.arange(length)
    return corpus[places].long(), corpus[places + 1].long()
