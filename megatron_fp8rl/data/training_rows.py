"""Samples of rows that are learned as they are: conversations (command sft) and pairs of answers (command dpo).

A conversation is a list of messages, or a prompt and its answer. Every turn of the assistant is trained once, from its
first token to its end token. A template with ``{% generation %}`` marks the turns itself. Otherwise a turn is the text
that the template adds behind its generation prompt. A template that rewrites history, such as Qwen3's, which removes
earlier reasoning, makes several samples of one conversation, as in inference.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.columns import (
    ColumnError,
    Columns,
    as_message,
    first_named,
    inputs_of,
    lookup,
    parsed,
    require_text,
)
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.dropped import DroppedLog, RowError, row_errors
from megatron_fp8rl.data.prompts import ProblemSource, apportion
from megatron_fp8rl.data.tokenizer import end_ids
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Segment

_MARKERS = re.compile(r"\{%-?\s*generation\b")  # transformers' tag around the tokens of the assistant
_SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "problem", "query", "instruction")  # of pairs
_SCORES = ("score_{}", "{}_score", "{}_rating", "{}-rating")
_LEARNED = ("tools", "tool_calls", "function_call", "reasoning_content", "thinking")  # lost without the template

Messages = list[dict[str, Any]]


class TrainingRows:
    """Rows in order, each once an epoch, shuffled by seed and epoch. ``position`` is that of the next row."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, log: bool = False):
        """``log``: write rows that are left out to ``data/dropped.jsonl``; set it on one rank only."""
        self.is_pairs = cfg.algo.loss == "dpo"
        self._prompt_columns = [source.prompt_column for source in cfg.data.environments]
        if self.is_pairs:
            sources = [replace(s, prompt_column="chosen", answer_column="rejected") for s in cfg.data.environments]
            cfg = replace(cfg, data=replace(cfg.data, environments=tuple(sources)))
        try:
            self._source, self._cfg = ProblemSource.from_run(cfg, tokenizer), cfg
        except ColumnError as error:
            raise ColumnError(
                f"pairs need the columns chosen and rejected; {error}" if self.is_pairs else error
            ) from None
        self.row_identities = {key: rows.identity() for key, rows in self._source.rows.items()}
        self.num_rows = {key: len(rows) for key, rows in self._source.rows.items()}
        self.num_held_out = {key: len(rows) for key, rows in self._source.held_out_rows.items()}
        self._dropped = DroppedLog(Path(cfg.run_dir) if log else None, cfg.data.max_dropped)
        self.position = 0
        self.num_rendered = 0  # conversations with special tokens of the chat template in a message
        self.columns: dict[str, None] = {}  # of prompts and answers that were read, in order
        self.ignored: set[str] = set()  # fields of messages that the chat template does not write

    @property
    def num_dropped(self) -> int:
        return self._dropped.num_dropped

    def next(self, count: int) -> list[Sample]:
        """The samples of the next ``count`` rows that can be used. Raises TooManyDroppedError."""
        samples: list[Sample] = []
        while count:
            position, self.position = self.position, self.position + 1
            key, ordinal = self._source._turn("train", position)
            row = self._source.rows[key].order(f"{self._cfg.seed}/train/{key}", ordinal)
            try:
                samples += self.samples(key, row)
            except RowError as error:
                self._dropped.add(f"row {row} of {key}", str(error))
                continue
            self._dropped.num_kept += 1
            count -= 1
        return samples

    def all_samples(self) -> list[Sample]:
        """The samples of all training rows that can be used, in the order of the files."""
        return [s for key, num in self.num_rows.items() for part in self._usable(key, range(num)) for s in part]

    def held_out(self, count: int) -> list[Sample]:
        """Samples of at most ``count`` held-out rows of all sources by weight, the same for every seed."""
        weights = {key: self._source.configs[key].weight for key in self.num_held_out}
        samples: list[Sample] = []
        for key, share in apportion(count, weights).items() if weights else ():
            order = (self._source.held_out_rows[key].order("held out", i) for i in range(self.num_held_out[key]))
            samples += itertools.chain(*itertools.islice(self._usable(key, order, held_out=True), share))
        return samples

    def _usable(self, key: str, rows: Iterable[int], *, held_out: bool = False) -> Iterator[list[Sample]]:
        for row in rows:
            with suppress(RowError):
                yield self.samples(key, row, held_out=held_out)

    def samples(self, key: str, row: int, *, held_out: bool = False) -> list[Sample]:
        """The samples of a row; of a pair, first the chosen and then the rejected side. Raises RowError."""
        rows = (self._source.held_out_rows if held_out else self._source.rows)[key]
        name = f"{key}/{'eval-' if held_out else ''}{row}"
        with row_errors():
            content = rows.rows[row]
            require_text(content)
            tools = _decoded_json(content.get("tools"))
            if not self.is_pairs:
                return self._samples(name, key, self._conversation(key, content), tools)
            before, answers = self._pair(key, content)
            pair = [self._samples(f"{name}/{s}", key, [*before, *a], tools, len(before)) for s, a in answers.items()]
        if any(len(samples) > 1 for samples in pair):
            raise RowError("chosen or rejected has several turns, and the chat template rewrites the first of them")
        if pair[0][0].token_ids == pair[1][0].token_ids:
            raise RowError("chosen and rejected are equal")
        return [sample for samples in pair for sample in samples]

    def _conversation(self, key: str, row: Mapping[str, Any]) -> Messages:
        columns = self._source.rows[key].columns
        value = parsed(lookup(row, columns.prompt), columns.prompt)
        if isinstance(value, Sequence) and not isinstance(value, str):
            messages = _normalized(value, columns.prompt)
            if messages[-1]["role"] == "assistant" or columns.answer is None:
                self.columns[columns.prompt] = None
                return self._begun(key, row, messages)
        if columns.answer is None:
            raise RowError(f"{columns.prompt} is text, and no column has its answer; set answer_column")
        prompt = self._source._messages(key, columns.problem(row))
        self.columns |= dict.fromkeys((columns.prompt, *(i for i in columns.inputs if i in row), columns.answer))
        return [*prompt, *_answer(lookup(row, columns.answer), columns.answer)]

    def _pair(self, key: str, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Messages]]:
        """(messages of the prompt, answer by side)."""
        named = self._prompt_columns[list(self._source.configs).index(key)]
        column = named or first_named(row, _PROMPTS) or "prompt"
        prompt = parsed(lookup(row, column), column)
        if isinstance(prompt, str) and not named:  # with the input of an instruction
            prompt = Columns(column, None, inputs_of(row, column)).question(row, prompt)
        before = [] if prompt is None else _normalized(prompt, column)
        answers = {side: _answer(row.get(side), side) for side in _SIDES}
        if any(messages[0]["role"] != "assistant" for messages in answers.values()):  # they begin with the prompt
            heads = {side: _head(messages) for side, messages in answers.items()}
            if heads["chosen"] != heads["rejected"]:
                raise RowError("chosen and rejected have different prompts")
            if before and heads["chosen"] != before and (named or column.lower() == _PROMPTS[0]):
                raise RowError(f"chosen and rejected begin with another prompt than the column {column!r}")
            before = heads["chosen"]
            answers = {side: messages[len(before) :] for side, messages in answers.items()}
        if not before:
            raise RowError(
                f"has no prompt: neither a column {column!r} nor messages before the answers; set prompt_column"
            )
        if answers["chosen"] == answers["rejected"]:
            raise RowError("chosen and rejected are equal")
        for name in _SCORES:
            chosen, rejected = (row.get(name.format(side)) for side in _SIDES)
            if isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen < rejected:
                low, high = (
                    f"{name.format(side)} {score}" for side, score in zip(_SIDES, (chosen, rejected), strict=True)
                )
                raise RowError(f"{low} is below {high}: the sides may be exchanged")
        return self._begun(key, row, before, is_text=isinstance(prompt, str)), answers

    def _begun(self, key: str, row: Mapping[str, Any], messages: Messages, *, is_text: bool = False) -> Messages:
        """Messages after those of other columns and the system prompt of the source. ``is_text``: a text in the row."""
        messages = [*self._source.rows[key].columns.before(row, () if is_text else messages), *messages]
        system = self._source.configs[key].system_prompt
        is_missing = system and messages[0]["role"] != "system"
        return [{"role": "system", "content": system}, *messages] if is_missing else messages

    def _samples(self, name: str, key: str, messages: Messages, tools: list, first: int = 0) -> list[Sample]:
        """Samples that train the assistant's messages from index ``first`` on."""
        if not any(message["role"] == "assistant" for message in messages[first:]):
            raise RowError("has no message of the assistant")
        if not first and messages[0]["role"] == "assistant":
            raise RowError("begins with a message of the assistant; put a message before it")
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and not (message["content"].strip() or message.get("tool_calls")):
                raise RowError(f"message {index} of the assistant is empty")
        chat = self._source.chat_format
        self.num_rendered += chat.has_markers(messages)
        for field in [*itertools.chain(*messages), *(["tools"] if tools else [])]:
            if field not in ("role", "content") and not chat.writes(field):
                if field in _LEARNED:
                    raise RowError(
                        f"has {field!r}, which the chat template does not write; remove it, or use another one"
                    )
                self.ignored.add(field)
        marked = chat.uses_chat and _MARKERS.search(str(chat.tokenizer.chat_template))
        parts = [_by_markers(chat, messages, tools, first)] if marked else list(_by_text(chat, messages, tools, first))
        limit = self._cfg.max_sequence_tokens
        samples = []
        for number, segments in enumerate(parts):
            merged = tuple(
                Segment(TokenArray.from_ids(list(itertools.chain(*(ids for ids, _ in group)))), is_trained=is_trained)
                for is_trained, group in itertools.groupby((part for part in segments if part[0]), lambda part: part[1])
            )
            if not merged or merged[0].is_trained:
                raise RowError("begins with a message of the assistant; put a message before it")
            sample = Sample(name=f"{name}/{number}" if number else name, environment=key, segments=merged)
            if sample.num_tokens > limit:
                raise RowError(
                    f"has {sample.num_tokens} tokens, more than {limit} = sampling.max_prompt_tokens + "
                    "sampling.max_completion_tokens; raise --max_length, or shorten it"
                )
            samples.append(sample)
        return samples


