"""Text from a model in a pipeline, token by token.

Each round makes a token for every prompt: it goes through all stages of the model, and the token
that the last stage chooses is the input of the first stage in the next round. The plan has the
stages of the model once for each round, on the same ranks, and forwards alone, as the program
`decoding` of the gallery says it. Here 2 ranks, 2 groups of prompts and 3 rounds:

    rank 0    0F0  0F1  2F0  2F1  4F0  4F1
    rank 1         1F0  1F1  3F0  3F1  5F0  5F1

The stages 0, 2 and 4 are one module, which has a cache of keys and values for each group. 2F0 needs
1F0, as in any chain of stages; what goes from one to the other is a token for each row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostics.wrong_arguments import check_whole, shown
from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_list, check_plan, check_stages
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.pipeline import Pipeline

#: What a module is called with for a group of prompts, beside its input.
Cache = Mapping[str, Any]


def most_likely(output: Any) -> Tensor:
    """The next token of each row, (rows,), from the scores of its last position: the output of the
    last stage, (rows, length, tokens), or its `logits`.
    """
    scores: Tensor = getattr(output, "logits", output)
    return scores[:, -1].argmax(dim=-1)


@frozen(eq=False)
class _Group:
    """A group of prompts: its cache on this rank; and on the last one, the tokens that were chosen
    in this run of the plan, (rows, 1) in each round.
    """

    cache: Cache
    chosen: list[Tensor] = field(factory=list)


class _Stage(nn.Module):
    """A stage of the model, in all rounds; the last one has `choose`, and returns tokens."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[_Group],
        choose: Callable[[Any], Tensor] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._groups = groups
        self._choose = choose

    def forward(self, *inputs: Any, group: int) -> Any:
        """The stage's output for a group; on the last stage, the next token of each row."""
        of_group = self._groups[group]
        output = self.module(*inputs, **of_group.cache)
        if self._choose is None:
            return output
        tokens = self._choose(output)[:, None]
        of_group.chosen.append(tokens)
        return tokens


