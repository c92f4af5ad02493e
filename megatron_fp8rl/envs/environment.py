"""Environment interface, and construction from a configuration.

An environment is a reasoning-gym generator, named by ``dataset``, or a user's class ``env:package.module:Class``,
constructed as ``Class(**options)``. Rows of files (``data/rows.py``) are not environments.

The trainer generates problems. Worker processes (envs/scoring.py) construct the environment again to score completions,
so ``Prompt.metadata`` must contain all data for scoring, as JSON.
"""

import string
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fp8rl.algo.load_function import FunctionError, load_function
from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import EnvironmentConfig
from megatron_fp8rl.envs.source_kind import CLASS, kind_of, short_name
from megatron_fp8rl.types import Prompt

_GENERATORS = "megatron_fp8rl.envs.libraries.reasoning_gym:ReasoningGymEnvironment"


class EnvironmentSpecError(ValueError):
    """Unknown environment, option or template field; the message lists near matches."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem as text."""

    question: str  # determines the split: equal questions are in the same split
    answer: str  # reference answer; empty if there is none
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON-serializable; template fields and input to scoring
    messages: tuple[dict[str, str], ...] = ()  # role and content, the question last; empty: plain text


class Environment(Protocol):
    """Generates problems and scores completions."""

    def make_problem(self, index: int) -> Problem:
        """Return the problem at an index, 0 <= index < 2**31; the same in every process."""

    def score(self, prompt: Prompt, completion_text: str) -> float | dict[str, float]:
        """Return the reward, or its parts by name. The reward is the part "reward", otherwise the sum. Runs in a
        separate process with a deadline, so it may be slow, hang or crash."""


def build_environment(cfg: EnvironmentConfig) -> Environment:
    """Construct the environment. Raises EnvironmentSpecError for an unknown module, class, generator or option."""
    if kind_of(cfg.dataset) == "generator":
        return load_function(_GENERATORS)(cfg.dataset, cfg.options)
    try:
        return load_function(cfg.dataset.removeprefix(CLASS))(**cfg.options)
    except FunctionError as error:
        raise EnvironmentSpecError(f"environment {cfg.dataset!r}: {error}") from error
    except TypeError as error:
        raise EnvironmentSpecError(f"environment {cfg.dataset!r} with options {cfg.options}: {error}") from error
    except EnvironmentSpecError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise EnvironmentSpecError(f"environment {cfg.dataset!r} with options {cfg.options}: {reason}") from error


def environments_by_key(configs: Iterable[EnvironmentConfig]) -> dict[str, EnvironmentConfig]:
    """Configurations by the names used in prompts, metrics and records: the dataset's name, numbered if repeated."""
    keyed: dict[str, EnvironmentConfig] = {}
    for cfg in configs:
        name = short_name(cfg.dataset)
        key, count = name, 1
        while key in keyed:
            count += 1
            key = f"{name}-{count}"
        keyed[key] = cfg
    return keyed


def render(template: str, problem: Problem) -> str:
    """Fill in the prompt template. Template fields are ``question`` and the keys of ``problem.metadata``. Raises
    EnvironmentSpecError with near matches for an unknown field, or if a value is null."""
    fields = {**problem.metadata, "question": problem.question}
    try:
        text = template.format_map(fields)
    except (KeyError, IndexError, ValueError) as error:
        names = []
        with suppress(ValueError):  # unbalanced braces
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = [name for name in names if name.split(".")[0].split("[")[0] not in fields]
        hint = near_matches(unknown[0], fields) if unknown else f": {error}"
        raise EnvironmentSpecError(
            f"template {template!r}: {'no field ' + repr(unknown[0]) if unknown else 'cannot be filled'}{hint} "
            f"(fields: {', '.join(sorted(fields))}; write a literal brace twice)"
        ) from error
    for _, name, _, _ in string.Formatter().parse(template):
        if name and fields.get(name, "") is None:
            raise EnvironmentSpecError(f"template {template!r}: {name!r} is null; write a text, or remove the row")
    return text
