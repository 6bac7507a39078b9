# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment
# in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of processes: Python compiles a module once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo example test checks core large gpu test-torch test-browser test-editor site titan explore models trainings faults pages nodes fuzz measure
.PHONY: formatting mutation architecture editor-grammars gallery prove prove-damage prove-ranks transport-table gains reference pictures
.PHONY: bench bench-tune bench-start bench-runtime bench-walk bench-runs bench-prediction bench-search
.PHONY: bench-partition bench-search-runs bench-overlap bench-playground bench-post-validation

demo: .venv/installed
	$(BIN)/schedc run programs/1f1b.sched --check
	$(BIN)/schedc run programs/interleaved_1f1b.sched -p chunks=2 --check

# A Llama of transformers, trained under ZB-V, saved, and trained on under DualPipe, on 4 processes.
example: .venv/installed
	rm -rf build/llama && mkdir -p build/llama
	for each in zb_v dualpipe; do $(BIN)/schedc compile programs/$$each.sched -o build/llama/$$each.json || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 \
	    examples/train.py build/llama/zb_v.json --folder build/llama --steps 10
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 \
	    examples/train.py build/llama/dualpipe.json --folder build/llama --steps 20

# The checks, and of the tests the core: tests/support/selection.py says which ones. The checks take
# one processor, so the tests begin beside them.
test: .venv/installed
	$(MAKE) --no-print-directory -j 2 checks core

checks: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

core: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m 'core and not large'

# All other tests: more cases, the larger sizes, more processes; and three times as many of
# hypothesis's examples. PART=3/8 runs one of eight parts.
PART ?= 0/1
large: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m '(hypothesis or large or not core) and not own' --part $(PART) \
	    --hypothesis-profile large

# The tests with another version of torch, in an environment of its own in build/, which is kept;
# the rest is that of constraints.txt. TESTS=tests/runtime runs some only.
TORCH ?= 2.15.0
TESTS ?= tests
OTHER := build/torch-$(TORCH)
test-torch: $(OTHER)/installed
	$(OTHER)/bin/pytest -n 2 --dist worksteal $(TESTS)

$(OTHER)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	{ grep -v '^torch==' constraints.txt; echo 'torch==$(TORCH)'; } > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --constraint $(OTHER)/constraints.txt --editable '.[runtime,dev]'
	touch $@

# The documentation and the playground, in build/site; `python -m http.server --directory
# build/site` shows them. It needs npm; what it has fetched is kept in build/.
site: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m tools.website.build

# The page of `schedc view`, its trace in Perfetto, the site and the playground, in a real Chromium,
# which must be on this machine, as must npm. It prints the times to first paint, for each hover and
# for each key.
test-browser: site
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	npm install --silent --no-save --prefix build axe-core@4
	$(BIN)/pytest -m browser -rP

# The language server on 200 damaged programs, and what editors colour programs by, in node, which
# must be on this machine with npm; and where it is on this machine, tree-sitter's own command.
test-editor: .venv/installed
	cd editors/vscode && npm install --no-audit --no-fund --no-package-lock
	$(BIN)/pytest -m 'editors or not editors' tests/editor --blocks 0..10
	if command -v tree-sitter; then cd editors/tree-sitter-sched && tree-sitter generate && tree-sitter test; fi

# torchtitan on 4 processes of this machine: by itself, with tables of ours, and in our runtime, its
# losses side by side (docs/torchtitan.md). It has an environment of its own, with the torch that it
# is made for (CONTRIBUTING.md says how to get a build for the CPU alone); TITAN_PYTHON=PYTHON is
# one that is there.
ifndef TITAN_PYTHON
TITAN_PYTHON := build/titan/bin/python
titan: build/titan/installed
endif
titan: .venv/installed
	TITAN_PYTHON=$(abspath $(TITAN_PYTHON)) $(BIN)/pytest -m titan -s tests/torch/test_titan.py

build/titan/installed: pyproject.toml
	$(PYTHON) -m venv build/titan
	build/titan/bin/pip install --quiet --editable . torch==2.15.0 torchtitan==0.3.0
	touch $@

