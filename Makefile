# Two commands do everything: `make demo` and `make test`. They need bash, make, Python >= 3.11 and Java 17 or 21.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Much of a test on real parts is waiting: three processes, each with parts of its own, keep two cores busy.
SHARED := -n 3 --dist loadscope --no-loadscope-reorder

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: java $(VENV)/.ready ## the main job end to end on real parts
	@$(BIN)/oncebox demo

test: java $(VENV)/.ready ## all tests but the long ones, soak and bench
	@$(PYTEST) $(SHARED) -m "not long"

test-long: java $(VENV)/.ready ## all tests, the enumerations and copies in full
	@$(PYTEST) $(SHARED)

check: $(VENV)/.ready ## format, lint, types, import layers, generated code fresh
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/protos.py --check
	@$(BIN)/python scripts/diagram.py --check
	@$(BIN)/python scripts/reference.py --check

bench: java $(VENV)/.ready ## measure against the peers
	@$(BIN)/oncebox bench all --quick --markdown docs/bench.md --plot docs/bench.svg

format: $(VENV)/.ready ## mend format and simple lint
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: $(VENV)/.ready ## generate oncebox/v1 from protos/
	@$(BIN)/python scripts/protos.py

# The images get the same pins, but only what they need: deploy/<service>.lock, and build.lock to make the wheel.
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --no-header --quiet
lock: $(VENV)/.ready ## pin all requirements anew
	@$(COMPILE) --upgrade --all-extras --group dev pyproject.toml -o requirements.lock
	@$(COMPILE) --constraint requirements.lock --extra coordinator pyproject.toml -o deploy/coordinator.lock
	@$(COMPILE) --constraint requirements.lock --extra relay pyproject.toml -o deploy/relay.lock
	@$(COMPILE) --constraint requirements.lock --extra spark pyproject.toml -o deploy/spark.lock
	@$(COMPILE) --constraint requirements.lock - -o deploy/build.lock <<< $$'hatchling\nsetuptools'

# It asks a service on the network; a package that cannot be looked up is a failure, too. Not in the lock: a newer one
# knows more.
audit: $(VENV)/.ready ## look for known vulnerabilities in what is pinned
	@for lock in requirements.lock deploy/*.lock; do echo "$$lock"; $(BIN)/uvx pip-audit --strict --disable-pip --require-hashes -r "$$lock"; done

clean: ## remove all that make and the tests have made here
	@rm -rf $(VENV) .oncebox dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

java:
	@$(PYTHON) oncebox/local/java.py

# --no-deps: the lock is complete; the project itself is installed editable, without an index look-up.
$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "oncebox needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV) (first time: downloads about 600 MB, mostly Spark)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --require-hashes -r requirements.lock | { grep -v -E '^(Requirement already|  (Using cached|Downloading))' || true; }
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: help demo test test-long check bench format protos lock audit clean java
