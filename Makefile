# PYTHON makes the environment (3.11 or newer); ARGS goes to the command that a target runs.
PYTHON ?= python3
ARGS ?=
# Test processes of one thread each, which together are twice as fast as one process of as many threads.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS ?= $(if $(filter 1 2 3,$(CORES)),$(CORES),4)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: help app test test-all lint types quick every format screenshots clean

help:
	@echo "make app      install what the lab needs into .venv (once) and start it in the browser"
	@echo "make test     the same for the tests: ruff, mypy, pytest (ARGS='-k lens' picks some)"
	@echo "make test-all the same with the slow ones too: the browser, crowds, kills, Dask, the wheel"
	@echo "make format   let ruff tidy the code"
	@echo "make screenshots  take the pictures of the README anew, from the app itself"
	@echo "make clean    remove .venv, caches and build folders"
	@echo "PYTHON=python3.12 names another interpreter, ARGS='--port 8600' adds options"

app: .venv/installed
	@$(BIN)/engram-lab app $(ARGS)

# Once the text is clean, the types are checked beside the tests.
test: lint
	@$(MAKE) --no-print-directory -j 2 types quick

test-all: lint
	@$(MAKE) --no-print-directory -j 2 types every

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy

# Each process gets its part of the files in order; whoever is done takes from the others. With the browser a process
# more than there are cores: each waits for its pages for a quarter of the time.
every: WORKERS := $(shell echo $$(($(WORKERS) + 1)))
quick: SOME := -m 'not slow and not browser'
quick every: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(SOME) $(ARGS)

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: no other package can then pull in another release of it.
# setuptools is pinned like the rest, so the project is built with it and not in an isolated environment.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Engram Lab needs Python 3.11 or newer, which '$(PYTHON)' is not; name another one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --no-build-isolation --editable '.[dev]'
	@mkdir -p .venv/typed/engram_lab
	@for part in models probes lab pages; do ln -sfn ../../../$$part .venv/typed/engram_lab/$$part; done
	@touch $@

# The pictures of the README, from the real app; needs a Chromium.
screenshots: .venv/installed-dev
	PYTHONPATH=. $(BIN)/python assets/screenshots/make.py $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
