# `make` lists what there is to do. Every target sets itself up first, in .venv; CI calls only these.

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
UV ?= $(shell command -v uv)
OPS ?= 100000
SEED ?= 1
KILLS ?= 200
JOBS ?= auto

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
PEERS := .venv-peers/.ready

# uv does not read pip's settings: where pip is told where to look, pip installs.
PIP_SETTINGS := $(PIP_FIND_LINKS)$(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL)$(PIP_NO_INDEX)$(PIP_CONFIG_FILE)
ifeq ($(if $(PIP_SETTINGS),,$(UV)),)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
else
INSTALL := $(UV) pip install --quiet --python $(BIN)/python
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo example test test-fast lint types format sim torture-spark bench-engine bench-server bench-spark \
	bench-jobs bench-stores reference requirements clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## see a queue at work, in a minute
	$(BIN)/python -m millpond.demo

example: $(READY) ## events to Spark to Parquet and a second queue, dead letters, redrive and a report, in two minutes
	$(BIN)/python examples/orders.py

test: lint types ## everything that CI checks: lint, types, the simulators in their CI size, all tests
	$(BIN)/python -m tests.sim.run --seed 1 --seeds 1000 --pairs-min 100
	$(BIN)/python -m tests.tasks.pool_world 1 1000
	$(BIN)/python -m pytest -n $(JOBS) --ignore tests/spark
	$(BIN)/python -m pytest tests/spark

test-fast: $(READY) ## the tests that are not slow, in under 90 seconds
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy, strict
	$(BIN)/mypy

format: $(READY) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

sim: $(READY) ## the simulator: make sim OPS=100000 SEED=1
	$(BIN)/python -m tests.sim.run --ops $(OPS) --seed $(SEED)

bench-engine: $(READY) ## measure the engine on this machine
	$(BIN)/python -m benchmarks.run

bench-server: $(READY) ## measure the server on this machine, beside bare servers and Go's
	$(BIN)/python -m benchmarks.server

bench-spark: $(READY) ## measure source, sink, exporter and the jobs on the history
	$(BIN)/python -m benchmarks.spark

bench-jobs: $(READY) $(PEERS) ## measure tasks and commands beside Celery, RQ, Dramatiq, Huey, Procrastinate and xargs
	$(BIN)/python -m benchmarks.jobs

bench-stores: $(READY) $(PEERS) ## measure PostgreSQL beside SKIP LOCKED and Procrastinate, and rebalances under load; 30 minutes
	$(BIN)/python -m benchmarks.stores

torture-spark: $(READY) ## kill driver, executors and server 200 times: make torture-spark KILLS=200 SEED=1
	$(BIN)/python -m tests.spark.torture.run --kills $(KILLS) --seed $(SEED)

reference: $(READY) ## write docs/reference/cli.md and tasks.md from the code
	$(BIN)/python docs/generate.py

requirements: ## pin the dependencies of pyproject.toml again; UPGRADE=--upgrade for newer ones (needs uv)
	$(if $(UV),,$(error make requirements needs uv; install it or name it with UV=/path/to/uv))
	$(COMPILE) --group build --output-file requirements/build.txt
	$(COMPILE) pyproject.toml --output-file requirements/core.txt
	$(COMPILE) pyproject.toml --extra dev --constraint requirements/build.txt --constraint requirements/core.txt \
		--output-file requirements/dev.txt
	$(COMPILE) --group peers --output-file requirements/peers.txt

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make requirements" $(UPGRADE)

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) .venv-peers build dist .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# What millpond itself needs and what builds it, hash-checked, then millpond, editable. Needs the network only for what is
# not there yet. The files of requirements/ name all there is: with no dependencies to look for, pip cannot find that a
# newer one has come out since.
$(CORE): requirements/build.txt requirements/core.txt pyproject.toml
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "millpond needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-deps --require-hashes -r requirements/build.txt -r requirements/core.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# All the rest, Spark with it. That is half a gigabyte of source that is packed by the setuptools of build.txt: an isolated
# build would fetch one that no hash vouches for.
$(READY): $(CORE) requirements/dev.txt
	$(INSTALL) --no-deps --no-build-isolation --require-hashes -r requirements/dev.txt
	@touch $@

# Benchmarks' peers: what they need is not what millpond needs.
$(PEERS): requirements/peers.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r requirements/peers.txt
	@touch $@
