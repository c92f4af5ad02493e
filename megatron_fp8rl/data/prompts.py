"""Tokenized prompts of all environments in one stream, and a fixed held-out set. Runs on rank 0.

Every prompt is a pure function of (seed, position): a run resumes by setting the position, and nothing is stored.

Whether a problem is held out for evaluation depends only on its question, not on the seed: one eighth of all questions
are, in every run. A warm start with one seed can therefore never have trained on the evaluation problems of a run with
another seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.tokenizer import UnknownCharacterError, encode
from megatron_fp8rl.envs.environment import Problem, build_environment, environments_by_key, render
from megatron_fp8rl.types import Prompt

_HELD_OUT_ONE_IN = 8
_NUM_INDICES = 2**31
_MAX_DRAWS = 1000  # draws to find one problem of the requested side; by chance alone a miss has probability 1e-58


class PromptTooLongError(ValueError):
    """A prompt with more tokens than the configuration allows."""


class TooFewProblemsError(ValueError):
    """An environment whose questions all fall on one side of the split between training and evaluation."""


class ProblemSource:
    """The environments of a configuration, drawn by weight, and the rendering of their problems as prompts."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase):
        if len(tokenizer) > cfg.model.vocab_size:
            raise ValueError(
                f"data.tokenizer = {cfg.data.tokenizer!r} has {len(tokenizer)} tokens, model.vocab_size is only "
                f"{cfg.model.vocab_size}"
            )
        if cfg.data.chat_template and not tokenizer.chat_template:
            raise ValueError(f"data.chat_template is set, but tokenizer {cfg.data.tokenizer!r} has no chat template")
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.configs = environments_by_key(cfg.data.environments)
        self.environments = {key: build_environment(env_cfg) for key, env_cfg in self.configs.items()}

    def draw(self, stream: str, position: int) -> tuple[str, Problem]:
        """(environment, training problem) at a position of a named stream."""
        rng = random.Random(f"{self.cfg.seed}/{stream}/{position}")
        keys = list(self.configs)
        key = rng.choices(keys, weights=[self.configs[k].weight for k in keys])[0]
        for _ in range(_MAX_DRAWS):
            problem = self.environments[key].make_problem(rng.randrange(_NUM_INDICES))
            if not is_held_out(problem.question):
                return key, problem
        raise TooFewProblemsError(f"environment {key}: {_MAX_DRAWS} draws gave no problem to train on; {_variety(key)}")

    def held_out(self, key: str, count: int) -> list[Problem]:
        """Up to ``count`` different held-out problems of an environment, at least one; the same for every seed."""
        rng = random.Random(f"held out/{key}")
        found: dict[str, Problem] = {}
        misses = 0
        while len(found) < count and misses < _MAX_DRAWS:
            problem = self.environments[key].make_problem(rng.randrange(_NUM_INDICES))
            is_new = is_held_out(problem.question) and problem.question not in found
            misses = 0 if is_new else misses + 1
            if is_new:
                found[problem.question] = problem
        if not found:
            raise TooFewProblemsError(f"environment {key}: no problem to hold out; {_variety(key)}")
        return list(found.values())

    def prompt(self, prompt_id: str, key: str, problem: Problem) -> Prompt:
        """Render and tokenize a problem.

        Raises:
            PromptTooLongError, UnknownCharacterError: with the prompt's id.
        """
        text = render(self.configs[key].template, problem)
        use_chat = self.cfg.data.chat_template
        if use_chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        try:
            # A chat template writes the special tokens itself.
            token_ids = encode(self.tokenizer, text, add_special_tokens=not use_chat)
        except UnknownCharacterError as error:
            raise UnknownCharacterError(f"prompt {prompt_id}: {error}") from None
        limit = self.cfg.rollout.max_prompt_tokens
        if len(token_ids) > limit:
            raise PromptTooLongError(
                f"prompt {prompt_id} has {len(token_ids)} tokens, more than rollout.max_prompt_tokens = {limit}; raise "
                f"it, or make the problems of {key} shorter through its options or template: {text!r}"
            )
        return Prompt(
            prompt_id=prompt_id,
            environment=key,
            token_ids=token_ids,
            text=text,
            answer=problem.answer,
            metadata=problem.metadata,
        )


class PromptStream:
    """Training prompts in order, starting at ``position``; set ``position`` to resume."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, position: int = 0):
        self._source = ProblemSource(cfg, tokenizer)
        self.position = position  # of the next prompt

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next ``count`` training prompts; advances the position. Ids read "<environment>/<position>"."""
        prompts = []
        for position in range(self.position, self.position + count):
            key, problem = self._source.draw("train", position)
            prompts.append(self._source.prompt(f"{key}/{position}", key, problem))
        self.position += count
        return prompts

    def upcoming(self, count: int) -> list[Prompt]:
        """The prompts that :meth:`next_prompts` will return; the position stays."""
        position = self.position
        prompts = self.next_prompts(count)
        self.position = position
        return prompts

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Held-out prompts, shared out by weight; never a training question, and the same for every seed.

        Fewer than ``count`` if an environment has fewer distinct held-out questions. Ids read "<environment>/eval-<i>".
        """
        weights = {key: cfg.weight for key, cfg in self._source.configs.items()}
        return [
            self._source.prompt(f"{key}/eval-{i}", key, problem)
            for key, share in apportion(count, weights).items()
            if share
            for i, problem in enumerate(self._source.held_out(key, share))
        ]


def position_after(prompts: Iterable[Prompt]) -> int:
    """Where a :class:`PromptStream` continues after these prompts of another one, by their ids."""
    return 1 + max(int(prompt.prompt_id.rpartition("/")[2]) for prompt in prompts)


def is_held_out(question: str) -> bool:
    """Whether a question is held out for evaluation, in every run."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % _HELD_OUT_ONE_IN == 0


def apportion(count: int, weights: dict[str, float]) -> dict[str, int]:
    """Whole shares of ``count`` in proportion to ``weights`` (largest remainders), in the order of the keys."""
    total = sum(weights.values())
    quotas = {key: count * weight / total for key, weight in weights.items()}
    shares = {key: int(quota) for key, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda key: shares[key] - quotas[key])
    for key in by_remainder[: count - sum(shares.values())]:
        shares[key] += 1
    return shares


def _variety(key: str) -> str:
    return f"the options of {key} leave too few different questions; widen them"
