# make sweep   run the sweep               make sweep ARGS="--seeds 1"
# make test    run the tests               make test ARGS="tests/test_data.py -k batch"
# make lint    ruff and mypy
# make check   lint, then test
#
# Each makes the virtual environment first when it is missing, and installs again only when
# pyproject.toml or constraints.txt changes.
#   PYTHON  the Python that makes the environment (3.11 or newer)
#   VENV    where the environment is
#   JOBS    how many processes run the tests

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
# One stamp for each set of packages; each set holds the ones before it.
RUN_STAMP := $(VENV)/.fp8lab-run
TEST_STAMP := $(VENV)/.fp8lab-test
DEV_STAMP := $(VENV)/.fp8lab-dev
PINS := pyproject.toml constraints.txt

comma := ,
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
USABLE := import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)

.PHONY: help sweep test lint check
# Two goals must not install into one environment at the same time.
.NOTPARALLEL:

help:
	@sed -n '/^# make/s/^# //p' Makefile

sweep: $(RUN_STAMP)
	$(BIN)/fp8lab sweep $(ARGS)

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

# The larger set first, so that one install does for both.
check: lint test

# $(call install,EXTRAS): an environment that lacks pip (its making was interrupted), or whose Python
# is too old, is made again; a whole one is kept. Only what a pyvenv.cfg marks is ever cleared.
define install
	@if ! '$(BIN)/python' -c 'import pip._internal.cli.main; $(USABLE)' >/dev/null 2>&1; then \
		'$(PYTHON)' -c '$(SUPPORTED)' 2>/dev/null || { \
			echo "fp8lab needs Python 3.11 or newer; $(PYTHON) is $$('$(PYTHON)' --version 2>&1 || :)." \
				"Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
		clear=; if [ -f '$(VENV)/pyvenv.cfg' ]; then clear=--clear; fi; \
		echo "$(PYTHON) -m venv $$clear $(VENV)"; \
		'$(PYTHON)' -m venv $$clear '$(VENV)'; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(1)]' -c constraints.txt
endef

$(RUN_STAMP): $(PINS)
	$(call install,kernels$(comma)experiments)
	@touch $(RUN_STAMP)

$(TEST_STAMP): $(PINS)
	$(call install,test)
	@touch $(RUN_STAMP) $(TEST_STAMP)

$(DEV_STAMP): $(PINS)
	$(call install,dev)
	@touch $(RUN_STAMP) $(TEST_STAMP) $(DEV_STAMP)
