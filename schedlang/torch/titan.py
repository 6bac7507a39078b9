"""torchtitan's configurations, with our runtime in place of torch's.

torchtitan takes a configuration from any module that has it, and a configuration has the function
that makes a pipeline of the model. So nothing of torchtitan is changed; a run says

    --module schedlang.torch.titan --config llama3.llama3_debugmodel

in place of `--module llama3 --config llama3_debugmodel`, and a configuration of one's own is

    def my_config():
        return on_schedlang(llama3_debugmodel())

The schedule is the one that the configuration names, or its table.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from schedlang.torch.from_torch import pipeline


def on_schedlang(config: Any) -> Any:
    """A configuration of torchtitan whose pipelines run in our runtime; ValueError for a model
    without pipelines.
    """
    model = config.model_spec
    if model is None or model.pipelining_fn is None:
        raise ValueError(
            "the configuration has no model that can be a pipeline (`pipelining_fn`)"
        )
    config.model_spec = replace(
        model, pipelining_fn=partial(_pipelined, model.pipelining_fn)
    )
    return config


def _pipelined(pipelining_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torchtitan's function gives, with our runtime in place of the schedule."""
    schedule, *others = pipelining_fn(*args, **kwargs)
    return pipeline(schedule), *others


def __getattr__(name: str) -> Callable[[], Any]:
    """A configuration by its module and its name: `llama3.llama3_debugmodel`, of torchtitan's own
    models, or `my_package.my_config`.
    """
    module, _, function = name.rpartition(".")
    if not module:
        raise AttributeError(
            f"`{name}` is no configuration: it must be MODULE.FUNCTION, such as "
            "`llama3.llama3_debugmodel`"
        )
    configure = getattr(import_module(_path_of(module)), function)
    return lambda: on_schedlang(configure())


def _path_of(module: str) -> str:
    """Where the configurations of a module are: as torchtitan does, models of its own come
    first.
    """
    if "." not in module and find_spec("torchtitan"):
        own = f"torchtitan.models.{module}"
        if find_spec(own):
            return f"{own}.config_registry"
    return module