Parts = list[tuple[Sequence[int], bool]]  # (token ids, whether they are trained)


def _by_markers(chat: ChatFormat, messages: Messages, tools: list, first: int) -> Parts:
    """The parts that the template's generation markers give. Raises RowError."""
    chat.render(messages, tools, answered=True)  # raises what the template refuses
    made = chat.tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **chat.arguments,
    )
    ids, mask = made["input_ids"], made["assistant_masks"]
    runs = [(bool(on), [ids[i] for i, _ in group]) for on, group in itertools.groupby(enumerate(mask), lambda x: x[1])]
    num_turns = sum(message["role"] == "assistant" for message in messages)
    num_before = sum(message["role"] == "assistant" for message in messages[:first])
    if (num_marked := sum(on for on, _ in runs)) != num_turns:
        raise RowError(
            f"the chat template marks {num_marked} parts, and there are {num_turns} messages of the assistant"
        )
    if (unknown := chat.tokenizer.unk_token_id) is not None and unknown in ids:
        raise RowError("has characters that the tokenizer does not know")
    turns = itertools.count()
    return [(part, on and next(turns) >= num_before) for on, part in runs]


def _by_text(chat: ChatFormat, messages: Messages, tools: list, first: int) -> Iterator[Parts]:
    """The parts of each sample, from the text that the template adds for each turn. Raises RowError."""
    parts: Parts = []
    written = ""  # text of ``parts``; empty if the next turn begins a new sample
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first:
            continue
        before, after = chat.render(messages[:index], tools), chat.render(messages[: index + 1], tools, answered=True)
        if not after.startswith(before) or len(after) == len(before):
            raise RowError(
                f"the turn of message {index} cannot be marked: the chat template does not write it behind its "
                "generation prompt; use a template with generation markers"
            )
        is_new = not (written and before.startswith(written))
        if is_new and parts:
            yield parts
            parts = []
        rest = before if is_new else before[len(written) :]
        parts.append((chat._encode(rest, add_special_tokens=is_new and not chat.uses_chat) if rest else (), False))
        ids = chat._encode(after[len(before) :], add_special_tokens=False)
        ends = [place for place, token in enumerate(ids, 1) if token in chat.stop_ids]
        if ends:
            parts += [(ids[: ends[-1]], True), (ids[ends[-1] :], False)]
            written = after
        else:
            parts.append(((*ids, end_ids(chat.tokenizer)[0]), True))
            written = ""
        last = parts[-1]
    if not last[1]:
        parts = parts[:-1]  # the template's text after the last end token
    yield parts


def _normalized(value: Any, column: str) -> Messages:
    """Messages with role and content; text is a message of the user. Raises RowError."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{column} is empty")
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise RowError(f"{column} is neither text nor a list of messages: {str(value)[:60]!r}")
    messages = []
    for message in value:
        normal = as_message(message, column, missing="")
        rest = {name: part for name, part in message.items() if part is not None and name not in ("from", "value")}
        messages.append(rest | normal)
    return messages


def _answer(value: Any, column: str) -> Messages:
    """The messages of an answer: text is one message of the assistant. Raises RowError."""
    # NaN is a missing value of a table, and True a label.
    is_number = isinstance(value, int | float) and value == value and not isinstance(value, bool)
    value = str(value) if is_number else None if isinstance(value, float) else parsed(value, column)
    if value in (None, []) or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{column} is empty")
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _normalized(value, column)


def _head(messages: Messages) -> Messages:
    """The messages before the last turn of the assistant."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return messages[:last]


def _decoded_json(tools: Any) -> list:
    value = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if value and not isinstance(value, list):
        raise RowError("tools is not a list")
    return value or []
