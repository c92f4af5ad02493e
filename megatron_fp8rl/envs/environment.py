"""What an environment is, and how a configuration names one.

An environment makes problems by index and scores completions. It comes from reasoning-gym by the name of a generator,
or from the user's own module as ``package.module:Class``, built as ``Class(**options)``.

Problems are made in the trainer; scores are computed in worker processes (envs/scoring.py) that build the same
environment again, so everything that scoring needs travels in ``Prompt.metadata``, as JSON.
"""

from __future__ import annotations

import difflib
import importlib
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fp8rl.config import EnvironmentConfig
from megatron_fp8rl.types import Prompt


class EnvironmentSpecError(ValueError):
    """An environment, option or template field that does not exist, with the nearest that do."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem as text."""

    question: str  # decides whether the problem is held out: equal questions are never on both sides
    answer: str  # a reference answer; empty when there is none
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON-serialisable; template fields, and input to scoring


class Environment(Protocol):
    """A source of problems and the judge of their answers."""

    def make_problem(self, index: int) -> Problem:
        """The problem of an index, 0 <= index < 2**31; the same in every process."""

    def score(self, prompt: Prompt, completion_text: str) -> float:
        """Reward of a completion. May be slow, hang or crash: it runs in a process of its own, with a deadline."""


def build_environment(cfg: EnvironmentConfig) -> Environment:
    """The environment that a configuration names.

    Raises:
        EnvironmentSpecError: unknown module, class, generator or option.
    """
    if ":" not in cfg.dataset:
        from megatron_fp8rl.envs.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(cfg.dataset, cfg.options)
    module_name, _, class_name = cfg.dataset.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvironmentSpecError(f"environment {cfg.dataset!r}: cannot import {module_name!r}: {error}") from error
    if not hasattr(module, class_name):
        raise EnvironmentSpecError(
            f"environment {cfg.dataset!r}: {module_name} has no {class_name!r}{near(class_name, dir(module))}"
        )
    try:
        return getattr(module, class_name)(**cfg.options)
    except TypeError as error:
        raise EnvironmentSpecError(f"environment {cfg.dataset!r} with options {cfg.options}: {error}") from error


def environments_by_key(configs: Iterable[EnvironmentConfig]) -> dict[str, EnvironmentConfig]:
    """Configurations under the names that prompts, metrics and records use: the dataset's, numbered if it repeats."""
    keyed: dict[str, EnvironmentConfig] = {}
    for cfg in configs:
        key, count = cfg.dataset, 1
        while key in keyed:
            count += 1
            key = f"{cfg.dataset}-{count}"
        keyed[key] = cfg
    return keyed


def render(template: str, problem: Problem) -> str:
    """The text of a prompt. Template fields are ``question`` and the keys of ``problem.metadata``.

    Raises:
        EnvironmentSpecError: an unknown field, with the nearest that exist.
    """
    fields = {**problem.metadata, "question": problem.question}
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError) as error:
        names = [name for _, name, _, _ in _parsed(template) if name is not None]
        unknown = [name for name in names if name.split(".")[0].split("[")[0] not in fields]
        hint = near(unknown[0], fields) if unknown else f": {error}"
        raise EnvironmentSpecError(
            f"template {template!r}: {'no field ' + repr(unknown[0]) if unknown else 'cannot be filled'}{hint} "
            f"(fields: {', '.join(sorted(fields))}; write a literal brace twice)"
        ) from error


def near(name: str, candidates: Iterable[str]) -> str:
    """'; did you mean ...?' with the closest candidates, or nothing."""
    found: Sequence[str] = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _parsed(template: str) -> list[tuple]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError:
        return []
