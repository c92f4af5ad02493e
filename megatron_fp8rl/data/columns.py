"""Find prompt and answer of a row by its column names; all other columns are for rewards. Pure.

Known columns: GSM8K, DAPO-Math-17k, OpenR1-Math, MATH-500, AIME, verl's parquet files, and conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.data.dropped import RowError
from megatron_fp8rl.envs.environment import Problem

# In order of preference; case-insensitive.
_PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "query", "input", "instruction")
_ANSWERS = "answer reward_model.ground_truth ground_truth final_answer target label solution output".split()
_ROLES = {"human": "user", "gpt": "assistant"}  # names used in "conversations"
_FINAL_ANSWER = "####"  # GSM8K: marks the final answer


class ColumnError(ValueError):
    """A required column is missing; the message lists the existing columns."""


@dataclass(frozen=True)
class Columns:
    """Names of the prompt and (optional) answer columns. "a.b" is key b in column a."""

    prompt: str
    answer: str | None

    def problem(self, row: Mapping[str, Any]) -> Problem:
        """Convert a row. Raises RowError for an empty prompt, or one that is neither text nor messages."""
        value = lookup(row, self.prompt)
        answer = None if self.answer is None else lookup(row, self.answer)
        messages: tuple[dict[str, str], ...] = ()
        if isinstance(value, str):
            question = value
        else:
            messages, replied = _messages(value, self.prompt)
            question = messages[-1]["content"]
            answer = replied if answer is None else answer
        if not question.strip():
            raise RowError(f"{self.prompt} is empty")
        text = _as_text(answer)
        whole = {"full_answer": text} if _FINAL_ANSWER in text else {}
        used = {self.prompt, self.answer}
        rest = {name: _as_json(value) for name, value in row.items() if name not in used and name != "answer"}
        return Problem(
            question=question,
            answer=text.rpartition(_FINAL_ANSWER)[2].strip(),
            metadata={**rest, **whole},
            messages=messages,
        )


def find_columns(row: Mapping[str, Any], *, prompt: str = "", answer: str = "") -> Columns:
    """Find the columns of rows like this one; ``prompt`` and ``answer`` override the names. Raises ColumnError."""
    names = {name: None for name in row}
    listed = ", ".join(names) or "none"
    for field, name in (("prompt_column", prompt), ("answer_column", answer)):
        if name and lookup(row, name) is None and name.partition(".")[0] not in names:
            raise ColumnError(f"{field} = {name!r} is no column{near_matches(name, names)} (columns: {listed})")
    prompt_column = prompt or _first(row, _PROMPTS)
    if prompt_column is None:
        raise ColumnError(f"no known prompt column; set prompt_column (columns: {listed})")
    return Columns(prompt_column, answer or _first(row, _ANSWERS, but=prompt_column))


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key in it if the name has dots; None if it does not exist."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _first(row: Mapping[str, Any], candidates: Sequence[str], but: str = "") -> str | None:
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
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise RowError(f"{column} contains {str(message)[:60]!r}, which is not a message")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise RowError(f"{column} contains a message without role or text: {str(dict(message))[:60]!r}")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if asked is None:
        raise RowError(f"{column} has no user message")
    replies = [message["content"] for message in messages[asked + 1 :] if message["role"] == "assistant"]
    return tuple(messages[: asked + 1]), replies[0] if replies else None


def _as_text(answer: Any) -> str:
    if answer is None:
        return ""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return answer.strip() if isinstance(answer, str) else json.dumps(_as_json(answer))


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
