# Needs Python 3.11 or newer and nothing else: every target makes the environment that it uses. `make` lists the targets.
PYTHON ?= python3

PINNED_TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
# `make test TORCH=torch==2.15.0` uses another one, in another environment.
TORCH  := $(PINNED_TORCH)
VENV   := .venv$(if $(filter-out $(PINNED_TORCH),$(TORCH)),-$(subst ==,-,$(TORCH)))
LOWEST := .venv-lowest
NEXT   := .venv-next
WHEEL  := .venv-wheel
SEED   := 0
COUNT  := 300
BENCHMARKS := launching rendezvous resume save samplers loaders uneven batchnorm supervision early_end collectives
BIN    := $(VENV)/bin

# `dependencies` of pyproject.toml and what follows down to `debug`, each at its lower bound.
LOWEST_OF := sed -n '/^dependencies/,/^debug/p' pyproject.toml | grep -o '[A-Za-z_]*>=[0-9.]*' | sed 's/>=/==/'
LOWEST_TORCH := $(shell $(LOWEST_OF) | grep '^torch==')
LIGHTNING_NEXT := git+https://github.com/Lightning-AI/pytorch-lightning.git@master
INSTALLED := .installed
FIELD     := .field
PROGRAMS  := .venv-programs
# More than the cores of a small machine: tests wait for processes, and for limits to pass.
PARALLEL  := --numprocesses 3 --dist worksteal
PIP       := -m pip --disable-pip-version-check --no-input install --quiet

