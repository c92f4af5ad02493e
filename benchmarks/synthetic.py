"""A language that any model learns in a hundred steps, and whose entropy is known: data for measurements of precision.

A sequence is a walk over some tokens of the vocabulary. Each token has a few successors of unequal probability, and
which of two tables of them applies depends on the token before: a bigram model cannot learn it, a layer of attention
can. What a trained model says about such sequences has the structure of real text where it matters here, a few likely
tokens and a long tail, rather than the flat noise of random weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fp8rl.types import Sample

_DECAY = 0.55  # probability of a successor against the one before it


@dataclass(frozen=True)
class Language:
    """Deterministic in its fields."""

    vocab_size: int
    num_words: int = 256  # tokens that occur
    num_successors: int = 6
    seed: int = 0

    @property
    def entropy(self) -> float:
        """Nats per token: the loss of a perfect model behind the second token of a sequence."""
        p = self._probabilities()
        return float(-(p * np.log(p)).sum())

    def walks(self, count: int, length: int, *, seed: int) -> np.ndarray:
        """Token ids, int64 [count, length], another set for each seed."""
        own, draw = np.random.default_rng(self.seed), np.random.default_rng((self.seed, seed))
        num_words = min(self.num_words, self.vocab_size // 2)
        words = own.choice(np.arange(8, self.vocab_size), num_words, replace=False)  # special tokens come first
        tables = own.integers(num_words, size=(2, num_words, self.num_successors))
        ranks = draw.choice(self.num_successors, (length, count), p=self._probabilities())
        walk = np.zeros((length, count), dtype=np.int64)
        walk[0] = draw.integers(num_words, size=count)
        before = np.zeros(count, dtype=np.int64)
        for t in range(1, length):
            walk[t] = tables[before % 2, walk[t - 1], ranks[t]]
            before = walk[t - 1]
        return words[walk.T]

    def samples(self, count: int, length: int, *, seed: int) -> list[Sample]:
        """Supervised samples with loss on all tokens but the first."""
        walks = self.walks(count, length, seed=seed).tolist()
        return [as_sample(f"walk-{seed}-{i}", walk, 1, (0.0,) * (length - 1)) for i, walk in enumerate(walks)]

    def _probabilities(self) -> np.ndarray:
        weights = _DECAY ** np.arange(self.num_successors)
        return weights / weights.sum()


def as_sample(
    name: str, token_ids: Sequence[int], num_prompt_tokens: int, rollout_logprobs: Sequence[float]
) -> Sample:
    """Prompt and completion, with the log-probabilities of the completion's tokens."""
    num_completion = len(token_ids) - num_prompt_tokens
    if len(rollout_logprobs) != num_completion or not all(map(math.isfinite, rollout_logprobs)):
        raise ValueError(f"{name}: {num_completion} completion tokens need as many finite log-probabilities")
    zeros = (0.0,) * num_prompt_tokens
    return Sample(
        name=name, environment="synthetic", token_ids=tuple(token_ids), num_prompt_tokens=num_prompt_tokens,
        loss_mask=(False,) * num_prompt_tokens + (True,) * num_completion,
        rollout_logprobs=(*zeros, *rollout_logprobs), advantages=(0.0,) * len(token_ids),
    )  # fmt: skip
