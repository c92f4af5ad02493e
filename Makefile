# make demo    first run: creates .venv, installs, trains the tiny mixture of experts into runs/demo
# make test    runs the tests; FP8RL_SLURM_TESTS=1 adds those on a real Slurm, which it installs by apt as root
#              JOBS=1 runs them one after the other
# make install only creates .venv; EXTRAS="test launch" adds extras
# FP8RL_EXTRA=cpu or gpu overrides what nvidia-smi says; FP8RL_PYTHON names a Python 3.12.

SHELL := /bin/sh
PYTHON := .venv/bin/python
ARGS ?=
JOBS ?= 3
EXTRAS ?=

.PHONY: help install demo test

help:
	@sed -n 's/^# //p' Makefile

install:
	@sh tools/bootstrap.sh $(EXTRAS)

demo:
	@sh tools/bootstrap.sh
	@$(PYTHON) -m megatron_fp8rl demo --output_dir runs/demo $(ARGS)

test:
	@sh tools/bootstrap.sh test launch
	@bash tests/slurm/cluster.sh prepare
	@$(PYTHON) tools/run_tests.py -n $(JOBS) $(ARGS)