# What a surrounding environment, job or launcher may have set, and would send Python or the ranks astray.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_CONSTRAINT
unexport RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
unexport $(filter-out DDPX_TESTS_% DDPX_GPU_TESTS_%,$(filter DDPX_% SLURM_% OMPI_% PMI_% TORCHELASTIC_%,$(.VARIABLES)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo docs test fast nightly slurm field programs gpu soak coverage lint types api dist test-wheel test-lowest test-next bench \
    bench-quick clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target does; do \
	    printf '  make %-12s %s\n' "$$target" "$$does"; done

venv: $(VENV)/$(INSTALLED) ## Make .venv and install the package with everything for development

demo: venv ## Train on the UCI digits with two ranks, save and resume (under a minute once installed)
	$(BIN)/python examples/digits.py

docs: venv ## Build the documentation into site/ (to read it: python3 -m http.server -d site)
	$(BIN)/python -m sphinx -c docs -W --keep-going -q -E -d build/doctrees . site
	cp site/README.html site/index.html

test: venv ## Lint, types, and the tests that need no GPU; types are checked meanwhile, and printed at the end
	@checked=$$(mktemp); $(MAKE) --no-print-directory --keep-going lint types > "$$checked" 2>&1 & checks=$$!; \
	    $(BIN)/python -m pytest -m "not gpu and not nightly and not field and not programs" $(PARALLEL) --durations 10; tests=$$?; \
	    wait $$checks; failed=$$?; cat "$$checked"; rm "$$checked"; exit $$((tests || failed))

nightly: venv ## The long tests that `make test` leaves out, those of `make gpu` on CPU stand-ins, 60 faults, `make field`, and `make programs`; SEED= of the first fault
	$(BIN)/python -m pytest -m "nightly and not field" $(PARALLEL) --durations 0
	DDPX_GPU_TESTS_ON=cpu $(BIN)/python -m pytest tests/gpu $(PARALLEL)
	$(MAKE) soak COUNT=60
	$(MAKE) field
	$(MAKE) programs

slurm: venv ## The short jobs on a real SLURM of two nodes, which it starts itself, as root (three minutes)
	@echo "Debian: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
	$(BIN)/python -m pytest tests/field/test_slurm.py -m "field and not nightly" $(PARALLEL) --durations 10

field: $(VENV)/$(FIELD) ## All jobs on a real SLURM, Open MPI, MPICH, two agents of torchrun, and an S3 server, as root (20 minutes)
	@echo "Debian: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin mpich"
	$(BIN)/python -m pytest -m field $(PARALLEL) --durations 10

programs: $(PROGRAMS)/$(INSTALLED) ## Seven programs of other people with ddp and with ddp_ext, and the recipes of docs/ (10 minutes, 3 GB)
	$(PROGRAMS)/bin/python -m pytest tests/programs $(PARALLEL) --durations 10
	$(PROGRAMS)/bin/python -m pytest tests/test_documented_code.py $(PARALLEL)

fast: venv ## Tests without processes, and one run of each main promise (a minute)
	$(BIN)/python -m pytest -m "unit or lowest" $(PARALLEL) --durations 10

gpu: venv ## Tests that need CUDA (10 minutes), and the benchmarks of a GPU
	$(BIN)/python -m pytest tests/gpu -v --durations 10
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    $(BIN)/python benchmarks/batchnorm.py layers collectives; fi

soak: venv ## 300 faults in real runs, one after another, and as many killed saves and ranks (an hour); SEED= of the first one, COUNT=
	SOAK_SEED=$(SEED) SOAK_COUNT=$(COUNT) $(BIN)/python -m pytest tests/faults tests/integration/test_failed_saves.py tests/integration/test_kill_chains.py -k 'survived or killed_save' --verbose

coverage: venv ## All tests, with line coverage
	$(BIN)/python -m pytest --cov -m "not gpu and not field and not programs" $(PARALLEL)

lint: venv ## Style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## Types, strictly
	$(BIN)/mypy

api: venv ## Record the public API in tests/public-api.txt, after an intended change
	$(BIN)/python -m tests.test_public_api

dist: venv ## Build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# The tests are those of the sdist, without its package, so that it is the wheel that they import.
test-wheel: dist $(WHEEL)/$(INSTALLED) ## The fast tests on the wheel, installed into a new environment
	$(WHEEL)/bin/python $(PIP) --no-deps --force-reinstall dist/*.whl
	rm -rf $(WHEEL)/tests && mkdir $(WHEEL)/tests
	tar -xzf dist/*.tar.gz -C $(WHEEL)/tests --strip-components 1 --exclude 'lightning_ddp_ext-*/lightning_ddp_ext'
	cd $(WHEEL)/tests && ../bin/python -m pytest -m "unit or lowest" $(PARALLEL)

test-lowest: $(LOWEST)/$(INSTALLED) ## A cheap subset of the tests on the lowest supported versions (see compatibility.md)
	$(LOWEST)/bin/python -m pytest -m lowest $(PARALLEL)

test-next: $(NEXT)/$(INSTALLED) ## The same subset on Lightning's main branch (LIGHTNING_NEXT= another requirement)
	$(NEXT)/bin/python $(PIP) -c $(NEXT)/constraints.txt --upgrade '$(LIGHTNING_NEXT)'
	$(NEXT)/bin/python -m pytest -m lowest $(PARALLEL)

bench: venv ## Measure all figures of benchmarks/README.md, and renew its tables (40 minutes, on an otherwise idle machine)
	@failed=; for script in $(BENCHMARKS); do echo "== $$script"; \
	    $(BIN)/python benchmarks/$$script.py --json benchmarks/results/$$script.json || failed="$$failed $$script"; done; \
	    $(BIN)/python benchmarks/tables.py && $(BIN)/python docs/charts.py || exit 1; \
	    if [ "$$failed" ]; then echo "failed, and their figures are those of an earlier run:$$failed"; exit 1; fi

bench-quick: venv ## Run each benchmark once, as short as possible: shows that it works, measures nothing
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python benchmarks/$$script.py --quick; done

clean: ## Remove what tests and builds leave behind; keeps the environments
	rm -rf build dist site htmlcov checkpoints lightning_logs .coverage .coverage.* \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightning_ddp_ext tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(VENV))
	@sed 's/^torch==.*/$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt $(TORCH)
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt -e '.[dev,examples]'
	@touch $@

$(VENV)/$(FIELD): $(VENV)/$(INSTALLED)
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt -e '.[field]'
	@touch $@

$(PROGRAMS)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(PROGRAMS))
	$(PROGRAMS)/bin/python $(PIP) -c constraints.txt $(TORCH)
	$(PROGRAMS)/bin/python $(PIP) -c constraints.txt -e '.[programs]'
	@touch $@

$(WHEEL)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(WHEEL))
	$(WHEEL)/bin/python $(PIP) -c constraints.txt $(TORCH)
	$(WHEEL)/bin/python $(PIP) -c constraints.txt '.[test,docs,examples]'
	@touch $@

$(LOWEST)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(LOWEST))
	@{ grep ^pytest constraints.txt; $(LOWEST_OF); $(LOWEST_OF) | sed -n 's/^lightning/pytorch-&/p'; } > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt $(LOWEST_TORCH)
	$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt -e '.[test,examples]'
	@touch $@

$(NEXT)/$(INSTALLED): pyproject.toml constraints.txt
	$(call make-environment,$(NEXT))
	@grep -v lightning constraints.txt > $(NEXT)/constraints.txt
	$(NEXT)/bin/python $(PIP) -c $(NEXT)/constraints.txt $(TORCH)
	$(NEXT)/bin/python $(PIP) -c $(NEXT)/constraints.txt -e '.[test,examples]'
	@touch $@

# An environment that is already there is used as it is; a half-made one is completed.
define make-environment
@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version if sys.version_info < (3, 11) else 0)'
@$(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(1)
endef
