# Every target does its own set-up and is quick the second time. Variables (make VARIABLE=value ...):
#   PYTHON           interpreter that makes .venv, 3.10 or newer         default python3
#   TORCH_SPEC       torch requirement to install                        default torch==2.13.0
#   TORCH_INDEX_URL  package index to take torch from                    default pip's own
#   JOBS             parallel compiler processes                         default number of cores
#   WERROR           ON: compiler warnings are errors                    default OFF
#   UNITY            OFF: each source by itself, see CONTRIBUTING.md      default ON
#   MESHCAST_CUDA    AUTO, ON or OFF                                     default AUTO
#   FUZZ_SECONDS     how long each fuzz target runs                     default 60
#   FUZZ_SEED        which inputs it tries                              default 0, a random one
#   FUZZ_RUNS        inputs for the planner instead of a time            default 0, as many as the time allows
#   WHEELS           wheels to build, e.g. WHEELS="2.15.0:3.13:cpu"      default those of noxfile.py
#   MATRIX           pairs for test-matrix, e.g. MATRIX="2.15.0:3.13"     default those of noxfile.py
#   CLIENTS          packages for test-clients, e.g. CLIENTS="torchft"   default all
#   SIMULATE_SECONDS how long `make simulate` draws programs             default 600, and 100,000 programs at least
#   SIMULATE_SEED    the first of its seeds                              default 1
#   FAULT_SECONDS    how long `make test-faults` makes ranks fail        default 1800
#   HOOK             one check of `make lint` alone, e.g. HOOK=mypy      default all of .pre-commit-config.yaml
#   PYTEST_ARGS      more arguments for pytest, e.g. PYTEST_ARGS="-k halo"
SHELL := /bin/bash
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX_URL ?=
JOBS ?= $(shell nproc)
WERROR ?= OFF
UNITY ?= ON
MESHCAST_CUDA ?= AUTO
PYTEST_ARGS ?=
HOOK ?=
MATRIX ?=
CLIENTS ?=
WHEELS ?=
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
FUZZ_RUNS ?= 0
FAULT_SECONDS ?= 1800
SIMULATE_SECONDS ?= 600
SIMULATE_SEED ?= 1

VENV := .venv
PY := $(abspath $(VENV)/bin/python)
PIP := $(PY) -m pip install -q --disable-pip-version-check
NOX := $(PY) -m nox
TORCH_STAMP := $(VENV)/.stamp-$(subst /,_,$(subst $() ,_,$(TORCH_SPEC)))
# Catch2 is installed or downloaded where C++ tests are asked for.
FETCH_CATCH2 := OFF
test test-all asan tsan: FETCH_CATCH2 := ON
CONFIGURE = -DMESHCAST_FETCH_CATCH2=$(FETCH_CATCH2) -G $(shell command -v ninja >/dev/null && echo Ninja || echo '"Unix Makefiles"') \
             -DPython_EXECUTABLE=$(PY) -DMESHCAST_WERROR=$(WERROR) -DMESHCAST_UNITY=$(UNITY) -DMESHCAST_CUDA=$(MESHCAST_CUDA) \
             $(shell command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
# The lock serialises builds that several people or tools start in one tree.
LOCK := flock build/.lock

.DEFAULT_GOAL := build
.PHONY: build faults cuda-check on-gpu demo demo-long test test-all test-faults simulate simulate-mutants test-matrix test-newest test-clients wheels release-check bench bench-all bench-check bench-pipeline bench-e2e docs fuzz lint tidy analyze metrics format asan tsan clean configure help

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"; echo; echo "Targets:"
	@sed -nE 's/^([a-z][a-z0-9 -]*):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  %-16s %s\n", $$1, $$2}'
	@echo; echo "Variables:"; sed -n '2,/^SHELL/s/^#   /  /p' $(firstword $(MAKEFILE_LIST))

# ---- set-up ----------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo "meshcast: $(PYTHON) is not there or too old: install Python 3.10 or newer, or name it with make PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) tools/build_tools.py
	@echo "Making the environment $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)

$(TORCH_STAMP): | $(VENV)/bin/python
	@echo "Installing $(TORCH_SPEC) into $(VENV): 200 MB for CPUs, 2 to 3 GB with CUDA's libraries$(if $(TORCH_INDEX_URL),, (TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes the smaller)) ..."
	@$(PY) -m pip install --disable-pip-version-check $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH_SPEC)"
	@rm -f $(VENV)/.stamp-torch* && touch $@

