# Each goal sets up all it needs: a virtual environment, the frameworks, and the package, built from this tree.
#
#   make demo      replay the recorded rollout in examples/
#   make test      run the tests
#   make lint      check format, lint and types
#   make format    rewrite the sources in the format that lint checks
#   make clean     remove the environment and everything built
#
# Variables: make test PYTHON=python3.12 JAX=0.11.0 TORCH= PYTEST_ARGS='-k replay'
PYTHON ?= python3
VENV ?= .venv
JAX ?=
TORCH ?= torch==2.13.0
CUDA ?= AUTO
PYTEST_ARGS ?=

# PYTHON starts the environment, JAX is a version (default: the newest that fits), TORCH a requirement (empty: none, and
# its tests are skipped), CUDA is JAX_TOPP_CUDA of CMakeLists.txt.
FRAMEWORKS = $(if $(JAX),'jax==$(JAX)',jax) $(if $(TORCH),'$(TORCH)')
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
CPP = $(wildcard csrc/*.h csrc/*.cc csrc/*.cu csrc/*.cuh)

.DEFAULT_GOAL := help
.PHONY: help environment install demo test lint format clean

help:
	@sed -n 's/^#   make/make/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is not Python 3.11 or later: choose another, as in 'make test PYTHON=python3.12'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'

# One pip call for the frameworks and the build tools, so that it settles all versions together.
environment: $(BIN)/python
	$(PIP) install --quiet $(FRAMEWORKS) --group build

# Editable: Python files run from this tree, and only what changed is compiled again. Without isolation, the build takes
# the FFI headers of the very jaxlib that will load it.
install: environment
	$(PIP) install --quiet --no-build-isolation -Cbuild-dir=$(VENV)/build \
	  -Ccmake.define.JAX_TOPP_CUDA=$(CUDA) --editable '.$(EXTRAS)'

demo: install
	$(BIN)/jax-topp replay examples/smollm2_vllm_small.npz

test: EXTRAS = [test]
test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: environment
	$(PIP) install --quiet --group lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

format: $(BIN)/python
	$(PIP) install --quiet --group lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache jax_topp/_core*
