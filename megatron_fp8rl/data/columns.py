"""Find prompt and answer of a row by its column names; rewards get the columns under their names, too. Pure.

Known columns: GSM8K, DAPO-Math-17k, OpenR1-Math, MATH-500, AIME, verl's parquet files, Alpaca, Dolly, prompt and
completion, and conversations. Messages may be JSON text, and their content a list of text parts.
"""

import ast
import contextlib
import json
import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.data.dropped import RowError
from megatron_fp8rl.envs.environment import Problem
from megatron_fp8rl.envs.rewards.extraction import after_hashes

# In order of preference; case-insensitive.
_PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "query", "instruction", "input")
_ANSWERS = (
    "answer reward_model.ground_truth ground_truth final_answer target label solution output completion response"
).split()
_TALKS = ("messages", "conversations")  # read first where rows are learned as they are
_LEARNED = ("completion", "response", "output", "solution")  # there before a reference answer or a label
_SYSTEM = ("system_prompt", "system_message")
_ROLES = {"human": "user", "gpt": "assistant"}  # names used in "conversations"
_LOOKS_LIKE_MESSAGES = re.compile(
    r"""\s*(?:\{\s*["'](?:messages|conversations)["']\s*:\s*)?\[?\s*\{\s*["'](?:role|from|content|value)["']\s*:"""
)
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


class ColumnError(ValueError):
    """A required column is missing; the message lists the existing columns."""


