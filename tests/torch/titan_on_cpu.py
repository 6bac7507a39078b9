"""torchtitan's own command on a CPU, for which it is not made: `torchrun titan_on_cpu.py ARGUMENTS`.

Nothing of torchtitan is changed but what is named here; docs/torch.md says the same of it.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of `flex_attention`, which has no backward on a CPU."""
    rows = query.shape[2]
    columns = key.shape[2]
    mask = create_mask(block_mask.mask_mod, len(query), 1, rows, columns, device="cpu")
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return output, None


# Without an accelerator, torchtitan takes CUDA.
torch._utils._get_available_device_type = lambda: "cpu"

# What torchtitan asks of an accelerator: the number of the device for a barrier, and its memory,
# which it prints.
ASKED = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: SimpleNamespace(total_memory=2**30),
    "memory_stats": lambda device: {},
    "reset_peak_memory_stats": lambda: None,
}
for name, answer in ASKED.items():
    setattr(torch.cpu, name, answer)

from torchtitan.models.common import attention as of_torchtitan  # noqa: E402
from torchtitan.train import main  # noqa: E402

of_torchtitan.FlexAttention._compiled_flex_attn = attention
# Its mask is compiled, for which a machine must have a compiler of C++.
of_torchtitan._compiled_create_block_mask = create_block_mask

if __name__ == "__main__":
    main()
