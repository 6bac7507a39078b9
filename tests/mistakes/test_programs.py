"""Programs and files with a mistake: the whole message that each gets is in `programs.txt`, to be read.

`STATEMENTS` stand in a rank, `ITEMS` in a schedule with a rank that is right, `PROGRAMS` by themselves,
and `FILES` are command lines about the files of a folder. `pytest --update-golden` writes the messages.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from time import process_time

import pytest

from tests.support import commands
from tests.support.paths import PROGRAMS as GALLERY
from tests.support.sections import section

#: What is no statement of a rank, or none that can be run there.
STATEMENTS = (
    # Operators and values of other languages.
    "if r > 0 && r < 3 { F(0) }",
    "if r == 0 || r == 3 { F(0) }",
    "if !(r == 0) { F(0) }",
    "if r <> 0 { F(0) }",
    "if r = 0 { F(0) }",
    "let x == 3",
    "let x := 3",
    "let x = 2 ** r",
    "let x = r %% 2",
    "let x = r // 2",
    "let x = r > 0 ? 1 : 2",
    "let x = 1 if r > 0 else 2",
    "let x = if r > 0 { 1 } else { 2 }",
    "if 0 <= r < 3 { F(0) }",
    "if r in 0 .. 2 { F(0) }",
    "let x = True",
    "let x = ceil(microbatches / 3)",
    "repeat 0.5 * microbatches { F(0) }",
    "if r < .5 { F(0) }",
    "if r < 1. { F(0) }",
    "let x = 1.5e3",
    "let x = 2.5e-3",
    "let x = 1_000",
    "let x = 1e3",
    "let x = 'three'",
    "let x = [3, 3]",
    "let x: int = 3",
    "let mut x = 3",
    "var x = 3",
    "x = 3",
    "x += 1",
    "let n = 3\n    n = n + 1",
    "def warm = 3",
    "warmup = ranks - 1 - r repeat warmup { F(next) }",
    "assert peak(r) <= if r == 0 then 3 else 2",
    "assert memory(r) <= 3",
    "assert idle <= 3",
    "assert speed <= 3",
    "repeat microbatches / 3 { F(next) } repeat microbatches { B(next) }",
    "for m in 0 .. 3 { F(next) } for m in 0 .. microbatches { F(next) B(next) }",
    "let f(x) = 2 * x",
    "def f(x): return 2 * x",
    "fn f(x) { return 2 * x }",
    "let x = r \N{MULTIPLICATION SIGN} 2",
    "if r \N{LESS-THAN OR EQUAL TO} 2 { F(0) }",
    "let \N{GREEK SMALL LETTER ALPHA} = 3",
    # Phases.
    "repeat 3 { F(next) } cooldown { repeat 3 { B(next) } }",
    "warm_up { F(0) } steady_state { B(0) F(1) } drain { B(1) }",
    "phase 1 { F(next) }",
    "warmup { F(0) } steady { for m in 0 .. microbatches { F(m + 1) B(m) } U } Cooldown { B(next) }",
    "warmup { F(0) } repeat microbatches { B(next) }",
    "if r > 0 { warmup { F(0) } } steady { F(1) B(0) U }",
    # Words.
    "let W = 3",
    "let x = 3 let next = 4",
    "fn on(x) = x",
    "for in in 0 .. 3 { F(0) }",
    "repaet 3 { F(next) }",
    "FOR m in 0 .. 3 { F(m) }",
    "if r == 0 { F(0) } esle { F(1) }",
    "for m im 0 .. 3 { F(m) }",
    "wrmup { F(0) }",
    # Loops, conditions and blocks.
    "for m in 0 ... microbatches { F(m) }",
    "for m in 0 ..= 7 { F(m) }",
    "for m in range(microbatches) { F(m) }",
    "for m in range(1, microbatches) { F(m) }",
    "for m in range(0, microbatches, 2) { F(m) }",
    "for m in range(microbatches - 1, -1, -1) { F(m) }",
    "for m in reversed(range(microbatches)) { F(m) }",
    "for m in 0 .. microbatches step 2 { F(m) }",
    "for m in microbatches { F(m) }",
    "for m in 0 to 7 { F(m) }",
    "for (int m = 0; m < 8; m++) { F(m) }",
    "for m in range(microbatches):\n    F(m)\n    B(m)",
    "while r < 3 { F(next) }",
    "repeat 3 times { F(next) }",
    "repeat { F(next) }",
    "if r == 0 then { F(0) }",
    "if r == 0 { F(0) } elif r == 1 { F(1) }",
    "if r == 0 F(0)",
    "if { F(0) }",
    "else { F(0) }",
    "for m in 0 .. 3 { break }",
    # Ops.
    "f(next)",
    "F[0]",
    "F 0",
    "F0 B0",
    "0F0 0B0",
    "F(0",
    "F(0))",
    "F(0, )",
    "F(stage(0) 1)",
    "F(0); B(0);",
    "F(0), B(0)",
    "forward(0) backward(0)",
    "send(0)",
    "send F",
    "recv_forward(0)",
    "overlap(F(0), B(0))",
    "exchange { F(0) }",
    "optimizer.step()",
    "print(r)",
    "F(nxt)",
    "F(mm)",
    "F(-1)",
    "F(8)",
    "F(0, 0, 0)",
    "F()",
    "F(1, 0)",
    "B(0) F(0)",
    "F(0) F(0)",
    "F(next + 1)",
    "// the first one\n    F(0)",
    "param depth = 3",
    # Values that cannot be.
    "for m in 0 .. microbatches / r { F(m) }",
    "for m in 0 .. 8 % r { F(m) }",
    "repeat r - 2 { F(next) }",
    "let x = 99999999999999999999",
    "let x = 10 * 1000000000 * 1000000000 * 1000000000",
    "let r = 3",
    "let x = x + 1",
    "fn f(x) = f(x - 1)",
    "let x = min()",
    "let x = abs(1, 2)",
    "let x = min",
    "let x = half(2)",
    "let x = stage(1)\n    F(x, 0)",
    "for m in 0 .. 1000000000 { F(0) }",
    'require r > 0, "no first rank"',
    "assert peak() <= 1",
)

#: What is no item of a schedule, or none that can be.
ITEMS = (
    "param depth: 3",
    "param depth 3",
    "param depth",
    "param ranks = 2",
    "param lots = 10000000000",
    "let depth",
    "let a = 1, b = 2",
    "require ranks > 8",
    "require ranks > 8, 'too few'",
    'require (ranks > 8, "too few")',
    'require ranks > 8 "too few"',
    'assert makespan < 10, "quick"',
    "assert peak(9) == 1",
    "assert bubles == 3",
    "assert peak <= 4",
    "stage s on s",
    "stage s in 0 .. ranks at s",
    "stage s in 1 .. ranks on s",
    "stage s in 0 .. ranks on s + 1",
    "stage s in 0 .. 2 on s",
    "stage s in 0 .. ranks on s stage t in 0 .. ranks on t",
    "cost F = [3, 3]",
    "cost F 3",
    "cost forward = 3",
    "cost transfer = 2",
    "def warm = 3",
    "cost F = -1",
    "cost F = 1 cost F = 2",
    "cost send(s) = 1",
    "memory R = 1",
    "weights = stash",
    "weights stashed",
    "weights delay -1",
    "objective fast",
    "fill w",
    "fill B",
    "reorder()",
    "recompute 3 .. 9",
    "skip s in 0 .. 1 from 3 to 0",
    "frozen 3 .. 9",
    "frozen 0 .. ranks",
    "freeze 0 .. 2",
    "link r of 1",
    "pipeline down stage s in 0 .. ranks on s",
    "import v",
    'import "absent.sched"',
    "from v import chunks",
    "F(0)",
    "for m in 0 .. 3 { F(m) }",
    "ranks = 8",
    "rank q { F(0) }",
)

#: Whole programs.
PROGRAMS = (
    "",
    "# nothing yet\n",
    "rank r { F(0) B(0) }\n",
    "schedule 1f1b { }\n",
    'schedule "mine" { }\n',
    "schedule my-own { }\n",
    "schedule mine(ranks = 4) { }\n",
    "schedule mine { }\n",
    "scheduel mine { param ranks = 2 param microbatches = 2 rank r { F(0) B(0) F(1) B(1) } }\n",
    "schedule a { param ranks = 1 param microbatches = 1 rank r { F(0) B(0) } }\nschedule b { }\n",
    "schedule a { param ranks = 2 param microbatches = 1 rank 0 { F(0) } rank 1 { F(0) } }\n",
    "schedule a { param ranks = 2 param microbatches = 1 rank r in 0 .. ranks { F(0) B(0) } }\n",
    "schedule a { rank r { F(0) param ranks = 2 param microbatches = 1 }\n",
    """\
