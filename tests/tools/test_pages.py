"""The pages of the site, before they are built."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

import pytest
import yaml

from schedlang.files.programs import names
from tests.support.pages import blocks
from tests.support.paths import DOCS, ROOT
from tools.website.pages import for_site, gallery_entries

#: The blocks of the page on clusters, by language; of commands, those for a cluster.
CLUSTERS = {
    block.language: block
    for block in blocks(DOCS / "clusters.md")
    if block.elsewhere or block.file
}


def entries(navigation: list[dict[str, object]]) -> list[str]:
    """The pages in a navigation."""
    pages: list[str] = []
    for entry in navigation:
        for below in entry.values():
            pages += entries(below) if isinstance(below, list) else [str(below)]
    return pages


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "tools" / "website" / "zensical.toml").read_text()
    config = tomllib.loads(Template(text).substitute(gallery=gallery_entries()))
    pages = [page.relative_to(ROOT).as_posix() for page in DOCS.glob("*.md")]
    pages += [
        page.relative_to(ROOT).as_posix() for page in (DOCS / "reports").glob("*.md")
    ]
    pages += [f"programs/{name}.md" for name in names()]
    pages += [
        "index.md",
        "CONTRIBUTING.md",
        "programs/index.md",
        "docs/errors/index.md",
        "docs/reference.md",
    ]
    assert sorted(entries(config["project"]["nav"])) == sorted(pages)


def test_what_is_for_tests_alone_is_not_on_the_site() -> None:
    text = "```sched first.sched wrong\nschedule s {}\n```\n```sh elsewhere: two machines\nls\n```\n"
    assert for_site(text) == "```sched\nschedule s {}\n```\n```sh\nls\n```\n"


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](../README.md#run-it)", "[a](../index.md#run-it)"),
        ("[a](../programs/README.md)", "[a](../programs/index.md)"),
        ("[a](../programs/zb_v.sched)", "[a](../programs/zb_v.md)"),
        ("[a](costs.md)", "[a](costs.md)"),
        ("[a](https://example.com/README.md)", "[a](https://example.com/README.md)"),
    ],
)
def test_links(link: str, on_the_site: str) -> None:
    assert for_site(link) == on_the_site


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