# The verifier against every interleaving, an oracle and real processes, on 10^5 programs where
# the tests have 750; then docs/verification.md. A run can be divided by BLOCKS, each of its
# own seed; one that is tried again counts once.
BLOCKS ?= 0..100
explore: .venv/installed
	$(BIN)/pytest -n 2 tests/proof/test_machine.py tests/proof/test_transports.py tests/proof/test_processes.py \
	    --blocks $(BLOCKS) --tally build/tally
	$(BIN)/python -m tests.support.verification_page build/tally > docs/verification.md

# What models do in their forwards, under schedules of every kind, against one process; then
# docs/model-table.md. It can be stopped and goes on where it was. RANDOM=20000 tries as many models
# that hypothesis makes of all these.
RANDOM ?= 200
models: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m 'models or not models' tests/models --rows build/models --random $(RANDOM); \
	    status=$$?; $(BIN)/python -m tests.models.page build/models > build/model-table.md \
	    && mv build/model-table.md docs/model-table.md && exit $$status

# Everything that may go wrong in a training run, on 4 real processes: ranks killed at every point,
# stages that throw, stall or return wrong shapes, restarts, and nodes that come and go; pytest
# tries a few of each.
faults: .venv/installed
	$(BIN)/pytest -m processes tests/runtime/test_faults.py tests/runtime/test_restarts.py \
	    tests/runtime/test_elastic.py

# What the runtime does on a GPU, of which all processes share one: build/gpu/gpu.json, and a line
# for each check. docs/gpu.md is made of what was found on GPUs so far, in tests/gpu/runs.
gpu: .venv/installed
	$(BIN)/python -m tests.gpu --out build/gpu

# 30 steps of the command with every program of the gallery.
trainings: .venv/installed
	$(BIN)/pytest -n 2 -m trainings tests/runtime/test_loss_falls.py

# All commands of the documentation, also those that train the example.
pages: .venv/installed
	$(BIN)/pytest -m 'pages or not pages' tests/project/test_pages.py

# Two nodes in network namespaces of this machine, and a link that is cut; as root.
nodes: .venv/installed
	$(BIN)/pytest -m processes -rs tests/runtime/test_nodes.py

