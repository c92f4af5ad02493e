"""Inspect the data sources of a run before it starts: rows, columns, rendered prompts, lengths, skipped rows.

All rows of small sources are rendered and tokenized; of larger ones, an even sample.
"""

import inspect
import itertools
import math
import random
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RunConfig
from megatron_fp8rl.data.columns import Columns
from megatron_fp8rl.data.conversation import ChatFormat, ConversationError, LeftOutError
from megatron_fp8rl.data.dropped import RowError, TooManyDroppedError
from megatron_fp8rl.data.prompts import ProblemSource, RowSource
from megatron_fp8rl.data.tokenizer import end_ids, is_special
from megatron_fp8rl.data.training_rows import TrainingRows
from megatron_fp8rl.envs.environment import Problem, environments_by_key
from megatron_fp8rl.envs.rewards.answers import references
from megatron_fp8rl.envs.rewards.choices import letters_of
from megatron_fp8rl.envs.rewards.configured import needs_answers
from megatron_fp8rl.envs.rewards.numbers import number_of
from megatron_fp8rl.envs.rewards.scalar import is_served
from megatron_fp8rl.envs.scoring import Score, ScorePool, ScorePoolError
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.types import IS_RIGHT, Prompt

_ALL_UP_TO = 20_000  # larger sources are sampled
_SAMPLE = 2_000  # rows
_GENERATED = 64  # problems per generator or class
_COMPARED_UP_TO = 1_000_000  # rows compared between training and held-out data
_SHOWN = 2_000  # characters of the first prompt
_END_SHOWN = 100  # characters of the end of a first prompt, in one line
_QUESTION = "1 1 1"
_LETTERS = "ABCDEFGHIJ"
_OPTIONS = ("choices", "options")  # columns with the texts that letters choose
# Columns whose text may belong before the question -> what puts it there.
_BEFORE = {
    "history": "add {history} to template",
    "system": "if it is a system prompt, rename the column to 'system_prompt'",
}
_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 12


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Inspection result of one source."""

    key: str
    dataset: str
    num_rows: int | None  # None: generator
    num_held_out: int | None
    columns: Columns | None
    lengths: tuple[int, ...]  # tokens of the usable prompts
    dropped: tuple[tuple[str, str], ...]  # (row, reason)
    num_equal: int  # held-out questions that are also training questions
    prompts: tuple[Prompt, ...]  # the first few
    num_held_out_seen: int = 0
    held_out_dropped: tuple[tuple[str, str], ...] = ()  # (held-out row, reason)
    num_conflicts: int = 0  # rows whose prompt an earlier row has, with another reference answer or exchanged sides
    num_rendered: int = 0  # rows that contain special tokens of the chat template
    is_choice: bool = False  # whether a reward compares letters
    lacks_tools: bool = False  # whether rows have tools, which no prompt shows
    ignored: tuple[str, ...] = ()  # fields of messages that the chat template or the prompt does not write

    @property
    def num_seen(self) -> int:
        return len(self.lengths) + len(self.dropped)

    def warnings(self) -> Iterator[str]:
        """Suspicious results, as sentences."""
        if self.num_equal:
            what = "rows" if self.columns is None else "questions"
            yield f"{self.num_equal} held-out {what} of {self.key} are training {what}, too"
        if self.num_conflicts and self.columns is None:
            yield f"{self.num_conflicts} pairs of {self.key} are another pair with exchanged sides; remove one of both"
        elif self.num_conflicts:
            yield (
                f"{self.num_conflicts} rows of {self.key} have the prompt of another row and another reference "
                "answer; correct the answers, or list all right ones in one row"
            )
        if self.num_rendered:
            yield (
                f"{self.num_rendered} of {self.num_seen} read rows of {self.key} contain special tokens that the chat "
                "template writes, as if it were applied already; store messages, or set --data.chat_template False"
            )
        if self.lacks_tools:
            yield f"the prompts of {self.key} lack the 'tools' of their rows; name an agent, or remove the column"
        if self.ignored:
            names = ", ".join(map(repr, self.ignored))
            reader = "neither the chat template nor the loss uses" if self.columns is None else "no prompt shows"
            yield f"messages of {self.key} have {names}, which {reader}"
        for prompt in self.prompts[:1]:
            for column, remedy in _BEFORE.items():
                value = prompt.metadata.get(column)
                if isinstance(value, str) and value.strip() not in prompt.text:
                    yield f"the prompts of {self.key} lack the text in {column!r}; {remedy}"
            for column in _OPTIONS if self.is_choice else ():
                options = dict(_texts(column, prompt.metadata.get(column)))
                if any(text not in prompt.text for text in options.values()):
                    template = r"{question}" + "".join(rf"\n{x}. {{{y}}}" for x, y in zip("AB", options, strict=False))
                    yield (
                        f"the prompts of {self.key} lack the options in {column!r}; set template to {template} "
                        "and so on"
                    )

    def lines(self, whole: bool = False) -> Iterator[str]:
        """Console lines: size, columns, length histogram, skipped rows, first prompt (with ``whole``, all of it)."""
        rows = "generated problems" if self.num_rows is None else f"{self.num_rows:,} rows"
        held_out = "" if not self.num_held_out else f", {self.num_held_out:,} held out"
        yield f"{self.key}: {rows}{held_out} ({self.dataset})"
        if self.columns is not None:
            prompts = " and ".join(map(repr, (self.columns.prompt, *self.columns.inputs)))
            yield f"  prompt in {prompts}, answer in {self.columns.answer!r}"
            named = dict.fromkeys(name for prompt in self.prompts for name in prompt.metadata)
            if before := [name for name in (self.columns.system, self.columns.history) if name in named]:
                yield f"  messages before the prompt in {' and '.join(map(repr, before))}"
            if self.columns.counts:
                yield f"  integers in {self.columns.answer!r} count {self.columns.counts!r} from 0: 0 is A, 1 is B"
        if self.lengths:
            low, high = min(self.lengths), max(self.lengths)
            middle = sorted(self.lengths)[len(self.lengths) // 2]
            span = f"{low} {_histogram(self.lengths)} {high}, median {middle}" if low < high else f"{low} in each"
            yield f"  prompt tokens {span}, of {self.num_seen:,} read"
        for row, reason in (*self.dropped[:3], *self.held_out_dropped[:3]):
            yield f"  left out: {row}: {reason[:160]}"
        if len(self.dropped) > 3:
            yield f"  left out: {len(self.dropped) - 3:,} more of {self.num_seen:,}"
        if self.num_equal:
            yield f"  {self.num_equal:,} of the held-out questions are also training questions"
        if whole and self.prompts:
            yield from _whole(self.prompts[0])
            return
        for prompt in self.prompts[:1]:
            answer = f" -> {prompt.answer[:60]!r}" if prompt.answer else " (no reference answer)"
            cut = "..." if len(prompt.text) > _END_SHOWN else ""
            yield f"  first: {cut}{prompt.text[-_END_SHOWN:]!r}{answer}"


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The texts of a column with their template fields: of a list, an object by letters, or one with a list "text"."""
    if isinstance(value, dict):
        inner = {"text": value["text"]} if "text" in value else value
    else:
        inner = dict(enumerate(value)) if isinstance(value, list) else {}
    for key, part in inner.items():
        if isinstance(part, dict | list):
            yield from _texts(f"{path}[{key}]", part)
        elif part is not None:
            yield f"{path}[{key}]", str(part)


