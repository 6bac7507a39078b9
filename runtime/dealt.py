"""An error or a warning if the ranks of a pipeline get different batches.

A pipeline needs the same batch on all of its ranks, but most loaders of distributed training give
different rows to each. If such a loader is in use, it is an error. If the script made the batch in
another way, such as from random numbers to try a model, it is a warning.
"""

import gc
import warnings

from torch.utils.data import DistributedSampler, RandomSampler

from schedlang.runtime.errors import PipelineError

#: Samplers that give different rows to ranks, or shuffle by the seed of a rank.
_LOADERS = {
    DistributedSampler: "a DistributedSampler, which deals out other rows to each rank",
    RandomSampler: "a DataLoader that shuffles, by another seed on each rank",
}
#: Loaders and samplers of accelerate, which the Trainer of transformers uses, too.
_OF_ACCELERATE = {"BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"}


def tell_of_other_batch(other: int) -> None:
    """Raise PipelineError, or warn, since rank `other` has another batch than this one."""
    told = (
        f"rank {other} was given another batch than this rank, so inputs of the one meet targets "
        "of the other, and all ranks of a pipeline train on one batch"
    )
    loader = _loader()
    if loader is None:
        warnings.warn(
            f"{told}: load the same rows on all, or give None for what a rank does not need "
            "(inputs but on the first stage, targets but on the last)",
            stacklevel=2,
        )
        return
    raise PipelineError(
        f"{told}. The script has {loader}: leave the DataLoader out of accelerate's `prepare`, "
        "write a loop in place of transformers' Trainer, give a DistributedSampler the replicas of "
        "the pipeline (`num_replicas`, `rank`) and not its ranks, and one that shuffles a "
        "`generator` with the same seed on all ranks"
    )


def _loader() -> str | None:
    """The name of a loader in this process that gives different rows to ranks, if any."""
    kinds = {*map(type, gc.get_objects())}
    # accelerate uses torch's samplers, too, so it is checked first.
    for kind in kinds:
        if kind.__name__ in _OF_ACCELERATE and kind.__module__.startswith("accelerate"):
            return "a DataLoader that accelerate's `prepare` deals out to ranks"
    for known, what in _LOADERS.items():
        if any(issubclass(kind, known) for kind in kinds):
            return what
    return None
