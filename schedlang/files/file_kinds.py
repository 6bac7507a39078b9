"""What a file is, by its content: so a command that is given another kind of file can say so."""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.files.reading import read_source


class FileKind(Enum):
    """A kind of file: what messages call it, and what can be done with it; `{}` is its path."""

    EMPTY = ("an empty file", None)
    PROGRAM = ("a program", "`schedc compile {} -o plan.json` makes a plan of it")
    ITEMS = (
        "a list of items without a schedule around them",
        'write `schedule name { … }` around them; or a program takes them in by `import "{}"`',
    )
    PLAN = (
        "a plan",
        "`schedc view {}`, `check`, `simulate`, `compare`, `export` and `run` take it",
    )
    CERTIFICATE = (
        "the certificate of a proof",
        "`schedc check {}` checks it, and says what it proves",
    )
    TRACE = (
        "a trace",
        "`schedc view {}` and `schedc compare {}` show the run of a plan, and `--costs {}` takes "
        "what the ops of any trace cost",
    )
    EVENTS = (
        "another trainer's record of a schedule, such as zero-bubble's or Primus'",
        "write its order as a table, a row for each rank with cells such as `0F0`, for `schedc "
        "import`; or its times as a trace, an event for each op, for `--costs`",
    )
    COSTS = ("a file of costs", "`--costs {}` takes it, beside a program or a plan")
    TABLE = (
        "an action table of torch",
        "`schedc import {} -o plan.json` makes a plan of it",
    )
    NOTEBOOK = ("a notebook", None)
    OBJECT = ("a JSON document of another kind", None)
    DAMAGED = ("JSON that is cut off or damaged", "write it again")
    CSV = ("a table of another kind", None)
    PYTHON = ("a Python script", None)
    TEXT = ("a text", None)

    @property
    def called(self) -> str:
        """What messages call it."""
        called: str = self.value[0]
        return called

    def help(self, path: object) -> str | None:
        """What can be done with a file of this kind."""
        use = self.value[1]
        return use.replace("{}", str(path)) if use else None


def is_trace(text: str) -> bool:
    """Whether the text of a file is that of a trace."""
    # A plan whose program has this word in a comment has it with other quotes: JSON escapes them.
    return text.lstrip().startswith("{") and '"traceEvents"' in text


def is_certificate(text: str) -> bool:
    """Whether the text of a file is the certificate of a proof."""
    return text.lstrip().startswith("{") and '"format": "schedlang certificate' in text


def kind_of_file(path: str | Path) -> FileKind:
    """What kind of file can be read as text; `TEXT` also where it cannot."""
    try:
        return kind_of(read_source(path).text)
    except CompileError:
        return FileKind.TEXT


# As texts: they are compiled where they are needed, which is seldom.
_CELL = r'\s*"?(?:\d+[A-Z][A-Z_]*\d*|\(\d+[A-Z]+\d+(?:;\d+[A-Z]+\d+)+\)[A-Z_]+)?"?\s*'
_ROW = rf'(?:{_CELL},)+{_CELL}|\s*"?\d+(?:[FBIW]|BW|SEND_[FB]|RECV_[FB])\d+"?\s*'
_CSV_LINE = r"[^,;\t{}()]*(?:[,;\t][^,;\t{}()]*)+"
_SCHEDULE = r"(?m)^\s*schedule\b[^\n]*\{|^\s*schedule\s+\w+\s*$"
_ITEM = (
    r"\s*(?:import\s+\"|param\s+\w+|let\s+\w+\s*=|fn\s+\w+\s*\(|stage\s+\w+\s+in|rank\s+\w+\s*\{"
    r"|block\s+\w+|pipeline\s+\w+)"
)
_IMPORT = r"(?m)^(?:import \w[\w.]*(?: as \w+)?|from \w[\w.]* import .*|def \w+\(.*)$"
_TIME = r'"(?:start|end|completion)(?:_time)?"'
_NUMBER = r'"(?:mini|micro)_?batch(?:_id)?"'
_EVENTS = (
    rf"\{{[^{{}}]*(?:{_TIME}[^{{}}]*{_NUMBER}|{_NUMBER}[^{{}}]*{_TIME})"
    r'|"(?:fwd|bwd|wgrad)_(?:start|end|minibatch)"'
)
_SETTING = r"[a-z_0-9]+\s*:\s*[-\[\d][^{}]*"


def kind_of(text: str) -> FileKind:
    """What kind of file a text is; `TEXT` where nothing tells."""
    if not text.strip():
        return FileKind.EMPTY
    if text.lstrip()[0] in "{[":
        return _kind_of_json(text)
    # A comment may say anything.
    lines = [line for line in re.sub(r"#.*", "", text).splitlines() if line.strip()]
    if re.search(_SCHEDULE, "\n".join(lines)):
        return FileKind.PROGRAM
    if lines and re.match(_ITEM, lines[0]):
        return FileKind.ITEMS
    if re.search(_IMPORT, text):
        return FileKind.PYTHON
    if lines and all(re.fullmatch(_SETTING, line) for line in lines):
        return FileKind.COSTS
    if lines and re.fullmatch(_ROW, lines[0]):
        return FileKind.TABLE
    if lines and all(re.fullmatch(_CSV_LINE, line) for line in lines):
        return FileKind.CSV
    return FileKind.TEXT


def _kind_of_json(text: str) -> FileKind:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return FileKind.DAMAGED
    kind = kind_of_document(document)
    is_other = kind in (FileKind.OBJECT, FileKind.COSTS)
    return FileKind.EVENTS if is_other and re.search(_EVENTS, text) else kind


def kind_of_document(document: Any) -> FileKind:
    """What kind of file a JSON document is."""
    if not isinstance(document, dict):
        return FileKind.OBJECT
    if str(document.get("format", "")).startswith("schedlang.plan"):
        return FileKind.PLAN
    if str(document.get("format", "")).startswith("schedlang certificate"):
        return FileKind.CERTIFICATE
    if "traceEvents" in document:
        return FileKind.TRACE
    if "nbformat" in document:
        return FileKind.NOTEBOOK
    if document and all(
        isinstance(value, int | float | list) for value in document.values()
    ):
        return FileKind.COSTS
    return FileKind.OBJECT
