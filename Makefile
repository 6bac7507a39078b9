# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test explore gallery

demo: .venv/installed
	$(BIN)/schedc run programs/1f1b.sched --check
	$(BIN)/schedc run programs/interleaved_1f1b.sched -p chunks=2 --check

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadscope

# The verifier against every interleaving and against an oracle, on 10^5 programs: `make test` tries blocks 0 to 10, this
# the BLOCKS given, so that a run can be divided; blocks tried again replace what they counted before.
BLOCKS ?= 0..200
explore: .venv/installed
	$(BIN)/pytest -n 2 tests/test_machine.py tests/test_transports.py --blocks $(BLOCKS) --tally build/tally

# The table of the programs and their figures; a test holds it current.
gallery: .venv/installed
	$(BIN)/python -m schedlang.gallery > programs/README.md

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
