"""The buffers of a stage: what a forward counts and averages, as BatchNorm does.

A forward may change them in place. So what leaves the stage is never their memory; and a forward
that is run again (R) finds them as its first run did, and leaves them as they are by then:

    F 0         F 1         R 0              F 2
    n = 0 → 1   n = 1 → 2   n = 0 (a copy)   n = 2 → 3
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import are_same
from schedlang.schedule.kinds import REPEATS

#: Layers that keep running averages.
_AVERAGING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class Buffers(Part):
    """The buffers of one stage, of whose microbatches some are `recomputed`.

    Where the stage has `replicas`, other stages of the plan that are the same one, no forward may
    change a buffer on which outputs depend: the replicas would not see it.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        recomputed: Container[int],
        replicas: Sequence[int],
    ) -> None:
        self._stage = stage
        self._recomputed = recomputed
        self._replicas = replicas
        #: Where the module has each of them now, by name: a forward may put another in its place.
        self._places = {
            f"{prefix}.{name}" if prefix else name: (owner, name)
            for prefix, owner in module.named_modules()
            for name, _ in owner.named_buffers(recurse=False)
        }
        #: Those on which no output depends while the module trains: running averages, of which each
        #: replica has those of its own microbatches, as in data parallel training.
        self._averages = {
            name
            for name, (owner, _) in self._places.items()
            if isinstance(owner, _AVERAGING)
        }
        #: Those that the first forward has changed.
        self._changing: set[str] | None = None
        #: Right before a forward: each buffer, and how often it had been changed in place.
        self._before: dict[str, tuple[Tensor, int]] = {}
        #: Copies of those that forwards change, or before the first one of all; and for each
        #: microbatch to recompute, those that its first forward found.
        self._copies: dict[str, Tensor] = {}
        self._found: dict[int, Mapping[str, Tensor]] = {}

    def before_forward(self, run: Forward) -> None:
        """Keep the buffers for the second run, or put them back for it."""
        if run.is_repeated:
            run.substitutes |= self._found.pop(run.microbatch)
        elif self._watches(run):
            buffers = {name: getattr(*place) for name, place in self._places.items()}
            # The first forward shows which buffers change; from then on only those are copied.
            kept = buffers.keys() if self._changing is None else self._changing
            self._copies = {name: buffers[name].clone() for name in kept}
            self._before = {
                name: (buffer, changes_of(buffer)) for name, buffer in buffers.items()
            }

    def after_forward(self, run: Forward) -> None:
        """Let nothing that is returned be the memory of a buffer; and see which ones changed."""
        run.returned = self._without_memory(run.returned)
        if not self._watches(run):
            return
        if self._changing is None:
            # BatchNorm's kernel does not count what it changes.
            self._changing = {
                name
                for name, before in self._before.items()
                if self._differs(name, *before)
                or not are_same(getattr(*self._places[name]), self._copies[name])
            }
        if run.microbatch in self._recomputed:
            self._found[run.microbatch] = {
                name: self._copies[name] for name in self._changing
            }
        self._check()

    def _check(self) -> None:
        """PipelineError where a buffer changed that must not."""
        changing = self._changing or set()
        later = {
            name
            for name, before in self._before.items()
            if name not in changing and self._differs(name, *before)
        }
        unseen = (changing | later) - self._averages
        if self._replicas and unseen:
            others = " and ".join(map(str, self._replicas))
            raise PipelineError(
                f"the forward of stage {self._stage} changes its buffer "
                f"`{min(unseen)}`, and the plan has replicas of it, stage "
                f"{others}, which would not see that: keep no such state, or take a schedule with "
                "one pipeline"
            )
        if later:
            raise PipelineError(
                f"the forward of stage {self._stage} changes its buffer `{min(later)}`, which its "
                "first one did not, so there is no copy of it for the forward that is run again "
                "(R): let all forwards of the stage change it, or none"
            )

    def _watches(self, run: Forward) -> bool:
        """Whether it matters what a forward changes: one that is run again is the first of two."""
        if run.is_repeated or run.is_evaluation:
            return False
        return bool(self._replicas) or run.microbatch in self._recomputed

    def _differs(self, name: str, before: Tensor, changes: int) -> bool:
        buffer = getattr(*self._places[name])
        return buffer is not before or changes_of(buffer) != changes

    def _without_memory(self, returned: Any) -> Any:
        """What was returned, with a copy in place of each tensor that has the memory of a buffer.

        A tensor with a graph has memory of its own.
        """
        values, tree = tree_flatten(returned)
        if all(
            not isinstance(value, Tensor) or value.requires_grad for value in values
        ):
            return returned
        buffers = [getattr(*place) for place in self._places.values()]
        addresses = {_address(buffer) for buffer in buffers if buffer is not None}
        for index, value in enumerate(values):
            if isinstance(value, Tensor) and _address(value) in addresses:
                values[index] = value.clone()
        return tree_unflatten(values, tree)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def of_stages(site: Site) -> Iterator[tuple[int, Buffers]]:
    """Those of stages that have buffers."""
    for stage, module in site.modules.items():
        if any(True for _ in module.buffers()):
            others = [
                other
                for other in site.plan.layout.replicas(stage)
                if site.modules.get(other) is not module
            ]
            recomputed = site.microbatches(stage, REPEATS)
            yield stage, Buffers(stage, module, recomputed, others)
