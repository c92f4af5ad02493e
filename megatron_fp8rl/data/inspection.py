"""What the sources of a run hold, before it starts: rows, columns, rendered prompts, lengths, and what is left out.

In: a configuration and its tokenizer. Out: a :class:`SourceReport` for each source. Runs in ``doctor``, ``launch`` and
on rank 0 before engines start. All rows of small sources are rendered and tokenized, of larger ones an evenly spaced
sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.columns import Columns
from megatron_fp8rl.data.dropped import RowError, TooManyDroppedError
from megatron_fp8rl.data.prompts import ProblemSource
from megatron_fp8rl.envs.environment import environments_by_key
from megatron_fp8rl.envs.rewards.configured import needs_answers
from megatron_fp8rl.envs.rewards.scalar import is_served
from megatron_fp8rl.envs.scoring import ScorePool, ScorePoolError
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.types import Prompt

_ALL_UP_TO = 20_000  # rows; of more, this many are looked at:
_SAMPLE = 2_000
_GENERATED = 64  # problems of a generator or class
_COMPARED_UP_TO = 1_000_000  # training rows that are compared with the held-out ones
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One source."""

    key: str
    dataset: str
    num_rows: int | None  # None: it generates problems
    num_held_out: int | None
    columns: Columns | None
    lengths: tuple[int, ...]  # tokens of the prompts that were looked at and can be used
    dropped: tuple[tuple[str, str], ...]  # (row, reason)
    num_equal: int  # held-out questions that are also training questions
    prompts: tuple[Prompt, ...]  # the first ones

    @property
    def num_seen(self) -> int:
        return len(self.lengths) + len(self.dropped)

    def lines(self) -> Iterator[str]:
        """For people: what was found, a histogram of lengths, and the first prompt."""
        rows = "generated problems" if self.num_rows is None else f"{self.num_rows:,} rows"
        held_out = "" if not self.num_held_out else f", {self.num_held_out:,} held out"
        yield f"{self.key}: {rows}{held_out} ({self.dataset})"
        if self.columns is not None:
            yield f"  prompt in {self.columns.prompt!r}, answer in {self.columns.answer!r}"
        if self.lengths:
            low, high = min(self.lengths), max(self.lengths)
            middle = sorted(self.lengths)[len(self.lengths) // 2]
            yield f"  prompt tokens {low} {_histogram(self.lengths)} {high}, median {middle}, of {self.num_seen:,} looked at"
        for row, reason in self.dropped[:3]:
            yield f"  left out: {row}: {reason[:160]}"
        if len(self.dropped) > 3:
            yield f"  left out: {len(self.dropped) - 3:,} more of {self.num_seen:,}"
        if self.num_equal:
            yield f"  {self.num_equal:,} of the held-out questions are training questions, too"
        for prompt in self.prompts[:1]:
            answer = f" -> {prompt.answer[:60]!r}" if prompt.answer else " (no reference answer)"
            yield f"  first: {prompt.text[-160:]!r}{answer}"


def inspect_sources(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[SourceReport]:
    """Look at every source. Raises what opening or rendering one raises, with its field."""
    source = ProblemSource(cfg, tokenizer)
    return [_inspect(source, key) for key in source.configs]


def require_usable(reports: Sequence[SourceReport], max_dropped: float) -> None:
    """Raise TooManyDroppedError if a source has more than this fraction of prompts that cannot be used."""
    for report in reports:
        allowed = max_dropped * report.num_seen
        if report.num_rows != report.num_seen:  # a sample, which by chance has more
            allowed += 3 * math.sqrt(allowed)
        if len(report.dropped) > allowed:
            row, reason = report.dropped[0]
            raise TooManyDroppedError(
                f"{report.dataset}: {len(report.dropped):,} of {report.num_seen:,} prompts cannot be used, more than "
                f"data.max_dropped = {max_dropped:g}. The first one, {row}: {reason}. Mend the data, raise "
                "sampling.max_prompt_tokens, or raise data.max_dropped"
            )


@dataclass(frozen=True, kw_only=True)
class RewardCheck:
    """What the scorer of one source gives to reference answers and to empty ones."""

    key: str
    reference: tuple[float, ...]  # of the reports' prompts that have a reference answer
    empty: tuple[float, ...]  # of the same prompts
    failure: str  # the first score that failed; empty if none did
    compares: bool = False  # a reward compares with reference answers

    def warnings(self) -> list[str]:
        """What looks wrong, in sentences."""
        found = []
        if self.failure:
            found.append(f"{self.key}: {self.failure}")
        if not self.reference and self.compares and not self.failure:
            found.append(f"{self.key}: its reward compares with reference answers, and the first rows have none")
        if self.reference and max(self.reference) <= 0:
            found.append(f"{self.key}: no reference answer is rewarded; the reward or the answer column is wrong")
        elif self.reference and min(self.reference) <= 0:
            share = sum(score <= 0 for score in self.reference) / len(self.reference)
            found.append(f"{self.key}: {share:.0%} of the reference answers are not rewarded")
        if self.empty and max(self.empty) > 0 and (not self.reference or max(self.empty) >= max(self.reference)):
            found.append(f"{self.key}: an empty answer is rewarded by {max(self.empty):g}, as much as a right one")
        return found

    def line(self) -> str:
        """For people."""
        if not self.reference:
            return f"{self.key}: no reference answer to score"
        means = (sum(scores) / len(scores) for scores in (self.reference, self.empty))
        return "{}: reference answers score {:.3g}, empty ones {:.3g} (means of {})".format(
            self.key, *means, len(self.reference)
        )


def check_rewards(cfg: RunConfig, reports: Sequence[SourceReport]) -> list[RewardCheck]:
    """Score reference answers and empty ones of the reports' prompts, in a score worker with the run's deadline. The
    reward models that the run serves do not answer yet, and sources with no other reward are left out."""
    found = []
    keyed = environments_by_key(cfg.data.environments)
    now = {key: replace(one, rewards=tuple(r for r in one.rewards if not is_served(r))) for key, one in keyed.items()}
    now = {key: one for key, one in now.items() if one.rewards or not has_rows(one.dataset)}
    with ScorePool(now, num_workers=1, deadline_s=cfg.scoring.deadline_s) as pool:
        for report in reports:
            if report.key not in now:
                continue
            prompts = [prompt for prompt in report.prompts if prompt.answer]
            asked = [(pool.submit(prompt, prompt.answer), pool.submit(prompt, "")) for prompt in prompts]
            try:
                scores = [(own.result(), empty.result()) for own, empty in asked]
            except ScorePoolError as error:
                found.append(RewardCheck(key=report.key, reference=(), empty=(), failure=str(error)))
                continue
            failure = next((score.detail for pair in scores for score in pair if score.status == "score_failed"), "")
            own, empty = zip(*scores, strict=True) if scores else ((), ())
            found.append(
                RewardCheck(
                    key=report.key,
                    reference=tuple(score.reward for score in own),
                    empty=tuple(score.reward for score in empty),
                    failure=failure,
                    compares=any(map(needs_answers, keyed[report.key].rewards)),
                )
            )
    return found


def _inspect(source: ProblemSource, key: str) -> SourceReport:
    lengths: list[int] = []
    dropped: list[tuple[str, str]] = []
    prompts: list[Prompt] = []
    for name, index in _looked_at(source, key):
        try:
            prompt = source.prompt(name, key, source.problem_at(key, index))
        except RowError as error:
            dropped.append((name, str(error)))
            continue
        lengths.append(len(prompt.token_ids))
        if len(prompts) < 8:
            prompts.append(prompt)
    rows, held_out = source.rows.get(key), source.held_out_rows.get(key)
    return SourceReport(
        key=key,
        dataset=source.configs[key].dataset,
        num_rows=None if rows is None else len(rows),
        num_held_out=None if held_out is None else len(held_out),
        columns=None if rows is None else rows.columns,
        lengths=tuple(lengths),
        dropped=tuple(dropped),
        num_equal=_num_equal(source, key),
        prompts=tuple(prompts),
    )


def _looked_at(source: ProblemSource, key: str) -> Iterator[tuple[str, int]]:
    if key not in source.rows:
        rng = random.Random(f"inspection/{key}")
        yield from ((f"problem {index} of {key}", index) for index in (rng.randrange(2**31) for _ in range(_GENERATED)))
        return
    num_rows = len(source.rows[key])
    step = 1 if num_rows <= _ALL_UP_TO else num_rows / _SAMPLE
    count = num_rows if num_rows <= _ALL_UP_TO else _SAMPLE
    yield from ((f"row {int(i * step)} of {key}", int(i * step)) for i in range(count))


def _num_equal(source: ProblemSource, key: str) -> int:
    """Held-out questions among the training rows, of which at most a million are compared."""
    held_out = source.held_out_rows.get(key)
    if held_out is None:
        return 0

    def questions(rows, count: int) -> Iterator[int]:
        for index in range(min(len(rows), count)):
            try:
                problem = rows.problem(index)
            except RowError:
                continue
            yield hash((problem.question, tuple(message["content"] for message in problem.messages)))

    wanted = set(questions(held_out, _COMPARED_UP_TO))
    return len(wanted.intersection(questions(source.rows[key], _COMPARED_UP_TO)))


def _histogram(lengths: Sequence[int], num_bars: int = 12) -> str:
    low, high = min(lengths), max(lengths)
    counts = [0] * num_bars
    for length in lengths:
        counts[min(num_bars - 1, (length - low) * num_bars // max(1, high - low))] += 1
    most = max(counts)
    return "".join(_BARS[count * (len(_BARS) - 1) // most] if count else " " for count in counts)