# Any bytes as a program and as a plan file, following the branches of the compiler (atheris), from
# the gallery on.
FUZZ_SECONDS ?= 600
fuzz: .venv/installed
	$(BIN)/pip install --quiet atheris
	mkdir -p build/fuzz/program build/fuzz/plan && cp programs/*.sched build/fuzz/program
	for each in programs/*.sched; do $(BIN)/schedc compile $$each -o build/fuzz/plan/$$(basename $$each .sched).json; done
	for what in program plan; do $(BIN)/python -m tests.support.fuzzed $$what build/fuzz/$$what \
	    -timeout=120 -rss_limit_mb=2048 -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit 1; done

# Ten thousand programs, written in any way, formatted: each stays what it is.
formatting: .venv/installed
	$(BIN)/pytest -n 2 tests/language/test_formatting.py --blocks 0..100

# Changes the verifier in one place at a time and sees whether the tests notice (mutmut); then
# docs/mutation.md. It takes hours, can be stopped and goes on where it was;
# MUTANTS='schedlang.proof.channels*' tries some only. With EACH=20 a mutant that stands meets its
# quickest tests only, for 20 seconds, and the page counts those.
mutation: .venv/installed
	$(BIN)/pip install --quiet mutmut
	EACH=$(EACH) PATH=$(CURDIR)/$(BIN):$$PATH python -P tests/support/mutation_run.py run --max-children 2 $(MUTANTS)
	PATH=$(CURDIR)/$(BIN):$$PATH python -m tests.support.mutation_page > docs/mutation.md

# The compiler against torch's own pipelining, in a few minutes, and a plot; BENCH=--large for the
# sizes of the largest runs, in half an hour; BENCH=--gallery for every program of the gallery.
bench: .venv/installed
	$(BIN)/pip install --quiet matplotlib && mkdir -p build
	$(BIN)/python benchmarks/compile.py $(BENCH) --plot build/compile.svg

# How many candidates a minute schedc tune looks at, in two minutes or three.
bench-tune: .venv/installed
	$(BIN)/python benchmarks/tune.py

# What it costs to start a command.
bench-start: .venv/installed
	$(BIN)/python benchmarks/start.py

# The runtime against torch's own pipelining: processor time per action, and time per step.
bench-runtime: .venv/installed
	$(BIN)/python benchmarks/runtime.py

# How many optima `schedc optimize` proves of a hundred instances, and what simpler ways give. Each
# of the three takes at most so long; what is missing then, or after Ctrl-C, comes the next time.
# All of it takes one to two hours on two cores.
FOR ?= 40m
bench-search: .venv/installed
	$(BIN)/python benchmarks/search.py --for $(FOR)
	$(BIN)/python benchmarks/large.py --for $(FOR)
	$(BIN)/python benchmarks/published.py --for $(FOR)

# Layers of unequal work shared out in the ways that there are, by simulation, in ten minutes.
bench-partition: .venv/installed
	$(BIN)/python benchmarks/partition.py

# What the search chooses from a measured run against the gallery, on 4 processes, in five minutes;
# for a machine without other work.
bench-search-runs: .venv/installed
	$(BIN)/python benchmarks/search_runs.py

# What an action costs by itself, without models and messages.
bench-walk: .venv/installed
	$(BIN)/python benchmarks/walk.py

# What a key costs in the playground, in this Python and in that of the browser; it needs node.
bench-playground: site
	$(BIN)/python benchmarks/playground.py

# What 200 runs with noise take, walked at once, against one simulation.
bench-runs: .venv/installed
	$(BIN)/python benchmarks/runs.py

# What overlapping forwards and backwards gains, predicted and published.
bench-overlap: .venv/installed
	$(BIN)/python benchmarks/overlap.py

# Updates that do not wait for the norm that clips them, against those that do, on 4 processes.
bench-post-validation: .venv/installed
	$(BIN)/python benchmarks/post_validation.py

# Predicted against measured step time, for a machine without other work.
bench-prediction: .venv/installed
	$(BIN)/python benchmarks/prediction.py

# How large the project is, and how much of it one use loads.
measure: .venv/installed
	$(BIN)/python tools/measure.py

# The drawing of the packages in docs/architecture.md, from the imports; a test holds it current.
architecture: .venv/installed
	$(BIN)/python tests/support/architecture_page.py

# The table of the programs and their figures; a test holds it current.
gallery: .venv/installed
	$(BIN)/python -m schedlang.report.gallery > programs/README.md

# The grammars by which editors colour programs, from the grammar of the language; a test holds them
# current.
editor-grammars: .venv/installed
	$(BIN)/python -m tools.grammars.textmate > editors/vscode/syntaxes/sched.tmLanguage.json
	$(BIN)/python -m tools.grammars.tree_sitter editors/tree-sitter-sched

# What the gallery takes on the transports of GPUs, by simulation; a test holds it current.
transport-table: .venv/installed
	$(BIN)/python benchmarks/transports.py > docs/transport-table.md

# What published schedules are said to gain, and what is predicted for them; a test holds it
# current.
gains: .venv/installed
	$(BIN)/python benchmarks/gains.py > docs/published-gains.md

# The gallery, proved for any number of microbatches: at some numbers of ranks, the first and the
# last, and at any.
RANKS ?= 2 16
prove: .venv/installed
	mkdir -p build
	$(BIN)/python -m tests.support.proof_page $(RANKS) > build/proved.md
	mv build/proved.md docs/proved.md

# Proofs for any number of ranks against the compiler at each size: 5,000 damaged programs at all
# sizes up to 10 x 30, and closed forms at all sizes up to 12 x 40. BLOCKS=0..500 does a tenth.
prove-ranks: BLOCKS = 0..5000
prove-ranks: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m sizes tests/prove --blocks $(BLOCKS)

# What is proved for all sizes of 5,000 damaged programs, against the compiler: each at some number
# of ranks up to 10, and at every number of microbatches up to 30. FIRST=1200 leaves out those
# before.
FIRST ?= 0
prove-damage: .venv/installed
	$(BIN)/python -m tests.support.damaged_programs $(FIRST) $$((5000 - $(FIRST)))

# The reference of Python, from the docstrings; a test holds it current.
reference: .venv/installed
	$(BIN)/python -m tests.support.reference_page > docs/python.md

# The pictures in docs/pictures.md; a test holds them current.
pictures: .venv/installed
	for name in gpipe 1f1b interleaved_1f1b zb_h1 zb_v dualpipe; do \
		$(BIN)/schedc view programs/$$name.sched -o docs/pictures/$$name.svg || exit 1; \
	done

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
