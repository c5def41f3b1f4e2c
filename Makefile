# Needs Python 3.10 or newer and nothing else: every target makes the environment that it uses. `make` lists the targets.
PYTHON ?= python3

VENV   := .venv
LOWEST := .venv-lowest
SEED   := 0
COUNT  := 300
BIN    := $(VENV)/bin

VERSION   := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' lightning_ddp_ext/__init__.py)
TORCH     := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
LIGHTNING := $(shell sed -n 's/.*"lightning>=\([0-9.]*\)".*/\1/p' pyproject.toml)
INSTALLED := .installed-$(VERSION)
PIP       := -m pip --disable-pip-version-check --no-input install --quiet

# What a surrounding environment, job or launcher may have set, and would send Python or the ranks astray.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_CONSTRAINT
unexport RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
unexport $(filter DDPX_% SLURM_% OMPI_% PMI_% TORCHELASTIC_%,$(.VARIABLES))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo docs test fast gpu soak coverage lint types test-lowest bench clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target does; do \
	    printf '  make %-12s %s\n' "$$target" "$$does"; done

venv: $(VENV)/$(INSTALLED) ## Make .venv and install the package with everything for development

demo: venv ## Train on the UCI digits with two ranks, save and resume (under a minute once installed)
	$(BIN)/python examples/digits.py

docs: venv ## Build the documentation into site/ (to read it: python3 -m http.server -d site)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: lint types ## Lint, types, and all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu" --numprocesses 3 --dist worksteal --durations 10

fast: venv ## Tests without processes, and one run of each main promise (a minute)
	$(BIN)/python -m pytest -m "unit or lowest" --numprocesses 3 --dist worksteal --durations 10

gpu: venv ## What needs CUDA; says so where there is none
	$(BIN)/python -m pytest -m gpu

soak: venv ## 300 faults in real runs, one after another (half an hour); SEED= of the first one, COUNT=
	$(BIN)/python -m tests.faults --seed $(SEED) --count $(COUNT)

coverage: venv ## All tests, and which lines they reach: takes a quarter longer
	$(BIN)/python -m pytest --cov -m "not gpu" --numprocesses 3 --dist worksteal

lint: venv ## Style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## Types, strictly
	$(BIN)/mypy

test-lowest: $(LOWEST)/$(INSTALLED) ## A cheap subset of the tests on the lowest supported Lightning
	$(LOWEST)/bin/python -m pytest -m lowest

bench: venv ## Run the benchmarks and print their tables
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean: ## Remove what tests and builds leave behind; keeps the environments
	rm -rf build dist site htmlcov checkpoints lightning_logs .coverage .coverage.* \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightning_ddp_ext tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(VENV))
	$(VENV)/bin/python $(PIP) -c constraints.txt $(TORCH)
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[dev,examples]'
	@rm -f $(VENV)/.installed-* && touch $@

$(LOWEST)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(LOWEST))
	@{ grep -v lightning constraints.txt; printf '%s\n' lightning==$(LIGHTNING) pytorch-lightning==$(LIGHTNING); } \
	    > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt $(TORCH)
	$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt -e '.[test,examples]'
	@rm -f $(LOWEST)/.installed-* && touch $@

# An environment that is already there is used as it is; a half-made one is completed.
define make-environment
@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
@$(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(1)
endef
