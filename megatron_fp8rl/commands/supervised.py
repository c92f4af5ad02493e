"""The commands ``sft`` and ``dpo``: train a model's folder on conversations or pairs, without a line of Python.

Out: a complete ``RunConfig``, whose printed function ``python -m launch`` also takes. Imports nothing heavy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_fp8rl import cli
from megatron_fp8rl.commands import train
from megatron_fp8rl.commands.grpo import absolute, read_model, with_layout
from megatron_fp8rl.config import (
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ObserveConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    Violation,
)
from megatron_fp8rl.envs.source_kind import has_rows, is_supervised, short_name
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.memory import GpuName


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Model and data; all fields of a configuration are options as well."""

    model: str = ""  # folder of a Hugging Face model (config.json, tokenizer, weights), or FILE.gguf
    data: tuple[str, ...] = ()  # files or folders of rows, or hub:NAME
    eval: tuple[str, ...] = ()  # held-out rows for the validation loss, in the order of --data
    batch_size: int = 64  # rows of one update
    epochs: float = 1.0  # passes over the rows; --num_steps overrides it
    max_length: int = 4096  # tokens of a row at most; longer rows are left out
    gpus: int | None = None  # GPUs of the trainer; None: those of this machine; 0: the CPU
    gpu: GpuName | None = None  # GPU model to plan for; None: the GPU of this machine, else h200


@dataclass(frozen=True, kw_only=True)
class DpoOptions(SftOptions):
    """Model, data and the loss of direct preference optimization (arXiv 2305.18290)."""

    beta: float = 0.1  # strength of the pull to the reference model, which is the initial model
    label_smoothing: float = 0.0  # assumed share of pairs with exchanged sides, from 0 to below 0.5


def configure(
    options: SftOptions, override: Callable[[RunConfig], RunConfig], *, loss: str, lr: float
) -> tuple[RunConfig, list[str]]:
    """(configuration, lines that explain it). Raises ConfigError with every mistake in the options."""
    errors = _problems(options)
    model, folder = read_model(options.model, errors)
    if errors or model is None:
        raise ConfigError(errors)
    length = min(options.max_length, model.max_sequence_tokens)
    sides = 2 if loss == "dpo" else 1
    is_dpo = isinstance(options, DpoOptions)
    values = {"beta": options.beta, "label_smoothing": options.label_smoothing} if is_dpo else {}
    held_out = [absolute(name) for name in options.eval] + [""] * len(options.data)
    sources = zip(options.data, held_out, strict=False)
    cfg = RunConfig(
        name=f"{folder.resolve().name.removesuffix('.hf')}-{loss}-{'-'.join(map(short_name, options.data))}",
        model=model,
        optim=OptimConfig(
            lr=lr, warmup_steps=10, decay="cosine", max_tokens_per_microbatch=max(8192, sides * length + 16)
        ),
        sampling=SamplingConfig(
            prompts_per_step=options.batch_size,
            max_prompt_tokens=length - length // 2,
            max_completion_tokens=length // 2,
        ),
        engine=EngineConfig(deadline_scale=3.0),
        data=DataConfig(
            environments=tuple(EnvironmentConfig(dataset=absolute(name), eval=rows) for name, rows in sources),
            tokenizer=str(folder.resolve()),
        ),
        algo=AlgoConfig(loss=loss, loss_options=values),
        checkpoint=CheckpointConfig(every_steps=100, every_minutes=30),
        observe=ObserveConfig(eval_every=50),
    )
    rows = override(cfg)  # with other options of a source, such as its split
    if violations := rules.check_sources(rows):
        raise ConfigError(violations)
    num_steps = _num_steps(rows, options.epochs)
    cfg = replace(cfg, num_steps=num_steps, optim=replace(cfg.optim, warmup_steps=min(10, num_steps // 10)))
    return with_layout(cfg, options.gpus, options.gpu, override)


def _num_steps(cfg: RunConfig, epochs: float) -> int:
    """Updates of so many passes over the rows."""
    from megatron_fp8rl.data.rows import open_rows  # imports NumPy

    try:
        num_rows = sum(len(open_rows(source.dataset, source.options)) for source in cfg.data.environments)
    except (OSError, ValueError, ImportError) as error:
        values = [source.dataset for source in cfg.data.environments]
        raise ConfigError([Violation("--data", values, str(error), "Name other files")]) from error
    return max(1, math.ceil(num_rows * epochs / cfg.sampling.prompts_per_step))


def _problems(options: SftOptions) -> list[Violation]:
    errors: list[Violation] = []

    def refuse(field: str, problem: str, remedy: str) -> None:
        errors.append(Violation(f"--{field}", getattr(options, field), problem, remedy))

    if not options.data:
        refuse("data", "there is nothing to learn", "Name a file, such as train.jsonl")
    if others := [name for name in options.data if not has_rows(name)]:
        refuse("data", f"{others[0]} has no rows", "Name files, folders or hub:NAME")
    if len(options.eval) > len(options.data):
        refuse("eval", f"there are {len(options.data)} sources of rows to train on", "Name at most one for each --data")
    if options.batch_size < 1:
        refuse("batch_size", "is below 1", "Learn at least one row per update; 64 is usual")
    if not 0 < options.epochs < math.inf:
        refuse("epochs", "is not a number above 0", "Set 1 to see each row once")
    if options.max_length < 2:
        refuse("max_length", "leaves no token to predict", "Set the tokens of the longest row")
    if isinstance(options, DpoOptions):
        if not 0 < options.beta < math.inf:
            refuse("beta", "is not a number above 0", "0.1 is usual")
        if not 0 <= options.label_smoothing < 0.5:
            refuse("label_smoothing", "is not from 0 to below 0.5", "0 is usual")
    return errors


def _sft(invocation: cli.Invocation) -> int:
    """The rows of the configuration, or the warm start of a configuration of reinforcement learning."""
    if is_supervised(invocation.cfg):
        return train.start(invocation.cfg, job="sft")
    return train.start(invocation.cfg, wants_rl=False)


SFT = cli.Command(
    name="sft",
    summary="supervised training on conversations: --model DIR --data FILE; with CONFIG, its warm start alone",
    run=_sft,
    options=SftOptions,
    configure=partial(configure, loss="sft", lr=1e-5),
    reads_data=True,
)
DPO = cli.Command(
    name="dpo",
    summary="direct preference optimization on pairs of answers: --model DIR --data FILE",
    run=lambda invocation: train.start(invocation.cfg, job="dpo"),
    options=DpoOptions,
    configure=partial(configure, loss="dpo", lr=1e-6),
    reads_data=True,
)