$(VENV)/.stamp-build: requirements-build.txt $(TORCH_STAMP)
	@echo "Installing what requirements-build.txt names ..."
	@$(PIP) -r requirements-build.txt
	@touch $@

$(VENV)/.stamp-demo: requirements-demo.txt $(TORCH_STAMP)
	@echo "Installing what requirements-demo.txt names ..."
	@$(PIP) -r requirements-demo.txt
	@touch $@

$(VENV)/.stamp-dev: requirements-dev.txt requirements-demo.txt $(TORCH_STAMP)
	@echo "Installing what requirements-dev.txt names ..."
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.stamp-lint: requirements-lint.txt $(VENV)/.stamp-dev
	@echo "Installing what requirements-lint.txt names ..."
	@$(PIP) -r requirements-lint.txt
	@touch $@

$(VENV)/.stamp-hf: requirements-hf.txt $(VENV)/.stamp-dev
	@echo "Installing what requirements-hf.txt names ..."
	@$(PIP) -r requirements-hf.txt
	@touch $@

$(VENV)/.stamp-fuzz: requirements-fuzz.txt $(VENV)/.stamp-dev
	@echo "Installing what requirements-fuzz.txt names ..."
	@$(PIP) -r requirements-fuzz.txt
	@touch $@

# The sessions of noxfile.py install torch themselves.
$(VENV)/.stamp-nox: requirements-dev.txt | $(VENV)/bin/python
	@echo "Installing nox ..."
	@$(PIP) "$$(grep '^nox' requirements-dev.txt)"
	@touch $@

$(VENV)/.stamp-docs: requirements-docs.txt $(TORCH_STAMP)
	@echo "Installing what requirements-docs.txt names ..."
	@$(PIP) -r requirements-docs.txt
	@touch $@

# ---- build -----------------------------------------------------------------------------------------------

configure: $(VENV)/.stamp-build ## configure build/release without compiling
	@mkdir -p build; echo "Configuring build/release (build/configure.log) ..."
	@$(LOCK) cmake --preset release $(CONFIGURE) >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
	@grep -E '^-- (meshcast|CUDA)' build/configure.log

build: configure ## compile the extension module into python/meshcast; all that it needs comes into .venv (the default)
	@$(LOCK) cmake --build build/release -j$(JOBS) --target _C

faults: $(VENV)/.stamp-build ## _C with fault points, for tests alone, in build/faults
	@mkdir -p build/faults/python/meshcast
	@$(LOCK) cmake --preset faults $(CONFIGURE) >build/configure-faults.log 2>&1 || { cat build/configure-faults.log; exit 1; }
	@$(LOCK) cmake --build build/faults -j$(JOBS) --target _C
	@for each in python/meshcast/*; do case $$each in */_C.*.so | */_build_info.py | */__pycache__) ;; \
	   *) ln -sfn "$(CURDIR)/$$each" build/faults/python/meshcast/ ;; esac; done

# Everything that was written for GPUs, on a machine with one: built with python3's torch, tested, measured.
# ON_GPU_ARGS=--dry: as far as it goes without.
on-gpu: ## on a machine with a GPU: build with CUDA, test and measure all that was written for it (ON_GPU_ARGS=--dry: without one)
	@tools/on_gpu.sh $(ON_GPU_ARGS)

