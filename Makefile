# Two commands: `make demo` runs the main job, `make test` passes the tests. Each sets up its own environment.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Spinning OpenMP threads slow everything down as soon as a core is busy.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test slow lint models clean

demo: $(INSTALLED)
	$(BIN)/kvtailor demo --out out

test: $(INSTALLED) models
	$(BIN)/pytest

slow: $(INSTALLED) models
	$(BIN)/pytest -m slow

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

clean:
	rm -rf $(VENV) out build dist
