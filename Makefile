# Two commands on a fresh machine: `make train` and `make test`. Both make .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: help train test test-all run-test run-test-all test-share test-machines kernels drills check install dist docs bench gpu-check clean

help:
	@echo "make train     install into .venv and train a small model on Python's own standard library: 4 minutes"
	@echo "make test      format check, lint, types and the fast tests"
	@echo "make test-all  the slow tests too"
	@echo "make test-share  an eighth of the slow tests, and those of touched rooms, for 12 minutes"
	@echo "make test-machines  the fast tests as on other machines: processors, threads, orders, load"
	@echo "make drills    kills, damaged files, full disks and lost ranks; prints what was tried and what was lost"
	@echo "make bench     the benchmarks; JSON in benchmarks/results"
	@echo "make gpu-check  on a machine with a GPU: its tests and benchmarks, half an hour; JSON in benchmarks/results/gpu"
	@echo "make dist      the wheel and the source in dist/, tried in an empty environment"
	@echo "make docs      the pages of docs/ as a site in build/site"
	@echo "make clean     remove .venv and caches (runs/ stays)"

train: $(VENV)/.installed
	$(BIN)/multipack train config=src/multipack/cli/recipes/first.yaml $(ARGS)

# Tests start many processes. Where this variable is set, as in many images, each would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
NOT_HERE := not cuda and not drill

# Tests wait for each other's processes, so that lint and types beside them take little more time.
test test-all: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory --jobs=2 check run-$@

run-test: kernels
	$(PYTEST) -m "not slow and $(NOT_HERE)"

run-test-all: kernels
	$(PYTEST) -m "$(NOT_HERE)"

# Once, for all processes of tests: numba keeps them on disk.
kernels: $(VENV)/.installed-dev
	$(BIN)/python tests/compile_kernels.py

# One test at a time, in the order that the plugin gives them.
test-share: kernels
	PYTHONPATH=tests $(BIN)/python -m pytest -p slow_share --numprocesses $(JOBS) --dist load --maxschedchunk 1 \
		-m "slow and $(NOT_HERE)"

test-machines: kernels
	tests/machines.sh $(ARGS)

drills: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m drill tests/drills

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel must plan where nothing but its own dependencies is installed.
dist:
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/build && $(PYTHON) -m venv build/dist/empty
	build/dist/build/bin/python -m pip install --quiet --disable-pip-version-check build
	build/dist/build/bin/python -m build --outdir dist .
	build/dist/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/dist && empty/bin/python -c 'import numpy; numpy.save("lengths.npy", numpy.arange(1, 2000))' \
		&& empty/bin/multipack plan lengths.npy plan.capacity=4096

bench: $(VENV)/.installed-dev
	for script in attention draws precision padding overhead planning prepare integrations parallel; do $(BIN)/python benchmarks/$$script.py || exit 1; done

# Installs nothing: without .venv it runs on $(PYTHON), which must have torch and multipack's other dependencies.
gpu-check:
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_check.py $(ARGS)

install: $(VENV)/.installed-dev

# The stamps hold what was installed, so that a changed pyproject.toml installs anew. Python compiles modules when they
# are first imported: for all of them pip would take a minute.
define installed
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "multipack needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]'
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call installed,train)
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(call installed,dev)
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
