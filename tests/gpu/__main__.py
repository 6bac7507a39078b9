"""Runs the checks, each in processes of its own and under a limit, and prints one line of JSON each.

    python -m tests.gpu [--device cuda|cpu] [--seconds 440] [--only NAME,NAME] [--out FOLDER]

All processes share one GPU. Checks run side by side, as many as there are cores for; those that
measure run alone; and those that end processes amid work for the GPU come last.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# One thread of each library for each process.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from tests.gpu import against_torch, loops, one_rank, several_ranks, verdicts
from tests.gpu.checks import CHECKS, Check, device, on_gpu, wait_for_device

#: NCCL takes processes with other names of hosts for those of several machines, which may not share
#: a GPU otherwise (before its version 2.30); their messages go over sockets.
_NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "8",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

#: Seconds left under which no check begins.
_LEAST = 10


def main() -> int:
    """Run the checks; 1 if one did not go well."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--only", help="names of checks, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _be_rank(CHECKS[options.rank_of], options.out)
    only = options.only.split(",") if options.only else CHECKS
    chosen = [CHECKS[name] for name in only]
    if options.device == "cpu":
        chosen = [each for each in chosen if not each.needs_gpu]
    options.out.mkdir(parents=True, exist_ok=True)
    runner = _Runner(options.device, options.out, time.monotonic() + options.seconds)
    cores = os.cpu_count() or 1
    has_mps = options.device == "cuda" and _start_mps()
    runner.run(
        [each for each in chosen if not each.alone and not each.breaks], cores // 4
    )
    runner.run([each for each in chosen if each.alone], 1)
    if has_mps:
        subprocess.run(
            ["nvidia-cuda-mps-control"], input=b"quit", check=False, timeout=60
        )
    runner.run([each for each in chosen if each.breaks], cores // 4)
    _keep(options.out / "gpu.json", options.device, runner.found)
    wrong = [name for name, each in runner.found.items() if each["verdict"] != "ok"]
    print(f"{len(runner.found) - len(wrong)} passed, {len(wrong)} failed", flush=True)
    return 1 if wrong else 0


def _keep(file: Path, device: str, found: dict[str, Any]) -> None:
    """Write what was found, beside what other checks have found before."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    before = earlier.get("checks", {}) if earlier.get("device") == device else {}
    result = {"device": device, "checks": before | found}
    file.write_text(json.dumps(result, indent=1) + "\n")


def _start_mps() -> bool:
    """Start CUDA MPS, without which processes have the GPU one after the other."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    started = subprocess.run(
        ["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False
    )
    return started.returncode == 0


class _Runner:
    """Runs checks until a moment, and keeps what they have found."""

    def __init__(self, device: str, folder: Path, end: float) -> None:
        self.found: dict[str, Any] = {}
        self._device = device
        self._folder = folder
        self._end = end

    def run(self, checks: Iterable[Check], at_once: int) -> None:
        """Run some checks, so many at once."""
        with ThreadPoolExecutor(max(at_once, 1)) as pool:
            for check, found in pool.map(self._run, checks):
                self.found[check.name] = found

    def _run(self, check: Check) -> tuple[Check, Any]:
        start = time.monotonic()
        limit = min(start + check.seconds, self._end)
        if limit - start < _LEAST:
            return check, {"verdict": "no time left"}
        # The processes meet at a store of this one, as under torchrun: a free port that a rank opens
        # later may be taken by then.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = range(check.ranks)
        files = [self._folder / f"{check.name}.{rank}" for rank in ranks]
        processes = [
            _start(check, rank, store.port, self._device, files[rank]) for rank in ranks
        ]
        codes = _wait(processes, limit)
        seconds = time.monotonic() - start
        ends_well = codes == list(check.exit_codes)
        verdict = "ok" if ends_well else "hangs" if None in codes else "failed"
        found: dict[str, Any] = {"verdict": verdict, "seconds": round(seconds, 1)}
        said = [file.with_suffix(f"{file.suffix}.json") for file in files]
        found["said"] = next(
            (json.loads(each.read_text()) for each in said if each.exists()), None
        )
        if verdict != "ok":
            found["codes"] = codes
            found["ends"] = [
                _end_of(file.with_suffix(f"{file.suffix}.log")) for file in files
            ]
        print(json.dumps({"check": check.name, **found}), flush=True)
        return check, found


def _start(
    check: Check, rank: int, port: int, device: str, file: Path
) -> subprocess.Popen[bytes]:
    """Start a process of a check: what it prints goes to `file.log`, what it finds to
    `file.json`.
    """
    Path(f"{file}.json").unlink(missing_ok=True)
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(check.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CHECK_DEVICE": "cuda:0" if device == "cuda" else "cpu",
        "NCCL_HOSTID": f"host{rank}",
        **_NCCL,
    }
    command = [
        sys.executable,
        "-m",
        "tests.gpu",
        "--rank-of",
        check.name,
        "--out",
        str(file),
    ]
    with Path(f"{file}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _be_rank(check: Check, file: Path) -> None:
    """One process of a check. It does not end by way of its process group, which may hang."""
    code = 1
    try:
        torch.set_num_threads(1)
        if on_gpu():
            torch.cuda.set_device(device())
        Path(f"{file}.json").write_text(json.dumps(check.run()))
        if check.ranks > 1 and not check.breaks:
            _leave_together()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_together() -> None:
    """Wait until all ranks of a check have done their work: where one ends amid the work of others,
    CUDA MPS ends all that share the GPU.
    """
    wait_for_device()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """The exit codes of processes; None for those that are still there at the limit, which are
    ended.
    """
    while any(each.poll() is None for each in processes) and time.monotonic() < limit:
        time.sleep(0.02)
    codes = [each.poll() for each in processes]
    for each in processes:
        each.kill()
        each.wait()
    return codes


def _end_of(log: Path) -> str:
    """The last lines that a process has printed."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.strip().splitlines()[-12:])[-1500:]


if __name__ == "__main__":
    # Imported for the checks that they register.
    assert {against_torch, loops, one_rank, several_ranks, verdicts}
    sys.exit(main())
