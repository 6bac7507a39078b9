"""Runs scenarios of `test_models.py` on real processes, as `runtime_worker.py` its own: models that
`split` cuts.
"""

import copy
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, load_model, load_optimizers, measure, split
from tests.support.paths import DOCS
from tests.support.runtime_worker import OPTIMIZERS, difference, main, pipeline, program, report

LENGTH = 12
ROWS = 2
VOCABULARY = 64
#: The blocks of a model of transformers, in the order of their calls.
BLOCKS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
STEPS = 20


class Llama(LlamaForCausalLM):
    """The model of transformers, which returns a tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, use_cache=False).logits


def llama(tied: bool = False) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
    )
    return Llama(config)


def empty_llama(tied: bool = False) -> Llama:
    """Without weights, but for its positions, which are in no file."""
    with torch.device("meta"):
        model = llama(tied)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Those of 8 microbatches, which count on from some token."""
    begin = torch.randint(VOCABULARY, (8 * ROWS, 1), generator=torch.Generator().manual_seed(step))
    drawn = (begin + torch.arange(LENGTH + 1)) % VOCABULARY
    return drawn[:, :-1], drawn[:, 1:]


def sequence() -> nn.Sequential:
    """Blocks of several kinds, with a normalisation that counts in its buffers."""
    torch.manual_seed(0)
    shapes = [(8, 32), (32, 8), (8, 8), (8, 64), (64, 8), (8, 8)]
    layers = [
        each for shape in shapes for each in (nn.Linear(*shape, dtype=torch.float64), nn.Tanh())
    ]
    return nn.Sequential(*layers, nn.LayerNorm(8, dtype=torch.float64))


