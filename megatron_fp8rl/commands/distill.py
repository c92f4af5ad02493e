"""The command ``distill``: on-policy distillation of a model's folder from one or several teachers.

Out: a complete ``RunConfig``, that of ``grpo`` with a teacher for each source. Imports nothing heavy.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo, train
from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.preflight.teachers import is_served


@dataclass(frozen=True, kw_only=True)
class DistillOptions(grpo.GrpoOptions):
    """Student, teachers, data and, if wanted, rewards; all fields of a configuration are options as well."""

    # Folders of Hugging Face models with the student's tokenizer, or URLs of vLLM servers, in the order of --data. One
    # teacher is that of all data.
    teacher: tuple[str, ...] = ()


def configure(options: DistillOptions, override: Callable[[RunConfig], RunConfig]) -> tuple[RunConfig, list[str]]:
    """(configuration, lines that explain it). Raises ConfigError with every mistake in the options."""
    num_sources, teachers = len(options.data), [_named(name) for name in options.teacher]
    if not teachers or len(teachers) not in (1, num_sources):
        problem = f"{len(teachers)} teachers for {num_sources} sources" if teachers else "there is no teacher"
        remedy = "Name one folder or URL, or one for each --data, in the same order"
        raise ConfigError([Violation("--teacher", options.teacher, problem, remedy)])
    if len(teachers) == 1:
        teachers *= num_sources

    def with_teachers(cfg: RunConfig) -> RunConfig:
        sources = cfg.data.environments
        if not any(source.teacher for source in sources):
            pairs = zip(sources, teachers, strict=True)
            sources = tuple(replace(source, teacher=teacher) for source, teacher in pairs)
            cfg = replace(
                cfg,
                name=f"{cfg.name}-distilled",
                data=replace(cfg.data, environments=sources),
                algo=replace(cfg.algo, kl_coef=1.0, zero_variance="keep"),
            )
        return override(cfg)

    return grpo.configure(options, with_teachers, needs_reward=False)


def _named(teacher: str) -> str:
    return teacher if is_served(teacher) else os.path.abspath(os.path.expanduser(teacher))


COMMAND = cli.Command(
    name="distill",
    summary="on-policy distillation: --model STUDENT --teacher DIR|URL --data FILE",
    run=lambda invocation: train.start(invocation.cfg, job="distill"),
    options=DistillOptions,
    configure=configure,
    reads_data=True,
)
