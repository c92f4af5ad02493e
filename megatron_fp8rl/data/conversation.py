"""Conversations as token ids: what a chat template adds to a past that stays as it was sampled. Pure.

In: messages, and what was sampled. Out: token ids. The ids of a conversation only grow: nothing that was sampled is
tokenized again. A template may say of the past what the ids do not, for instance without the reasoning of earlier answers
(Qwen3) or with the tools moved to the last question (Mistral); :meth:`ChatFormat.extend` then says so, and the caller
decides between a new trajectory and a refusal.

    rendered = template(messages, with generation prompt)   the text whose ids were the prompt
    answer   = what was sampled, without its end token
    next     = template(messages + answer + new messages, with generation prompt)

The past is kept if ``next`` begins with ``rendered + answer``, or with what the template itself makes of ``messages +
answer``, which may trim spaces or rewrite JSON. The rest of ``next`` is what is new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.data.tokenizer import encode

Message = Mapping[str, Any]  # role, content and, of an assistant, tool_calls, as in OpenAI's chat completions
_MARK = "\u2042answer\u2042"  # stands for an answer where only its surroundings matter


class ConversationError(ValueError):
    """Messages that the chat template refuses, or text that the tokenizer cannot represent."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation up to the point where the policy speaks."""

    text: str
    new_text: str  # what was not there before
    new_ids: tuple[int, ...]  # of it; for a conversation that begins, all
    keeps_past: bool = True  # False: the template tells the past otherwise than it was sampled


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of a run; without one, a conversation is its contents one after another."""

    tokenizer: PreTrainedTokenizerBase
    uses_chat: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the template
    stop_ids: frozenset[int] = frozenset()  # tokens that end an answer

    def begin(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """A conversation from its beginning. Raises ConversationError."""
        text = self._render(messages, tools)
        ids = self._encode(text, add_special_tokens=not self.uses_chat)
        return Rendered(text=text, new_text=text, new_ids=ids)

    def extend(
        self,
        before: str,
        past: Sequence[Message],
        sampled_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Any] = (),
    ) -> Rendered:
        """What ``new`` messages add to a conversation, rendered as ``before``, in which ``sampled_ids`` were sampled.

        ``past`` are all its messages, the sampled answer last. Raises ConversationError.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_ids
        answer = self.tokenizer.decode(list(sampled_ids[: len(sampled_ids) - ended]), skip_special_tokens=False)
        text = self._render([*past, *new], tools)
        closing = self._closing(tools)
        told = self._render(past, tools, answered=True).removesuffix(closing)
        keeps_past, start = True, 0
        if text.startswith(before + answer):
            start = len(before + answer)
        elif told.startswith(before) and text.startswith(told):
            start = len(told)
        else:
            keeps_past, start = False, self._end_of_answer(text, past, new, tools)
        rest = text[start:]
        ids = self._encode(rest, add_special_tokens=False)
        if ended and ids and (ids[0] == sampled_ids[-1] or (closing and ids[0] in self.stop_ids)):
            ids = ids[1:]  # the end of the answer was sampled
        return Rendered(text=text, new_text=rest, new_ids=ids, keeps_past=keeps_past)

    def _end_of_answer(self, text: str, past: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]) -> int:
        """Where the last answer of ``past`` ends in ``text``, which tells the past otherwise."""
        marked = self._render([*past[:-1], {**past[-1], "content": _MARK}, *new], tools)
        _, found, rest = marked.rpartition(_MARK)
        if not found or not text.endswith(rest):
            raise ConversationError("the chat template does not show where the last answer ends")
        return len(text) - len(rest)

    def _closing(self, tools: Sequence[Any]) -> str:
        """What the template writes after an answer, such as its end token and a line break."""
        if not self.uses_chat:
            return ""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        return self._render(probe, tools, answered=True).rpartition(_MARK)[2]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], *, answered: bool = False) -> str:
        if not self.uses_chat:
            return "".join(plain(message)["content"] for message in messages)
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=not answered,
                tokenize=False,
                **self.arguments,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConversationError(f"the chat template refuses the messages ({roles}): {error}") from None

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return encode(self.tokenizer, text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ConversationError(str(error)) from None


def plain(message: Message) -> dict[str, Any]:
    """What identifies a message: its role, its text and the calls of an assistant.

    Raises ConversationError for a message that is none.
    """
    try:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        calls = [(one["function"]["name"], _arguments(one)) for one in message.get("tool_calls") or ()]
        if not isinstance(content or "", str):
            raise TypeError(f"content of type {type(content).__name__}")
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConversationError(f"{message!r:.300} is no message of a conversation ({problem})") from None
    found = {"role": message.get("role"), "content": content or ""}
    if calls:
        found["tool_calls"] = calls
    return found


def _arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call as an object; as text if they are no JSON."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _for_template(message: Message) -> dict[str, Any]:
    """Templates expect text as content and objects as arguments."""
    found = {**message, "content": plain(message)["content"]}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls
        ]
    return found
