# Everything installs itself into .venv; only Python >= 3.11 and make are needed. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# Test files run side by side; raise it on a machine with more cores.
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
CREATED := $(VENV)/.created
RUN := $(VENV)/.installed
TEST := $(VENV)/.installed-test
# The kernels are also tested on the newest JAX, which needs Python 3.12, and compiled for TPUs, which needs libtpu, and
# for Hopper, which needs JAX's CUDA plugin and ptxas (from nvidia-cuda-nvcc).
PYTHON312 ?= python3.12
KERNELS := $(VENV)/kernels
KERNELS_READY := $(KERNELS)/.installed
KERNELS_NEED := jax==0.12.0.1 jaxlib==0.12.0.1 libtpu==0.0.50.1 jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 \
  nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 'flax>=0.12.9' jaxtyping numpy pytest hypothesis
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-kernels lint format bench-smoke clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jdlite needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments; install its venv and ensurepip modules (on Debian: python3-venv)." >&2; exit 1; }
	@touch $@

$(RUN): pyproject.toml constraints.txt | $(CREATED)
	@echo "Installing jdlite into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(TEST): $(RUN)
	@echo "Installing what the tests need into $(VENV) (CPU torch included, for parity with transformers)"
	@$(PIP) --editable '.[test,parity]'
	@touch $@

install: $(RUN)  ## make .venv with what is needed to run

demo: $(RUN)  ## decode real prompts with a real chat model, plainly, with AdaPLD, DLite and both
	@VENV=$(VENV) bash scripts/demo.sh $(ARGS)

test: $(TEST)  ## the fast test suite (minutes on two cores)
	$(PYTEST) -m "not slow and not real_model" $(ARGS)

test-all: $(TEST)  ## all tests: slow ones and those on the real model too
	$(PYTEST) $(ARGS)

$(KERNELS_READY): Makefile | $(CREATED)
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "The kernels' tests need Python 3.12 or newer, but $(PYTHON312) is $$($(PYTHON312) --version 2>&1); name another one: make test-kernels PYTHON312=..." >&2; exit 1; }
	@echo "Installing JAX 0.12, libtpu, JAX's CUDA plugin and ptxas into $(KERNELS)"
	@$(PYTHON312) -m venv --clear $(KERNELS)
	@$(KERNELS)/bin/python -m pip install -qq --disable-pip-version-check $(KERNELS_NEED)
	@touch $@

test-kernels: $(KERNELS_READY)  ## the Pallas kernels on JAX 0.12, compiled for four kinds of TPU and for Hopper without one
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 $(KERNELS)/bin/python -m pytest tests/pallas_kernels $(ARGS)

lint: $(TEST)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(TEST)  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-smoke: $(RUN)  ## the benchmark on one short row, to see that it runs
	$(BIN)/python -m jdlite.bench --target demo --tasks tests/smoke.jsonl --drafters plain,pld --max-new-tokens 16 \
	  --repeats 1 --profile-rows 0 $(ARGS)

clean:  ## remove .venv and caches of tools
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
