"""Build the configured rewards of a source of rows, in score workers, which do not open the rows."""

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import RewardConfig
from megatron_fp8rl.envs.rewards import answers, functions, judge, programs, sandboxed, scalar
from megatron_fp8rl.envs.rewards.choices import letters_of
from megatron_fp8rl.envs.rewards.extraction import is_unfinished
from megatron_fp8rl.envs.rewards.functions import RewardError
from megatron_fp8rl.envs.rewards.numbers import number_of
from megatron_fp8rl.types import IS_RIGHT, Prompt

Reward = Callable[[Sequence[Prompt], Sequence[str]], list[Any]]  # a number or dict of numbers of each completion

_COMPARISONS = {
    "exact": answers.exact,
    "number": answers.number,
    "choice": answers.choice,
    "math": answers.math,
    "format": answers.matches,
    "length": answers.length,
}
_OTHERS = {"code": programs.code, "judge": judge.judge, "model": scalar.model}
_NEED_AN_END = ("exact", "number", "choice", "math", "code", "judge")  # 0 for unfinished reasoning
_SAY_WHETHER_RIGHT = ("exact", "number", "choice", "math", "code", "length", "model")  # with any weight, or never
BUILT_IN = (*_COMPARISONS, *_OTHERS)


class RowRewards:
    """Scores completions of rows by the weighted sum of several rewards."""

    def __init__(self, configs: Sequence[RewardConfig]):
        """Raises RewardError, or SandboxError if this machine cannot run a required sandbox."""
        self._rewards = [(part_name(cfg), cfg.weight, build(cfg)) for cfg in configs]

    def score(self, prompt: Prompt, completion_text: str) -> dict[str, float]:
        """The parts by name, and their weighted sum as "reward"."""
        return self.score_many([prompt], [completion_text])[0]

    def score_many(self, prompts: Sequence[Prompt], completion_texts: Sequence[str]) -> list[dict[str, float]]:
        """Score several completions; batched rewards are called once."""
        scores: list[dict[str, float]] = [{"reward": 0.0} for _ in prompts]
        for name, weight, reward in self._rewards:
            for score, value in zip(scores, reward(prompts, completion_texts), strict=True):
                number, parts = reward_and_parts(value, name)
                if not isinstance(value, Mapping):
                    parts = {name: number}
                    if weight != 1 and len(self._rewards) == 1 and name not in _SAY_WHETHER_RIGHT:
                        parts[IS_RIGHT] = float(number >= 1)  # the weighted reward does not say it
                if IS_RIGHT in parts and IS_RIGHT in score:
                    parts[IS_RIGHT] = min(parts[IS_RIGHT], score[IS_RIGHT])
                score |= {_unused(part, score): number for part, number in parts.items()}
                score["reward"] += weight * number
        return scores


def _unused(name: str, taken: Collection[str]) -> str:
    """The name of a part, with a number if another reward has a part of this name. ``is_right`` stays."""
    numbered = (f"{name}-{count}" for count in itertools.count(2))
    return name if name == IS_RIGHT or name not in taken else next(other for other in numbered if other not in taken)


def build(cfg: RewardConfig) -> Reward:
    """One reward as a function. Raises RewardError."""
    if reason := problem(cfg):
        raise RewardError(reason)
    if cfg.sandbox:
        return _each(sandboxed.SandboxedReward(cfg))
    if cfg.function not in BUILT_IN:
        return functions.load(cfg.function, cfg.options)
    try:
        reward = _OTHERS[cfg.function](**cfg.options) if cfg.function in _OTHERS else _comparison(cfg)
        return _each(_of_finished(reward) if cfg.function in _NEED_AN_END else reward)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {cfg.function!r} with options {cfg.options}: {error}") from error


def _comparison(cfg: RewardConfig) -> Callable[[Prompt, str], float]:
    compare = _COMPARISONS[cfg.function](**cfg.options)
    if not needs_answers(cfg):
        return lambda prompt, completion: compare(completion, prompt.answer)
    return lambda prompt, completion: max(
        (compare(completion, reference) for reference in answers.references(prompt.answer)), default=0.0
    )


def _of_finished(reward: Callable[[Prompt, str], Any]) -> Callable[[Prompt, str], Any]:
    """The reward, with 0 for completions that end within their reasoning."""
    return lambda prompt, completion: 0.0 if is_unfinished(prompt.text, completion) else reward(prompt, completion)


def _each(reward: Callable[[Prompt, str], Any]) -> Reward:
    return lambda prompts, completions: list(map(reward, prompts, completions))