schedule a {
    param ranks = 2
    param microbatches = 2
    rank r {
        for m in 0 .. microbatches {
            F(m)
        for m in 0 .. microbatches {
            B(m)
        }
    }
}
""",
    """\
schedule a {
    param ranks = 2
    param microbatches = 2
    rank r {
        for m in 0 .. microbatches {
            F(m)
        }
        }
        for m in 0 .. microbatches {
            B(m)
        }
    }
}
""",
    """\
schedule a:
    param ranks = 2
    param microbatches = 2
    rank r:
        for m in range(microbatches):
            F(m)
        for m in range(microbatches):
            B(m)
""",
    """\
schedule a {
    parma ranks = 2
    param microbatches := 2;
    let W = 3
    rank r {
        while 1 { F(next) }
        B[0] B(1
    }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    block m every 2 {
        stage s in 0 .. ranks { F(s, m) at s  B(s, m) at ranks + 2 * (ranks - 1 - s) }
    }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    block m every 1 { stage s in 0 .. ranks { F(s, m) at 40  B(s, m) at s } }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    block m every 9 { stage s in 0 .. ranks { F(s, m) at s  B(s, m) at s } }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    block m every 9 { stage s in 0 .. ranks { F(s, m) @ s  B(s, m) at 9 } }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    block m in 0 .. 8 every 0 { stage s in 0 .. ranks { F(m) at s  B(s, next) at 9 } }
}
""",
    """\
schedule a {
    param ranks = 2  param microbatches = 4
    let most = 3
    fn limit(r) = most - r
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { B(m) }
        assert peak(r) <= limit(r), "it fits"
    }
    assert not (bubble > 0) and makespan == 1
}
""",
    """\
