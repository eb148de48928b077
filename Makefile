# `make demo` and `make test` need Python 3.11 or newer and nothing else: the first run makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types imports unit sandbox docker bench clean

demo: $(STAMP)
	$(BIN)/agentgym demo

test: lint types imports unit sandbox

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy tests

imports: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest --durations=5

sandbox: $(STAMP)
	$(BIN)/pytest -m sandbox --durations=5 -rs

# a daemon that answers is used; else, as root with dockerd installed, one is started for the run
docker: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docker]'
	$(BIN)/pytest -m docker --durations=5 -rs

bench: $(STAMP)
	$(BIN)/agentgym bench fork

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# The pip line is the slow one, so only a change of pyproject.toml repeats it. A .venv whose pip does not
# answer was interrupted, or moved, or belongs to a Python that is gone, and is made afresh.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("make: $(PYTHON) is Python " + v + "; 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments (no ensurepip); on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