@dataclass(frozen=True)
class Columns:
    """Names of the prompt and (optional) answer columns. "a.b" is key b in column a."""

    prompt: str
    answer: str | None
    inputs: tuple[str, ...] = ()  # columns with more text of the prompt; a row may lack them
    system: str = ""  # column with a system prompt; a row may lack it
    history: str = ""  # column with messages before the question, or pairs of question and answer; a row may lack it
    counts: str = ""  # column with the options that an integer answer counts from 0, as in MMLU; the answer is a letter

    def problem(self, row: Mapping[str, Any]) -> Problem:
        """Convert a row. Raises RowError for an empty prompt, or one that is neither text nor messages."""
        require_text(row)
        value = parsed(lookup(row, self.prompt), self.prompt)
        answer = None if self.answer is None else lookup(row, self.answer)
        messages: tuple[dict[str, str], ...] = ()
        if isinstance(value, str):
            question = self.question(row, value)
        else:
            messages, replied = _messages(value, self.prompt)
            question = messages[-1]["content"]
            answer = replied if answer is None else answer
        if not question.strip():
            raise RowError(f"{self.prompt} is empty")
        if before := self.before(row, messages):
            messages = (*before, *(messages or ({"role": "user", "content": question},)))
        text = _letter(answer, row.get(self.counts), self.counts)
        last = after_hashes(text)
        used = {"answer"} if isinstance(value, str) else {"answer", self.prompt}
        rest = {name: _as_json(value) for name, value in row.items() if name not in used}
        return Problem(
            question=question,
            answer=last or text.strip(),
            metadata={**rest, "full_answer": text} if last else rest,
            messages=messages,
        )

    def unread(self, row: Mapping[str, Any]) -> set[str]:
        """The fields of messages in the prompt of a usable row that :meth:`problem` leaves out."""
        value = parsed(lookup(row, self.prompt))
        messages = () if isinstance(value, str) else value
        fields = {name for message in messages for name, part in message.items() if part is not None}
        return fields - {"role", "content", "from", "value"}

    def before(self, row: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The messages of other columns that come before the prompt."""
        system, history = row.get(self.system) or "", row.get(self.history) or ()
        if not isinstance(system, str):
            raise RowError(f"{self.system} is a system prompt and no text: {str(system)[:60]!r}")
        if not isinstance(history, list | tuple):
            raise RowError(f"{self.history} is no list of messages: {str(history)[:60]!r}")
        if history and messages:
            raise RowError(f"{self.history} and {self.prompt} both contain messages")
        has_system = bool(messages) and messages[0]["role"] == "system"
        before = [{"role": "system", "content": system}] if system.strip() and not has_system else []
        for turn in history:
            if not isinstance(turn, Mapping):
                texts = list(turn) if isinstance(turn, list | tuple) else [turn]
                if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                    raise RowError(f"{self.history} contains {str(turn)[:60]!r}, which is no question with its answer")
                before += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
            else:
                before.append(as_message(turn, self.history))
        return before

    def question(self, row: Mapping[str, Any], text: str) -> str:
        """``text`` with the columns that continue it. Raises RowError if one of them has no text."""
        values = {name: row[name] for name in self.inputs if row.get(name) is not None}
        for name, value in values.items():
            if not isinstance(value, str):
                raise RowError(f"{name} belongs to the prompt and is no text: {str(value)[:60]!r}")
        return "\n\n".join(filter(str.strip, (text, *values.values())))


def find_columns(
    row: Mapping[str, Any],
    *,
    prompt: str = "",
    answer: str = "",
    template: str = "",
    is_choice: bool = False,
    is_learned: bool = False,
) -> Columns:
    """Find the columns of rows like this one; ``prompt`` and ``answer`` override the names. Raises ColumnError.

    The input of an instruction belongs to the prompt, unless ``prompt`` is set or ``template`` has a field for one.
    ``is_choice``: the reward compares letters, so that an integer answer beside a list ``choices`` is converted.
    ``is_learned``: rows are learned as they are, so that whole conversations and long answers come first.
    """
    names = {name: None for name in row}
    listed = ", ".join(names) or "none"
    for field, name in (("prompt_column", prompt), ("answer_column", answer)):
        if name and lookup(row, name) is None and name.partition(".")[0] not in names:
            raise ColumnError(f"{field} = {name!r} is no column{near_matches(name, names)} (columns: {listed})")
    prompt_column = prompt or first_named(row, (*_TALKS, *_PROMPTS) if is_learned else _PROMPTS)
    if prompt_column is None:
        raise ColumnError(f"no known prompt column; set prompt_column (columns: {listed})")
    inputs = () if prompt else inputs_of(row, prompt_column)
    if _fields(template) & {prompt_column, *inputs}:  # the template puts them together
        prompt_column, inputs = first_named(row, ("input",)) or prompt_column, ()
    answer_column = answer or first_named(row, (*_LEARNED, *_ANSWERS) if is_learned else _ANSWERS, but=prompt_column)
    options = first_named(row, ("choices",)) or ""
    is_counted = is_choice and answer_column is not None and _index(lookup(row, answer_column)) is not None
    counts = options if is_counted and isinstance(row.get(options), list) else ""
    system, history = _messages_before(row, _fields(template))
    return Columns(prompt_column, answer_column, inputs, system, history, counts)


def _messages_before(row: Mapping[str, Any], used: Collection[str]) -> tuple[str, str]:
    """The columns with a system prompt and with earlier messages, unless the template uses them; "" if there is none.
    ``system`` counts beside an instruction, messages, a history or pairs, as in files for LLaMA-Factory."""
    beside = ("instruction", "messages", "conversations", "history", "chosen")
    names = (*_SYSTEM, "system") if first_named(row, beside) else _SYSTEM
    system = first_named(row, names) or _SYSTEM[0]
    history = first_named(row, ("history",)) or "history"  # later rows may have it
    system = system if isinstance(row.get(system), str | None) and system not in used else ""
    return system, history if isinstance(row.get(history), list | tuple | None) and history not in used else ""


def inputs_of(row: Mapping[str, Any], prompt_column: str) -> tuple[str, ...]:
    """Columns that continue an instruction: ``input`` (Alpaca), or ``context`` beside ``response`` (Dolly)."""
    by_lower = {name.lower(): name for name in row}
    if prompt_column.lower() != "instruction":
        return ()
    return (by_lower["context"],) if {"context", "response"} <= set(by_lower) else (by_lower.get("input", "input"),)


def require_text(row: Mapping[str, Any]) -> None:
    """Raise RowError if a row has images, videos or sounds in columns of their own."""
    for name, value in row.items():
        if name.lower() in _MEDIA and value is not None and value not in ("", [], {}):
            raise RowError(f"has the column {name!r}, and only text can be used; remove the column, or the row")


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key in it if the name has dots; None if it does not exist."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def first_named(row: Mapping[str, Any], candidates: Sequence[str], but: str = "") -> str | None:
    by_lower = {name.lower(): name for name in row}
    for candidate in candidates:
        head, dot, tail = candidate.partition(".")
        name = by_lower.get(head)
        if name is not None and name != but and (not dot or lookup(row, f"{name}.{tail}") is not None):
            return f"{name}{dot}{tail}"
    return None


def _messages(value: Any, column: str) -> tuple[tuple[dict[str, str], ...], str | None]:
    """(messages up to the last user message, the reply after it or None)."""
    if not isinstance(value, Sequence) or not value:
        raise RowError(f"{column} is neither text nor a list of messages: {str(value)[:60]!r}")
    roles = [message.get("role", message.get("from")) if isinstance(message, Mapping) else None for message in value]
    asked = max((i for i, role in enumerate(roles) if _ROLES.get(role, role) == "user"), default=None)
    calls = ("tool_calls", "function_call")
    if any(message.get(key) for message in value[:asked] if isinstance(message, Mapping) for key in calls):
        raise RowError(f"{column} contains a call of a tool, which a prompt of rows cannot have; remove it")
    messages = [as_message(message, column) for message in value]
    if asked is None:
        raise RowError(f"{column} has no user message")
    replies = [message["content"] for message in messages[asked + 1 :] if message["role"] == "assistant"]
    return tuple(messages[: asked + 1]), replies[0] if replies else None


def as_message(message: Any, column: str, missing: str | None = None) -> dict[str, str]:
    """Role and text of a message, with ``missing`` where it has no content. Raises RowError."""
    if not isinstance(message, Mapping):
        raise RowError(f"{column} contains {str(message)[:60]!r}, which is not a message")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    content = missing if content is None else content
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(part, column) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowError(f"{column} contains a message without role or text: {str(dict(message))[:60]!r}")
    return {"role": _ROLES.get(role, role), "content": content}


def _part(part: Any, column: str) -> str:
    """The text of a part of a message's content. Raises RowError for images and other parts."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RowError(f"{column} contains a part of type {kind!r}; only text can be used")
    return text


def parsed(value: Any, column: str = "") -> Any:
    """The messages of one message, of JSON text, or of a Python literal; other values unchanged. Raises RowError if
    text begins like messages and cannot be read, if ``column`` is set."""
    if isinstance(value, str) and _LOOKS_LIKE_MESSAGES.match(value):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                decoded = parsed(read(value.strip()))
                is_messages = isinstance(decoded, list) and decoded and all(map(_is_message, decoded))
                return decoded if is_messages else value
        names = (("role", "content"), ("from", "value"))
        if column and any(all(re.search(rf"""["']{name}["']""", value) for name in pair) for pair in names):
            raise RowError(f"{column} begins like messages in JSON and is not JSON: {value[:60]!r}")
    if isinstance(value, Mapping):
        return [value] if _is_message(value) else value.get("messages", value.get("conversations", value))
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def _fields(template: str) -> set[str]:
    with contextlib.suppress(ValueError):  # unbalanced braces are reported when the template is filled
        return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name}
    return set()