# The same dry, with CUDA's torch in an environment of its own, .nox/cuda (5 GB). CUDA_CHECK_ARGS=--if-possible lets
# it pass where that torch cannot be had.
cuda-check: $(VENV)/.stamp-nox ## build with CUDA without a GPU, in .nox/cuda (5 GB; CUDA_CHECK_ARGS=--if-possible passes where that cannot be had)
	@JOBS=$(JOBS) WERROR=$(WERROR) $(NOX) -s cuda -- $(CUDA_CHECK_ARGS)

# ---- test ------------------------------------------------------------------------------------------------

test: build $(VENV)/.stamp-dev ## C++ tests, then pytest without its slow tests
	@PY=$(PY) JOBS=$(JOBS) tools/run_tests.sh quick $(PYTEST_ARGS)

test-all: build faults $(VENV)/.stamp-hf $(VENV)/.stamp-docs asan tsan analyze ## all tests, sanitizers and analyzer: about an hour
	@PY=$(PY) JOBS=$(JOBS) tools/run_tests.sh all $(PYTEST_ARGS)

test-matrix: $(VENV)/.stamp-nox ## `make test` under several releases of torch and Python (MATRIX)
	@MATRIX="$(MATRIX)" $(NOX) -s matrix -- $(MATRIX_ARGS)

test-newest: $(VENV)/.stamp-nox ## ten minutes of the tests with the newest torch
	@JOBS=$(JOBS) $(NOX) -s newest

test-clients: build $(VENV)/.stamp-nox ## tests of packages that use meshcast, each in an environment of its own (CLIENTS)
	@CLIENTS="$(CLIENTS)" TORCH_SPEC="$(TORCH_SPEC)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(NOX) -s clients -- $(PYTEST_ARGS)

wheels: $(VENV)/.stamp-nox ## build wheels and try each in a fresh environment (WHEELS)
	@WHEELS="$(WHEELS)" $(NOX) -s wheels

release-check: ## whether version, changelog, documents, tag and wheels agree
	@$(PYTHON) tools/release_check.py

simulate: configure ## groups of ranks in virtual time: drawn calls, refusals and faults, for SIMULATE_SECONDS
	@$(LOCK) cmake --build build/release -j$(JOBS) --target meshcast_simulate
	build/release/meshcast_simulate --seconds $(SIMULATE_SECONDS) --programs 100000 --first-seed $(SIMULATE_SEED) --jobs $(JOBS)

simulate-mutants: $(VENV)/.stamp-build ## whether the simulation notices faults that are planted in the core
	@$(PY) tests/simulation/mutants.py --jobs $(JOBS)

asan tsan: $(VENV)/.stamp-build ## C++ tests under sanitizers of addresses, and of threads
	@mkdir -p build
	@$(LOCK) cmake --preset $@ $(CONFIGURE) >build/configure-$@.log 2>&1 || { cat build/configure-$@.log; exit 1; }
	$(LOCK) cmake --build build/$@ -j$(JOBS) --target meshcast_tests meshcast_simulate
	ctest --preset $@

# Ranks that fail at every moment, FAULT_SECONDS of it, then refused calls and ways to end, as many in proportion.
test-faults: build faults $(VENV)/.stamp-dev ## ranks that fail at every moment, for FAULT_SECONDS
	@MESHCAST_FAULT_SECONDS=$(FAULT_SECONDS) $(PY) -m pytest tests/fault/test_matrix.py \
	    tests/fault/test_drawn_arguments.py tests/fault/test_exits.py $(PYTEST_ARGS)

fuzz: build $(VENV)/.stamp-fuzz ## fuzz targets, each for FUZZ_SECONDS
	@PY=$(PY) JOBS=$(JOBS) tools/fuzz.sh $(FUZZ_SECONDS) $(FUZZ_SEED) $(FUZZ_RUNS)

demo: build $(VENV)/.stamp-demo ## a table, two pictures and a short training, in half a minute
	@PYTHONPATH=$(CURDIR)/python PYTHON=$(PY) examples/demo.sh

