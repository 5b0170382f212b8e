# `make demo` and `make test` set up everything they need in .venv; `make help` lists the rest.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin

# The first Python >= 3.12 that can make environments; candidates are run, because a pyenv shim may exist
# and still fail; inside an environment the interpreter below it counts.
find_python = for p in python3.12 python3.13 python3.14 python3 "$$(pyenv root 2>/dev/null)"/versions/*/bin/python3 \
	"$$HOME"/.pyenv/versions/*/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3; do \
	"$$p" -c 'import os, sys, venv, ensurepip; sys.exit(1) if sys.version_info < (3, 12) else print(os.path.realpath(sys._base_executable))' 2>/dev/null && break; done
PYTHON ?= $(shell $(find_python))

# The environment is made anew when what it was made from changes.
KEY := $(shell { cat pyproject.toml constraints.txt; echo "$(PYTHON) $(CURDIR)"; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/made-$(KEY)

.PHONY: help venv demo test slow gpu lint format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

venv: $(STAMP) ## the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "sejax needs Python 3.12 or newer with its venv module: none is on PATH or in pyenv; install one or run make PYTHON=/path/to/python3.12." >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON) ..."
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint constraints.txt pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(STAMP) ## a conversation with a real model under several methods, in minutes
	@$(BIN)/python bench/demo.py

test: $(STAMP) ## the default tests
	@$(BIN)/python -m pytest

slow: $(STAMP) ## the tests left out of the default run
	@$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1500

gpu: ## on an accelerator, with the python of PATH (cuda and test extras installed): its own tests, the laws, the demo model
	@python -m pytest -m gpu
	@XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -m 'not slow' tests/laws tests/models/test_smollm2.py

lint: $(STAMP) ## style, format, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP) ## rewrites the sources in the one format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## removes the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build
