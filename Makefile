# Everything is set up in .venv and nothing outside of the checkout is touched but pip's cache. `make help`.
# PYTHON is the interpreter that .venv is made with.
PYTHON ?= python3
TORCH := torch==2.13.0
OLDEST_TRANSFORMERS := transformers==5.17.*

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEMO := runs/demo
OLDEST := $(VENV)/oldest-transformers
# A worker a core, up to 8; each test runs in one of them, and torch has one thread in each.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test corpus fuzz soak lint docs clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo    the main job with its log on disk, then a replay of that log"
	@echo "make test    the tests; none needs a GPU"
	@echo "make corpus  what failed once, again"
	@echo "make fuzz    a minute of fixed seeds, a small world explored, a third of the mutants"
	@echo "make soak    MINUTES=60 of seeds on every core; logs of what fails lie in runs/soak"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the pages of docs/ as a site in .site; a warning is an error"
	@echo "make clean   remove .venv, runs and caches"
	@echo "Each sets up .venv at need. PYTHON=python3.x chooses its interpreter (3.11 or later)."

# -- set-up: a stamp a stage, redone when pyproject.toml or this file changes ----------------------
# Torch first and pinned, so that no later requirement can choose another build of it.
$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) must be Python 3.11 or later: call make with PYTHON=python3.x" >&2; exit 1; }
	@echo "setting up $(VENV): $(TORCH)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@echo "setting up $(VENV): hisparse" >&2
	@$(PIP) install -e .
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo "setting up $(VENV): hisparse[test]" >&2
	@$(PIP) install -e '.[test]'
	@touch $(VENV)/.run $@

# Beside the newest, which is of the tests' requirements: tests of both run in one suite.
$(OLDEST)/.there: Makefile $(VENV)/.torch
	@echo "setting up $(OLDEST): $(OLDEST_TRANSFORMERS)" >&2
	@rm -rf $(OLDEST)
	@$(PIP) install --no-deps --target $(OLDEST) '$(OLDEST_TRANSFORMERS)'
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.torch
	@echo "setting up $(VENV): hisparse[test,lint]" >&2
	@$(PIP) install -e '.[test,lint]'
	@touch $(VENV)/.run $(VENV)/.test $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	@echo "setting up $(VENV): hisparse[docs]" >&2
	@$(PIP) install -e '.[docs]'
	@touch $(VENV)/.run $@

# -- what people call ------------------------------------------------------------------------------
# Fails unless the run verifies, every path of the tiers was taken, and the log replays to its end.
demo: $(VENV)/.run
	@rm -rf $(DEMO) $(DEMO).txt $(DEMO)-replay.txt && mkdir -p $(dir $(DEMO))
	@echo '$$ hisparse run --requests 64 --log $(DEMO)'
	@$(BIN)/hisparse run --requests 64 --log $(DEMO) >$(DEMO).txt; \
	  code=$$?; cat $(DEMO).txt; exit $$code
	@for name in requests_finished spills hot_hits hot_misses prefix_hit_tokens; do \
	  awk -v name=$$name '$$1 == name && $$2 > 0 { found = 1 } END { exit !found }' $(DEMO).txt || \
	    { echo "the demo shows no $$name" >&2; exit 1; }; done
	@echo && echo '$$ hisparse replay $(DEMO)'
	@$(BIN)/hisparse replay $(DEMO) >$(DEMO)-replay.txt; \
	  code=$$?; cat $(DEMO)-replay.txt; exit $$code
	@live=$$(awk '$$1 == "state_digest" { print $$2 }' $(DEMO).txt); \
	  replayed=$$(awk '$$1 == "state_digest" { print $$2 }' $(DEMO)-replay.txt); echo; \
	  if [ -n "$$live" ] && [ "$$live" = "$$replayed" ]; \
	  then echo "digests equal: live $$live, replayed $$replayed"; \
	  else echo "digests differ: live $$live, replayed $$replayed" >&2; exit 1; fi

test: $(VENV)/.test $(OLDEST)/.there
	HISPARSE_OLDEST_TRANSFORMERS=$(OLDEST) $(BIN)/python -m pytest $(WORKERS)

corpus: $(VENV)/.test
	$(BIN)/python -m pytest tests/testing/test_corpus.py

# Seeds are the same on every run; which third of the mutants is hunted changes with the day
# (PART=0/1: all of them), on another core than the rest.
PART ?= $(shell expr $$(date +%s) / 86400 % 3)/3
fuzz: $(VENV)/.test
	@mkdir -p runs; $(BIN)/hisparse fuzz --mutants $(PART) --no-shrink >runs/mutants.txt 2>&1 & mutants=$$!; \
	code=0; $(BIN)/hisparse explore || code=1; \
	$(BIN)/hisparse fuzz --minutes 1 --no-marks || code=1; \
	wait $$mutants || code=1; cat runs/mutants.txt; exit $$code

MINUTES ?= 60
SOAK_FROM ?= 1000000
# One process a core, each with seeds of its own. Fails if a seed failed or a mark was never hit.
soak: $(VENV)/.run
	@mkdir -p runs/soak; cores=$$(nproc); pids=; code=0; \
	for i in $$(seq 1 $$cores); do first=$$(( $(SOAK_FROM) * i )); \
	  nice $(BIN)/hisparse fuzz --seeds $$first..$$(( first + 999999 )) --minutes $(MINUTES) \
	    --keep-logs runs/soak/logs-$$i --json >runs/soak/$$i.json 2>runs/soak/$$i.txt & \
	  pids="$$pids $$!"; done; \
	for pid in $$pids; do wait $$pid || code=1; done; \
	cat runs/soak/*.txt; echo "reports: runs/soak/*.json"; exit $$code

lint: $(VENV)/.lint
	$(BIN)/ruff check .; code=$$?; $(BIN)/ruff format --check --quiet . || code=1; \
	  $(BIN)/mypy && exit $$code

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find hisparse tests -name __pycache__ -type d -prune -exec rm -rf {} +
