# Needs python3 (3.11 or newer) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
# The lowest versions in pyproject.toml, and the SQLAlchemy of their time: MLflow before 3.9 fails with 2.1.
OLDEST_SET := torch==2.9.0 torchvision==0.24.0 mlflow==3.2.0 optuna==4.3.0 sqlalchemy==2.0.44
NEWEST := .venv-newest
AUDIT := .venv-audit
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# A test that waits for ever in Python fails, and says where: the longest takes two minutes on a slow machine.
BOUND := --timeout 600

# A .venv without pip, as Debian makes it where python3-venv is missing, is not kept for the next try.
.DELETE_ON_ERROR:

.PHONY: search test test-slow test-all test-oldest test-newest test-nightly fuzz audit lint format gpu benchmark finders published docs docs-all site serve mutants faults clean

search: $(VENV)/installed  ## the digits example: max batches and trainings within 64 MiB of main memory; a minute
	$(BIN)/amp-track search experiments/digits.py --device cpu --memory-budget 64MiB --time-limit 90s

# These tests expect a CPU, also on a machine with a GPU, whose tests `make gpu` runs.
test test-slow test-oldest test-newest test-nightly: export CUDA_VISIBLE_DEVICES :=

test: $(VENV)/installed-dev  ## the quick tests, of every module: three to four minutes on two cores
	$(PYTEST) $(BOUND) $(ARGS) -m "not slow and not nightly"

test-slow: $(VENV)/installed-dev  ## what takes more than two seconds and must pass before a change lands: nine minutes on two cores
	$(PYTEST) $(BOUND) $(ARGS) -m slow

test-all: test test-slow  ## the quick and the slow tests: twelve minutes on two cores

test-oldest: $(OLDEST)/installed  ## the quick tests with the oldest supported torch, MLflow and Optuna; five minutes
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(BOUND) $(ARGS) -m "not slow and not nightly"

test-newest: $(NEWEST)/bin/python  ## the quick tests with the newest release of everything that pyproject.toml allows; five minutes
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal $(BOUND) $(ARGS) -m "not slow and not nightly"

test-nightly: $(VENV)/installed-dev test-oldest test-newest  ## all other tests, every property with 100 new examples, and the quick tests with the oldest and the newest libraries: an hour on two cores
	HYPOTHESIS_PROFILE=thorough $(PYTEST) $(BOUND) $(ARGS) -m "(nightly and not slow) or property"

fuzz: $(VENV)/installed-dev  ## 10,000 cases of bad input, drawn anew: an hour on two cores
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) tests/fuzz

audit: $(VENV)/installed  ## every installed package against the public lists of known faults; needs a network that reaches them
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(AUDIT)/bin/pip-audit --strict --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

mutants: $(VENV)/installed-dev  ## every small change of the pure modules that their tests do not notice; a quarter of an hour
	$(BIN)/python tests/tools/mutants.py

lint: $(VENV)/installed-dev  ## ruff (check and format), mypy, and the rules on imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu:  ## on a machine with a GPU, with the Python that is there, installing nothing: tests and benchmarks, in stages; docs/gpu.md
	$(PYTHON) -m benchmarks.gpu $(ARGS)

benchmark: $(VENV)/installed-peers  ## what tracking, a server, a fresh process and a start cost, and loading, into benchmarks/results/
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.watching
	$(BIN)/python -m benchmarks.trials
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.server
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.input_pipeline

published: $(VENV)/installed  ## the five published experiments: claimed and measured, into benchmarks/results/
	$(BIN)/python -m benchmarks.published $(ARGS)

finders: $(VENV)/installed-peers  ## finders of the largest batch against each other, into benchmarks/results/
	$(BIN)/python -m benchmarks.finders $(ARGS)

faults: $(VENV)/installed  ## everything goes wrong that can, 20 times in real processes, into benchmarks/results/: nothing is lost; an hour
	$(BIN)/python -m benchmarks.faults $(ARGS)

docs: $(VENV)/installed-dev  ## the generated parts of README.md and docs/, from the code and from the records of examples
	$(BIN)/python docs/generate.py --run none

docs-all: $(VENV)/installed-dev  ## the same, after running every example anew: minutes, on a machine that does nothing else
	$(BIN)/python docs/generate.py --all

site: $(VENV)/installed-dev  ## README.md and docs/ as a site in build/site; half a minute, and any warning is an error
	$(BIN)/python docs/site_pages.py build

serve: $(VENV)/installed-dev  ## the same on http://127.0.0.1:8000, following changes of docs/
	$(BIN)/python docs/site_pages.py serve

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"amp_track needs Python 3.11 or newer, this is {sys.version}")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,dashboard]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-peers: pyproject.toml $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,peers]'
	@touch $@ $(VENV)/installed $(VENV)/installed-dev

$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST_SET) --editable '.[dev]'
	@touch $@

$(NEWEST)/bin/python:
	$(PYTHON) -m venv $(NEWEST)

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(AUDIT)
