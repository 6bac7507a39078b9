"""`schedc run`: a training on processes of this machine."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

from schedlang.cli.inputs import load_compiled
from schedlang.cli.progress import progress
from schedlang.cli.usage import USAGE, UsageError
from schedlang.diagnostics.diagnostic import counted

#: The environment variable with the path of a file that the processes make when the first step is
#: done.
STARTED = "SCHEDC_RUN_STARTED"
#: How often it is looked for, in seconds.
_INTERVAL = 0.05


def run(options: argparse.Namespace) -> int:
    """Train a small GPT on this machine."""
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    from schedlang.plan.write import write_plan

    plan = load_compiled(options)
    if find_spec("torch") is None:
        print(
            "error: schedc run needs torch: pip install 'schedlang[runtime]'",
            file=sys.stderr,
        )
        return USAGE
    _check_run(options, plan)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        write_plan(plan, path)
        processes = len(plan.ranks) * options.replicas
        # In a process of its own: this one never imports torch.
        launcher = "schedlang.examples.demo.launch"
        command = [sys.executable, "-m", launcher, str(processes), str(path)]
        for name in (
            "steps",
            "optimizer",
            "lr",
            "replicas",
            "trace",
            "checkpoint",
            "every",
            "device",
        ):
            value = getattr(options, name)
            if value is not None:
                command += [f"--{name}", str(value)]
        for name in ("check", "audit", "stop_on_nan", "error_feedback", "unequal"):
            if getattr(options, name):
                command.append(f"--{name.replace('_', '-')}")
        if options.format == "json":
            command.append("--json")
        started = Path(directory) / "started"
        # The ranks are the parallel part: threads of each would only be in each other's way.
        environment = (
            {"OMP_NUM_THREADS": "1"} | dict(os.environ) | {STARTED: str(started)}
        )
        what = f"loading torch, and starting {counted(processes, 'rank')}"
        return run_until_end(command, environment, started, what)


def _check_run(options: argparse.Namespace, plan: Any) -> None:
    """Say before processes start what would end the run only when it is over, or on every rank."""
    folder = options.checkpoint
    if folder and os.path.lexists(folder) and not os.path.isdir(folder):
        raise UsageError(f"`{folder}` is a file, --checkpoint names a folder")
    if options.every and not options.checkpoint:
        raise UsageError("--every says how often --checkpoint writes")
    for name in ("audit", "checkpoint", "lr", "optimizer"):
        if plan.is_forward_only and getattr(options, name):
            raise UsageError(
                f"--{name} is for a training, and `{plan.name}` has no backward"
            )
    if options.error_feedback:
        check_feedback(plan)
    if plan.kernels:
        try:
            plan.for_updates(max(options.steps or 0, plan.layout.updates))
        except ValueError as error:
            raise UsageError(str(error)) from None


def check_feedback(plan: Any) -> None:
    """UsageError where gradients are not late by one update, for which `--error-feedback` is."""
    stages = range(len(plan.placement))
    rules = [plan.weights_of(stage) for stage in stages]
    other = next((rule for rule in rules if rule.delay != 1), None)
    if other is not None:
        raise UsageError(
            "--error-feedback corrects gradients that are late by one update, as of `weights "
            f"delay(1)`, and `{plan.name}` has `weights {other}`"
        )


def run_until_end(
    command: list[str], environment: dict[str, str], started: Path, what: str
) -> int:
    """Run a command; its exit code. Until it makes the file `started`, say `what` it does.

    A signal that would end this process goes to the command alone, once: it ends its own processes,
    and then this one ends too.
    """
    import signal

    # In a session of its own, or Ctrl-C would reach all of its processes at once.
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in signals}
    # Whoever calls this from Python gets their own handlers back.
    try:
        with progress(what):
            while process.poll() is None and not started.exists():
                sleep(_INTERVAL)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