def problem(cfg: RewardConfig) -> str:
    """Why a reward cannot be built, without running user code; empty if it can."""
    if cfg.function not in BUILT_IN:
        if ".py:" in cfg.function:
            return functions.problem(cfg.function)
        hint = near_matches(cfg.function, BUILT_IN) or f"; there are {', '.join(BUILT_IN)}, and FILE.py:function"
        return f"no reward is called {cfg.function!r}{hint}"
    parameters = inspect.signature({**_COMPARISONS, **_OTHERS}[cfg.function]).parameters
    unknown = [name for name in cfg.options if name not in parameters]
    if unknown:
        return f"{cfg.function} has no option {unknown[0]!r} (options: {', '.join(parameters) or 'none'})"
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in cfg.options]
    if missing:
        return f"{cfg.function} needs the option {missing[0]!r}"
    return scalar.problem(cfg.options) if cfg.function == "model" else ""


def needs_answers(cfg: RewardConfig) -> bool:
    """Whether the reward compares with the reference answer of the row."""
    return cfg.function in ("exact", "number", "choice", "math")


def says_what_is_right(cfg: RewardConfig) -> bool:
    """Whether the pass rate follows from the reward."""
    return needs_answers(cfg) or cfg.function == "code"


def reference_problem(configs: Sequence[RewardConfig], answer: str) -> str:
    """Why a row's reference answer cannot be compared with; empty if it can, or if no reward compares."""
    names = [cfg.function for cfg in configs if needs_answers(cfg)]
    if not names:
        return ""
    needed = f"the reward {names[0]!r} compares with it"
    if not answers.references(answer):
        return f"has no reference answer; {needed}. Set answer_column, or remove the row"
    value = answers.decoded(answer)
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:6]))
        return f"has an object with the keys {keys} as reference answer; {needed}. Set answer_column to COLUMN.KEY"
    if (
        isinstance(value, list)
        and answers.references(answer) == (answer.strip(),)
        and {"number", "choice"}.intersection(names)
    ):
        return f"has the list {answer[:60]} as reference answer; {needed}. Alternatives are a list of texts"
    for cfg in configs:
        if cfg.function != "choice":
            continue
        letters = str(cfg.options.get("letters", answers.LETTERS))
        if not all(letters_of(text, letters.upper()) for text in answers.references(answer)):
            return (
                f"has the reference answer {answer[:60]!r}, and the reward 'choice' compares letters of {letters}. "
                "Write the letter, or set options.letters; an integer is read beside a list in the column 'choices'"
            )
    if set(names) == {"number"} and not any(number_of(text) is not None for text in answers.references(answer)):
        return (
            f"has the reference answer {answer[:60]!r}, and the reward 'number' reads no single number in it. "
            "Use the reward math or exact, or remove the row"
        )
    return ""


def takes_batches(configs: Sequence[RewardConfig]) -> bool:
    """Whether one of the rewards scores several completions in one call."""
    return any(
        not cfg.sandbox and cfg.function not in BUILT_IN and functions.takes_batches(cfg.function) for cfg in configs
    )


def needs_sandbox(cfg: RewardConfig) -> bool:
    """Whether the reward runs programs in a sandbox."""
    return cfg.sandbox or cfg.function == "code"


def part_name(cfg: RewardConfig) -> str:
    """The name of a reward in metrics and records."""
    return cfg.function if cfg.function in BUILT_IN else cfg.function.rpartition(":")[2]


def reward_and_parts(value: Any, name: str) -> tuple[float, dict[str, float]]:
    """(reward, parts) of a number or a dict, whose reward is the key "reward", otherwise the sum. The part "is_right"
    is True, False, 1 or 0, and is not in the sum. Raises TypeError for other values."""
    if not isinstance(value, Mapping):
        return as_number(value, name), {}
    is_right = value.get(IS_RIGHT)
    if is_right is not None and is_right not in (0, 1):
        raise TypeError(f"{name}[{IS_RIGHT!r}] is {is_right!r}; it says whether the answer is right: True or False")
    if value.keys() <= {IS_RIGHT}:
        raise TypeError(f"{name} returned {dict(value)!r} and no reward; add the part 'reward'")
    parts = {str(key): as_number(part, f"{name}[{key!r}]") for key, part in value.items() if key != IS_RIGHT}
    reward = parts.pop("reward", None)
    reward = sum(parts.values()) if reward is None else reward
    return reward, parts if is_right is None else {**parts, IS_RIGHT: float(is_right)}


def as_number(value: Any, name: str) -> float:
    """Convert to float. Raises TypeError for non-numbers, including True and False, also of NumPy and torch."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not hasattr(plain, "__float__"):
        raise TypeError(f"{name} returned {value!r}, which is not a number; return a number or a dict of numbers")
    return float(plain)
