# Everything a fresh machine needs: `make demo` runs the main job on a real model, `make test` passes the tests.
# TORCH picks the PyTorch build, e.g. make demo TORCH="torch==2.13.0 --index-url <a wheel index of your choice>".
PYTHON   ?= python3
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
VENV     ?= .venv
BIN      := $(VENV)/bin
SOURCES  := pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# An editable install knows the modules that there were when it was made: one that came, went or moved makes it anew.
MODULES  := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(MODULES)

.PHONY: demo test check check-native bench clean

demo: $(INSTALLED)
	$(BIN)/anybit demo -o demo

test: $(INSTALLED)-dev
	$(BIN)/python -m pytest

check: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python bench/tables.py --check
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, with a build of their own.
check-native: $(INSTALLED)-dev
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --upgrade --target build/sanitized \
	  -C build-dir=build/sanitized-cmake -C cmake.define.ANYBIT_SANITIZE=ON .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 ANYBIT_BUILD=build/sanitized \
	  $(BIN)/python -m pytest tests/test_kernels_cpu.py tests/test_kernels_lookup.py tests/test_kernels_layer.py \
	  tests/test_activations.py tests/test_nested.py tests/test_kmeans.py tests/test_two_four_sixteen.py -k "not fork and not model and not command"

bench: $(INSTALLED)
	$(BIN)/anybit bench kernels
	$(BIN)/python bench/memory.py
	$(BIN)/anybit bench quantize

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $(TORCH)
	touch $@

# Editable: Python edits count at once; the native extension is rebuilt when its sources change.
$(INSTALLED): $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e .
	rm -f $(VENV)/.installed*
	touch $@

$(INSTALLED)-dev: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e ".[dev]"
	rm -f $(VENV)/.installed*
	touch $@ $(INSTALLED)

clean:
	rm -rf $(VENV) build demo
