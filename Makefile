# The whole developer interface. `make` alone lists the targets.
#
#   PYTHON  interpreter that .venv is made from, 3.11 or newer
#   TORCH   what pip installs when PYTHON has no torch >= 2.11 of its own
#   PROMPT  what `make demo` asks, instead of a few questions of its own

TORCH ?= torch==2.13.0
export PROMPT

VENV := .venv
BIN := $(VENV)/bin
# Made in one step after the last install command: it exists only for a complete environment.
STAMP := $(VENV)/.complete
UNFINISHED := $(VENV)/.unfinished
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# The interpreter that .venv was made from stays in use until another one is named.
MADE_FROM := $(shell cat $(VENV)/.python 2>/dev/null)
ifeq ($(origin PYTHON),undefined)
PYTHON := $(or $(MADE_FROM),python3)
else ifneq ($(PYTHON),$(MADE_FROM))
.PHONY: $(STAMP)
endif

HAS_TORCH := import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))
# The packages of a virtual environment are not visible from a second one made with its interpreter.
SHARES_TORCH := import sys; sys.prefix == sys.base_prefix or sys.exit(1); $(HAS_TORCH)

.PHONY: help demo test test-slow check gpu memcheck bench

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name what; \
	  do printf '  make %-10s %s\n' "$$name" "$$what"; done

demo: $(STAMP) ## set up, then ask the shipped model a few questions, or PROMPT
	@if [ -n "$$PROMPT" ]; then set -- --message "$$PROMPT"; else \
	  set -- --message "Who are you?" --message "What is the capital of France?" \
	    --message "What is 347 + 58?" --message "Tell me a story about a fox."; fi; \
	$(BIN)/deepinfer chat models/demo --temperature 0 --max-tokens 200 "$$@"

test: $(STAMP) ## set up, then run the tests, a process for each core
	$(BIN)/python -m pytest -n auto --maxprocesses 8

test-slow: $(STAMP) ## set up, then run the tests marked slow, a process for each core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n auto

check: $(STAMP) ## set up, then check style, types, layering, docs and sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/meta

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'DeepInfer needs Python 3.11 or newer, and "$(PYTHON)" is not: install one and name it, as in "make PYTHON=python3.12 $(or $(MAKECMDGOALS),test)".' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo '"$(PYTHON)" cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv).' >&2; exit 1; }
	@# What an interrupted installation or another interpreter left is not built upon.
	@if [ -e $(UNFINISHED) ] || [ '$(PYTHON)' != '$(or $(MADE_FROM),$(PYTHON))' ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(UNFINISHED) && rm -f $(STAMP) && echo '$(PYTHON)' > $(VENV)/.python
	@if [ -e $(BIN)/python ]; then :; \
	elif $(PYTHON) -c '$(SHARES_TORCH)' 2>/dev/null; then \
	  echo 'making $(VENV), with the torch of $(PYTHON)'; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else echo 'making $(VENV)'; $(PYTHON) -m venv $(VENV); fi
	@# torch first and alone: a range would let pip choose another build of it.
	@$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || \
	  { echo 'installing $(TORCH)'; $(PIP) install $(TORCH); }
	@echo 'installing deepinfer'
	@$(PIP) install -c constraints.txt -e '.[test]'
	@mv $(UNFINISHED) $(STAMP)

gpu: ## run the tests that need a CUDA GPU, with this machine's Python as it is
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest tests/gpu tests/ops -p no:cacheprovider -p no:benchmark -n 12

memcheck: ## run small cases of attention, stores and matrices under compute-sanitizer, on a GPU
	compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest tests/ops/test_specs.py \
	  -p no:cacheprovider -p no:benchmark -q -k "attention or store or linear or expert"

bench: ## measure every operator on this machine's GPU, with its Python as it is
	$(PYTHON) benchmarks/ops.py --out benchmarks/results/ops.jsonl
