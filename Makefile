# make train   a fresh clone to a trained model: environment, corpus, 8 ranks (dp 2 · tp 2 · pp 2), a generated text
# make test    what a change runs   make lint    ruff and mypy           make parity  every layout against one process
# make slowest the same tests one after another, and which 20 of them took longest
# make nightly what `make test` has in small, in full: parity, torture, tests of more layouts, ten times the examples
# make torture runs killed, stopped, cut off, with flipped bits and full disks, for an hour (TORTURE="--seed 7 --only links")
# make bench   ours and the peers in turn, as tables: docs/benchmarks.md (BENCH="one dp2 --rounds 5" chooses),
#              and what has changed since the last time on this machine
# make slurm   a Slurm cluster of two nodes on this machine (as root, on Debian): submit, preempt, requeue, resume
# make setup   only .venv           make lock    pin new versions (needs uv)
# make docs  the pages of docs/ as a site in site/, every link and every piece of code in it found
# make reference   docs/config.md, the compatibility table and the schema, written anew from the config's declarations

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS := .venv/.docs
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq # errors only: what indexes lack is no news
CONFIG := examples/config_tiny_llama.yaml
RUN := runs/tiny_llama
PROMPT := import os
BENCH :=
TORTURE := --seconds 3600
WORKERS := 2
TESTS :=

.PHONY: train test slowest lint docs parity torture nightly nightly-tests slurm bench setup lock reference
.DEFAULT_GOAL := train

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "nanotron needs Python 3.10 or newer: make PYTHON=python3.12")'
	@test -x $(BIN)/pip || { echo "making .venv with $(PYTHON)" && $(PYTHON) -m venv .venv; }
	@echo "installing the $$(grep -vc '^#' requirements.lock) packages of requirements.lock into .venv, once: minutes, most of them torch's"
	@$(BIN)/python tools/install.py requirements.lock
	@echo "installing nanotron itself into .venv, as it lies here (pip install -e .)"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)

define TRY
Three things to try next:
  more of it, from a prompt of yours:
    $(BIN)/nanotron generate $(RUN) --prompt "class " --temperature 0.6
  the run as a page, $(RUN)/report.html:
    $(BIN)/nanotron report $(RUN)
  a model that has read more, with a live display while it learns:
    $(BIN)/nanotron train $(CONFIG) --override tokens.train_steps=400 --override checkpoints.checkpoints_path=runs/longer
endef
export TRY

train: setup
	$(BIN)/nanotron tokenize --stdlib
	$(BIN)/torchrun --nproc_per_node=8 run_train.py --config-file $(CONFIG)
	$(BIN)/nanotron generate $(RUN) --prompt "$(PROMPT)" --max-new-tokens 120 --temperature 0.6 --top-k 50
	@printf '\n%s\n' "$$TRY"

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

slowest: setup
	$(BIN)/python -m pytest --durations=20

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS): requirements-docs.lock $(STAMP)
	@$(PIP) -r requirements-docs.lock
	@touch $(DOCS)

parity: setup
	$(BIN)/python -m tests.parity

torture: setup
	$(BIN)/python -m tests.torture $(TORTURE)

nightly: nightly-tests parity torture

nightly-tests: setup
	$(BIN)/python -m pytest -m "" --hypothesis-profile=nightly

slurm: setup
	apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
	$(BIN)/python -m pytest -m "" tests/slurm

bench: setup
	$(BIN)/python -m bench $(BENCH) --history .bench/history

reference: setup
	$(BIN)/python tools/write_reference.py

lock:
	uv pip compile -q --universal --python-version 3.10 --extra dev --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links pyproject.toml | grep -vE '^(nvidia|cuda|triton)\b' > requirements.new
	(grep '^#' requirements.lock; cat requirements.new) > requirements.lock.new
	rm requirements.new && mv requirements.lock.new requirements.lock
	uv pip compile -q --universal --python-version 3.10 --extra docs --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links -c requirements.lock pyproject.toml | grep -vxFf requirements.lock \
	  | grep -vE '^(nvidia|cuda|triton)\b' > requirements.new
	(grep '^#' requirements-docs.lock; cat requirements.new) > requirements-docs.lock.new
	rm requirements.new && mv requirements-docs.lock.new requirements-docs.lock
