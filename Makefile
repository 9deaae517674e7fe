# The commands a newcomer needs. Each creates .venv, installs once per change of pyproject.toml, and runs.
#   make demo   converts the bundled tiny checkpoint and compares decoders on it (CPU, minutes)
#   make chat   fetches SmolLM2-135M (90 MB, once) and opens idlm-chat with it and its adapter
#   make page   idlm-serve with the same: a chat, and AR and ISD side by side, at http://127.0.0.1:8000
#   make test   lint, types, import rules and the tests of every rule in its smallest form (before a commit)
#   make test-all   these, and then the sweeps: all sizes, settings and families, soaks, fuzzing, benchmarks
#   make wheel  a wheel in dist/, which is installed into a new environment and run there
#   make docs   the documentation as a site, in site/
#   make gpu-test PART=engine|block|changes|kernels|ranks  the tests of tests/gpu, on a machine with a GPU
# PYTHON=python3.12 make ... picks another interpreter; VENV=/path puts the environment elsewhere.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# --no-compile: bytecode is written at first import, and most of what is installed is never imported.
PIP := $(RUN) -m pip --disable-pip-version-check install -qq --no-compile
KEY := $(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)
CPU_INDEX := https://download.pytorch.org/whl/cpu

# Idle OpenMP threads must not spin while a neighbour works; nothing here needs the network once installed; and a
# folder of the working directory must never shadow a library (transformers imports a package called `kernels`).
export OMP_WAIT_POLICY := passive
export PYTHONSAFEPATH := 1
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export IDLM_TRANSFORMERS4 ?= $(abspath $(VENV))/transformers4
# Imports store what pip did not compile: without this each of the many processes of the tests compiles torch,
# transformers and DeepSpeed again, which takes three times as long as an import.
unexport PYTHONDONTWRITEBYTECODE

# A file stays on one worker, so its models are made once; long files come before the many short ones. Tests that
# compare what models decide run on a second instruction set, their sweeps on that one alone: rounding must not decide.
PYTEST := $(RUN) -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder
FIRST := not sweep and not gpu and not multigpu
SWEEPS := sweep and not decides and not gpu and not multigpu
DECIDES := decides and not gpu and not multigpu
DECIDING = $(shell grep -rl 'mark.decides$$' --include='test_*.py' tests | grep -v tests/gpu/ | LC_ALL=C sort)

# tests/gpu has a folder for each part, of at most eight minutes on an H200. Tests that count the bytes of the GPU run
# first and alone, each file in a process of its own: a process keeps memory that parts of it still use.
GPU_WORKERS ?= 8

.PHONY: demo chat page test test-all types run-tests gpu-test wheel docs format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-$(KEY)
	$(RUN) -m benchmarks.demo

# With the released gated LoRA, or your own, which drafts for it. Greedy, because a model of this size rambles when it
# is sampled.
SMOLLM2 := outputs/smollm2_base
ADAPTER = $(firstword $(wildcard outputs/smollm2_lora recipes/assets/smollm2_lora))
# Most CPUs multiply several rows in 16 bits one after the other, and each row takes time of a pass.
CPU_OPTIONS := dtype=float32 decoder=isd decoder.stride=3 decoder.rejection_strategy=alternate
CPU_ONLY = $(shell command -v nvidia-smi >/dev/null || echo $(CPU_OPTIONS))
# Alone on the machine, threads may spin: waking them takes longer than small products.
chat: $(VENV)/.demo-$(KEY) | $(SMOLLM2)/config.json
	@env -u OMP_WAIT_POLICY $(RUN) -m idlm.infer.clients.chat sampling.temperature=0 model=$(ADAPTER) base=$(SMOLLM2) $(CPU_ONLY)

page: $(VENV)/.serve-$(KEY) | $(SMOLLM2)/config.json
	@env -u OMP_WAIT_POLICY $(RUN) -m idlm.infer.cli.serve model=$(ADAPTER) base=$(SMOLLM2) $(CPU_ONLY)

$(SMOLLM2)/config.json: | $(VENV)/.demo-$(KEY)
	@$(RUN) recipes/smollm2.py $(SMOLLM2)

test: $(VENV)/.test-$(KEY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@$(MAKE) --no-print-directory -j2 types run-tests

# Each of these has one process: alone they would leave a core idle for a minute.
types:
	$(VENV)/bin/lint-imports
	$(RUN) -m mypy

run-tests:
	$(PYTEST) -m "$(FIRST)"

test-all: test $(VENV)/.sweep-$(KEY)
	$(PYTEST) -m "$(SWEEPS)"
	ATEN_CPU_CAPABILITY=default $(PYTEST) -m "$(DECIDES)" $(DECIDING)

# In an environment that has the extras gpu and dev: nothing is installed here.
gpu-test:
	@test -n "$(PART)" -a -d "tests/gpu/$(PART)" || { echo "make gpu-test PART=engine, PART=block, PART=changes, PART=kernels or PART=ranks"; exit 1; }
	set -e; for file in $$(grep -l mark.alone tests/gpu/$(PART)/*.py); do $(PYTHON) -m pytest -m "gpu and alone" $$file; done
	$(PYTHON) -m pytest -m "gpu and not alone" -n $(GPU_WORKERS) tests/gpu/$(PART)

# build/ may hold modules that are gone.
wheel: $(VENV)/.test-$(KEY)
	rm -rf build dist
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	.ci/check-wheel dist/*.whl $(RUN)

docs: $(VENV)/.docs-$(KEY)
	$(RUN) -m zensical build --strict

format: $(VENV)/.test-$(KEY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; give it as PYTHON=..."; exit 1; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "cannot create $(VENV); on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@# Without a GPU a CPU wheel from pip's find-links, if there is one, comes before newer ones of an index.
	@command -v nvidia-smi >/dev/null || $(PIP) --no-index --no-deps torch 2>/dev/null || true

$(VENV)/.demo-$(KEY): | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once, one to two minutes) ..."
	@$(PIP) $(call cpu_index) -e .
	@touch $@

$(VENV)/.serve-$(KEY): | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once, one to two minutes) ..."
	@$(PIP) $(call cpu_index) -e '.[serve]'
	@touch $(VENV)/.demo-$(KEY) $@

$(VENV)/.test-$(KEY): | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once, one to two minutes) ..."
	@$(PIP) $(call cpu_index) -e '.[dev]'
	@touch $(VENV)/.demo-$(KEY) $@

# The older transformers, in which tests load exports, lies next to the packages.
$(VENV)/.sweep-$(KEY): | $(VENV)/.test-$(KEY)
	@$(PIP) $(call cpu_index) -e '.[sweep]'
	@$(PIP) --upgrade --target $(IDLM_TRANSFORMERS4) --no-deps 'transformers==4.57.*' 'huggingface_hub<1' 'tokenizers==0.22.*'
	@touch $@

$(VENV)/.docs-$(KEY): | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once, one to two minutes) ..."
	@$(PIP) $(call cpu_index) -e '.[docs]'
	@touch $(VENV)/.demo-$(KEY) $@

# Linux without a GPU: PyTorch's CPU wheels (200 MB instead of several GB) where their index can be reached.
define cpu_index
$$(if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && \
	$(RUN) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then echo "--extra-index-url $(CPU_INDEX)"; fi)
endef
