# make demo: install, fetch a small model, answer several prompts at once.
# make test: install what tests need, run them.   make lint: style, types, import contract.
# make test-kernels: the kernels and the compiled step alone, without PyTorch and the like.
#
# PYTHON is the interpreter to build the virtual environment with, EXTRAS adds optional parts:
#     make demo PYTHON=python3.12 EXTRAS=cuda

PYTHON ?= python3
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
# A process per core, each with whole files: what a file has compiled, its tests share. In the order
# of their names, since the longest are in the middle.
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder
comma := ,
empty :=
extras = $(if $(strip $(1)),[$(subst $(empty) ,$(comma),$(strip $(1)))])
# One stamp per set of extras: nothing is installed again until pyproject.toml changes.
RUN_STAMP := $(VENV)/.installed$(subst $(empty) ,,$(patsubst %,-%,$(EXTRAS)))
TEST_STAMP := $(RUN_STAMP)-test
KERNEL_STAMP := $(RUN_STAMP)-test-kernels

# What depends on the JAX version: the kernels, and the step around them. What is plain XLA among
# the kernels' tests, and takes long, `make test` is enough for.
COMPILED_STEP := $(patsubst %,tests/engine/test_%.py,engine step sampler block_tables)
NOT_KERNELS := --ignore tests/kernels/test_attention.py

.PHONY: demo test test-kernels environment kernel-environment lint clean

demo: $(RUN_STAMP)
	@$(BIN)/pagedjax demo

test: $(TEST_STAMP)
	$(PYTEST) $(ARGS)

test-kernels: $(KERNEL_STAMP)
	$(PYTEST) tests/kernels tests/models $(COMPILED_STEP) $(NOT_KERNELS) -m "not slow" $(ARGS)

environment: $(TEST_STAMP)

kernel-environment: $(KERNEL_STAMP)

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; name one with: make PYTHON=...")'
	@echo "creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(call extras,$(EXTRAS))"
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing what the tests need (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(call extras,$(EXTRAS) test)"
	@touch $@

$(KERNEL_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing what the kernel tests need (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(call extras,$(EXTRAS) test-kernels)"
	@touch $@
