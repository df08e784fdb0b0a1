# make demo | test | lab | bench | check | setup | clean. Every one is complete in itself: the first makes .venv.
# Needs git, make and Python >= 3.11 with venv. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Threads of torch that wait for one another do not spin: on a machine that others use too, spinning costs tenfold.
export OMP_WAIT_POLICY ?= PASSIVE
STAMP := $(VENV)/.installed
DEMO := build/demo
LESSON := 01-a-cluster-in-a-cell
LAB_OPTIONS ?=
# What needs least comes first; two files at a time, of which no test disturbs another.
TIERS := $(addprefix tests/,unit test_tiny.py ranks kernel packaging tutorials)

.PHONY: demo test lab bench check setup clean
.DEFAULT_GOAL := demo

setup: $(STAMP)

# torch comes first and alone: a CPU wheel that is already there (see the README) satisfies everything after it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "installing into $(VENV): some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test,lab]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python tools/run_tutorial.py tutorials/$(LESSON).md --out $(DEMO)

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TIERS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size_report.py

lab: $(STAMP) build/lab/$(LESSON).ipynb
	$(BIN)/jupyter lab $(LAB_OPTIONS) build/lab/$(LESSON).ipynb

# A copy to play with: edits stay there until the lesson itself is newer.
build/lab/%.ipynb: tutorials/%.md | $(STAMP)
	@mkdir -p $(@D)
	$(BIN)/jupytext --quiet --to notebook --output $@ $<

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
