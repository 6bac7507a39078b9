"""Batches of messages by NCCL."""

from collections.abc import Sequence

import torch.distributed as dist

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.messages import Receive, Send
from schedlang.schedule.transports import NCCL


def post_as_one(messages: Sequence[Send | Receive]) -> None:
    """Post messages as one batch of NCCL; in a new step one by one through gloo."""
    # In a new step, `post` sends through gloo, and receives begin at the waits for them.
    if any(message.form.new for message in messages):
        for message in messages:
            message.post()
        return
    tensors = [message.tensors() for message in messages]
    operations = [
        message.wire.operation(
            dist.isend if isinstance(message, Send) else dist.irecv,
            tensor,
            message.peer,
        )
        for message, parts in zip(messages, tensors, strict=True)
        for tensor in parts
    ]
    if len(operations) > NCCL.most:
        raise PipelineError(
            f"the {len(messages)} messages of a batch have {len(operations):,} tensors, and NCCL "
            f"may hang with more than {NCCL.most:g} in one batch: write fewer transfers into an "
            "`overlap`, or let stages hand on fewer tensors"
        )
    in_flight = iter(messages[0].wire.as_one(operations) if operations else [])
    for message, parts in zip(messages, tensors, strict=True):
        if isinstance(message, Send):
            message.note(parts)
        message.in_flight = [next(in_flight) for _ in parts]
