# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test

demo: .venv/installed
	$(BIN)/schedc run programs/1f1b.sched --check
	$(BIN)/schedc run programs/interleaved_1f1b.sched -p chunks=2 --check

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
