# Everything happens in a virtual environment of the project's own; all that is needed beforehand is Python 3.11 or newer.
#   make train ARGS="--job.steps 20"      arguments for `ahp train`
#   make test  ARGS="-m 'not slow'"       arguments for pytest; -m wide: proofs on further models and layouts
#   make train PYTHON=python3.12 VENV=/somewhere/else

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# A person sees pip's progress; a log needs only what went wrong.
PIP_INSTALL := $(BIN)/python -m pip install $(if $(CI),--quiet,) --disable-pip-version-check --constraint .ci/constraints.txt
CODE := $(wildcard src tests benchmarks .ci)

# Tests start a hundred processes: without bytecode each of them would compile all of AHP again, half a second of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install dev train test test-gpu test-matrix smoke exports lint docs clean
.DELETE_ON_ERROR:

help:
	@echo "make train       install, then plan and train a small LLaMA on this machine (ARGS=... for ahp train)"
	@echo "make test        install, then run the tests (ARGS=... for pytest)"
	@echo "make test-gpu    install, then run the tests that need a GPU"
	@echo "make test-matrix run the tests that use torch on its oldest and newest release (ARGS=\"--torch 2.12.1 --python python3.13\")"
	@echo "make smoke       build a wheel, and run every command from it in an environment that has nothing else"
	@echo "make exports     install accelerate, DeepSpeed and torchtitan into $(VENV)-exports, and train there what ahp export writes"
	@echo "make lint        formatting, lint and types"
	@echo "make docs        build the pages of docs/ into site/, every warning an error"
	@echo "make install     only install, into $(VENV)"
	@echo "make clean       remove $(VENV), $(VENV)-exports, .venv-matrix and caches; the runs stay"

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

# A stamp older than pyproject.toml means that the dependencies may have changed. The package is installed editable:
# a change in src needs no new installation.
$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "PYTHON = $(PYTHON): no such program; AHP needs Python 3.11 or newer (make PYTHON=python3.11)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON = $(PYTHON): AHP needs Python 3.11 or newer (make PYTHON=python3.11)" >&2; exit 1; }
	@echo "Installing AHP into $(VENV): some minutes the first time, most of it PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what tests and lint need"
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

train: install
	$(BIN)/ahp train $(ARGS)

test: dev
	$(BIN)/python -m pytest $(ARGS)

test-gpu: dev
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

# Environments and logs: .venv-matrix.
test-matrix:
	$(PYTHON) .ci/matrix.py $(ARGS)

smoke:
	$(PYTHON) .ci/smoke.py $(ARGS)

# The releases whose keys are exported (docs/export.md): apart from $(VENV), which must not depend on them. torchtitan imports triton,
# which torch for GPUs brings and torch for processor cores does not.
$(VENV)-exports/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)-exports
	$(VENV)-exports/bin/python -m pip install --disable-pip-version-check --constraint .ci/constraints.txt --editable . accelerate==1.15.0 deepspeed==0.19.8 torchtitan==0.2.2 ninja "triton; sys_platform == 'linux'"
	@touch $@

# DeepSpeed compiles its AdamW for processor cores with the ninja of that environment.
exports: $(VENV)-exports/.installed
	PATH="$(abspath $(VENV)-exports/bin):$$PATH" python benchmarks/exports.py $(ARGS)

lint: dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python

# The tool by itself, since a page needs nothing of AHP; tests hold the reference to the code.
$(VENV)/.installed-docs: pyproject.toml $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.installed-docs
	$(BIN)/zensical build --strict --clean
	@echo "site/index.html is the first page"

clean:
	rm -rf $(VENV) $(VENV)-exports .venv-matrix build dist site .cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