class Decoding(Pipeline):
    """Generates text by a plan that has the stages of a model once for each round, such as one of
    the program `decoding`.

    `stages` are the modules of this rank in the first round: `split(model, plan,
    stages=range(ranks))`. `new_cache(prompts)` makes the keyword arguments with which they are
    called for a group of prompts, in all of its rounds: a cache among them, such as
    `{"past_key_values": DynamicCache()}`, to which a module adds the keys and values of the tokens
    that it is given. `choose` is given what the last stage returns, and gives the next token of
    each row, (rows,); by default the most likely one. The other arguments are those of `Pipeline`.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        new_cache: Callable[[Tensor], Cache],
        choose: Callable[[Any], Tensor] = most_likely,
        *,
        mesh: DeviceMesh | None = None,
        timeout: float = 60.0,
    ) -> None:
        _check_arguments(plan, stages, new_cache, choose)
        self._rounds = _rounds_of(plan, stages)
        self._new_cache = new_cache
        self._groups: list[_Group] = []
        size = len(plan.placement) // self._rounds
        modules: dict[int, nn.Module] = {}
        for number, module in stages.items():
            is_last = number == size - 1
            stage = _Stage(module, self._groups, choose if is_last else None)
            modules |= dict.fromkeys(range(number, len(plan.placement), size), stage)
        super().__init__(plan, modules, mesh=mesh, timeout=timeout)

    def generate(
        self,
        prompts: Sequence[Tensor],
        max_tokens: int,
        end: int | None = None,
        pad: int | None = None,
    ) -> list[Tensor]:
        """The tokens that follow the prompts of each group, on all ranks: (rows, tokens).

        `prompts` are a tensor for each group, (rows, length), the same on all ranks. Groups are
        under way at the same time, and may differ in length and in the number of rows. A group has
        ended when it has `max_tokens`, or when each row has the token `end`; behind it, a row has
        `pad`, by default `end` again. The plan runs until all groups have ended, and makes a token
        in each of its rounds, so a cache needs room for all tokens of the last run.
        """
        _check_prompts(prompts, max_tokens, end, pad)
        pad = end if pad is None else pad
        self._groups[:] = [_Group(self._new_cache(each)) for each in prompts]
        texts = [prompt[:, :0] for prompt in prompts]
        inputs = dict(enumerate(prompts))
        while inputs:
            options = [{"group": group} for group in inputs]
            self.evaluate([*inputs.values()], options=options)
            chosen = self._chosen([*inputs], [len(rows) for rows in inputs.values()])
            for group, tokens in zip([*inputs], chosen, strict=True):
                text = torch.cat([texts[group], tokens], dim=1)[:, :max_tokens]
                texts[group] = text
                inputs[group] = tokens[:, -1:]
                has_ended = end is not None and bool((text == end).any(dim=1).all())
                if has_ended or text.shape[1] == max_tokens:
                    del inputs[group]
        # Caches take memory.
        self._groups.clear()
        if end is None or pad is None:
            return texts
        return [_padded(text, end, pad) for text in texts]

    def _chosen(self, groups: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
        """The tokens of groups in the last run of the plan, (rows, rounds), from the rank that has
        chosen them.
        """
        found = []
        for group, count in zip(groups, rows, strict=True):
            own = self._groups[group].chosen
            nothing = torch.zeros(
                count, self._rounds, dtype=torch.int64, device=self._device
            )
            found.append(torch.cat(own, dim=1) if own else nothing)
            own.clear()
        together = torch.cat(found)
        with self._watchdog.guard("in generate"):
            self._wire.reduce(together, dist.ReduceOp.MAX)
        return [*torch.split(together, [*rows])]


def _rounds_of(plan: Plan, stages: Mapping[int, nn.Module]) -> int:
    """How often a plan has the stages of a model; PipelineError unless it has them once for each
    round, on the same ranks.
    """
    layout = plan.layout
    first = min(stages, default=0)
    held = plan.stages_of(plan.placement[first]) if first < len(plan.placement) else []
    rounds, rest = divmod(len(held), max(len(stages), 1))
    size = len(plan.placement) // max(rounds, 1)
    is_chain = len(layout.pipelines) == layout.slices == 1 and not (
        layout.edges or layout.skips
    )
    if (
        rest
        or sorted(stages) != held[: len(stages)]
        or plan.placement != plan.placement[:size] * rounds
        or not (is_chain and plan.is_forward_only)
    ):
        raise PipelineError(
            f"the plan does not have the stages {sorted(stages)} once for each round: take one of "
            "the program `decoding`, which has forwards alone, and cut the model into the stages "
            "of the first round, `split(model, plan, stages=range(ranks))`"
        )
    return rounds


def _padded(text: Tensor, end: int, pad: int) -> Tensor:
    """A text with `pad` behind the first `end` of each row, cut off where all rows have ended."""
    is_end = text == end
    ends = is_end.cumsum(dim=1)
    going_on = int((ends == 0).any(dim=0).sum())
    ends_before = ends - is_end.long()
    return text.masked_fill(ends_before > 0, pad)[:, : going_on + 1]


def _check_arguments(plan: Any, stages: Any, new_cache: Any, choose: Any) -> None:
    """The arguments of `Decoding` that are not `Pipeline`'s, or that it needs before that."""
    check_plan(plan)
    check_stages(stages)
    for name, function, what in (
        ("new_cache", new_cache, "a function of the prompts of a group"),
        ("choose", choose, "a function of what the last stage returns"),
    ):
        if not callable(function):
            raise TypeError(f"`{name}` is {shown(function)}: it must be {what}")


def _check_prompts(prompts: Any, max_tokens: Any, end: Any, pad: Any) -> None:
    """The arguments of `Decoding.generate`."""
    what = "tensors of tokens, (rows, length), one for each group of prompts"
    if isinstance(prompts, Tensor):
        raise TypeError(f"`prompts` is {shown(prompts)}: it must be a list of {what}")
    check_list("prompts", prompts, Tensor, what)
    for group, tokens in enumerate(prompts):
        if tokens.ndim != 2 or not tokens.numel():
            shape = list(tokens.shape)
            raise ValueError(
                f"`prompts[{group}]` has the shape {shape}, not (rows, length)"
            )
    check_whole("max_tokens", max_tokens, 1)
    for name, token in (("end", end), ("pad", pad)):
        if token is not None:
            check_whole(name, token, 0)
