"""The command as a process: signals, pipes, terminals, standard input."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import children, until

SCHEDC = [sys.executable, "-m", "schedlang"]
ONE_F_ONE_B = PROGRAMS / "1f1b.sched"


def take_interrupts() -> None:
    """In a new process: whoever starts the tests in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `schedc` is the command."""
    line = f'schedc() {{ {" ".join(SCHEDC)} "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ, **environment),
        preexec_fn=take_interrupts,
    )


def on_a_terminal(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run `schedc` with a terminal as its stderr: its exit code, its stdout, and what the terminal
    has got.
    """
    return shown_by([*SCHEDC, *arguments], environment)


def shown_by(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The same of any command."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=dict(os.environ, TERM="xterm", **environment),
    )
    os.close(theirs)
    shown = b""
    while True:
        if select.select([ours], [], [], 60)[0]:
            try:
                part = os.read(ours, 4096)
            # The other end is closed.
            except OSError:
                break
            if not part:
                break
            shown += part
    stdout = process.communicate(timeout=60)[0]
    os.close(ours)
    return process.returncode, stdout.decode(), shown.decode()


def without_progress(shown: str) -> str:
    """What a terminal shows in the end: a machine that is busy shows progress of anything."""
    return re.sub(r"\x1b\[K([^\r\n]*\r)?", "", shown)


@pytest.mark.parametrize(
    "command", ["show 1f1b", "compile --help", "gallery", "--version"]
)
def test_a_full_disk_is_one_line(command: str) -> None:
    done = shell(f"schedc {command} > /dev/full")
    assert done.returncode == 2
    assert (
        done.stderr == "error: the output cannot be written: No space left on device\n"
    )


@pytest.mark.slow
def test_streams_that_are_closed_or_know_few_characters() -> None:
    ascii_only = shell("schedc view 1f1b", PYTHONIOENCODING="ascii", COLUMNS="60")
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "rank 0 |FFFF......" in ascii_only.stdout
    assert shell("schedc view 1f1b >&-").stderr == ""
    closed = shell("schedc compile - <&-")
    assert closed.returncode == 2
    assert closed.stderr.startswith(
        "error[unreadable]: cannot read `<stdin>`: it is closed\n"
    )


def test_a_closed_pipe_is_silent_and_no_success() -> None:
    done = shell("set -o pipefail; schedc show 1f1b -p microbatches=4000 | head -c 1")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "turned", ["", "except KeyboardInterrupt: raise ImportError('numpy')"]
)
def test_ctrl_c_during_imports_is_one_line(turned: str, tmp_path: Path) -> None:
    """Some modules make another error of it."""
    lines = ["import os, signal", "try: os.kill(os.getpid(), signal.SIGINT)"]
    lines.append(turned or "finally: pass")
    (tmp_path / "numpy.py").write_text("\n".join(lines))
    paths = os.pathsep.join(
        [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    )
    done = shell("schedc compile 1f1b", PYTHONPATH=paths)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3])
