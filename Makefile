# `make demo` and `make test` need Python 3.11+ and nothing else: they build their own environment
# in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of processes: Python compiles a module once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo example test checks core large test-torch test-browser test-editor test-clusters titan site sheet pages newcomer faults
.PHONY: explore explore-verifier explore-formatting explore-ranks explore-damage explore-streams explore-trainings explore-models explore-fuzz
.PHONY: explore-transformers
.PHONY: models mutation gpu bench regenerate measure

# Two schedules train a small GPT on 4 processes; each is compared with one process.
INTERLEAVED := programs/interleaved_1f1b.sched -p chunks=2
demo: .venv/runtime
	@echo "demo, 2 of 4: train a small GPT under 1F1B, on 4 processes of this machine, and again on one"
	@$(BIN)/schedc run programs/1f1b.sched --steps 3 --check
	@echo
	@echo "demo, 3 of 4: the same under interleaved 1F1B, whose ranks have two stages each"
	@$(BIN)/schedc run $(INTERLEAVED) --steps 3 --check
	@echo
	@echo "demo, 4 of 4: the two schedules as they are proved, a line for each rank; dots are idle"
	@$(BIN)/schedc simulate programs/1f1b.sched | sed '/^$$/q'
	@$(BIN)/schedc simulate $(INTERLEAVED) | sed '/^$$/q'
	@echo "Both schedules compute what one process computes. Interleaved 1F1B is idle for less of the time."
	@echo "Next: the first five minutes of README.md, then docs/tutorial.md. schedc is $(BIN)/schedc."

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
# which must be on this machine, as must npm. It prints the times to first paint, for each hover, for
# each key and of frames while a wheel zooms and moves.
test-browser: site
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	npm install --silent --no-save --prefix build axe-core@4
	$(BIN)/pytest -m browser -rP

# How the pages look, on one picture: docs/pictures/contact-sheet.jpg.
sheet: site
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m tests.support.contact_sheet

# The language server on 200 damaged programs, and what editors colour programs by, in node, which
# must be on this machine with npm; and where it is on this machine, tree-sitter's own command.
test-editor: .venv/installed
	cd editors/vscode && npm install --no-audit --no-fund --no-package-lock
	$(BIN)/pytest -m 'editors or not editors' tests/editor --blocks 0..10
	if command -v tree-sitter; then cd editors/tree-sitter-sched && tree-sitter generate && tree-sitter test; fi

# The files of docs/clusters.md: the job for Slurm by Slurm's own controller, which must be on this
# machine (Debian: slurmctld, slurm-client) and needs root, that for Kubernetes by its API's schemas.
test-clusters: .venv/installed
	$(BIN)/pip install --quiet kubernetes-validate
	$(BIN)/pytest -m clusters tests/tools/test_clusters.py

# torchtitan on 4 processes of this machine: by itself, with tables of ours, and in our runtime, its
# losses side by side (docs/torch.md). It has an environment of its own, with the torch that it
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

# All commands of the documentation, also those that train the example.
pages: .venv/installed
	$(BIN)/pytest -m 'pages or not pages' tests/project/test_pages.py

# What a newcomer does first: the pages README, tutorial and train, in an environment that a fresh
# `make demo` has made.
newcomer: .venv/installed
	$(BIN)/pytest -m newcomer tests/project/test_pages.py

# Everything that may go wrong in a training run, on 4 real processes: ranks killed at every point,
# stages that throw, stall or return wrong shapes, restarts, and nodes that come and go; pytest
# tries a few of each. Two nodes in network namespaces, with a link that is cut, need root.
faults: .venv/installed
	$(BIN)/pytest -m processes -rs tests/runtime/test_faults.py tests/runtime/test_restarts.py \
	    tests/runtime/test_elastic.py tests/runtime/test_nodes.py

# Long runs that look for counterexamples. WHAT is one of
#   verifier    the verifier against every interleaving, an oracle and real processes, on 10^5 programs
#               where the tests have 750; then docs/reports/verification.md. BLOCKS=0..50 does half of
#               it, each block with its own seed; one that is tried again counts once
#   formatting  ten thousand programs, written in any way, formatted: each stays what it is
#   ranks       proofs for any number of ranks against the compiler at each size: 5,000 damaged
#               programs, and closed forms. BLOCKS=0..500 does a tenth
#   damage      what is proved of 5,000 damaged programs for any number of microbatches, against the
#               compiler. FIRST=1200 leaves out those before
#   streams     what ranks give their GPUs, stream by stream: 5,040 lists of steps, damaged, against an
#               explorer of orders. BLOCKS=0..4 does a tenth
#   trainings   30 steps of the command with every program of the gallery
#   models      random models with tensors of every kind between stages, and in random loops of
#               training, against one process: 3,800 and 1,200. BLOCKS=0..10 does a tenth
#   transformers  all language models of transformers, cut by split from tiny configs, against one
#               process; then docs/reports/transformers.md
#   fuzz        any bytes as a program and as a plan, following the branches of the compiler (atheris)
explore: explore-$(or $(WHAT),verifier)

explore-verifier: BLOCKS ?= 0..100
explore-verifier: .venv/installed
	$(BIN)/pytest -n 2 tests/proof/test_machine.py tests/proof/test_transports.py tests/proof/test_processes.py \
	    --blocks $(BLOCKS) --tally build/tally
	$(BIN)/python -m tools.pages verification

