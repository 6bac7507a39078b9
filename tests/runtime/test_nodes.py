"""Two nodes in network namespaces of this machine: the link between them is cut, and training goes
on later.

It needs the right to make namespaces: root, or CAP_NET_ADMIN and CAP_SYS_ADMIN. `make faults`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from schedlang import Source, compile, write_plan
from tests.support.paths import PROGRAMS
from tests.support.processes import ENVIRONMENT
from tests.support.training import printed_figures

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytestmark = pytest.mark.processes

#: Seconds for which a rank waits at most, and in which all have ended then.
TIMEOUT = 5
END = 20
LIMIT = 100
STEPS = 12
EVERY = 3
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@frozen
class Nodes:
    """Two namespaces, and a link between their devices `up0` and `up1`."""

    names: tuple[str, str]

    def link(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "up0", state)

    def start(self, folder: Path, node: int, restarts: int = 0) -> subprocess.Popen:
        """A node's torchrun, with two ranks; it writes to `node<n>` of the folder."""
        command = [
            "ip",
            "netns",
            "exec",
            self.names[node],
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{ADDRESSES[0]}:29500",
            "--rdzv-conf",
            f"is_host={int(node == 0)}",
            "--local-addr",
            ADDRESSES[node],
            "--max-restarts",
            str(restarts),
            "-m",
            "schedlang.runtime",
            str(folder / "plan.json"),
            "--steps",
            str(STEPS),
            "--timeout",
            str(TIMEOUT),
            "--checkpoint",
            str(folder / "kept"),
            "--every",
            str(EVERY),
            "--check",
        ]
        with (folder / f"node{node}").open("w") as log:
            environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": f"up{node}"}
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    names = (f"schedlang{os.getpid()}a", f"schedlang{os.getpid()}b")
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "up0",
            "type",
            "veth",
            "peer",
            "name",
            "up1",
            "netns",
            names[1],
        )
        for node, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"up{node}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"up{node}", "up")
        yield Nodes(names)
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, check=False
            )


def ranks_of(torchrun: int) -> list[int]:
    """The processes of a node's ranks."""
    return [
        int(each)
        for each in Path(f"/proc/{torchrun}/task/{torchrun}/children")
        .read_text()
        .split()
    ]


def until(condition: object, seconds: float) -> float:
    """Wait for something, at most some seconds; how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)
    return time.monotonic() - start


def ended(process: int) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return (
            Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
            == "Z"
        )
    except OSError:
        return True


@pytest.mark.faults
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_cut_link_ends_all_and_training_goes_on(
    tmp_path: Path, nodes: Nodes, restarts: int
) -> None:
    """All ranks end within the time-out and say why; in the end, losses and gradients are those of
    one process.

    What goes on is a new launch, or torchrun by itself, which may start some nodes too early.
    """
    program = PROGRAMS / "1f1b.sched"
    write_plan(
        compile(Source(program.name, program.read_text()), {"ranks": 4}),
        tmp_path / "plan.json",
    )
    launched = [nodes.start(tmp_path, node, restarts) for node in range(2)]
    try:
        until((tmp_path / "kept" / f"step-{EVERY}").exists, LIMIT)
        ranks = [rank for each in launched for rank in ranks_of(each.pid)]
        assert len(ranks) == 4
        nodes.link("down")
        # Not at once: nobody can tell a cut link from a slow one before the time is over.
        assert until(lambda: all(map(ended, ranks)), END) > TIMEOUT - 1
        check_reports([(tmp_path / f"node{node}").read_text() for node in range(2)])
        nodes.link("up")
        if not restarts:
            # The launchers do not notice the cut, and end when they can tell each other.
            until(lambda: all(each.poll() is not None for each in launched), LIMIT)
            launched = [nodes.start(tmp_path, node) for node in range(2)]
        codes = [each.wait(LIMIT) for each in launched]
        out = (tmp_path / "node1").read_text()
        assert codes == [0, 0], out
        steps = [int(step) for step in re.findall(r"^step +(\d+) ", out, re.M)]
        assert steps.count(1) == bool(restarts)
        figures = printed_figures(out)
        assert (figures["steps"], figures["loss_error"], figures["gradient_error"]) == (
            STEPS,
            0,
            0,
        )
    finally:
        for each in launched:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def check_reports(logs: list[str]) -> None:
    """The first node has the store and knows who does not answer; the second one only that it has
    lost the store.
    """
    place = r"at \d\w+\d \(1f1b.sched:\d+\)"
    first = rf"rank [23] does not answer: rank [01] has waited {TIMEOUT} s {place}"
    for rank in range(4):
        second = rf"the store of the process group does not answer: rank {rank} lost it {place}: no answer for 7 s"
        cause = first if rank < 2 else second
        assert re.search(
            rf"^(?:rank {rank}: stopped: )?{cause}$", logs[rank // 2], re.M
        ), logs
    for rank, peer in ((1, 2), (2, 1)):
        waited = rf"^  rank {rank} has waited [5-9]\.\d s for rank {peer} {place}$"
        assert re.search(waited, logs[rank // 2], re.M), logs
