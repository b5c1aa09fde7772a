# Needs only python3 (3.11 or later, with venv and pip), make and git; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-clients lint clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/make \1: \2/p' Makefile

demo: $(STAMP) ## set up, then generate text with the built-in pair of models: no GPU, no download of weights
	$(BIN)/card demo

test: lint ## set up, then check format, lint, types and run the tests
	$(BIN)/python -m pytest

test-gpu: $(STAMP) ## set up, then run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

lint: $(STAMP) ## set up, then check format, lint and types
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean: ## remove .venv, dist and the tools' caches; build/ (training runs) stays
	rm -rf $(VENV) dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One pip call, so that every version is resolved under the constraints.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