explore-formatting: .venv/installed
	$(BIN)/pytest -n 2 tests/language/test_formatting.py --blocks 0..100

explore-ranks: BLOCKS ?= 0..5000
explore-ranks: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m sizes tests/prove --blocks $(BLOCKS)

FIRST ?= 0
explore-damage: .venv/installed
	$(BIN)/python -m tests.support.damaged_programs $(FIRST) $$((5000 - $(FIRST)))

explore-streams: BLOCKS ?= 0..42
explore-streams: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal tests/ranks/test_gpu_streams.py --blocks $(BLOCKS)

explore-trainings: .venv/installed
	$(BIN)/pytest -n 2 -m trainings tests/runtime/test_loss_falls.py

explore-models: BLOCKS ?= 0..100
explore-models: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal tests/models/test_between.py tests/models/test_loops.py --blocks $(BLOCKS)

explore-transformers: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m transformers tests/models/test_tiny_models.py --rows build/transformers; \
	    status=$$?; $(BIN)/python -m tools.pages transformers && exit $$status

FUZZ_SECONDS ?= 600
explore-fuzz: .venv/installed
	$(BIN)/pip install --quiet atheris
	mkdir -p build/fuzz/program build/fuzz/plan && cp programs/*.sched build/fuzz/program
	for each in programs/*.sched; do $(BIN)/schedc compile $$each -o build/fuzz/plan/$$(basename $$each .sched).json; done
	for what in program plan; do $(BIN)/python -m tests.support.fuzzed $$what build/fuzz/$$what \
	    -timeout=120 -rss_limit_mb=2048 -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit 1; done

# What models do in their forwards, under schedules of every kind, against one process; then
# docs/reports/model-table.md. It can be stopped and goes on where it was. RANDOM=20000 tries as many
# models that hypothesis makes of all these.
RANDOM ?= 200
models: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m 'not transformers' tests/models --rows build/models --random $(RANDOM); \
	    status=$$?; $(BIN)/python -m tools.pages models && exit $$status

# Changes the verifier in one place at a time and sees whether the tests notice (mutmut); then
# docs/reports/mutation.md. It takes hours, can be stopped and goes on where it was;
# MUTANTS='schedlang.proof.channels*' tries some only. With EACH=20 a mutant that stands meets its
# quickest tests only, for 20 seconds, and the page counts those.
mutation: .venv/installed
	$(BIN)/pip install --quiet mutmut
	EACH=$(EACH) PATH=$(CURDIR)/$(BIN):$$PATH python -P tests/support/mutation_run.py run --max-children 2 $(MUTANTS)
	PATH=$(CURDIR)/$(BIN):$$PATH python -m tools.pages mutation

# What the runtime does on a GPU, of which all processes share one: build/gpu/gpu.json, and a line
# for each check. docs/reports/gpu.md is made of what was found on GPUs so far, in tests/gpu/runs.
gpu: .venv/installed
	$(BIN)/python -m tests.gpu --out build/gpu

# WHAT names a file of benchmarks/, whose first lines say what it measures; `make bench` compiles,
# against torch's own pipelining, in a few minutes. BENCH is for its options: BENCH=--large are the
# sizes of the largest runs, in half an hour, BENCH=--gallery every program of the gallery. Those
# that run models need a machine without other work. WHAT=search takes FOR, five times; what is
# missing then, or after Ctrl-C, comes the next time.
FOR ?= 40m
SCRIPTS := $(or $(WHAT),compile)
bench: $(if $(filter playground,$(WHAT)),site,.venv/installed)
	$(BIN)/pip install --quiet matplotlib && mkdir -p build
	for each in $(if $(filter search,$(SCRIPTS)),search large published offload gathers,$(SCRIPTS)); do $(BIN)/python benchmarks/$$each.py \
	    $(if $(filter search,$(SCRIPTS)),--for $(FOR)) $(if $(filter compile,$(SCRIPTS)),--plot build/compile.svg) $(BENCH) || exit 1; done

# Pages, pictures and grammars that are made from the source, as tests hold them; WHAT=gains writes
# one. tools/pages/__main__.py has the list, with those that need a long run.
regenerate: .venv/installed
	$(BIN)/python -m tools.pages $(WHAT)

# How large the project is, and how much of it one use loads.
measure: .venv/installed
	$(BIN)/python tools/measure.py

# What training needs. The tests, the checks and the tools need more. venv takes four seconds to make a
# pip of its own, so the pip of $(PYTHON) installs it, if there is one. pip would compile all modules of
# torch on one core, and most are never imported: those that torch imports last are compiled while the
# first training begins, the others when they are imported.
HAS_PIP = $(shell $(PYTHON) -c 'import pip' 2>/dev/null && echo yes)
.venv/runtime: pyproject.toml constraints.txt
	@echo "demo, 1 of 4: build .venv with torch and what else training needs"
	@$(PYTHON) -m venv $(if $(HAS_PIP),--without-pip) .venv
	@$(if $(HAS_PIP),$(PYTHON) -m pip --python $(BIN)/python,$(BIN)/pip) install --disable-pip-version-check \
	    --no-compile --constraint constraints.txt pip --editable '.[runtime]'
	@(cd .venv/lib/python3*/site-packages && ../../../bin/python -m compileall -qq sympy torch/_dynamo torch/fx &)
	@touch $@

.venv/installed: .venv/runtime
	@echo "adding to .venv what the tests, the checks and the tools need"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	@touch $@
