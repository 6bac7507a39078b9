"""The buffers of a stage, which its forwards may change in place, such as BatchNorm's averages.

So an output never shares memory with a buffer. And a forward that is recomputed (R) reads the
buffers of its first run, and leaves the current ones alone:

    F 0         F 1         R 0              F 2
    n = 0 → 1   n = 1 → 2   n = 0 (a copy)   n = 2 → 3

A backward may change buffers, too, such as a layer in float8 that notes the largest number of its
gradients. It must not change the copy that R has read, since that change would be lost.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.shared_memory import copies_of
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


#: Buffers by name, each with its count of changes in place.
_Counted = dict[str, tuple[Tensor, int]]


class Buffers(Part):
    """The buffers of one stage, some of whose microbatches are `recomputed`.

    If the stage has `replicas` in the plan, no forward or backward may change a buffer on which
    outputs depend, since the replicas would not see the change. If a replica `runs_again` what
    another one ran ahead, running averages may not change either, since they would twice.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        recomputed: Container[int],
        replicas: Sequence[int],
        runs_again: bool,
    ) -> None:
        self._stage = stage
        self._recomputed = recomputed
        self._replicas = replicas
        self._runs_again = runs_again
        self._module = module
        #: By name, the module and the attribute of each buffer: a forward may replace the tensor.
        self._places: dict[str, tuple[nn.Module, str]] = {}
        #: Running averages, on which no output depends in training. Each replica averages over its
        #: own microbatches, as in data parallel training.
        self._averages: set[str] = set()
        #: The buffers that the first forward with these has changed; None before it.
        self._changing: set[str] | None = None
        self.begin_step()
        #: Right before a forward: each buffer, and its count of changes in place.
        self._before: _Counted = {}
        #: The same right before a backward; and from R to its backward, by microbatch, of the
        #: copies that R has read.
        self._before_backward: _Counted = {}
        self._read: dict[int, _Counted] = {}
        #: Copies of the buffers that forwards change (of all before the first forward); and for
        #: each microbatch to recompute, the copies from before its first forward.
        self._copies: dict[str, Tensor] = {}
        self._found: dict[int, Mapping[str, Tensor]] = {}

    def begin_step(self) -> None:
        """Look up the buffers: a script may have put in some since the last step, or a layer with
        others.
        """
        places = {
            f"{prefix}.{name}" if prefix else name: (owner, name)
            for prefix, owner in self._module.named_modules()
            for name, _ in owner.named_buffers(recurse=False)
        }
        if places != self._places:
            self._places = places
            self._averages = {
                name
                for name, (owner, _) in places.items()
                if isinstance(owner, _AVERAGING) and not self._runs_again
            }
            self._changing = None

    def before_forward(self, run: Forward) -> None:
        """Copy the buffers before a first run, or substitute these copies in the second run."""
        if run.is_repeated:
            run.substitutes |= self._found.pop(run.microbatch)
        elif self._watches(run):
            buffers = {name: getattr(*place) for name, place in self._places.items()}
            # The first forward shows which buffers change; from then on only those are copied.
            kept = buffers.keys() if self._changing is None else self._changing
            self._copies = copies_of({name: buffers[name] for name in kept})
            self._before = _counted(buffers)

    def after_forward(self, run: Forward) -> None:
        """Copy outputs that share memory with a buffer, and find out which buffers changed."""
        run.returned = self._without_memory(run.returned)
        if run.is_repeated:
            copies = {name: run.substitutes[name] for name in self._changing or ()}
            self._read[run.microbatch] = _counted(copies)
        if not self._watches(run):
            return
        if self._changing is None:
            # BatchNorm's kernel does not count its changes, so values are compared, too.
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
        self._check(run.microbatch)

    def before_backward(self, run: Backward) -> None:
        """Count the changes of the buffers before a backward that must not change them."""
        if self._replicas:
            self._before_backward = _counted(
                {name: getattr(*place) for name, place in self._places.items()}
            )

    def after_backward(self, run: Backward) -> None:
        """PipelineError if a backward has changed a buffer, and the change would be lost."""
        if not self._places:
            return
        before = self._before_backward.items()
        self._check_replicas(
            "backward", {name for name, each in before if self._differs(name, *each)}
        )
        read = self._read.pop(run.microbatch, {}).items()
        lost = {name for name, (copy, changes) in read if changes_of(copy) != changes}
        if lost:
            raise PipelineError(
                f"the backward of stage {self._stage} changes its buffer `{min(lost)}`, of which "
                "the forward that was run again (R) has read a copy, so the change would be lost: "
                "keep what a backward changes in another buffer than what a forward changes, or do "
                "not recompute it"
            )

    def _check_replicas(self, what: str, changed: set[str]) -> None:
        """PipelineError if a forward or backward has changed a buffer of a stage with replicas."""
        unseen = changed - self._averages
        if self._replicas and unseen:
            others = " and ".join(map(str, self._replicas))
            raise PipelineError(
                f"the {what} of stage {self._stage} changes its buffer "
                f"`{min(unseen)}`, and the plan has replicas of it, stage "
                f"{others}, which would not see that: keep no such state, or take a schedule with "
                "one pipeline"
            )

    def _check(self, microbatch: int) -> None:
        """PipelineError if a forward has changed a buffer that it must not change."""
        changing = self._changing or set()
        later = {
            name
            for name, before in self._before.items()
            if name not in changing and self._differs(name, *before)
        }
        self._check_replicas("forward", changing | later)
        if later and microbatch in self._recomputed:
            raise PipelineError(
                f"the forward of stage {self._stage} changes its buffer `{min(later)}`, which its "
                "first one did not, so there is no copy of it for the forward that is run again "
                "(R): let all forwards of the stage change it, or none"
            )

    def _watches(self, run: Forward) -> bool:
        """Whether changes of a forward matter: the stage has replicas, or R will run it again."""
        if run.is_repeated or run.is_evaluation:
            return False
        return bool(self._replicas) or run.microbatch in self._recomputed

    def _differs(self, name: str, before: Tensor, changes: int) -> bool:
        buffer = getattr(*self._places[name])
        return buffer is not before or changes_of(buffer) != changes

    def _without_memory(self, returned: Any) -> Any:
        """The result, with a copy of each tensor that shares memory with a buffer.

        A tensor with a graph never does.
        """
        if not self._places:
            return returned
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


def _counted(buffers: Mapping[str, Tensor]) -> _Counted:
    return {name: (buffer, changes_of(buffer)) for name, buffer in buffers.items()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def of_stages(site: Site) -> Iterator[tuple[int, Buffers]]:
    """Make the part for every stage: buffers may be put in later."""
    layout = site.plan.layout
    runs_again = bool(layout.handovers)
    for stage, module in site.modules.items():
        others = [
            other
            for other in layout.replicas(stage)
            if other != stage and (runs_again or site.modules.get(other) is not module)
        ]
        recomputed = site.microbatches_with(REPEATS, stage)
        yield stage, Buffers(stage, module, recomputed, others, runs_again)
