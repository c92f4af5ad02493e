"""Tokenized prompts of all sources in one stream, and a fixed held-out set.

Every prompt is a pure function of (seed, position), so a run resumes by setting the position. Generators draw a random
problem at each position. Rows appear once per epoch, shuffled by seed and epoch. Several sources share the positions
by weight. A prompt that is too long, empty or cannot be encoded is skipped; its position counts.

One eighth of a generator's questions is held out for evaluation, independent of the seed. ``EnvironmentConfig.eval``
names held-out rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.columns import ColumnError, Columns, find_columns
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.dropped import DroppedLog, RowError, row_errors
from megatron_fp8rl.data.rows import Rows, data_files, open_rows
from megatron_fp8rl.data.tokenizer import encode, end_ids
from megatron_fp8rl.data.unchanged import DataFile, digest_of
from megatron_fp8rl.envs.environment import Problem, build_environment, environments_by_key, render
from megatron_fp8rl.envs.rewards.configured import reference_problem
from megatron_fp8rl.envs.source_kind import has_rows, is_supervised
from megatron_fp8rl.types import Prompt

_HELD_OUT_ONE_IN = 8
_NUM_INDICES = 2**31
_MAX_DRAWS = 1000  # draws to find one problem of the requested split; random failure has probability 1e-58
_BLOCK = 1024  # positions within which each source has exactly its share
_NUM_TRIED = 100  # rows tried to find the columns


class PromptTooLongError(RowError):
    """A prompt exceeds sampling.max_prompt_tokens."""


class TooFewProblemsError(ValueError):
    """All questions of an environment are in one split: training or evaluation."""


class RowSource:
    """The rows of one source as problems."""

    def __init__(self, cfg: EnvironmentConfig, dataset: str, *, is_learned: bool = False):
        """``dataset``: ``cfg.dataset``, or ``cfg.eval``. ``is_learned``: rows are learned as they are. Raises
        FileNotFoundError, ColumnError or ValueError."""
        self.rows: Rows = open_rows(dataset, cfg.options)
        self.dataset = dataset
        if not len(self.rows):
            raise ValueError(f"{dataset} has no rows")
        self.columns = self._find_columns(cfg, is_learned)
        features = getattr(self.rows, "features", None) or {}  # of a Parquet file, or of the hub
        self._is_fp32 = getattr(features.get(self.columns.answer), "dtype", "") == "float32"

    def __len__(self) -> int:
        return len(self.rows)

    def identity(self) -> str:
        """Describe the rows so that a resume notices others under the same name."""
        files = [DataFile(path) for path in data_files(self.dataset)]
        return f"{len(self.rows):,} rows" + (f" (digest {digest_of(files)})" if files else "")

    def problem(self, index: int) -> Problem:
        """The problem of a row. Raises RowError if the row is unusable."""
        with row_errors():
            row, name = self.rows[index], self.columns.answer
            if self._is_fp32 and name is not None and row[name] is not None and abs(row[name]) < 1 << 24:
                row = {**row, name: float(str(np.float32(row[name])))}  # 0.1 instead of 0.10000000149011612
            return self.columns.problem(row)

    def order(self, seed: str, ordinal: int) -> int:
        """The row index for an ordinal; every ``len(self)`` ordinals (one epoch) contain each row once."""
        epoch, place = divmod(ordinal, len(self.rows))
        return int(_permutation(len(self.rows), f"{seed}/epoch {epoch}")[place])

    def _find_columns(self, cfg: EnvironmentConfig, is_learned: bool) -> Columns:
        """The columns of the first usable row."""
        failure: ValueError | None = None
        for index in range(min(_NUM_TRIED, len(self.rows))):
            try:
                with row_errors():
                    row = self.rows[index]
                return find_columns(
                    row,
                    prompt=cfg.prompt_column,
                    answer=cfg.answer_column,
                    template=cfg.template,
                    is_choice=any(reward.function == "choice" for reward in cfg.rewards),
                    is_learned=is_learned,
                )
            except (RowError, ColumnError) as error:
                failure = failure or type(error)(f"{self.dataset}: row {index}: {error}")
        raise failure


class ProblemSource:
    """Draws problems from all sources by weight and renders them as prompts."""

    def __init__(
        self,
        data: DataConfig,
        sampling: SamplingConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        seed: int,
        learns_rows: bool = False,
    ):
        num_ids = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))  # ids may have gaps
        if num_ids > vocab_size:
            raise ValueError(
                f"the tokenizer in {data.tokenizer!r} has {num_ids} tokens, "
                f"model.vocab_size is only {vocab_size}; "
                "resize the embedding (resize_token_embeddings), or remove the added tokens"
            )
        wanted = data.chat_template
        if wanted and not tokenizer.chat_template:
            raise ValueError(f"data.chat_template is set, but tokenizer {data.tokenizer!r} has no chat template")
        self._uses_chat = bool(tokenizer.chat_template) if wanted is None else wanted
        stop_ids = frozenset({*end_ids(tokenizer), *sampling.stop_token_ids})
        self.chat_format = ChatFormat(tokenizer, self._uses_chat, data.chat_template_arguments, stop_ids)
        self.tokenizer = tokenizer
        self._max_prompt_tokens, self._seed = sampling.max_prompt_tokens, seed
        self.configs = environments_by_key(data.environments)
        rows = {key: env for key, env in self.configs.items() if has_rows(env.dataset)}
        self.rows = {key: RowSource(env, env.dataset, is_learned=learns_rows) for key, env in rows.items()}
        held_out = {key: env for key, env in rows.items() if env.eval}
        self.held_out_rows = {key: RowSource(env, env.eval, is_learned=learns_rows) for key, env in held_out.items()}
        self.environments = {key: build_environment(env) for key, env in self.configs.items() if key not in rows}

    @classmethod
    def from_run(cls, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ProblemSource:
        return cls(
            cfg.data,
            cfg.sampling,
            tokenizer,
            vocab_size=cfg.model.vocab_size,
            seed=cfg.seed,
            learns_rows=is_supervised(cfg),
        )

    def draw(self, stream: str, position: int) -> tuple[str, Problem]:
        """(source, training problem) at a position of a named stream. Raises RowError for an unusable row."""
        rng = random.Random(f"{self._seed}/{stream}/{position}")
        if not self.rows:
            key = rng.choices(list(self.configs), weights=[cfg.weight for cfg in self.configs.values()])[0]
            return key, self._generated(key, rng)
        key, ordinal = self._turn(stream, position)
        if key not in self.rows:
            return key, self._generated(key, rng)
        source = self.rows[key]
        row = source.order(f"{self._seed}/{stream}/{key}", ordinal)
        try:
            problem = source.problem(row)
        except RowError as error:
            name = f"row {row} of {key}"
            raise RowError(f"{name} {error}", row=name) from None
        return key, replace(problem, metadata={**problem.metadata, "row": row})

    def any_problem(self, key: str, rng: random.Random) -> Problem:
        """A random problem of a source, from either split. Raises RowError."""
        if key in self.rows:
            return self.rows[key].problem(rng.randrange(len(self.rows[key])))
        return self.problem_at(key, rng.randrange(_NUM_INDICES))

    def problem_at(self, key: str, index: int) -> Problem:
        """The problem of a row or generator index. Raises RowError if it is unusable."""
        if key in self.rows:
            return self.rows[key].problem(index)
        with row_errors():
            return self.environments[key].make_problem(index)

    def held_out(self, key: str, count: int) -> list[Problem]:
        """Up to ``count`` distinct held-out problems, the same for every seed. Rows without ``eval`` have none."""
        if key in self.rows:
            return self._held_out_rows(key, count)
        rng = random.Random(f"held out/{key}")
        problems: dict[str, Problem] = {}
        misses = 0
        while len(problems) < count and misses < _MAX_DRAWS:
            try:
                problem = self.problem_at(key, rng.randrange(_NUM_INDICES))
            except RowError:
                misses += 1
                continue
            is_new = is_held_out(problem.question) and problem.question not in problems
            misses = 0 if is_new else misses + 1
            if is_new:
                problems[problem.question] = problem
        if not problems:
            raise TooFewProblemsError(f"environment {key}: no problem to hold out; {_variety(key)}")
        return list(problems.values())

    def prompt(self, prompt_id: str, key: str, problem: Problem) -> Prompt:
        """Render and tokenize a problem. Raises RowError, for instance PromptTooLongError, if it cannot be used."""
        with row_errors():
            if reason := reference_problem(self.configs[key].rewards, problem.answer):
                raise RowError(reason)
            messages = self._messages(key, problem)
            text = self._text(messages)
            # A chat template writes the special tokens itself.
            token_ids = encode(self.tokenizer, text, add_special_tokens=not self._uses_chat)
            if token_ids[:2] == (self.tokenizer.bos_token_id,) * 2:
                bos = self.tokenizer.bos_token
                raise RowError(
                    f"begins with {bos}, which the tokenizer or the chat template adds; remove it from the row"
                )
            json.dumps([problem.answer, problem.metadata], ensure_ascii=False).encode()  # rejects lone surrogates
        limit = self._max_prompt_tokens
        if len(token_ids) > limit:
            raise PromptTooLongError(
                f"prompt {prompt_id} has {len(token_ids)} tokens, more than sampling.max_prompt_tokens = {limit}; "
                f"raise it, or shorten the problems of {key} by its options or template: {text[:300]!r}"
            )
        return Prompt(
            prompt_id=prompt_id,
            environment=key,
            token_ids=token_ids,
            text=text,
            answer=problem.answer,
            metadata=problem.metadata,
            messages=tuple(messages) if self._uses_chat else (),
        )

    def _messages(self, key: str, problem: Problem) -> list[dict[str, str]]:
        cfg = self.configs[key]
        messages = [*problem.messages[:-1], {"role": "user", "content": render(cfg.template, problem)}]
        if cfg.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": cfg.system_prompt})
        return messages

    def _text(self, messages: list[dict[str, str]]) -> str:
        if self._uses_chat:
            return self.chat_format.render(messages, ())
        if len(messages) > 1:
            raise RowError("has several messages, or a system prompt, and needs a tokenizer with a chat template")
        return messages[0]["content"]

    def _generated(self, key: str, rng: random.Random) -> Problem:
        for _ in range(_MAX_DRAWS):
            problem = self.problem_at(key, rng.randrange(_NUM_INDICES))
            if not is_held_out(problem.question):
                return problem
        raise TooFewProblemsError(f"environment {key}: {_MAX_DRAWS} draws gave no problem to train on; {_variety(key)}")

    def _turn(self, stream: str, position: int) -> tuple[str, int]:
        """(source of a position, number of earlier positions of that source)."""
        block, place = divmod(position, _BLOCK)
        shares = apportion(_BLOCK, {key: cfg.weight for key, cfg in self.configs.items()})
        turns = _turns(tuple(shares.values()), f"{self._seed}/{stream}/block {block}")
        index = int(turns[place])
        key = list(shares)[index]
        return key, block * shares[key] + int((turns[:place] == index).sum())

    def _held_out_rows(self, key: str, count: int) -> list[Problem]:
        source, problems = self.held_out_rows.get(key), []
        for ordinal in range(0 if source is None else len(source)):
            if len(problems) == count:
                break
            with suppress(RowError):
                problems.append(source.problem(source.order("held out", ordinal)))
        return problems


class PromptStream:
    """Training prompts in order, starting at ``position``; set ``position`` to resume."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, position: int = 0, log: bool = False):
        """``log``: write skipped prompts to ``data/dropped.jsonl`` in the run's folder; set it on one rank only."""
        self._source = ProblemSource.from_run(cfg, tokenizer)
        self._dropped = DroppedLog(Path(cfg.run_dir) if log else None, cfg.data.max_dropped)
        self.chat_format = self._source.chat_format
        # By source: the rows at the start of the run, for a later resume.
        self.row_identities = {key: source.identity() for key, source in self._source.rows.items()}
        self._next = position
        self._pending: list[int] = []  # positions drawn but not trained before a resume

    @property
    def num_dropped(self) -> int:
        """Prompts skipped by this stream so far."""
        return self._dropped.num_dropped

    @property
    def position(self) -> Any:
        """Position of the next prompt. If groups train out of order, also the pending positions."""
        return {"next": self._next, "pending": list(self._pending)} if self._pending else self._next

    @position.setter
    def position(self, value: Any) -> None:
        is_whole = not isinstance(value, dict)
        self._next, self._pending = (value, []) if is_whole else (value["next"], list(value["pending"]))

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return the next ``count`` training prompts and advance the position. Ids are "<environment>/<position>".
        Raises TooManyDroppedError if significantly more than ``data.max_dropped`` of the prompts are skipped."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            position = self._pending.pop(0) if self._pending else self._next
            self._next = max(self._next, position + 1)
            if (prompt := self._at(position)) is not None:
                prompts.append(prompt)
        return prompts

    def upcoming(self, count: int) -> list[Prompt]:
        """Return the next prompts without advancing the position."""
        position = self.position
        prompts = self.next_prompts(count)
        self.position = position
        return prompts

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Held-out prompts of all sources by weight, the same for every seed. Ids are "<environment>/eval-<i>". Fewer
        than ``count`` if a source has fewer distinct held-out questions, or some cannot be encoded."""
        source = self._source
        weights = {key: cfg.weight for key, cfg in source.configs.items() if key not in source.rows}
        weights |= {key: source.configs[key].weight for key in source.held_out_rows}
        prompts = []
        for key, share in apportion(count, weights).items() if weights else ():
            for i, problem in enumerate(source.held_out(key, share) if share else ()):
                try:
                    prompts.append(source.prompt(f"{key}/eval-{i}", key, problem))
                except RowError as error:
                    self._dropped.add(f"{key}/eval-{i}", str(error))
        return prompts

    def _at(self, position: int) -> Prompt | None:
        name = f"position {position}"
        try:
            key, problem = self._source.draw("train", position)
            name = f"row {problem.metadata['row']} of {key}" if "row" in problem.metadata else f"{key}/{position}"
            prompt = self._source.prompt(f"{key}/{position}", key, problem)
        except RowError as error:
            self._dropped.add(error.row or name, str(error))
            return None
        self._dropped.num_kept += 1
        return prompt


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: str) -> np.ndarray:
    return np.random.default_rng(_number(seed)).permutation(np.arange(size, dtype=np.uint32))


@functools.lru_cache(maxsize=8)
def _turns(shares: tuple[int, ...], seed: str) -> np.ndarray:
    return np.random.default_rng(_number(seed)).permutation(np.repeat(np.arange(len(shares)), shares))


def _number(seed: str) -> int:
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest())


def position_after(prompts: Iterable[Prompt]) -> int:
    """The stream position after these prompts, from their ids."""
    return 1 + max(int(prompt.prompt_id.rpartition("/")[2]) for prompt in prompts)


def is_held_out(question: str) -> bool:
    """Whether a question is held out for evaluation, in every run."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % _HELD_OUT_ONE_IN == 0


def apportion(count: int, weights: dict[str, float]) -> dict[str, int]:
    """Integer shares of ``count`` in proportion to ``weights`` (largest remainder method)."""
    total = sum(weights.values())
    quotas = {key: count * weight / total for key, weight in weights.items()}
    shares = {key: int(quota) for key, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda key: shares[key] - quotas[key])
    for key in by_remainder[: count - sum(shares.values())]:
        shares[key] += 1
    return shares


def _variety(key: str) -> str:
    return f"the options of {key} produce too few distinct questions; widen them"
