"""Supervised samples for the warm start: prompt, reference answer, end token. Pure.

The end token is the one that the chat template writes after an answer, or else the tokenizer's EOS token.
"""

import random
from contextlib import suppress
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.dropped import DroppedLog, RowError
from megatron_fp8rl.data.prompts import ProblemSource, apportion
from megatron_fp8rl.data.tokenizer import encode, end_ids
from megatron_fp8rl.envs.environment import Problem
from megatron_fp8rl.envs.rewards.answers import decoded, references
from megatron_fp8rl.envs.rewards.configured import needs_answers
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Segment


class SftSource:
    """Batches of ``warm_start.batch_size`` supervised samples, a pure function of (seed, step)."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase):
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._source = ProblemSource.from_run(cfg, tokenizer)
        chat = self._source.chat_format
        closing_id = chat.closing_id()
        self._end_id = closing_id if closing_id in chat.stop_ids else end_ids(tokenizer)[0]
        self._dropped = DroppedLog(None, cfg.data.max_dropped)

    def samples(self, step: int) -> list[Sample]:
        """The batch of a step; the loss covers answer and end token.

        Skips problems without a reference answer, or with one longer than sampling.max_completion_tokens. Raises
        TooManyDroppedError, or RowError if no problem is left.
        """
        size, batch, failure = self._cfg.warm_start.batch_size, [], None
        for position in range(step * size, (step + 1) * size):
            try:
                batch.append(self._demonstration(position))
                self._dropped.num_kept += 1
            except RowError as error:
                failure = error
                self._dropped.add(f"position {position}", str(error))
        if failure is not None and not batch:
            raise failure
        return batch

    def held_out(self, count: int) -> list[Sample]:
        """At most ``count`` supervised samples of held-out problems with correct answers, the same for every seed."""
        shares = apportion(count, {key: cfg.weight for key, cfg in self._source.configs.items()})
        samples = []
        for key, share in shares.items():
            for i, problem in enumerate(self._source.held_out(key, share) if share else ()):
                with suppress(RowError):
                    samples.append(self._sample(f"{key}/eval-{i}", key, problem))
        return samples

    def _demonstration(self, position: int) -> Sample:
        """A training sample. A fraction ``warm_start.wrong_answers`` gets the answer of another problem."""
        key, problem = self._source.draw("sft", position)
        rng = random.Random(f"{self._cfg.seed}/wrong answers/{position}")
        if rng.random() < self._cfg.warm_start.wrong_answers:
            other = self._source.any_problem(key, rng)
            problem = replace(problem, answer=other.answer)
        return self._sample(f"{key}/sft-{position}", key, problem)

    def _sample(self, name: str, key: str, problem: Problem) -> Sample:
        prompt = self._source.prompt(name, key, problem)
        text = problem.answer
        if any(map(needs_answers, self._source.configs[key].rewards)):
            text = next(iter(references(text)), "")  # the first of several accepted answers
        elif has_rows(self._source.configs[key].dataset) and _is_list_of_texts(text):
            raise RowError(
                f"problem {name} has the list {text[:60]} as reference answer, and no reward compares with it, so its "
                "members may be alternatives or one answer; set answer_column to a text, or warm_start.steps to 0"
            )
        if not text:
            raise RowError(f"problem {name} has no reference answer to learn from; set warm_start.steps to 0")
        answer = (*encode(self._tokenizer, text, add_special_tokens=False), self._end_id)
        limit = self._cfg.sampling.max_completion_tokens
        if len(answer) > limit:
            raise RowError(
                f"the answer of {name} has {len(answer)} tokens with its end token, more than "
                f"sampling.max_completion_tokens = {limit}: {text!r}"
            )
        segments = Segment(TokenArray.from_ids(prompt.token_ids)), Segment(TokenArray.from_ids(answer), is_trained=True)
        return Sample(name=name, environment=key, segments=segments)


def _is_list_of_texts(answer: str) -> bool:
    value = decoded(answer)
    return isinstance(value, list) and any(isinstance(member, str) for member in value)
