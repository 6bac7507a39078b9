"""What may come from anywhere, a program or a plan file, read as its users have it read: any bytes
get an answer.

`python -m tests.support.fuzzed program|plan [FOLDER] [-libfuzzer options]` is the long mode, `make explore WHAT=fuzz`:
atheris follows the branches of the compiler. The default run of the tests has the same two targets,
see test_fuzz.py.
"""

import sys
import tempfile

from schedlang import CompileError, Source, compile, read_plan


def program(data: bytes) -> None:
    """Compile a program; whatever is wrong with it is a diagnostic that can be printed."""
    try:
        compile(Source("fuzzed.sched", data.decode("utf-8", errors="replace")))
    except CompileError as error:
        str(error)


def plan(data: bytes) -> None:
    """Read a plan file; what is believed is a plan that is written as it was read."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            read_plan(file.name).to_json()
        except CompileError as error:
            str(error)


def main() -> None:
    import atheris

    target = {"program": program, "plan": plan}[sys.argv[1]]
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
