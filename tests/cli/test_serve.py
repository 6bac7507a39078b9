"""`schedc view --serve`: what the server answers, and to whom. What a browser makes of it is in
tests/report/test_browser.py.
"""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from schedlang.cli.command_table import parse
from schedlang.cli.main import main
from schedlang.cli.serve import PageServer
from tests.support.paths import PROGRAMS

TEXT = (PROGRAMS / "1f1b.sched").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine.sched"
    path.write_text(TEXT)
    return path


@pytest.fixture
def server(program: Path) -> Iterator[PageServer]:
    with PageServer(
        parse(["view", str(program), "--serve", "-p", "ranks=3"])
    ) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


def asked(server: PageServer, path: str, host: str = "") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def data(server: PageServer, query: str) -> dict[str, Any]:
    status, text = asked(server, f"/data?{query}")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_has_a_slider_for_each_parameter(server: PageServer) -> None:
    status, text = asked(server, "/")
    assert status == 200
    assert (
        '{"name":"ranks","value":3,"most":16},{"name":"microbatches","value":8,"most":32}'
        in text
    )


def test_parameters_and_saves_give_other_schedules(
    server: PageServer, program: Path
) -> None:
    (schedule,) = data(server, "ranks=5&microbatches=2")["schedules"]
    assert schedule["title"] == "one_f_one_b (ranks = 5, microbatches = 2)"
    text = TEXT.replace(
        "param microbatches = 8", "param microbatches = 8 param depth = 1"
    )
    program.write_text(text.replace("one_f_one_b", "mine"))
    answer = data(server, "")
    assert (
        answer["schedules"][0]["title"]
        == "mine (ranks = 3, microbatches = 8, depth = 1)"
    )
    assert answer["parameters"] == {"ranks": 3, "microbatches": 8, "depth": 1}
    # A page that does not know yet that it is gone may ask for it.
    program.write_text(TEXT)
    answer = data(server, "ranks=4&microbatches=8&depth=2")
    assert answer["parameters"] == {"ranks": 4, "microbatches": 8}


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("ranks=0", "error[parameter]"),
        ("ranks=x", "error: a parameter is a whole number"),
    ],
)
def test_what_is_wrong_is_said(server: PageServer, query: str, wrong: str) -> None:
    assert wrong in data(server, query)["wrong"]


def test_a_wrong_program_is_said_and_read_again(
    server: PageServer, program: Path
) -> None:
    program.write_text(TEXT.replace("schedule", "shcedule", 1))
    assert "error[syntax]" in data(server, "")["wrong"]
    status, text = asked(server, "/")
    assert status == 200
    assert "error[syntax]" in text
    program.write_text(TEXT)
    assert len(data(server, "")["schedules"]) == 1


def test_a_save_is_told(server: PageServer, program: Path) -> None:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", "/saved")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    program.write_text(TEXT + "\n# saved\n")
    assert answer.readline() == b"data: saved\n"
    connection.close()


def test_only_this_machine_is_answered(server: PageServer) -> None:
    """Another site's name may lead to this address: its pages must read nothing here."""
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/", host="elsewhere.example")[0] == 403
    assert asked(server, "/etc/passwd")[0] == 404
    assert asked(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("more", [["-o", "view.html"], [str(PROGRAMS / "zb_h1.sched")]])
def test_one_program_and_no_file(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["view", str(PROGRAMS / "1f1b.sched"), "--serve", *more])
    assert caught.value.code == 2
    assert "--serve shows one program" in capsys.readouterr().err