demo-long: build $(VENV)/.stamp-dev ## the same with longer trainings, of a GPT and a U-Transformer: two minutes more
	@PYTHONPATH=$(CURDIR)/python PYTHON=$(PY) examples/demo.sh --long

bench: build $(VENV)/.stamp-dev ## benchmarks of the paper's cases (BENCH_ARGS="--mbit 150": more options of `python -m benchmarks reshard`)
	PYTHON=$(PY) benchmarks/run.sh paper $(BENCH_ARGS)

bench-all: build $(VENV)/.stamp-dev ## all benchmarks
	PYTHON=$(PY) benchmarks/run.sh all $(BENCH_ARGS)

bench-check: build $(VENV)/.stamp-dev ## whether this tree is as fast as the published results
	PYTHON=$(PY) benchmarks/run.sh check

# Writes benchmarks/results/pipeline_sweep.json.gz, the pictures and the tables of docs/pipelining.md.
bench-pipeline: build $(VENV)/.stamp-dev ## benchmarks of pipelines, for docs/pipelining.md
	PYTHON=$(PY) benchmarks/run.sh pipeline

# Writes benchmarks/results/e2e.json, the chart and the tables of docs/end_to_end.md.
bench-e2e: build $(VENV)/.stamp-dev ## benchmarks of whole trainings, for docs/end_to_end.md (BENCH_ARGS)
	PYTHON=$(PY) benchmarks/run.sh e2e $(BENCH_ARGS)

# ---- documents -------------------------------------------------------------------------------------------

docs: build $(VENV)/.stamp-docs ## the site, in build/docs/html; it needs no network, and warnings are errors
	@rm -rf build/docs
	@$(PY) -m sphinx -q -W --keep-going -j $(JOBS) -c docs -d build/docs/doctrees . build/docs/html

# ---- style -----------------------------------------------------------------------------------------------

metrics: build $(VENV)/.stamp-dev ## print the table of docs/design.md
	@PYTHONPATH=$(CURDIR)/python $(PY) tools/metrics.py

lint: $(VENV)/.stamp-build $(VENV)/.stamp-lint ## style, types, layers and clang-tidy; .pre-commit-config.yaml has the list
	@PRE_COMMIT_HOME=$(CURDIR)/build/pre-commit JOBS=$(JOBS) $(PY) -m pre_commit run --all-files --hook-stage manual $(HOOK)

# clang-tidy over what needs no torch; with the analyzer each source by itself.
tidy: PRESET := lint
analyze: PRESET := analyze
tidy analyze: $(VENV)/.stamp-build $(VENV)/.stamp-lint ## clang-tidy, as a part of lint; clang's analyzer, source by source: minutes
	@mkdir -p build
	@$(LOCK) cmake --preset $(PRESET) $(CONFIGURE) -DMESHCAST_WERROR=OFF -DMESHCAST_UNITY=$(if $(filter lint,$(PRESET)),ON,OFF) -DMESHCAST_CLANG_TIDY=$(abspath $(VENV)/bin/clang-tidy) >build/$(PRESET).log 2>&1 || { cat build/$(PRESET).log; exit 1; }
	@$(LOCK) cmake --build build/$(PRESET) -j$(JOBS) --target meshcast_core meshcast_ucx >>build/$(PRESET).log 2>&1 || { grep -vE '^\[|Building CXX' build/$(PRESET).log; exit 1; }

format: $(VENV)/.stamp-lint ## format Python and C++
	$(VENV)/bin/ruff check --fix-only -q . ; $(VENV)/bin/ruff format -q .
	find csrc tests/cpp \( -name '*.h' -o -name '*.cpp' \) -print0 | xargs -0 $(VENV)/bin/clang-format -i

clean: ## remove what builds have written, but not .venv
	rm -rf build dist python/meshcast/_C*.so python/meshcast/_build_info.py python/*.egg-info
