# The three commands a newcomer needs: `make demo`, `make test`, `make check`. Each makes the environment .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2

.PHONY: demo test check results format clean

# The paper's experiments in small, and a page about them: three minutes on two cores. Stopped, it goes on.
demo: $(READY)
	$(BIN)/avagrad demo $(ARGS)

# Every test process computes with one thread, so that processes do not fight over the cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page and the figures of what was measured, from the records in results/ alone.
results: $(READY)
	$(BIN)/python benchmarks/results.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and alone, at its pinned version: a package that asks for "torch" must find it there.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
