# Everything a user or contributor needs, from a machine with Python 3.11+ and g++ alone.
#   make demo    set up, compile the shipped model and a larger one, compare with onnxruntime, print the speeds
#   make test    set up with the development tools, run every test
#   make check   make lint, make types, make layers (the import contracts)
# VENV=dir uses another virtual environment, PYTHON=python3.12 another interpreter, JOBS=n more test workers.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
JOBS   ?= 2
TESTS  ?= tests
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
# By a plain path: so a folder named onnxc (a clone) beside a script does not hide the package.
SELF   := --config-settings editable_mode=compat --editable
DEMO   := build/demo

export ONNXC_ZOO ?= $(CURDIR)/build/zoo

.PHONY: help demo test test-gpu fuzz zoo check lint types layers format bench figures assets models clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,6s/^# \{0,1\}//p' Makefile
	@echo '  make test-gpu | fuzz | bench | figures | assets | zoo | models | format | clean'

# ------------------------------------------------------------------------------------------------ set-up
# One stamp for each level of set-up; pyproject.toml is what makes them stale.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	  "onnxc needs Python 3.11 to 3.13; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml | $(BIN)/python
	$(PIP) install -q $(SELF) .
	@touch $@

# torch is asked for first and exactly, so that nothing else can pull in another build of it.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q $(SELF) '.[dev]'
	@touch $@ $(VENV)/.user

$(VENV)/.bench: pyproject.toml | $(VENV)/.dev
	$(PIP) install -q $(SELF) '.[bench]'
	@touch $@

# -------------------------------------------------------------------------------------------------- use

demo: $(VENV)/.user
	@mkdir -p $(DEMO)
	@BIN=$(BIN) OUT=$(DEMO) bash models/demo.sh

# With KEEP=1, what an earlier such run compiled of the same text is not compiled again.
test: export ONNXC_TESTS_KEEP ?= $(KEEP)
test: $(VENV)/.dev zoo
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15 $(TESTS)

test-gpu: $(VENV)/.dev zoo  # on a machine with an NVIDIA GPU: the tests of answers, compiled for it
	$(BIN)/python -m pytest --target cuda -n $(JOBS) --dist worksteal --durations=15 $(TESTS)

# Random models against onnxruntime; those that differ are shrunk, and stored under build/fuzz.
SECONDS ?= 600
SEED    ?= 100000
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --first $(SEED)

zoo: $(VENV)/.dev
	$(BIN)/python -m models.zoo

check: lint types layers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench zoo
	$(BIN)/python -m benchmarks.run

# The figures and tables of README.md and docs/performance.md, from the last run of the benchmarks.
RESULTS ?= $(lastword $(sort $(wildcard benchmarks/results/*.json)))
figures: $(VENV)/.bench
	$(BIN)/python -m benchmarks.plots $(RESULTS)

# Needs Node.js. The result is committed: it changes when a version in onnxc/reports/bundles/package.json does.
assets:
	cd onnxc/reports/bundles && npm ci --no-audit --no-fund && node build.mjs

models: $(VENV)/.dev
	$(BIN)/python -m models.digits.train

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
