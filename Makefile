# Every target does its own set-up and is quick the second time. Variables:
#   PYTHON           interpreter that makes .venv (3.11 or newer)      default python3
#   TORCH_SPEC       torch requirement to install                      default torch==2.13.0
#   TORCH_INDEX_URL  package index to take torch from                  default pip's own
#   JOBS             parallel compiler processes                       default number of cores
#   WERROR           ON: compiler warnings are errors                default OFF
SHELL := /bin/bash
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX_URL ?=
JOBS ?= $(shell nproc)
WERROR ?= OFF
VENV := .venv
PY := $(VENV)/bin/python
LAUNCHER := $(shell command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
GENERATOR := $(shell command -v ninja >/dev/null && echo Ninja || echo 'Unix Makefiles')

.PHONY: build clean
.DEFAULT_GOAL := build

$(VENV)/.torch-installed:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH_SPEC)" numpy
	touch $@

# The lock serialises builds that several people or tools start in one tree.
build: $(VENV)/.torch-installed
	@mkdir -p build
	@flock build/.lock cmake --preset release -G "$(GENERATOR)" -DPython_EXECUTABLE=$(abspath $(PY)) $(LAUNCHER) -DMESHCAST_WERROR=$(WERROR) >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
	flock build/.lock cmake --build build/release -j$(JOBS) --target _C

clean:
	rm -rf build python/meshcast/_C*.so
