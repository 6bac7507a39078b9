"""Gradients over a channel that has no activations."""

from torch import Tensor

from schedlang.runtime.messages import GradientSend


class LoneGradientSend(GradientSend):
    """The send of gradients over a channel that has no activations, since the input came from
    another pipeline. Its box has pairs of the input's spec and the gradients.
    """

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """The gradients. In place of the first activation of a new form, they announce its spec."""
        spec, gradients = self.box.pop(self.microbatch)
        if self.form.spec is None:
            self.channel.announce(self.form, spec)
        return self.form.gradients.pack(gradients, self.channel.what)
