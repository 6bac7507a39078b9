"""Plans in torch's own pipelining, and schedules of torch's in our runtime.

    to_torch.py      `schedule`: a plan becomes a schedule of torch's, over its `PipelineStage`s
    from_torch.py    `pipeline`: a schedule of torch's becomes a `Pipeline`, under torch's signature
    same_stages.py   whether stages of torch's are those of a plan
    private.py       what torch calls private, in one place
    titan.py         torchtitan's configurations, with our runtime in place of torch's

Import it as `import schedlang.torch`: `from schedlang import torch` would hide torch itself.
"""

from schedlang.torch.from_torch import TorchPipeline, pipeline
from schedlang.torch.to_torch import schedule

__all__ = ["TorchPipeline", "pipeline", "schedule"]