def test_ctrl_c_ends_all_processes_without_a_word_more(
    seconds: float, tmp_path: Path
) -> None:
    """While they are made, while they are given work, and while they are at it."""
    sizes = ["--for", "ranks=2..40", "--for", "microbatches=1..400"]
    process = subprocess.Popen(
        [*SCHEDC, "check", str(ONE_F_ONE_B), *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        preexec_fn=take_interrupts,
    )
    try:
        until(lambda: children(process.pid))
        workers = children(process.pid)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (130, "", "interrupted\n")
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
def test_standard_output_as_a_file(tmp_path: Path) -> None:
    """Whoever reads it gets the plan and nothing else, and what it has had stays."""
    plan = tmp_path / "plan.json"
    compiled = f"schedc compile {ONE_F_ONE_B}"
    assert shell(f"{compiled} -o {plan}").returncode == 0
    piped = shell(f"{compiled} -o /dev/stdout | cat")
    assert piped.stdout == plan.read_text()
    assert piped.stderr.endswith("wrote /dev/stdout\n")
    both = tmp_path / "both"
    both.write_text("before\n")
    assert shell(f"{compiled} -o /dev/fd/1 >> {both}").returncode == 0
    assert both.read_text() == "before\n" + plan.read_text()
    # Nor does what comes later write over it.
    assert (
        shell(f"{{ {compiled} -o /dev/stdout; echo after; }} > {both}").returncode == 0
    )
    assert both.read_text() == plan.read_text() + "after\n"
    large = f"{compiled} -p microbatches=4000 -o /dev/stdout"
    ended = shell(f"set -o pipefail; {large} | head -c 1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (141, "{", "")


@pytest.mark.slow
def test_standard_input(tmp_path: Path) -> None:
    """Of a program, of a plan, and of what is wrong with one."""
    plan = tmp_path / "plan.json"
    assert (
        shell(f"schedc compile - -p ranks=2 -o {plan} < {ONE_F_ONE_B}").returncode == 0
    )
    shown = shell(f"schedc show - --ranks --compute < {plan}")
    assert shown.stdout.startswith("0F0 0F1 0B0 ")
    assert shell(f"schedc show {plan} --ranks --compute").stdout == shown.stdout
    wrong = shell("echo 'schedule nothing {' | schedc compile -")
    assert wrong.returncode == 1
    assert " --> <stdin>:1:" in wrong.stderr
    compared = shell(f"schedc compare - zb_h1 --json < {plan}")
    assert json.loads(compared.stdout)[0]["file"] == "-"


def test_the_gallery_is_there_from_everywhere(tmp_path: Path) -> None:
    """A file of the same name goes first."""
    environment = {"PYTHONPATH": str(ROOT)}
    listed = shell(f"cd {tmp_path} && schedc gallery", **environment).stdout
    programs = {path.stem for path in PROGRAMS.glob("*.sched")}
    assert {word for word in listed.split() if word in programs} == programs
    printed = shell(f"cd {tmp_path} && schedc gallery 1f1b", **environment)
    assert printed.stdout == ONE_F_ONE_B.read_text()
    assert shell(f"cd {tmp_path} && schedc compile 1f1b", **environment).returncode == 0
    (tmp_path / "1f1b").write_text("schedule")
    assert shell(f"cd {tmp_path} && schedc compile 1f1b", **environment).returncode == 1


def test_help_is_the_same_by_both_names() -> None:
    assert (
        shell("schedc help simulate").stdout
        == shell("schedc simulate --help").stdout
        != ""
    )
    assert shell("schedc help").stdout == shell("schedc --help").stdout != ""


@pytest.mark.slow
def test_colours_are_for_terminals(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sched"
    bad.write_text(
        "schedule bad { param ranks = 1 param microbatches = 1 rank r { F(x) B(0) } }"
    )
    arguments = ["compile", str(bad)]
    plain = shell(f"schedc compile {bad}").stderr
    assert "\x1b[" not in plain
    code, _, shown = on_a_terminal(*arguments)
    coloured = without_progress(shown)
    assert code == 1
    assert coloured.startswith("\x1b[1;31merror[")
    # Without its colours, it is the same.
    always = shell(f"schedc compile {bad} --color always", NO_COLOR="1").stderr
    assert always == coloured.replace("\r\n", "\n")
    for arguments_without, environment in [
        (arguments, {"NO_COLOR": "1"}),
        ([*arguments, "--color", "never"], {}),
    ]:
        shown = without_progress(on_a_terminal(*arguments_without, **environment)[2])
        assert shown.replace("\r\n", "\n") == plain


@pytest.mark.slow
def test_long_work_shows_where_it_is(tmp_path: Path) -> None:
    """On a terminal only; in the end the line is cleared, and nothing of it is on stdout."""
    slow = ["compile", "zb_2p", "-p", "ranks=96", "-p", "microbatches=800"]
    code, stdout, shown = on_a_terminal(*slow, XDG_CACHE_HOME=str(tmp_path))
    assert code == 0
    assert stdout.startswith("zb_2p: 96 ranks")
    assert "zb_2p: pass 1 of " in shown
    assert shown.endswith("\x1b[K")
    assert "\n" not in shown
    # What is over at once says nothing.
    lines = (
        "from schedlang.cli.progress import progress\nwith progress('working'): pass"
    )
    assert shown_by([sys.executable, "-c", lines], {}) == (0, "", "")


@pytest.mark.slow
def test_a_bar_says_what_is_left() -> None:
    """On one core, or a machine with many would be done before it says anything."""
    lines = """
import os
from schedlang.cli.main import main
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
raise SystemExit(main())
"""
    sizes = ["--for", "ranks=2..16", "--for", "microbatches=1..24"]
    command = [sys.executable, "-c", lines, "check", "1f1b", *sizes]
    code, stdout, shown = shown_by(command, {})
    assert (code, stdout) == (
        0,
        "360 sizes proved, 0 refused by the program's own `require`\n",
    )
    assert "of 360, " in shown
    assert " s left" in shown
    assert shown.endswith("\x1b[K")


@pytest.mark.slow
def test_the_start_of_a_run_is_shown_until_its_first_step(tmp_path: Path) -> None:
    """With processes that take two seconds to load, and two more after that."""
    started = tmp_path / "started"
    lines = f"""
from pathlib import Path
from schedlang.cli.run import run_until_end
command = ["sh", "-c", "sleep 2; touch {started}; sleep 2; exit 3"]
raise SystemExit(run_until_end(command, {{}}, Path("{started}"), "starting 4 ranks"))
"""
    code, _, shown = shown_by([sys.executable, "-c", lines], {})
    assert code == 3
    assert ", 1 s\r" in shown
    assert ", 3 s\r" not in shown
    assert shown.endswith("\x1b[K")


@pytest.mark.slow
def test_a_trace_replaces_no_program_under_torchrun_either(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    program = tmp_path / "my.sched"
    program.write_text(ONE_F_ONE_B.read_text())
    command = [
        sys.executable,
        "-m",
        "schedlang.runtime",
        str(program),
        "--trace",
        str(program),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "is read, and would be replaced" in done.stderr
    assert program.read_text() == ONE_F_ONE_B.read_text()


def test_completion_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "schedc.bash"
    script.write_text(shell("schedc completion bash").stdout)
    for words, expected in [
        ("schedc com", {"compile", "compare", "completion"}),
        ("schedc check --tr", {"--transport"}),
        ("schedc export x.json --to torch-csv-", {"torch-csv-compute"}),
        ("schedc check x.sched --transport nc", {"nccl", "nccl-eager", "nccl-edge"}),
        ("schedc explain deadl", {"deadlock"}),
        ("schedc gallery zb_v", {"zb_v"}),
    ]:
        count = len(words.split()) - 1
        line = (
            f"source {script}; COMP_WORDS=({words}); COMP_CWORD={count}; _shtab_schedc; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        assert set(shell(line).stdout.split()) == expected


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_completion_of_other_shells_has_every_command(name: str) -> None:
    script = shell(f"schedc completion {name}").stdout
    for word in ("simulate", "torch-csv-compute", "forward-only"):
        assert word in script
