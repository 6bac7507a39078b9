"""Text from pipelines on real processes: its tokens are those of the model in one process, which sees
the whole text for each of them.
"""

import warnings
from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn

from schedlang import compile
from schedlang.runtime import Decoding, PipelineError
from tests.support.ranks import Run

TOKENS = 16
WIDTH = 8
END = 4
PAD = 0


class Stage(nn.Module):
    """A stage of a small model: each position sees the sum of those before."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.embedding = nn.Embedding(TOKENS, WIDTH) if number == 0 else nn.Identity()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor, sums: dict[nn.Module, Tensor]) -> Tensor:
        x = self.embedding(x)
        seen = x.cumsum(dim=1) + sums.get(self, 0)
        sums[self] = seen[:, -1:]
        scores: Tensor = self.head(x + torch.sin(self.layer(3 * seen)))
        return scores


def build(stages: int) -> list[nn.Module]:
    """All stages of the model."""
    return [Stage(number, stages).double() for number in range(stages)]


def alone(stages: int, prompt: Tensor, max_tokens: int, end: int | None) -> Tensor:
    """The text that follows a group of prompts, by the whole model in one process."""
    model = build(stages)
    text = prompt
    has_ended = torch.zeros(len(prompt), dtype=torch.bool)
    while text.shape[1] < prompt.shape[1] + max_tokens and not has_ended.all():
        scores = text
        for stage in model:
            scores = stage(scores, {})
        token = scores[:, -1].argmax(dim=-1)
        token[has_ended] = PAD
        has_ended |= token == end
        text = torch.cat([text, token[:, None]], dim=1)
    return text[:, prompt.shape[1] :]


def prompts_of(groups: int) -> list[Tensor]:
    """Groups of prompts of other lengths and other numbers of rows."""
    generator = torch.Generator().manual_seed(groups)
    shapes = [(1 + group % 3, 2 + group % 4) for group in range(groups)]
    return [torch.randint(TOKENS, shape, generator=generator) for shape in shapes]


def differs(
    sizes: dict[str, int], groups: int, max_tokens: int, end: int | None = None
) -> tuple[bool, set[int]]:
    """Whether any text differs from that of one process, twice in turn; and their lengths."""
    plan = compile("decoding", sizes)
    ranks = sizes["ranks"]
    model = build(ranks)
    rank = torch.distributed.get_rank()
    with warnings.catch_warnings():
        # A pipeline that trains warns of stages with the same weights, as those of all rounds are.
        warnings.simplefilter("error")
        decoding = Decoding(plan, {rank: model[rank]}, lambda prompts: {"sums": {}})
    prompts = prompts_of(groups)
    expected = [alone(ranks, each, max_tokens, end) for each in prompts]
    wrong = False
    for _ in range(2):
        texts = decoding.generate(prompts, max_tokens, end, PAD)
        wrong |= not all(map(torch.equal, texts, expected))
    return wrong, {text.shape[1] for text in expected}


@pytest.mark.core
def test_texts_are_those_of_one_process(run_ranks: Run) -> None:
    """Prompts of unequal lengths, more tokens than the plan has rounds, rows that end early."""
    sizes = {"ranks": 2, "microbatches": 2, "rounds": 4}
    for wrong, lengths in run_ranks(partial(differs, sizes, 3, 10, END), 2).results():
        assert not wrong
        assert min(lengths) < 10


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds", "groups", "end"),
    [
        (1, 2, 3, 2, END),
        (2, 1, 4, 1, None),
        (3, 3, 1, 3, END),
        (3, 5, 2, 4, None),
        (4, 4, 5, 4, END),
        (4, 2, 9, 7, END),
    ],
)
def test_any_number_of_ranks_rounds_and_groups(
    run_ranks: Run,
    ranks: int,
    microbatches: int,
    rounds: int,
    groups: int,
    end: int | None,
) -> None:
    """Also more groups than the plan has microbatches, and fewer."""
    sizes = {"ranks": ranks, "microbatches": microbatches, "rounds": rounds}
    found = run_ranks(partial(differs, sizes, groups, 8, end), ranks).results()
    assert not any(wrong for wrong, _ in found)


def chooses_the_least_likely() -> bool:
    """Whether a rule of the script's own chooses the tokens."""
    plan = compile("decoding", {"ranks": 2, "microbatches": 1})
    rank = torch.distributed.get_rank()
    model = build(2)
    decoding = Decoding(
        plan,
        {rank: model[rank]},
        lambda prompts: {"sums": {}},
        lambda scores: scores[:, -1].argmin(dim=-1),
    )
    (prompt,) = prompts_of(1)
    (text,) = decoding.generate([prompt], 1)
    sums: dict[nn.Module, Tensor] = {}
    scores = model[1](model[0](prompt, sums), sums)
    return torch.equal(text[:, 0], scores[:, -1].argmin(dim=-1))


def test_a_script_chooses_tokens(run_ranks: Run) -> None:
    assert run_ranks(chooses_the_least_likely, 2).results() == [True, True]


@pytest.mark.parametrize(
    ("name", "sizes", "stages"),
    [
        ("gpipe", {"ranks": 1}, [0]),
        ("decoding", {"ranks": 2, "rounds": 3}, [0, 2]),
        ("decoding", {"ranks": 2, "rounds": 3}, [2]),
    ],
)
def test_what_is_no_plan_for_decoding_is_refused(
    name: str, sizes: dict[str, int], stages: list[int]
) -> None:
    modules = {stage: nn.Linear(1, 1) for stage in stages}
    with pytest.raises(PipelineError, match="once for each round"):
        Decoding(compile(name, sizes), modules, lambda prompts: {})