def _whole(prompt: Prompt) -> Iterator[str]:
    text = prompt.text
    cut = f" (the first {_SHOWN:,} of {len(text):,} characters)" if len(text) > _SHOWN else ""
    yield f"  first prompt, as the model reads it, {len(prompt.token_ids):,} tokens{cut}:"
    yield from (f"    | {line}" for line in text[:_SHOWN].splitlines())
    answer = repr(prompt.answer[:_SHOWN]) if prompt.answer else "none"
    yield f"  its reference answer: {answer}"
    if prompt.metadata:
        yield f"  its columns, for rewards and the template: {', '.join(prompt.metadata)}"


def inspect_sources(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[SourceReport]:
    """Inspect every source. Raises any error of opening or rendering it, with its field."""
    source = ProblemSource.from_run(cfg, tokenizer)
    return [_inspect(source, key) for key in source.configs]


def inspect_training_rows(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, whole: bool = False
) -> tuple[list[str], list[str]]:
    """(console lines, warnings) about rows of conversations or pairs. Raises TooManyDroppedError, or an error of
    opening a source. ``whole``: also the first row as the model reads it, with ``[[`` and ``]]`` around trained text.
    """
    rows, lines, warnings, seen = TrainingRows(cfg, tokenizer), list[str](), list[str](), set[int]()
    sources = [(key, num, False) for key, num in rows.num_rows.items()]
    sources += [(key, num, True) for key, num in rows.num_held_out.items()]
    for key, num_rows, is_held_out in sources:
        title = f"{key}, held out" if is_held_out else key
        num_seen = num_rows if num_rows <= _ALL_UP_TO else _SAMPLE
        usable, dropped, first, num_equal, num_conflicts = [], [], None, 0, 0
        rows.num_rendered, rows.ignored, rows.columns = 0, set(), {}
        for index in (int(i * num_rows / num_seen) for i in range(num_seen)):
            try:
                samples = rows.samples(key, index, held_out=is_held_out)
            except RowError as error:
                dropped.append((f"row {index} of {title}", str(error)))
                continue
            first = first or samples
            usable += samples
            texts = tuple(sample.token_ids.array.tobytes() for sample in samples)
            num_equal += is_held_out and hash(texts) in seen
            num_conflicts += rows.is_pairs and hash(texts[::-1]) in seen
            seen |= set() if is_held_out else {hash(texts)}
        lengths = tuple(sample.num_tokens for sample in usable)
        # Its lengths count rows, so that the share of dropped rows is right.
        report = SourceReport(
            key=key,
            dataset=title,
            num_rows=num_rows,
            num_held_out=None,
            columns=None,
            lengths=(0,) * (num_seen - len(dropped)),
            dropped=tuple(dropped),
            num_equal=num_equal,
            prompts=(),
            num_conflicts=num_conflicts,
            num_rendered=rows.num_rendered,
            ignored=tuple(sorted(rows.ignored)),
        )
        lines.append(f"{title}: {num_rows:,} {'pairs' if rows.is_pairs else 'conversations'}")
        lines += [f"  columns {', '.join(map(repr, rows.columns))}"] if rows.columns else []
        if usable:
            share = sum(sample.num_loss_tokens for sample in usable) / sum(lengths)
            bars = _histogram(lengths)
            lines.append(f"  tokens {min(lengths)} {bars} {max(lengths)}, {share:.0%} of them trained")
        lines += [f"  left out: {row}: {reason[:160]}" for row, reason in dropped[:3]]
        lines += [f"  left out: {len(dropped) - 3:,} more of {num_seen:,}"] if len(dropped) > 3 else []
        require_usable([report], cfg.data.max_dropped)
        warnings += report.warnings()
        for sample in first if whole and first and not is_held_out else ():
            parts = [(tokenizer.decode(s.token_ids.array.tolist()), s.is_trained) for s in sample.segments]
            text = "".join(f"[[{text}]]" if is_trained else text for text, is_trained in parts)[:_SHOWN]
            lines += [f"  {sample.name}, with [[ ]] around what is trained:"]
            lines += [f"    | {line}" for line in text.splitlines()]
    return lines, warnings + repetition(cfg, rows.num_rows.values())


def repetition(cfg: RunConfig, num_rows: Collection[int | None]) -> list[str]:
    """A warning if a step takes more rows than all sources have. ``num_rows``: of each source; None: a generator."""
    count, total = cfg.sampling.prompts_per_step, sum(filter(None, num_rows))
    if None in num_rows or total >= count:
        return []
    problem = f"a step takes {count:,} rows and there are {total:,}, so that each step repeats rows"
    return [f"{problem}; set --sampling.prompts_per_step (--batch_size of sft and dpo) to {total:,} or less"]


def inspect_ends(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    """(console line with the tokens that end a completion, warnings about them)."""
    chat = _chat_format(cfg, tokenizer)
    listed = dict.fromkeys((*end_ids(tokenizer), *cfg.sampling.stop_token_ids))
    tokens = {token: tokenizer.convert_ids_to_tokens(token) for token in listed}
    line = ", ".join(f"{text or 'no token'} ({token})" for token, text in tokens.items())
    warnings = [
        f"eos_token_id {token} in {tokenizer.name_or_path} is {repr(tokens[token]) if tokens[token] else 'no token'} "
        "of its tokenizer, and completions end there; correct config.json or generation_config.json"
        for token in end_ids(tokenizer)
        if not is_special(tokenizer, token)
    ]
    closing = chat.closing_id()
    if closing is not None and closing not in chat.stop_ids and is_special(tokenizer, closing):
        warnings.append(
            f"the chat template ends an answer with {tokenizer.convert_ids_to_tokens(closing)} ({closing}), which ends "
            f"no completion; set --sampling.stop_token_ids {closing}"
        )
    elif closing is not None and closing not in chat.stop_ids and chat.closing_text():
        warnings.append(
            f"the chat template ends an answer with {chat.closing_text()!r}, which begins with no special token, so "
            "that completions end elsewhere; correct the template, or add the token to the tokenizer"
        )
    if header := chat.header():
        warnings.append(
            f"the chat template has no generation prompt, and writes {header!r} before an answer, which the policy "
            "has to sample; add {% if add_generation_prompt %} with this text to its end"
        )
    return f"completions end at {line}", warnings


def require_template(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the chat template is not valid, lacks an argument, or leaves out the message of a user."""
    chat = _chat_format(cfg, tokenizer)
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    if chat.uses_chat and (unused := [name for name in chat.arguments if name not in known and not chat.writes(name)]):
        raise ValueError(
            f"data.chat_template_arguments: the chat template of {tokenizer.name_or_path} has no argument "
            f"{unused[0]!r}; leave it out"
        )
    try:
        chat.begin([{"role": "user", "content": _QUESTION}])
    except LeftOutError as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} leaves out the message of the user: every prompt is "
            f"{error.text[:100]!r}; correct it, or set --data.chat_template False"
        ) from None
    except ConversationError as error:
        if isinstance(error.__context__, TemplateSyntaxError):
            reason = f"line {error.__context__.lineno}: {error.__context__.message}"
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} is not valid ({reason}); copy it from the model again, "
                "or set --data.chat_template False"
            ) from None
        # Otherwise it may need other messages; the rows show it.


def _chat_format(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ProblemSource.from_run(replace(cfg, data=replace(cfg.data, environments=())), tokenizer).chat_format


def require_usable(reports: Sequence[SourceReport], max_dropped: float) -> None:
    """Raise TooManyDroppedError if the fraction of unusable prompts of a source exceeds ``max_dropped``."""
    for report in reports:
        for what, num_rows, num_seen, dropped in (
            ("prompts", report.num_rows, report.num_seen, report.dropped),
            ("held-out prompts", report.num_held_out, report.num_held_out_seen, report.held_out_dropped),
        ):
            allowed = max_dropped * num_seen
            if num_rows != num_seen:  # sampling error
                allowed += 3 * math.sqrt(allowed)
            if len(dropped) <= allowed:
                continue
            row, reason = dropped[0]
            raise TooManyDroppedError(
                f"{report.dataset}: {len(dropped):,} of {num_seen:,} {what} cannot be used, more than "
                f"data.max_dropped = {max_dropped:g}. First reason, {row}: {reason}. Fix the data, or raise "
                "sampling.max_prompt_tokens or data.max_dropped"
            )


@dataclass(frozen=True, kw_only=True)
class RewardCheck:
    """Scores of reference answers and of empty answers for one source."""

    key: str
    reference: tuple[float, ...]  # for report prompts with a reference answer
    empty: tuple[float, ...]  # for the same prompts
    failure: str  # reason of the first failed score, or empty
    is_broken: bool = False  # whether every score failed, or the function is called or answers wrongly
    compares: bool = False  # whether a reward compares with reference answers
    rewarded_wrong: tuple[tuple[str, str, float], ...] = ()  # (reference, wrong answer, score above 0)

    def warnings(self) -> list[str]:
        """Suspicious results, as sentences."""
        problems = [self.failure] if self.failure else []
        if not self.reference and self.compares and not self.failure:
            problems.append("its reward compares with reference answers, and the first rows have none")
        least = min(0.0, *self.empty) if self.empty else 0.0  # a reward may count from below 0
        if self.reference and max(self.reference) <= least and not self.is_broken:
            problems.append("no reference answer is rewarded; the reward or the answer column is wrong")
        elif self.reference and min(self.reference) <= least and not self.is_broken:
            share = sum(score <= least for score in self.reference) / len(self.reference)
            problems.append(f"{share:.0%} of the reference answers are not rewarded")
        if self.empty and max(self.empty) > 0 and (not self.reference or max(self.empty) >= max(self.reference)):
            problems.append(f"an empty answer is rewarded by {max(self.empty):g}, as much as a right one")
        if self.rewarded_wrong:
            reference, wrong, score = self.rewarded_wrong[0]
            problems.append(
                f"{len(self.rewarded_wrong)} wrong answers are rewarded, such as {wrong[:60]!r} by {score:g} where the "
                f"reference is {reference[:60]!r}; the reward or the answer column is wrong"
            )
        return [f"{self.key}: {problem}" for problem in problems]

    def line(self) -> str:
        """Console line with the mean scores."""
        if not self.reference:
            return f"{self.key}: no reference answer to score"
        means = (sum(scores) / len(scores) for scores in (self.reference, self.empty))
        text = "{}: reference answers score {:.3g}, empty answers {:.3g} (means of {})"
        return text.format(self.key, *means, len(self.reference))


def check_rewards(data: DataConfig, deadline_s: float, reports: Sequence[SourceReport]) -> list[RewardCheck]:
    """Score reference, empty and wrong answers of the reports' prompts in a score worker. Skips reward models served by
    the run, which are not started yet, and sources with no other reward."""
    checks = []
    keyed = environments_by_key(data.environments)
    now = {key: replace(env, rewards=tuple(r for r in env.rewards if not is_served(r))) for key, env in keyed.items()}
    now = {key: env for key, env in now.items() if env.rewards or not has_rows(env.dataset)}
    with ScorePool(now, num_workers=1, deadline_s=deadline_s) as pool:
        for report in reports:
            if report.key not in now:
                continue
            prompts = [prompt for prompt in report.prompts if prompt.answer]
            texts = [next(iter(references(prompt.answer)), prompt.answer) for prompt in prompts]
            asked = [
                (pool.submit(prompt, text), pool.submit(prompt, ""))
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            wrong, others = [], list[Future[Score]]()
            if has_rows(now[report.key].dataset):
                others = [] if prompts else [pool.submit(prompt, "pass") for prompt in report.prompts]
                pairs = ((prompt, other) for prompt in prompts for other in wrong_answers(prompt, texts))
                wrong = [(prompt.answer, other, pool.submit(prompt, other)) for prompt, other in pairs]
            try:
                scores = [(reference.result(), empty.result()) for reference, empty in asked]
                wrong_scores = [(answer, other, score.result()) for answer, other, score in wrong]
                all_scores = [*itertools.chain(*scores), *(score.result() for score in others)]
            except ScorePoolError as error:
                checks.append(RewardCheck(key=report.key, reference=(), empty=(), failure=str(error), is_broken=True))
                continue
            failed = [score.detail for score in all_scores if score.status == "score_failed"]
            failed_wrong = [score.detail for *_, score in wrong_scores if score.status == "score_failed"]
            failure = next(iter([*failed, *failed_wrong]), "")
            if failure and keyed[report.key].agent and not has_rows(now[report.key].dataset):
                continue  # such as a taskset, whose sessions have rewards of their own
            reference, empty = zip(*scores, strict=True) if scores else ((), ())
            checks.append(
                RewardCheck(
                    key=report.key,
                    reference=tuple(score.reward for score in reference),
                    empty=tuple(score.reward for score in empty),
                    failure=failure,
                    is_broken=any("raised RewardError" in detail for detail in failed)
                    or (bool(failed) and len(failed) == len(all_scores) and not _asks_server(keyed[report.key])),
                    compares=any(map(needs_answers, keyed[report.key].rewards)),
                    rewarded_wrong=tuple(
                        (*texts, reward) for *texts, score in wrong_scores if (reward := _correctness(score)) > 0
                    ),
                )
            )
    return checks


def _asks_server(source: EnvironmentConfig) -> bool:
    """Whether a reward asks a server, which may start later."""
    return any(reward.function == "judge" or "url" in reward.options for reward in source.rewards)


def wrong_answers(prompt: Prompt, texts: Sequence[str]) -> list[str]:
    """Answers to a prompt that its reference answers exclude. They are another number, another letter, a reference
    answer of another row (from ``texts``), and ``pass``."""
    right = references(prompt.answer) or (prompt.answer,)
    numbers = {number for text in right if (number := number_of(text)) is not None}
    letters = {letter for text in right for letter in letters_of(text, _LETTERS)}
    others = ["pass"]
    if numbers:
        others.append(str(math.floor(max(numbers)) + 1))
    if letters:
        others.append(next(letter for letter in _LETTERS if letter not in letters))
    for text in texts:
        is_equal = number_of(text) in numbers or letters_of(text, _LETTERS) == letters != frozenset()
        if not is_equal and text.casefold() not in map(str.casefold, right):
            others.append(text)
            break
    return [text for text in others if text not in right]


def _correctness(score: Score) -> float:
    """The part of a reward that compares answers, if there is one; otherwise the reward."""
    if IS_RIGHT in score.parts:
        return score.parts[IS_RIGHT]
    compared = [score.parts[name] for name in ("exact", "number", "choice", "math", "code") if name in score.parts]
    return max(compared, default=score.reward)


def _inspect(source: ProblemSource, key: str) -> SourceReport:
    lengths: list[int] = []
    dropped: list[tuple[str, str]] = []
    prompts: list[Prompt] = []
    questions, answers = set[int](), dict[int, str]()
    cfg, num_conflicts, num_rendered, has_tools, ignored = source.configs[key], 0, 0, False, set[str]()
    for name, index in _sampled(source, key):
        try:
            problem = source.problem_at(key, index)
            questions.add(_question(problem))
            prompt = source.prompt(name, key, problem)
            text = hash(unicodedata.normalize("NFC", prompt.text))
            num_conflicts += answers.setdefault(text, prompt.answer) != prompt.answer
            num_rendered += source.chat_format.has_markers(prompt.messages)
            has_tools = has_tools or bool(prompt.metadata.get("tools"))
            if problem.messages and (rows := source.rows.get(key)):
                ignored |= rows.columns.unread(rows.rows[index])
        except RowError as error:
            dropped.append((name, str(error)))
            continue
        lengths.append(len(prompt.token_ids))
        if len(prompts) < 8:
            prompts.append(prompt)
    rows, held_out = source.rows.get(key), source.held_out_rows.get(key)
    return SourceReport(
        key=key,
        dataset=cfg.dataset,
        num_rows=None if rows is None else len(rows),
        num_held_out=None if held_out is None else len(held_out),
        columns=None if rows is None else rows.columns,
        lengths=tuple(lengths),
        dropped=tuple(dropped),
        num_equal=_num_equal(source, key, questions),
        prompts=tuple(prompts),
        num_held_out_seen=min(len(held_out or ()), _SAMPLE),
        held_out_dropped=tuple(_unusable(source, key, held_out)) if held_out else (),
        num_conflicts=num_conflicts if any(map(needs_answers, cfg.rewards)) else 0,
        num_rendered=num_rendered,
        is_choice=any(reward.function == "choice" for reward in cfg.rewards),
        lacks_tools=has_tools and not cfg.agent,
        ignored=tuple(sorted(ignored)),
    )


def _unusable(source: ProblemSource, key: str, held_out: RowSource) -> Iterator[tuple[str, str]]:
    """(row, reason) of the first held-out rows that cannot be used."""
    for index in range(min(len(held_out), _SAMPLE)):
        name = f"held-out row {index} of {key}"
        try:
            source.prompt(name, key, held_out.problem(index))
        except RowError as error:
            yield name, str(error)


def _sampled(source: ProblemSource, key: str) -> Iterator[tuple[str, int]]:
    if key not in source.rows:
        rng = random.Random(f"inspection/{key}")
        yield from ((f"problem {index} of {key}", index) for index in (rng.randrange(2**31) for _ in range(_GENERATED)))
        return
    num_rows = len(source.rows[key])
    count = num_rows if num_rows <= _ALL_UP_TO else _SAMPLE
    step = num_rows / count
    yield from ((f"row {int(i * step)} of {key}", int(i * step)) for i in range(count))


def _num_equal(source: ProblemSource, key: str, seen: set[int]) -> int:
    """Number of held-out questions that are also training questions (at most a million rows compared). ``seen``: the
    questions that were read, which are all questions of a small source."""
    held_out = source.held_out_rows.get(key)
    if held_out is None:
        return 0

    def questions(rows: RowSource) -> Iterator[int]:
        for index in range(min(len(rows), _COMPARED_UP_TO)):
            with suppress(RowError):
                yield _question(rows.problem(index))

    is_whole = len(source.rows[key]) <= _ALL_UP_TO
    return len(set(questions(held_out)).intersection(seen if is_whole else questions(source.rows[key])))


def _question(problem: Problem) -> int:
    texts = (problem.question, *(message["content"] for message in problem.messages))
    return hash(tuple(unicodedata.normalize("NFC", " ".join(text.split())) for text in texts))


def _histogram(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    num_bars = min(_MAX_BARS, high - low + 1)
    counts = [0] * num_bars
    for length in lengths:
        counts[(length - low) * num_bars // (high - low + 1)] += 1
    most = max(counts)
    return "".join(_BARS[count * (len(_BARS) - 1) // most] if count else " " for count in counts)
