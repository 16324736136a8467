# Everything a fresh machine needs: `make demo` runs the main job on a real model, `make test` passes the tests.
# TORCH picks the PyTorch build, e.g. make demo TORCH="torch==2.13.0 --index-url <a wheel index of your choice>".
PYTHON   ?= python3
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
VENV     ?= .venv
BIN      := $(VENV)/bin
# Modules are compiled when they are first imported: pip would compile all of them, for 90 s on one core.
INSTALL  := $(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS)
unexport PYTHONDONTWRITEBYTECODE
SOURCES  := pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)
# MB of free disk that setting up takes, and that pip takes in TMPDIR meanwhile; PyTorch for Linux comes with CUDA.
ifneq (,$(findstring cpu,$(TORCH))$(filter Darwin,$(shell uname)))
DISK_MB  ?= $(if $(filter test% check%,$(MAKECMDGOALS)),4000,2000)
TMP_MB   ?= 500
else
DISK_MB  ?= 10000
TMP_MB   ?= 3000
endif
# An editable install knows the modules that there were when it was made: one that came, went or moved makes it anew.
MODULES  := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(MODULES)

PARALLEL := -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-fast check check-native check-threads fuzz bench clean

demo: $(INSTALLED)
	$(BIN)/anybit demo -o demo

# Several processes where there are several cores; what measures threads, memory or time runs afterwards, alone.
test: $(INSTALLED)-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not alone"
	$(BIN)/python -m pytest -m alone

test-fast: $(INSTALLED)-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu and not e2e and not alone"

check: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python bench/tables.py --check
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.h csrc/*/*.cpp

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, with a build of their own.
check-native: $(INSTALLED)-dev
	$(INSTALL) --no-deps --upgrade --target build/sanitized \
	  -C build-dir=build/sanitized-cmake -C cmake.define.ANYBIT_SANITIZE=address,undefined .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 ANYBIT_BUILD=build/sanitized \
	  $(BIN)/python -m pytest -m native tests/kernels tests/engine tests/formats tests/methods tests/bench tests/artifact -k "not fork and not model and not command"

# The pool's tests under ThreadSanitizer, with a build of their own. What follows a fork is not for it.
check-threads: $(INSTALLED)-dev
	$(INSTALL) --no-deps --upgrade --target build/threads \
	  -C build-dir=build/threads-cmake -C cmake.define.ANYBIT_SANITIZE=thread .
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1 \
	  ANYBIT_BUILD=build/threads $(BIN)/python -m pytest tests/kernels/test_threads.py tests/engine/test_decoder.py \
	  -k "not fork and not idle"

# N mutations of everything that comes from outside, with new seeds; a failing case prints the command that repeats it.
N ?= 1000
fuzz: $(INSTALLED)-dev
	$(BIN)/python -m tests.fuzz --cases $(N)

bench: $(INSTALLED)
	$(BIN)/anybit bench kernels
	$(BIN)/python bench/memory.py
	$(BIN)/anybit bench quantize

$(VENV)/.torch:
	@sh .ci/preflight $(PYTHON) $(VENV) $(DISK_MB) $(TMP_MB)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	touch $@

# Editable: Python edits count at once; the native extension is rebuilt when its sources change.
$(INSTALLED): $(VENV)/.torch $(SOURCES)
	@sh .ci/preflight $(BIN)/python $(VENV) 500 500
	$(INSTALL) -e ".[demo]"
	rm -f $(VENV)/.installed*
	touch $@

$(INSTALLED)-dev: $(VENV)/.torch $(SOURCES)
	@sh .ci/preflight $(BIN)/python $(VENV) 2000 500
	$(INSTALL) -e ".[dev]"
	rm -f $(VENV)/.installed*
	touch $@ $(INSTALLED)

clean:
	rm -rf $(VENV) build demo
