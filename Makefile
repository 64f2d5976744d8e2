# Every target sets up what it needs. PYTHON=... chooses the interpreter (3.11 or newer); if it has a torch from 2.11 to 2.15, that
# torch is used. ARGS=... is handed on to the command: make demo ARGS="--disk-path /tmp/pages". WORKERS=... is the number of
# processes that run tests.

VENV := .venv
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
MADE_FROM := $(shell cat $(VENV)/.made-from 2>/dev/null)
PYTHON ?= $(or $(MADE_FROM),python3)
BENCH ?= small
WORKERS ?= 2
TYPECHECK := build/typecheck
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hicache/mypy

# Images often switch byte code off; then every worker, fork server and program compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-busy test-long test-servers test-all check static plain budget bench docs tables clean

demo: $(DEMO)
	$(VENV)/bin/hicache demo $(ARGS)

serve: $(DEMO)
	$(VENV)/bin/hicache serve $(ARGS)

test: $(STAMP)
	$(PY) -m pytest -m "not long and not remote" --workers $(WORKERS) $(ARGS)

# The same files over and over beside processes that burn every core: make test-busy FILES="tests/stores".
test-busy: $(STAMP)
	ARGS="$(ARGS)" .ci/busy $(PY) $(FILES)

test-long: $(STAMP)
	HICACHE_TEST_PROFILE=thorough $(PY) -m pytest -m "long and not remote" --workers $(WORKERS) $(ARGS)

# Stores on other machines against their servers on this one, and the plug-ins against the code of theirs: SERVERS="remote vllm"
# chooses, MARKS=smoke runs the telling tests alone.
test-servers: $(STAMP)
	ARGS="$(ARGS)" $(PYTHON) .ci/servers $(SERVERS)

test-all: $(STAMP)
	PYTHON=$(PYTHON) .ci/all

check: static plain budget

# The package as it installs: kernels/, storage/ and bench/ stand inside hicache/, so mypy sees a tree of links. Every clone
# uses its cache, one at a time.
static: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)/hicache
	ln -s $(abspath hicache)/* $(abspath kernels) $(abspath storage) $(abspath bench) $(TYPECHECK)/hicache/
	mkdir -p $(CACHE)
	cd $(TYPECHECK) && flock $(CACHE)/lock $(abspath $(PY)) -m mypy --config-file $(abspath pyproject.toml) \
		--cache-dir $(CACHE) -p hicache

# The words of docstrings, comments and pages, compared with the budget of each folder in .ci/plain.toml.
plain: $(STAMP)
	$(PY) .ci/plain $(ARGS)

# What the last run of all tests took, beside tests/budget.toml.
budget: $(STAMP)
	$(PY) tests/support/budget.py

# The site, into build/site. Where the packages of these two extras are, the tests build the site, and check distributions,
# workflows and manifests.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Those of the pages of docs/ that tell what the code declares: settings, flags, metrics, families.
tables: $(STAMP)
	$(PY) docs/site/tables.py

# A small set, in a few minutes on any machine. BENCH=all runs each that this machine can run, BENCH=name one; the list is
# printed first.
bench: $(STAMP)
	$(PY) -m bench list
	$(PY) -m bench run $(BENCH) $(ARGS)

# Leaves $(VENV), whose making is the slow part.
clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

$(VENV)/.docs: $(STAMP)
	$(PY) -c 'import mkdocs, material, mkdocstrings, twine, check_jsonschema, kubernetes_validate' 2>/dev/null || \
		$(PY) -m pip install --quiet -e '.[docs,release]'
	touch $@

$(DEMO): pyproject.toml .ci/setup
	.ci/setup $(VENV) $(PYTHON) serve,model
	touch $@

$(STAMP): pyproject.toml .ci/setup
	.ci/setup $(VENV) $(PYTHON) test,model
	touch $(DEMO) $@

# Another interpreter than last time: set up again.
ifneq ($(PYTHON),$(or $(MADE_FROM),$(PYTHON)))
.PHONY: $(STAMP) $(DEMO)
endif
