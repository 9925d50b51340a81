# The virtual environment is created once, from the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench
TRAIN_ARGS ?= CartPole-v1 --stop-at 475
BENCH_ARGS ?=
SOAK_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-slow bench soak format lint type docs pins clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

train: $(INSTALLED)  ## train PPO on CartPole-v1 until it is solved
	$(BIN)/ludus train $(TRAIN_ARGS)

test: $(INSTALLED)  ## all fast tests, including lint and types
	$(BIN)/pytest --numprocesses auto --dist worksteal

test-slow: $(INSTALLED)  ## learning tests that take minutes to hours
	$(BIN)/pytest -m slow --numprocesses auto --dist worksteal

bench: $(INSTALLED_BENCH)  ## compare PPO with Stable-Baselines3
	$(BIN)/python -m benchmarks.harness $(BENCH_ARGS)

soak: $(INSTALLED)  ## train under injected faults for about 20 minutes
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

lint: $(INSTALLED)  ## style and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

docs: $(INSTALLED)  ## update line counts and check links
	$(BIN)/python docs/line_counts.py
	$(BIN)/pytest tests/architecture/test_architecture_docs.py tests/architecture/test_architecture_coming_from.py

pins: $(INSTALLED_BENCH)  ## write constraints.txt from the installed versions
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; \
	 } > constraints.new && mv constraints.new constraints.txt
	@touch $(INSTALLED) $(INSTALLED_BENCH)

clean:  ## remove the virtual environment and caches, but no runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py ludus/experience/native.c | $(BIN)/python
	@echo 'Installing into $(VENV) (once, about a minute) …'
	@$(PIP) pip  # a version with --build-constraint
	@$(PIP) --build-constraint constraints.txt --editable '.[dev,atari,cluster,envpool,mujoco,multiagent,offline,video]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	@echo 'Installing the libraries to compare with (once) …'
	@$(PIP) --build-constraint constraints.txt --editable '.[dev,atari,cluster,envpool,mujoco,multiagent,offline,video,bench]'
	@touch $@