def alone(model: nn.Module, loss_fn: object, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of 8 microbatches in one process, and its gradient in the weights."""
    losses = []
    for x, y in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        loss = loss_fn(model(x), y)
        (loss / 8).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def gradients(stages: dict[int, nn.Module], model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the weights of a rank, with the whole model's of the same name."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages.values():
        for name, weight in stage.named_parameters():
            yield weight.grad, whole[name].grad


def sequences() -> None:
    """A Sequential under schedules of all kinds of placement: whether gradients are to the bit, and
    how far at most.
    """
    inputs, targets = torch.randn(
        2, 8 * ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = {}
    for name in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe"):
        plan = program(name, ranks=4, microbatches=8)
        reference = sequence()
        alone(reference, nn.functional.mse_loss, inputs, targets)
        stages = split(sequence(), plan)
        Pipeline(plan, stages, nn.functional.mse_loss).step(inputs, targets)
        pairs = list(gradients(stages, reference))
        found[name] = [
            all(torch.equal(*each) for each in pairs),
            max(difference(*each) for each in pairs),
        ]
    report(f"found{dist.get_rank()}", found)


class Encode(nn.Module):
    """Changes what an encoder has so far; the first one embeds, and keeps that for the last stage
    of the decoder.
    """

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, dtype=torch.float64) if is_first else None
        self.layer = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.embed is not None:
            start = self.embed(passed.pop("source"))
            passed = passed | {"memory": start, "skip": start}
        return passed | {"memory": passed["memory"] + self.layer(passed["memory"]).tanh()}


class Decode(nn.Module):
    """Looks at all of what the encoder made; the first one embeds its own tokens."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, dtype=torch.float64) if is_first else None
        self.look = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.embed is not None:
            passed = passed | {"x": self.embed(passed.pop("tokens"))}
        x = passed["x"]
        memory = passed["memory"]
        return passed | {"x": x + self.look(x, memory, memory, need_weights=False)[0]}


class Scores(nn.Module):
    """The end of the decoder, which also has what the encoder began with."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(32, VOCABULARY, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> Tensor:
        return self.scores(torch.cat([passed["x"], passed["skip"]], -1))


def encoder_decoder() -> None:
    """An encoder and a decoder, and an edge from first to last: how far gradients are from those of
    one process.
    """
    generator = torch.Generator().manual_seed(1)
    source, given, targets = torch.randint(VOCABULARY, (3, 8 * ROWS, LENGTH), generator=generator)
    inputs = {"source": source, "tokens": given}
    found = {}
    for name in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe"):
        torch.manual_seed(0)
        firsts = (True, False, False, False)
        model = nn.Sequential(*map(Encode, firsts), *map(Decode, firsts), Scores())
        reference = copy.deepcopy(model)
        plan = program(name, ranks=4, microbatches=8)
        for part in range(8):
            mine = {key: value.chunk(8)[part] for key, value in inputs.items()}
            (loss_of(reference(mine), targets.chunk(8)[part]) / 8).backward()
        stages = split(model, plan)
        Pipeline(plan, stages, loss_of).step(inputs, targets)
        found[name] = max(difference(*each) for each in gradients(stages, reference))
    report(f"found{dist.get_rank()}", found)


def saved(tied: bool = False) -> Path:
    """A folder with a Llama that no pipeline has written."""
    folder = Path(os.environ["FOLDER"]) / "pretrained"
    if dist.get_rank() == 0:
        llama(tied).save_pretrained(folder)
    dist.barrier()
    return folder


def llamas() -> None:
    """A Llama of which each rank loads its own slice: as `sequences`, and the share of the weights
    that it holds.
    """
    folder = saved()
    whole = llama()
    found = {}
    expected = alone(whole, loss_of, *tokens(0))
    for name in ("zb_v", "dualpipe"):
        plan = program(name, ranks=4, microbatches=8)
        empty = empty_llama()
        stages = split(empty, plan, BLOCKS, measure(empty, tokens(0)[0][:ROWS], BLOCKS))
        assert load_model(folder, stages) == 0
        losses = Pipeline(plan, stages, loss_of).step(*tokens(0))
        pairs = list(gradients(stages, whole))
        held = {
            each.data_ptr(): each.numel()
            for stage in stages.values()
            for each in stage.parameters()
        }
        share = sum(held.values()) / sum(each.numel() for each in whole.parameters())
        same = losses is None or name == "dualpipe" or torch.equal(losses, expected)
        equal = same and all(torch.equal(*each) for each in pairs)
        found[name] = [equal, max(difference(*each) for each in pairs), share]
    report(f"found{dist.get_rank()}", found)


def tied_llamas() -> None:
    """One matrix for input and output: two steps under one plan after the other, from the files of
    the one before.
    """
    begin = saved(tied=True)
    whole = llama(tied=True)
    found = {}
    optimizer = OPTIMIZERS["adamw"](list(whole.parameters()))
    for step, name in enumerate(["zb_v", "dualpipe", "1f1b"]):
        stages = split(
            empty_llama(tied=True), plan := program(name, ranks=4, microbatches=8), BLOCKS
        )
        load_model(begin, stages)
        optimizers = [OPTIMIZERS["adamw"](list(stage.parameters())) for stage in stages.values()]
        if step:
            load_optimizers(begin, stages, optimizers)
        ours = Pipeline(plan, stages, loss_of)
        ours.step(*tokens(step))
        alone(whole, loss_of, *tokens(step))
        found[name] = max(difference(*each) for each in gradients(stages, whole))
        for each in (optimizer, *optimizers):
            each.step()
            each.zero_grad()
        begin = Path(os.environ["FOLDER"]) / name
        ours.save_model(begin, step + 1, optimizers)
    # The whole of it has one weight by two names again.
    load_model(begin, {0: (loaded := empty_llama(tied=True))})
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    found["end"] = max(
        difference(*each) for each in zip(loaded.parameters(), whole.parameters(), strict=True)
    )
    report(f"found{dist.get_rank()}", found)


def mesh() -> None:
    """Two replicas of a pipeline: how far what they save is from one process, trained on the
    batches of both.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = program("1f1b", ranks=2, microbatches=8)
    folder = Path(os.environ["FOLDER"]) / "saved"
    stages = split(sequence(), plan, rank=both.get_local_rank("pp"))
    optimizers = [OPTIMIZERS["momentum"](stage.parameters()) for stage in stages.values()]
    batches = torch.randn(
        2, 2, 8 * ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    ours = Pipeline(plan, stages, nn.functional.mse_loss, mesh=both)
    ours.step(*batches[both.get_local_rank("dp")])
    optimizers[0].step()
    ours.save_model(folder, optimizers=optimizers)
    whole = sequence()
    loaded = sequence()
    for batch in batches:
        alone(whole, nn.functional.mse_loss, *batch)
    for weight in whole.parameters():
        weight.grad /= 2
    OPTIMIZERS["momentum"](whole.parameters()).step()
    load_model(folder, {0: loaded})
    assert len(list(folder.glob("model-*"))) == 2
    pairs = zip(loaded.parameters(), whole.parameters(), strict=True)
    report(f"found{dist.get_rank()}", max(difference(*each) for each in pairs))


#: Models of transformers that are cut as they are: their names on the page, and in transformers.
FAMILIES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Phi-3": "phi3",
    "OLMo-2": "olmo2",
    "Gemma-3": "gemma3_text",
    "SmolLM3": "smollm3",
    "StarCoder2": "starcoder2",
    "StableLM": "stablelm",
}


def families() -> None:
    """Whether the stages, one after the other, compute what the whole model does, to the bit."""
    plan = program("zb_v", ranks=2, microbatches=8)
    found = {}
    for name, family in FAMILIES.items():
        config = AutoConfig.for_model(
            family,
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        whole = type(model)
        # As `Llama`.
        model.__class__ = type(
            family,
            (whole,),
            {
                "forward": lambda self, x, whole=whole: (
                    whole.forward(self, x, use_cache=False).logits
                )
            },
        )
        x, _ = tokens(0)
        expected = model(x)
        stages = {**split(model, plan, BLOCKS, rank=0), **split(model, plan, BLOCKS, rank=1)}
        for stage in sorted(stages):
            x = stages[stage](x)
        found[name] = torch.equal(x, expected)
    report("found0", found)


def trained(plan: Plan, begin: Path, steps: range, end: Path) -> list[float]:
    """Train a Llama with AdamW from one folder to another: the losses, on the rank of the last
    stage.
    """
    stages = split(empty_llama(), plan, BLOCKS)
    assert load_model(begin, stages) == steps.start
    optimizers = [OPTIMIZERS["adamw"](list(stage.parameters())) for stage in stages.values()]
    if steps.start:
        load_optimizers(begin, stages, optimizers)
    ours = Pipeline(plan, stages, loss_of)
    found = []
    for step in steps:
        losses = ours.step(*tokens(step))
        found += [] if losses is None else [float(losses.mean())]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.save_model(end, steps.stop, optimizers)
    return found


def first_half() -> None:
    """Under ZB-V on 4 ranks."""
    half = Path(os.environ["FOLDER"]) / "half"
    report(
        f"found{dist.get_rank()}",
        trained(program("zb_v", ranks=4, microbatches=8), saved(), range(10), half),
    )


def second_half() -> None:
    """Under 1F1B on 2 ranks; then all of it in one process: losses, and whether the weights in the
    end are the same.
    """
    folder = Path(os.environ["FOLDER"])
    found = trained(
        program("1f1b", ranks=2, microbatches=8), folder / "half", range(10, STEPS), folder / "end"
    )
    whole = llama()
    losses = []
    optimizer = OPTIMIZERS["adamw"](list(whole.parameters()))
    for step in range(STEPS):
        losses.append(float(alone(whole, loss_of, *tokens(step)).mean()))
        optimizer.step()
        optimizer.zero_grad()
    whole.config.save_pretrained(folder / "end")
    ends = dict(Llama.from_pretrained(folder / "end").named_parameters())
    same = all(torch.equal(ends[name], weight) for name, weight in whole.named_parameters())
    report(f"found{dist.get_rank()}", [found, losses, same])


def page() -> None:
    """The program of docs/models.md as it stands there: whether its step is that of one process, to
    the bit.
    """
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    os.chdir(os.environ["FOLDER"])
    whole = llama()
    (inputs, targets) = tokens(0)
    if dist.get_rank() == 0:
        whole.save_pretrained("llama")
    dist.barrier()
    given = {
        "plan": program("zb_v", ranks=2, microbatches=8),
        "config": whole.config,
        "rows": ROWS,
        "loss_fn": loss_of,
        "inputs": inputs,
        "targets": targets,
        "torch": torch,
        "AdamW": AdamW,
        "Llama": Llama,
        "LlamaRotaryEmbedding": LlamaRotaryEmbedding,
    }
    exec(re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1], given)
    alone(whole, loss_of, inputs, targets)
    AdamW(whole.parameters()).step()
    trained = llama()
    load_model("trained", {0: trained})
    same = zip(trained.parameters(), whole.parameters(), strict=True)
    report(f"found{dist.get_rank()}", all(torch.equal(*each) for each in same))


def updated() -> None:
    """A pipeline that updates by itself, with late weights: whether the newest are saved, and what
    AdamW keeps.
    """
    plan = program("pipedream_2bw", ranks=2, microbatches=4).for_updates(6)
    folder = Path(os.environ["FOLDER"]) / "saved"
    stages = split(sequence(), plan)
    optimizers = {
        stage: OPTIMIZERS["adamw"](module.parameters()) for stage, module in stages.items()
    }
    ours = Pipeline(plan, stages, nn.functional.mse_loss, optimizers=optimizers)
    ours.step(
        *torch.randn(
            2, plan.microbatches, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
    )
    ours.save_model(folder)
    whole = sequence()
    optimizer = OPTIMIZERS["adamw"](whole.parameters())
    load_model(folder, {0: whole})
    load_optimizers(folder, {0: whole}, [optimizer])
    weights = dict(whole.named_parameters())
    same = []
    for stage, module in stages.items():
        for name, weight in module.named_parameters():
            theirs = optimizer.state[weights[name]]
            kept = optimizers[stage].state[weight]
            same += [
                torch.equal(weight, weights[name]),
                theirs["step"] == 6,
                kept.keys() == theirs.keys(),
            ]
            same += [torch.equal(each, theirs[key]) for key, each in kept.items()]
    report(f"found{dist.get_rank()}", [len(same), all(map(bool, same))])


def split_pipeline() -> Pipeline:
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    if dist.get_rank() == 1:
        stages[1].register_state_dict_pre_hook(lambda *_: on_save())
    return Pipeline(plan, stages, nn.functional.mse_loss, timeout=2)


def on_save() -> None:
    if not (Path(os.environ["FOLDER"]) / "again").exists():
        os.kill(os.getpid(), signal.SIGKILL)


def dies_while_saving() -> None:
    """Rank 1, but not in the second run."""
    ours = split_pipeline()
    folder = Path(os.environ["FOLDER"])
    ours.save_model(folder / "saved", 3)
    report(f"found{dist.get_rank()}", load_model(folder / "saved", {0: sequence()}))


def names_twice() -> None:
    """Stages that were made one by one: both have a weight `0.weight`."""
    plan = program("1f1b", ranks=2, microbatches=2)
    model = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    pipeline(plan, model).save_model(Path(os.environ["FOLDER"]) / "saved")


def apart() -> None:
    """The ranks have a folder each."""
    (Path(os.environ["FOLDER"]) / "again").write_text("")
    split_pipeline().save_model(Path(os.environ["FOLDER"]) / f"{dist.get_rank()}" / "saved")


def nowhere() -> None:
    folder = Path(os.environ["FOLDER"]) / "file"
    folder.write_text("")
    (Path(os.environ["FOLDER"]) / "again").write_text("")
    split_pipeline().save_model(folder / "saved")


def still_empty() -> None:
    plan = program("1f1b", ranks=2, microbatches=2)
    with torch.device("meta"):
        Pipeline(plan, split(sequence(), plan), nn.functional.mse_loss)


SCENARIOS = {
    each.__name__: each
    for each in (
        sequences,
        encoder_decoder,
        llamas,
        tied_llamas,
        mesh,
        families,
        page,
        updated,
        first_half,
        second_half,
        dies_while_saving,
        names_twice,
        apart,
        nowhere,
        still_empty,
    )
}

if __name__ == "__main__":
    main(SCENARIOS.__getitem__)
