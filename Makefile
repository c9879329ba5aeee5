# make perf    all set-up, then measures the engines of a suite (SUITE=quick; ARGS= goes to pytest)
# make test    all set-up, then the tests
# make lint    ruff and mypy
# make prove   the suite smoke over 20 seeds, and with slowdowns planted: a quarter of an hour
#              (ARGS=fake_pairs: the same of the reference gate; hf_pairs: with a real model)
# make kills   SIGKILL at random moments, and what it leaves (ARGS="fake 45")
# make bench-detectors  our gates and others' on simulated nights (docs/detectors.md; ARGS="--seconds 60")
# make bench-load  our load generator and others' against a server whose truth is known (docs/load.md;
#              ARGS="--install" gets the others)
# make bench-engines  what each rung of our own engine is worth, beside Hugging Face and vLLM
#              (docs/ladder.md; ARGS="--engines hf_naive,graphs,vllm --unverified" is the short way)
# make gpu-check  our engine on a bare GPU machine, by its own Python with torch and transformers:
#              eight minutes, nothing is installed (PYTHON=/path/to/python; ARGS="--device cpu" too)
# Set-up needs Python 3.11 or later (PYTHON=/path/to/python to choose one) and a package index.

.PHONY: perf test prove kills bench-detectors bench-load bench-engines gpu-check lint format setup setup-all tools python wheel wheel-check clean
.DEFAULT_GOAL := help

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && $$python -c 'import sys; print(sys.executable)' && break; done)
endif
ENVIRONMENT = "$(PYTHON)" engines/boot.py headway.environment
HF_PYTHON = "$$($(ENVIRONMENT) make hf)"
SUITE ?= quick
ARGS ?=

.PHONY: help
help:
	@sed -n '/^$$/q; s/^# //p' Makefile

## what people run

perf: setup
	.venv/bin/headway run $(SUITE) $(ARGS)

test: setup-all
	$(HF_PYTHON) engines/boot.py pytest tests/hf
	.venv/bin/pytest tests -m "not alone and not paced" -n auto
	.venv/bin/pytest tests -m paced -n 4
	.venv/bin/pytest tests -m alone

prove: setup
	.venv/bin/python tests/prove.py $(ARGS)

kills: setup
	.venv/bin/python tests/kills.py $(ARGS)

bench-load: setup
	.venv/bin/python bench/load $(ARGS)

bench-detectors: setup
	.venv/bin/python bench/detectors $(ARGS)

bench-engines: setup
	.venv/bin/python bench/engines $(ARGS)

gpu-check:
	@test -n "$(PYTHON)" || { echo "say PYTHON=/path/to/python: 3.11 or later, with torch" >&2; exit 1; }
	"$(PYTHON)" bench/gpu_check $(ARGS)

lint: tools
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: tools
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

wheel: tools
	@rm -rf build  # what an earlier build left there would be packed again
	.venv/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist .

wheel-check: tools
	PYTHON=.venv/bin/python tests/wheel_check.sh

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

## set-up; all do nothing, quickly, when nothing has changed. What this machine has no wheels for
## (vllm, outside Linux on x86-64) is left out, and said.

setup: python
	@$(ENVIRONMENT) setup hf

# What a suite's optional engines run in, the suite makes itself.
setup-all: python
	@$(ENVIRONMENT) setup hf vllm

tools: python
	@$(ENVIRONMENT) setup

python:
	@test -n "$(PYTHON)" || { \
		echo "Headway needs Python 3.11 or later, and python3 is not: install one, or say PYTHON=/path/to/python." >&2; \
		exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { \
		echo "$(PYTHON) is not Python 3.11 or later, which Headway needs: say PYTHON=/path/to/python." >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)." >&2; \
		exit 1; }
