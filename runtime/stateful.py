"""The protocol of objects that a checkpoint can save."""

from typing import Any, Protocol


class Stateful(Protocol):
    """Anything with a state to save: a module, an optimizer, a learning rate scheduler, a data
    loader.
    """

    def state_dict(self) -> Any:
        """The state to save."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Load a state."""
