# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-browser explore gallery pictures bench-runtime bench-walk bench-prediction

demo: .venv/installed
	$(BIN)/schedc run programs/1f1b.sched --check
	$(BIN)/schedc run programs/interleaved_1f1b.sched -p chunks=2 --check

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadscope

# The page of `schedc view`, and its trace in Perfetto, in a real Chromium, which must be on this machine. It prints the
# times to first paint.
test-browser: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/pytest -m browser -rP

# The verifier against the oracle and against every interleaving, on many more damaged plans than `make test` tries.
explore: .venv/installed
	$(BIN)/pytest -n 2 tests/test_machine.py tests/test_transports.py --explore 20

# The runtime against torch's own pipelining: processor time per action, and time per step.
bench-runtime: .venv/installed
	$(BIN)/python benchmarks/runtime.py

# What an action costs by itself, without models and messages.
bench-walk: .venv/installed
	$(BIN)/python benchmarks/walk.py

# Predicted against measured step time, for a machine without other work.
bench-prediction: .venv/installed
	$(BIN)/python benchmarks/prediction.py

# The table of the programs and their figures; a test holds it current.
gallery: .venv/installed
	$(BIN)/python -m schedlang.gallery > programs/README.md

# The pictures in the README; a test holds them current.
pictures: .venv/installed
	for name in gpipe 1f1b interleaved_1f1b zb_h1 zb_v dualpipe; do \
		$(BIN)/schedc view programs/$$name.sched -o docs/pictures/$$name.svg || exit 1; \
	done

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
