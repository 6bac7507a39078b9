"""The state of torch's random numbers on a device."""

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state now."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Go on from a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
