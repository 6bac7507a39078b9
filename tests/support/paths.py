"""Where things stand in the repository: the one place that knows."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PROGRAMS = ROOT / "programs"
#: The shipped programs.
GALLERY = sorted(PROGRAMS.glob("*.sched"))
#: Recorded figures and verdicts.
CASES = TESTS / "cases"
#: What plans and views look like, whole.
GOLDEN = TESTS / "golden"
#: Bad programs, and the messages that they get.
DIAGNOSTICS = TESTS / "diagnostics"
