# make demo    first run: creates .venv, installs, trains the tiny mixture of experts into runs/demo
# make demo-math  writes a jsonl of word problems and a tokenizer, and trains on them by the grpo command, with --reward math
# make demo-real  fetches a pretrained model of 135M weights, widens it for FP8, and trains it: 100 steps on GPUs, 5 on a CPU
# make headline  measures the README's main figure on two H200s: steps of Qwen3-8B's shape in BF16, FP8 and exact FP8
# make lint    checks style (ruff), layout (ruff format) and types (pyright on the pure packages)
# make docs    builds the documentation site with the API reference into build/site
# make release builds wheel, documentation and image file into build/release, and says what to publish; publishes nothing
# make test    runs tests of everything in a few minutes: library, a layout of ranks, an engine, a short run, launches,
#              conversions; ends with the coverage of megatron_fp8rl
# make test-all  runs these and all others, an hour or so (test-rest: the others alone); FP8RL_SLURM_TESTS=1 adds those on a
#              real Slurm, which it installs by apt as root
#              JOBS=1 runs them one after the other
# make install only creates .venv; EXTRAS="test launch" adds extras
# FP8RL_EXTRA=cpu or gpu overrides what nvidia-smi says; FP8RL_PYTHON names a Python 3.12.

SHELL := /bin/sh
PYTHON := .venv/bin/python
ARGS ?=
JOBS ?= 3
EXTRAS ?=

.PHONY: help install demo demo-math demo-real headline docs lint release test test-all test-rest

help:
	@sed -n 's/^# //p' Makefile

install:
	@sh tools/bootstrap.sh $(EXTRAS)

demo:
	@sh tools/bootstrap.sh
	@$(PYTHON) -m megatron_fp8rl demo --output_dir runs/demo $(ARGS)

demo-math:
	@sh tools/bootstrap.sh
	@$(PYTHON) tools/demo_math.py runs/word_problems
	@$(PYTHON) -m megatron_fp8rl grpo --model runs/word_problems/model --model.random True --data runs/word_problems/train.jsonl \
	    --eval runs/word_problems/test.jsonl --reward math --name demo_math --num_steps 32 --optim.lr 4e-4 --optim.decay linear --optim.warmup_steps 5 \
	    --warm_start.steps 600 --warm_start.batch_size 128 --warm_start.lr 3e-3 --warm_start.wrong_answers 0.3 \
	    --sampling.prompts_per_step 16 --sampling.completions_per_prompt 16 --sampling.max_prompt_tokens 64 \
	    --sampling.max_completion_tokens 8 --observe.eval_prompts 101 --observe.eval_every 8 $(ARGS)

REAL_GPU := --data runs/real/train.jsonl --eval runs/real/test.jsonl --num_steps 100 --sampling.prompts_per_step 32 \
    --sampling.max_completion_tokens 192 --optim.lr 1e-5 --observe.eval_prompts 512
REAL_CPU := --data runs/real/easy.jsonl --eval runs/real/easy_test.jsonl --num_steps 5 --sampling.prompts_per_step 8 \
    --sampling.max_completion_tokens 32 --optim.lr 5e-5 --optim.warmup_steps 0 --observe.eval_prompts 16

demo-real:
	@sh tools/bootstrap.sh
	@$(PYTHON) tools/real_model.py runs/real
	@if nvidia-smi -L >/dev/null 2>&1; then size="$(REAL_GPU)"; else size="$(REAL_CPU)"; fi; \
	    $(PYTHON) -m megatron_fp8rl grpo --model runs/real/model \
	    --reward number --name demo_real --sampling.completions_per_prompt 8 --sampling.max_prompt_tokens 512 \
	    --observe.eval_every 20 $$size $(ARGS)

headline:
	@sh tools/bootstrap.sh
	@$(PYTHON) -m benchmarks.ledger --shape 8b_colocated --arm bf16 fp8_kv exact_kv $(ARGS)

# ruff, of the extra lint, lays out signatures.
docs:
	@sh tools/bootstrap.sh docs lint
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict
	@echo "Open build/site/index.html"

release:
	@sh tools/bootstrap.sh docs lint
	@$(PYTHON) tools/release.py

lint:
	@sh tools/bootstrap.sh lint
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m pyright

# sys.monitoring measures coverage almost for free. Processes that tests start are not measured.
test:
	@sh tools/bootstrap.sh test launch
	@COVERAGE_CORE=sysmon $(PYTHON) tools/run_tests.py -m "not slow" -n $(JOBS) --cov --cov-report= $(ARGS)

test-rest:
	@sh tools/bootstrap.sh test launch
	@bash tests/slurm/cluster.sh prepare
	@FP8RL_LONG_TESTS=$${FP8RL_LONG_TESTS:-1} $(PYTHON) tools/run_tests.py -m slow -n $(JOBS) $(ARGS)

test-all: test test-rest
