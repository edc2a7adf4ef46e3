PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check fuzz bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(VENV)/.light  ## show a run (installs no torch)
	$(BIN)/cadenza demo

test: $(VENV)/.dev  ## run the tests; PYTEST_ARGS adds options
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(PYTEST_ARGS)

check: $(VENV)/.dev  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(VENV)/.light  ## run 50,000 random schedules
	$(BIN)/cadenza fuzz --schedules 50000

bench: $(VENV)/.dev  ## measure the control plane
	$(BIN)/cadenza bench control-plane

clean:  ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find cadenza tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The default install and the plots.
$(VENV)/.light: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[plot]'
	touch $@

# Everything that the tests and the checks need; it contains the light install. Torch comes first and
# pinned, so that no later requirement picks another build of it.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	touch $(VENV)/.light $@
