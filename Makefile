# make help lists the targets. Everything is installed into .venv and nowhere else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,gguf,ifbench,megatron,parquet,reasoning-gym,tensorboard,wandb
PINS := pyproject.toml constraints.txt requirements.lock tools/install.sh
# Processes of the whole test suite: a test waits about a third of its time. One needs up to 5 GiB.
JOBS ?= $(shell echo $$(($$(nproc) < 5 ? $$(nproc) + 1 : 6)))
CHECKED := slime tests tools benchmarks examples train.py train_async.py

.DEFAULT_GOAL := help
.PHONY: debian help quickstart test test-chaos test-long test-published test-sglang test-cluster check format venv clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

quickstart: $(VENV)/.installed  ## install, make a tiny model and train it: minutes on two CPU cores
	$(BIN)/slime quickstart $(ARGS)

test: $(VENV)/.installed-dev debian  ## the CPU test suite; a part of it: make test ARGS=tests/unit
	$(BIN)/python -m pytest $(or $(ARGS),-n $(JOBS) tests)

test-long: $(VENV)/.installed-dev debian  ## the tests that make test leaves out because each takes minutes
	SLIME_TEST_LONG=1 $(BIN)/python -m pytest -n $(JOBS) -m long $(or $(ARGS),tests)

test-sglang: $(VENV)/.installed-dev  ## both engines by one suite, and runs through the real SGLang, on a CPU
	tools/sglang_cpu_env.sh
	SLIME_SGLANG_PYTHON=$(CURDIR)/build/sglang-cpu/bin/python \
	  $(BIN)/python -m pytest $(or $(ARGS),tests/conformance tests/sglang)

test-cluster: $(VENV)/.installed-dev  ## runs over three hosts, which are network namespaces; needs root
	SLIME_TEST_CLUSTER=1 $(BIN)/python -m pytest $(or $(ARGS),tests/cluster)

test-published: $(VENV)/.installed-dev  ## start every published command line with a tiny model: half an hour on two cores
	SLIME_TEST_PUBLISHED=1 $(BIN)/python -m pytest -n 2 $(or $(ARGS),tests/compat/test_starts.py)

test-chaos: $(VENV)/.installed-dev  ## break runs at random, resume and compare them; SEEDS=0-39 or SEEDS="7 9 100-120"
	$(BIN)/python -m tests.chaos.run --seeds "$(SEEDS)" $(ARGS)

check: $(VENV)/.installed-dev  ## formatting, lint and types
	$(BIN)/ruff format --check $(wildcard $(CHECKED))
	$(BIN)/ruff check $(wildcard $(CHECKED))
	$(BIN)/pyright

format: $(VENV)/.installed-dev  ## format the code, and fix what lint can fix
	$(BIN)/ruff format $(wildcard $(CHECKED))
	$(BIN)/ruff check --fix $(wildcard $(CHECKED))

venv: $(VENV)/.installed-dev  ## install everything for development into .venv

clean:  ## delete .venv and caches; runs/ stays
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis

# What tests use of Debian: bwrap runs programs of a model, chromium opens the page of `slime watch`.
debian:
	@for pair in bwrap:bubblewrap chromium:chromium; do package=$${pair#*:}; \
	  command -v $${pair%:*} >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && { apt-get install -y --no-install-recommends $$package \
	  || { apt-get update && apt-get install -y --no-install-recommends $$package; }; }; } \
	  || echo "$$package is missing: apt-get install $$package"; done

$(VENV)/bin/python:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) is missing, or has no venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PINS) | $(VENV)/bin/python
	tools/install.sh $(BIN)/python
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(VENV)/bin/python
	tools/install.sh $(BIN)/python $(EXTRAS)
	@touch $@ $(VENV)/.installed
