"""The state of torch's random numbers, on a device, and on a rank's device and its CPU."""

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state now."""
    return (
        torch.cuda.get_rng_state(device)
        if device.type == "cuda"
        else torch.get_rng_state()
    )


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Go on from a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class RandomState:
    """The state of torch's random number generators, on the CPU and on the device of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save."""
        state = {"cpu": torch.get_rng_state()}
        return state | (
            {"cuda": torch.cuda.get_rng_state(self._device)}
            if self._device.type == "cuda"
            else {}
        )

    def load_state_dict(self, state_dict: Mapping[str, Tensor], /) -> None:
        """Go on from a state."""
        torch.set_rng_state(state_dict["cpu"].cpu())
        if "cuda" in state_dict:
            torch.cuda.set_rng_state(state_dict["cuda"].cpu(), self._device)
