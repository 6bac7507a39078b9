"""The output of a failed run: one report, and a file with the tracebacks of all ranks.

    rank 1 failed at 1F1 (1f1b.sched:8): ValueError: a mask of 8 rows       the cause
      model.py:28, in attend: raise ValueError(…)                           lines of the script
      rank 0 has waited 0.0 s for rank 1 at 0B0 (1f1b.sched:9)              where each rank was
      …
      tracebacks of all ranks: /tmp/schedlang-4f1c09aa.txt

The rank that finds the cause prints the report. Ranks that print to the same terminal or file add
nothing. Elsewhere, for example on another node, one rank prints the cause in one line.

torchrun prints its own summary after the report, which names the process that ended first.
Processes of torchrun write the cause to its error files, so that the summary shows it.
"""

import json
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
from attrs import asdict, frozen

#: The limit of lines of the script in a report; the innermost ones are shown.
_SHOWN = 3

#: Folders of code that is not the script's.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        Path(multiprocessing.__file__).parent,
    )
)


@frozen
class Cause:
    """The cause of a failure in one line; where the rank that has found it prints (`stderr`); and
    the path of the file to which every rank adds its traceback.
    """

    message: str
    stderr: str
    tracebacks: str

    @classmethod
    def new(cls, message: str) -> "Cause":
        """A cause that this process has found."""
        name = f"schedlang-{secrets.token_hex(4)}.txt"
        return cls(message, stderr_of_process(), f"{tempfile.gettempdir()}/{name}")

    @classmethod
    def read(cls, text: str) -> "Cause":
        """A cause that another process has written."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """The text that other processes read."""
        return json.dumps(asdict(self))


def stderr_of_process() -> str:
    """The terminal, pipe or file that this process prints errors to, by host, device and inode."""
    try:
        file = os.fstat(2)
    except OSError:
        return f"{socket.gethostname()}: process {os.getpid()}"
    return f"{socket.gethostname()}: {file.st_dev}, {file.st_ino}"


def lines_of_script(error: BaseException | None) -> list[str]:
    """The innermost lines of the script in which this process met an error."""
    frames = [
        frame
        for frame in _frames(error)
        if not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    return [
        f"{_shortened(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}"
        for frame in frames[-_SHOWN:]
    ]


def keep_traceback(cause: Cause, rank: str, error: BaseException | None) -> None:
    """Add the stack of this rank's main thread, and its error, to the file of tracebacks."""
    own = "".join(traceback.format_list(_frames(None)))
    met = "" if error is None else "".join(traceback.format_exception(error))
    with suppress(OSError), open(cause.tracebacks, "a", encoding="utf-8") as file:
        # One write, so that it does not mix with those of other ranks.
        file.write(f"=== {rank}: {cause.message}\n{own}{met}\n")
    tell_torchrun(cause.message)


def tell_torchrun(message: str) -> None:
    """Write the cause to the error file that torchrun reads for this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": message, "extraInfo": more}})
            )


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """The stack of the main thread, outermost frame first, and then that of the error."""
    main = threading.main_thread().ident
    stack = traceback.extract_stack(sys._current_frames().get(main or 0))
    frames = [frame for frame in stack if frame.filename != __file__]
    while error is not None:
        frames += traceback.extract_tb(error.__traceback__)
        error = error.__cause__
    return frames


def _shortened(path: str) -> str:
    """The path relative to the working directory, if it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
