# Two commands: `make demo` runs the main job, `make test` passes the tests. Each sets up its own environment.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest

# Spinning OpenMP threads slow everything down as soon as a core is busy.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-oldest lint models clean

demo: $(INSTALLED)
	$(BIN)/kvtailor demo --out out

test: $(INSTALLED) models
	$(BIN)/pytest

# The contract with Transformers, on the oldest release that is served.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest tests/test_contract.py tests/test_full_retention.py tests/test_attach.py

lint: $(INSTALLED)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

models: $(INSTALLED)
	$(BIN)/python -m kvtailor.models.fetch

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) out build dist
