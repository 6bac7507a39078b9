# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test explore gallery bench-runtime bench-walk

demo: .venv/installed
	$(BIN)/schedc run programs/1f1b.sched --check
	$(BIN)/schedc run programs/interleaved_1f1b.sched -p chunks=2 --check

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadscope

# The verifier against the oracle and against every interleaving, on many more damaged plans than `make test` tries.
explore: .venv/installed
	$(BIN)/pytest -n 2 tests/test_machine.py tests/test_transports.py --explore 20

# The runtime against torch's own pipelining: processor time per action, and time per step.
bench-runtime: .venv/installed
	$(BIN)/python benchmarks/runtime.py

# What an action costs by itself, without models and messages.
bench-walk: .venv/installed
	$(BIN)/python benchmarks/walk.py

# The table of the programs and their figures; a test holds it current.
gallery: .venv/installed
	$(BIN)/python -m schedlang.gallery > programs/README.md

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