schedule a {
    param ranks = 100000  param microbatches = 1000
    rank r { for m in 0 .. microbatches { F(m) } for m in 0 .. microbatches { B(m) } }
}
""",
    """\
schedule a {
    param ranks = 1000000  param microbatches = 100000
    pipeline p(i) in 0 .. 1000 runs 100 stage s in 0 .. ranks on s
    rank r { F(p(0, r), 0) }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    rank r {
        let w = ranks - 1 - r
        warmup { for m in 0 .. w { F(m) } }
        steady { for m in 0 .. microbatches { F(m)  B(m) }  U }
    }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 8
    rank r {
        let w = ranks - 1 - r
        for m in 0 .. w { F(m) }
        for m in 0 .. microbatches { F(w + m)  B(m) }
    }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 4
    model encoder runs microbatches stage s in 0 .. 2 on s
    model decoder runs microbatches stage s in 0 .. 2 on s + 2
    rank r { repeat microbatches { if r < 2 { F(encoder(r), next) } else { F(decoder(r), next) } } }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 4
    rank r { repeat microbatches { F(r - 1, next)  F(r, next)  B(next) } }
}
""",
    """\
schedule a {
    param ranks = 4  param microbatches = 4
    model decoder runs microbatches stage s in 0 .. 2 on s
    model encoder runs microbatches stage s in 0 .. 2 on s + 2
    edge s in 1 .. 2 from encoder(s) to decoder(0)
    rank r { repeat microbatches { if r < 2 { F(decoder(r), next) } else { F(encoder(r - 2), next) } } }
}
""",
    """\
