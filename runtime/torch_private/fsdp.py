"""The end of a backward of FSDP2.

FSDP2 ends a backward in a callback of its root module, which waits for the reduced gradients. FSDP
does not see some backwards, such as a weight half, so the runtime must call it: there is no public
call that reduces gradients. Torch's own pipelining uses the same private one.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private import private


def check_fsdp(parts: Iterable[nn.Module]) -> None:
    """PipelineError if FSDP2 lacks the private parts that `fsdp_roots` needs."""
    for part in parts:
        try:
            state = private(part, "_get_fsdp_state")()
            private(state, "_is_root")
            private(state, "_root_post_backward_final_callback")
        except AttributeError as error:
            raise PipelineError(
                f"stages that FSDP2 has sharded need private parts of it that torch "
                f"{torch.__version__} does not have ({error}): no public call reduces gradients "
                "after a backward in halves; train with a version of torch that schedlang is "
                "tested with, or do not shard the stages"
            ) from None


def fsdp_roots(parts: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """The callbacks at the end of a backward, of those sharded modules that are roots.

    FSDP decides in the first forward which modules are roots.
    """
    states = [private(part, "_get_fsdp_state")() for part in parts]
    return [
        private(state, "_root_post_backward_final_callback")
        for state in states
        if private(state, "_is_root")
    ]