def _index(answer: Any) -> int | None:
    """The value of an integer, which a table with missing values stores as a float; None for others."""
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    return int(answer) if is_number and math.isfinite(answer) and answer == int(answer) else None


def _letter(answer: Any, options: Any, column: str) -> str:
    """The letter of the option that an integer counts from 0; the text of other answers. Raises RowError."""
    index = _index(answer)
    if index is None or not isinstance(options, list):
        return _as_text(answer)
    if not 0 <= index < len(options):
        raise RowError(
            f"has the answer {index} and {len(options)} members in {column!r}, which integers count from 0; write "
            "letters into the answer column if yours count from 1"
        )
    return string.ascii_uppercase[index : index + 1]


def _as_text(answer: Any) -> str:
    answer = parsed(answer)
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):  # missing in a JSON or Parquet table
        return ""
    if isinstance(answer, Sequence) and answer and all(map(_is_message, answer)):
        replies = [as_message(message, "the answer") for message in answer]
        return next((reply["content"] for reply in reversed(replies) if reply["role"] == "assistant"), "").strip()
    if isinstance(answer, list) and len(answer) == 1:
        return _as_text(answer[0])
    if isinstance(answer, bytes):
        raise RowError(f"has bytes as answer: {answer[:60]!r}; write text")
    value = _as_json(answer)  # decimals and dates of a Parquet file are text
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
