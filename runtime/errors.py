"""The errors of the runtime."""


class PipelineError(Exception):
    """What stopped the pipeline: the rank, the action with its program line, and the reason; after
    a failed step also what every rank was doing then.
    """


class LostRank(PipelineError):
    """The connection to another rank broke, or to one of several."""

    def __init__(self, ranks: set[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = ranks
