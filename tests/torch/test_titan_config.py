"""Configurations of torchtitan whose pipelines run in our runtime, without torchtitan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the schedules are torch's", exc_type=ImportError)
from schedlang.torch import titan


@dataclass
class Model:
    """The part of torchtitan's `ModelSpec` that matters here."""

    pipelining_fn: Any


@dataclass
class Config:
    """The part of torchtitan's `Trainer.Config` that matters here."""

    model_spec: Model | None


def test_a_configuration_is_found_by_its_module_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipelines are torchtitan's, in our runtime; all else that it gives stays."""
    given = [
        "from types import SimpleNamespace",
        "from tests.torch.test_titan_config import Config, Model",
        "def made(model, *, of):",
        "    return f'the schedule of {model}', ['parts of', of], True, False",
        "def small(): return Config(Model(made))",
    ]
    (tmp_path / "configs_of_mine.py").write_text("\n".join(given))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        titan, "pipeline", lambda schedule: f"our runtime, for {schedule}"
    )
    config = getattr(titan, "configs_of_mine.small")()
    assert config.model_spec.pipelining_fn("a model", of="it") == (
        "our runtime, for the schedule of a model",
        ["parts of", "it"],
        True,
        False,
    )


def test_what_is_no_configuration() -> None:
    # As torchtitan asks: what is not there is said by an AttributeError.
    assert getattr(titan, "llama3_debugmodel", None) is None
    with pytest.raises(AttributeError, match=r"it must be MODULE\.FUNCTION"):
        _ = titan.llama3_debugmodel
    with pytest.raises(AttributeError, match="no attribute 'nothing_there'"):
        getattr(titan, "tests.torch.test_titan_config.nothing_there")


@pytest.mark.parametrize("config", [Config(None), Config(Model(None))])
def test_a_model_without_pipelines_is_refused(config: Config) -> None:
    with pytest.raises(ValueError, match="no model that can be a pipeline"):
        titan.on_schedlang(config)
