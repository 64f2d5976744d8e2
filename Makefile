# Every target first makes the environment that it needs. PYTHON=... chooses the interpreter (3.11 or newer). If this
# interpreter has a torch from 2.11 to 2.15, that torch is used. The command of a target gets the arguments ARGS=...:
# make demo ARGS="--disk-path /tmp/pages". WORKERS=... is the number of processes that run tests.

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

# Container images often switch byte code off. Then every worker, fork server and program would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-busy test-long test-servers test-all check static plain bench docs tables clean

demo: $(DEMO)
	$(VENV)/bin/hicache demo $(ARGS)

serve: $(DEMO)
	$(VENV)/bin/hicache serve $(ARGS)

test: $(STAMP)
	$(PY) -m pytest -m "not long and not remote" --workers $(WORKERS) $(ARGS)

# Runs the files 20 times while other processes keep every core busy: make test-busy FILES="tests/stores".
test-busy: $(STAMP)
	ARGS="$(ARGS)" .ci/busy $(PY) $(FILES)

test-long: $(STAMP)
	HICACHE_TEST_PROFILE=thorough $(PY) -m pytest -m "long and not remote" --workers $(WORKERS) $(ARGS)

# Tests the remote stores with their servers on this machine, and the plug-ins with the code of vLLM and SGLang.
# SERVERS="remote vllm" chooses from these; MARKS=smoke only runs a small selection of tests.
test-servers: $(STAMP)
	ARGS="$(ARGS)" $(PYTHON) .ci/servers $(SERVERS)

test-all: $(STAMP)
	PYTHON=$(PYTHON) .ci/all

check: static plain

# In the installed package kernels/, storage/ and bench/ are inside hicache/, so mypy checks a tree of links. All clones
# share the cache of mypy, and use it one at a time.
static: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)/hicache
	ln -s $(abspath hicache)/* $(abspath kernels) $(abspath storage) $(abspath bench) $(TYPECHECK)/hicache/
	mkdir -p $(CACHE)
	cd $(TYPECHECK) && flock $(CACHE)/lock $(abspath $(PY)) -m mypy --config-file $(abspath pyproject.toml) \
		--cache-dir $(CACHE) -p hicache

# Counts the findings about words in docstrings, comments and pages, and compares them with the budgets in .ci/plain.toml.
plain: $(STAMP)
	$(PY) .ci/plain $(ARGS)

# Builds the site in build/site. If the packages of the extras docs and release are installed, the tests also build the
# site, and check distributions, workflows and manifests.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Writes the tables in docs/ that the code declares: settings, flags, metrics, families.
tables: $(STAMP)
	$(PY) docs/site/tables.py

# Lists all benchmarks, and runs a small set of them in a few minutes on any machine. BENCH=all runs every benchmark that
# this machine can run, BENCH=name runs one.
bench: $(STAMP)
	$(PY) -m bench list
	$(PY) -m bench run $(BENCH) $(ARGS)

# Keeps $(VENV), because making it again is slow.
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

# If PYTHON is another interpreter than last time, the environment is made again.
ifneq ($(PYTHON),$(or $(MADE_FROM),$(PYTHON)))
.PHONY: $(STAMP) $(DEMO)
endif
