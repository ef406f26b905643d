# The commands a newcomer needs: `make demo`, `make test`, `make check`, `make docs`. Each makes the environment .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NATIVE := $(VENV)/.native
DOCS   := $(VENV)/.docs
JOBS   ?= 2

.PHONY: demo test test-all check results docs format dist clean

# The paper's experiments in small, and a page about them: three minutes on two cores. Stopped, it goes on.
demo: $(NATIVE)
	$(BIN)/avagrad demo $(ARGS)

# Every test process computes with one thread, so that processes do not fight over the cores.
test: $(NATIVE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-all: $(NATIVE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page and the figures of what was measured, from the records in results/ alone.
results: $(NATIVE)
	$(BIN)/python benchmarks/results.py

# The documentation site, in site/: open site/index.html. A broken link and a missing docstring are errors.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	$(BIN)/python .ci/check_site.py site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The source distribution and the wheel. The libraries must be in the wheel, and no OpenMP runtime: torch brings one.
dist: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	$(BIN)/python .ci/check_wheel.py dist/*.whl
	$(BIN)/python -m twine check --strict dist/*

# torch first and alone, at its pinned version: a package that asks for "torch" must find it there.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@ $(NATIVE)

$(DOCS): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

$(NATIVE): $(READY) setup.py src/avagrad/optim/backends/native.c
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/avagrad/optim/backends/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
