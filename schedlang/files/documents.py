"""JSON and YAML files of users: costs, and the settings of `schedc pipeline`."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from schedlang.files.reading import read_source
from schedlang.files.writing import write_text


class _Loader(yaml.SafeLoader):
    """YAML in which 25e9 is a number, as in JSON and in YAML 1.2.

    PyYAML reads YAML 1.1, where a number with an exponent needs a point and a sign, as in 2.5e+10.
    """


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_document(path: str | Path) -> Any:
    """The content of a file: YAML if its name says so, or else JSON.

    ValueError for what is neither; CompileError for a file that cannot be read.
    """
    text = read_source(path).text
    try:
        if _is_yaml(path):
            return read_value(text)
        return json.loads(text)
    # Both readers call themselves for each list in a list.
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_document(value: Any, path: str | Path) -> None:
    """Write a file that `read_document` reads; CompileError when it cannot be written."""
    if _is_yaml(path):
        text = yaml.safe_dump(value, sort_keys=False)
    else:
        text = json.dumps(value, indent=1) + "\n"
    write_text(text, path)


def _is_yaml(path: str | Path) -> bool:
    return Path(path).suffix in (".yaml", ".yml")


def read_value(text: str) -> Any:
    """The value of a text in YAML; ValueError for a text that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        # The message has several lines, and stands in one of ours.
        raise ValueError(" ".join(str(error).split())) from None
