# Every target sets up what it needs in .venv first; a second call installs nothing again.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PEERS  := .venv-peers
# Two workers with one thread each: tiny tensors gain nothing from more threads, and lose much when they compete.
# Compiled tests are kept, whatever the environment says: to rewrite all asserts again takes seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # two installs into one environment must not meet
.PHONY: help demo test test-long test-all lint format docs bench bench-peers clean

help: ## Show this list
	@echo "usage: make TARGET [PYTHON=python3.12]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## Sample posteriors that are known exactly, and two real data sets; figures in demo-output/
	$(PY) -m isosgd.demo --out demo-output

test: lint ## Lint, the tests to run before every commit, and doctests
	$(PYTEST) -m "not long and not slow"

test-long: $(VENV)/.installed-dev ## The long tests: statistics, experiments, runs that are killed, compiled and native code
	$(PYTEST) -m "long and not slow" --timeout 900

test-all: lint ## Lint and all tests, those that take minutes too
	$(PYTEST) --timeout 3600

lint: $(VENV)/.installed-dev ## ruff check, ruff format --check, mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict src

format: $(VENV)/.installed-dev ## Let ruff mend style and format in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.installed-docs ## Build the documentation into site/; any warning is an error
	$(PY) -m mkdocs build --strict

bench: $(VENV)/.installed-dev ## Time one update of each sampler against torch.optim
	$(PY) -m benchmarks.step

bench-peers: $(PEERS)/.installed ## Chain-steps per second against blackjax and posteriors; estimators against those of others
	$(PEERS)/bin/python -W ignore -m benchmarks.chains
	$(PEERS)/bin/python -W ignore -m benchmarks.tables

clean: ## Remove the environment and everything built (demo-output/ too)
	rm -rf $(VENV) $(PEERS) site dist build demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests experiments benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# One stamp for each extra. The constraints keep pip from choosing another torch than the one tested.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

# The peers are no dependencies: they live in an environment of their own, with the torch that we test.
$(PEERS)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(VENV)/bin/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tables]' blackjax posteriors \
		xgboost lightgbm ngboost sklearn-contrib-bde ivon-opt
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "isosgd needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
		echo "Name another one: make PYTHON=python3.12 ..."; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@touch $@
