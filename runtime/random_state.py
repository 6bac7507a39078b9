"""The state of torch's random number generators, on a rank's device and on its CPU."""

from collections.abc import Mapping

import torch
from torch import Tensor

#: The state of the CPU's generator, `cpu`; for a stage on a GPU also that GPU's, `cuda`.
State = Mapping[str, Tensor]


def random_state(device: torch.device) -> State:
    """The current state. A stage on a GPU may also draw from the CPU's generator, as LayerDrop
    does.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: State) -> None:
    """Set the state of the generators."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


class RandomState:
    """The random state of a rank, as checkpoints keep it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> State:
        """The state to save."""
        return random_state(self._device)

    def load_state_dict(self, state_dict: State, /) -> None:
        """Set the state."""
        set_random_state(self._device, state_dict)