schedule a {
    param ranks = 2  param chunks = 2  param microbatches = 4
    stage s in 0 .. ranks * chunks on s % ranks
    rank r { for m in 0 .. microbatches { for c in 0 .. chunks { F(c, m) } } }
}
""",
)

#: Commands about files of another kind.
FILES = (
    "compile table.csv",
    "compile data.csv",
    "compile list.json",
    "compile trace.json",
    "compile cut.json",
    "compile costs.yaml",
    "compile script.py",
    "compile items.sched",
    "compile empty",
    "compile binary",
    "compile utf16.sched",
    "compile latin.sched",
    "compile archive.pt",
    "compile folder",
    "compile imports_a_plan.sched",
    "compile imports_a_program.sched",
    "compile imports_itself_wrong.sched",
    "simulate trace.json",
    "explain-bubble trace.json",
    "show costs.json",
    "show other.json",
    "show cut.json",
    "check list.json",
    "import plan.json",
    "import program.txt",
    "import trace.json",
    "import empty",
    "import data.csv",
    "simulate plan.json --costs program.txt",
    "simulate plan.json --costs plan.json",
    "simulate plan.json --costs table.csv",
    "simulate plan.json --costs empty",
    "simulate plan.json --costs other.json",
    "simulate plan.json --costs trace.json",
    "compare plan.json costs.json",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name, as the current one."""
    monkeypatch.chdir(tmp_path)
    program = (GALLERY / "gpipe.sched").read_text()
    Path("gpipe.sched").write_text(program)
    assert (
        schedc("compile gpipe.sched -p ranks=2 -p microbatches=2 -o plan.json")[0] == 0
    )
    Path("gpipe.sched").rename("program.txt")
    texts = {
        "table.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "data.csv": "step,loss\n1,5.6\n2,5.5\n",
        "list.json": "[1, 2, 3]\n",
        "other.json": '{"name": {"first": "a"}}\n',
        "cut.json": Path("plan.json").read_text()[:200],
        "trace.json": '{"traceEvents": [{"ph": "X", "name": "step", "ts": 0, "dur": 5}]}\n',
        "costs.json": '{"forward_times": [1, 2]}\n',
        "costs.yaml": "forward_times: [1, 2]\np2p_time: 1\n",
        "script.py": "import schedlang\n\nprint(schedlang)\n",
        "items.sched": "let chunks = 2\nfn half(n) = n / 2\n",
        "empty": "",
        "imports_a_plan.sched": 'schedule a {\n    import "plan.json"\n}\n',
        "imports_a_program.sched": 'schedule a {\n    import "program.txt"\n}\n',
        "imports_itself_wrong.sched": 'schedule a {\n    import "wrong.sched"\n}\n',
        "wrong.sched": "let chunks == 2\nfn half(n) -> n / 2\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("binary").write_bytes(b"a\x00b")
    Path("utf16.sched").write_text(program, encoding="utf-16")
    Path("latin.sched").write_bytes("# Grüße\n".encode("latin-1"))
    Path("archive.pt").write_bytes(b"PK\x03\x04\xff\xff")
    Path("folder").mkdir()
    Path("folder", "mine.sched").write_text(program)
    return tmp_path


def schedc(command: str) -> tuple[int, str]:
    """The exit code of a command, and what it prints for the user."""
    done = commands.schedc(*command.split())
    return done.returncode, done.stderr


def cases() -> Iterator[tuple[str, str]]:
    """Each wrong program as it is shown, and as it is compiled."""
    head = "schedule wrong {\n    param ranks = 4\n    param microbatches = 8\n"
    rank = "    rank r {\n        for m in 0 .. microbatches { F(m)  B(m) }\n    }\n"
    for statement in STATEMENTS:
        yield (
            statement,
            f"{head}    rank r {{\n{indent(statement, '        ')}\n    }}\n}}\n",
        )
    for item in ITEMS:
        yield item, f"{head}{indent(item, '    ')}\n{rank}}}\n"
    for program in PROGRAMS:
        yield program, program


@pytest.mark.slow
def test_programs(folder: Path, golden: Callable[[str, Path], None]) -> None:
    sections = []
    for shown, program in cases():
        Path("wrong.sched").write_text(program)
        before = process_time()
        code, message = schedc("compile wrong.sched")
        assert process_time() - before < 3
        assert code == 1, shown
        assert message.startswith("error["), shown
        sections.append(section(shown, message))
    golden("".join(sections), Path(__file__).parent / "programs.txt")


@pytest.mark.core
def test_a_forgotten_backward_is_warned_of(folder: Path) -> None:
    """A program without any backward is right, as an inference, for whoever says that it is meant."""
    forgotten = "schedule a { param ranks = 2 param microbatches = 4 rank r { repeat microbatches { F(next) } } }"
    Path("forgotten.sched").write_text(forgotten)
    code, message = schedc("compile forgotten.sched -o forgotten.json")
    assert code == 0
    assert message.startswith("warning[forward-only]: the program has no backward")
    assert "--forward-only" in message
    for command in (
        "compile forgotten.sched --forward-only",
        "simulate forgotten.json",
        "compile gpipe --forward-only",
        "compile gpipe",
    ):
        assert schedc(command) == (0, "")


def test_files(folder: Path, golden: Callable[[str, Path], None]) -> None:
    sections = []
    for command in FILES:
        code, message = schedc(command)
        assert code in (1, 2), command
        assert "error" in message, command
        sections.append(f"{'=' * 80}\n$ schedc {command}\n{message}exit code {code}\n")
    golden("".join(sections), Path(__file__).parent / "files.txt")
