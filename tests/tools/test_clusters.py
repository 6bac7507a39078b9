"""The files of docs/clusters.md: they start what there is, and clusters take them.

`make test-clusters` asks Slurm's own controller, which must be on this machine (Debian has it as
slurmctld and slurm-client), and Kubernetes' own schemas, which kubernetes-validate brings along.
"""

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.pages import blocks
from tests.support.paths import DOCS

#: The blocks of the page, by language; of commands, those for a cluster.
CLUSTERS = {
    block.language: block
    for block in blocks(DOCS / "clusters.md")
    if block.elsewhere or block.file
}
#: A controller with the two nodes of the page, which nobody starts: they are a cloud's.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
ProctrackType=proctrack/pgid
NodeName=node[1-2] CPUs=64 RealMemory=500000 Gres=gpu:8 State=CLOUD
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def check_started(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that torchrun, and the command that it starts, take these words."""
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    from torch.distributed.run import get_args_parser

    from schedlang.examples.demo import command

    started = get_args_parser().parse_args(words)
    assert (started.module, started.training_script) == (True, "schedlang.runtime")
    monkeypatch.setattr(
        sys, "argv", ["schedlang.runtime", *started.training_script_args]
    )
    assert command._options().steps == 10000


def test_the_job_for_kubernetes_starts_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, job = yaml.safe_load_all(CLUSTERS["yaml"].text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    first, *words = container["command"]
    assert first == "torchrun"
    check_started(words, monkeypatch)
    # The first pod is found by the service.
    endpoint = next(word for word in words if "rdzv-endpoint" in word)
    name = job["metadata"]["name"]
    assert endpoint == f"--rdzv-endpoint={name}-0.{service['metadata']['name']}:29500"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    volumes = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_job_for_slurm_starts_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CLUSTERS["sh"].text
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    (line,) = re.findall(r"^srun (.*)$", text.replace("\\\n", " "), re.M)
    line = (
        line.replace('"$SLURM_NNODES"', "2")
        .replace('"$SLURM_JOB_ID"', "1")
        .replace("$first", "a")
    )
    first, *words = shlex.split(line)
    assert first == "--cpus-per-task=$SLURM_CPUS_PER_TASK"
    assert words.pop(0) == "torchrun"
    check_started(words, monkeypatch)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller of Slurm, which commands of Slurm find by `SLURM_CONF`."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("localhost", 0))
        controller = first.getsockname()[1]
        node = second.getsockname()[1]
    configuration = tmp_path / "slurm.conf"
    text = CONFIGURATION.format(controller=controller, node=node, folder=tmp_path)
    configuration.write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    process = subprocess.Popen(["slurmctld", "-D", "-f", str(configuration)])
    try:
        # It answers within seconds.
        for _ in range(30):
            answer = subprocess.run(["scontrol", "ping"], capture_output=True)
            if b"is UP" in answer.stdout:
                break
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.clusters
def test_slurm_takes_the_job(slurm: None, tmp_path: Path) -> None:
    """`sbatch --test-only` says where it would run; it refuses a job that asks for more than the
    nodes have.
    """
    text = CLUSTERS["sh"].text

    def answer(text: str) -> str:
        script = tmp_path / "job.sh"
        script.write_text(text)
        command = ["sbatch", "--test-only", str(script)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return run.stderr

    assert "using 128 processors on nodes node[1-2]" in answer(text)
    too_many = answer(text.replace("--gpus-per-node=8", "--gpus-per-node=9"))
    assert "Requested node configuration is not available" in too_many


@pytest.mark.clusters
def test_kubernetes_takes_the_job() -> None:
    """By the schemas of its API, of the newest version there is; a field that the API lacks is
    noticed.
    """
    validator = pytest.importorskip("kubernetes_validate")
    version = validator.latest_version()
    service, job = yaml.safe_load_all(CLUSTERS["yaml"].text)
    for document in (service, job):
        validator.validate(document, version, strict=True)
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validator.ValidationError, match="completionsMode"):
        validator.validate(job, version, strict=True)
