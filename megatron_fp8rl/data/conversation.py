"""Conversations as token ids: extend a conversation without tokenizing sampled text again. Pure.

A chat template may rewrite history: Qwen3 removes earlier reasoning, Mistral moves the tools to the last question.
:meth:`ChatFormat.extend` then returns None, and the caller starts a new trajectory.

    rendered = template(messages, with generation prompt)   the prompt text
    answer   = sampled text without its end token
    next     = template(messages + answer + new messages, with generation prompt)

The history is kept if ``next`` begins with ``rendered + answer`` or with ``template(messages + answer)``; the template
may trim spaces or rewrite JSON. The rest of ``next`` is new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_fp8rl.data.tokenizer import encode, is_special

Message = Mapping[str, Any]  # role, content and, of an assistant, tool_calls, as in OpenAI's chat completions
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Template variables that are no arguments of a request.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_MARK = "\u2042answer\u2042"  # placeholder for an answer


class ConversationError(ValueError):
    """The chat template rejects the messages, or the tokenizer cannot represent the text."""


class LeftOutError(ConversationError):
    """The chat template leaves out a message. ``text``: what it wrote."""

    def __init__(self, problem: str, text: str) -> None:
        super().__init__(problem)
        self.text = text


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation up to the policy's next answer."""

    text: str
    new_text: str  # the added part
    new_ids: tuple[int, ...]  # token ids of new_text; for a new conversation, all ids


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of a run; without one, message contents are concatenated."""

    tokenizer: PreTrainedTokenizerBase
    uses_chat: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)  # template arguments
    stop_ids: frozenset[int] = frozenset()  # tokens that end an answer

    def for_request(self, tools: Sequence[Any], arguments: Mapping[str, Any]) -> ChatFormat:
        """Return the format with further template arguments. Raises ConversationError if the chat template writes no
        tools, or does not use one of the arguments."""
        template = str(self.tokenizer.chat_template) if self.uses_chat else ""
        if tools and not _uses(template, "tools"):
            raise ConversationError("tools: the chat template of the run writes none; describe them in a message")
        for name in arguments:
            if name in _RESERVED or name in self.tokenizer.special_tokens_map or not _uses(template, name):
                raise ConversationError(f"the chat template of the run has no argument {name!r}; leave it out")
        return replace(self, arguments={**self.arguments, **arguments}) if arguments else self

    def begin(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Render a new conversation. Raises ConversationError."""
        template = str(self.tokenizer.chat_template) if self.uses_chat else ""
        if any(message.get("tool_calls") for message in messages) and not _uses(template, "tool_calls"):
            raise ConversationError(
                "messages: the chat template of the run writes no tool calls; write them as content"
            )
        text = self.render(messages, tools)
        ids = self._encode(text, add_special_tokens=not self.uses_chat)
        return Rendered(text=text, new_text=text, new_ids=ids)

    def extend(
        self,
        before: str,
        past: Sequence[Message],
        sampled_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Any] = (),
    ) -> Rendered | None:
        """Render the ``new`` messages of a conversation; None if the template rewrites the history.

        Args:
            before: the text rendered before the last answer.
            past: all earlier messages, the sampled answer last.
            sampled_ids: the ids of that answer.

        Raises ConversationError.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_ids
        answer = self.tokenizer.decode(list(sampled_ids[: len(sampled_ids) - ended]), skip_special_tokens=False)
        text = self.render([*past, *new], tools)
        closing = self._closing(tools)
        ending = self.render(past, tools, answered=True).removesuffix(closing)
        if text.startswith(before + answer):
            start = len(before + answer)
        elif ending.startswith(before) and text.startswith(ending):
            start = len(ending)
        else:
            return None
        rest = text[start:]
        ids = self._encode(rest, add_special_tokens=False)
        if ended and ids and (ids[0] == sampled_ids[-1] or (closing and ids[0] in self.stop_ids)):
            ids = ids[1:]  # the end token was already sampled
        return Rendered(text=text, new_text=rest, new_ids=ids)

    @cached_property
    def _markers(self) -> list[str]:
        """The special tokens that the template writes into a conversation."""
        ids: tuple[int, ...] = ()
        with suppress(ConversationError):  # the template needs other messages
            ids = self.begin([{"role": "user", "content": "?"}]).new_ids if self.uses_chat else ()
        return [self.tokenizer.decode([token]) for token in dict.fromkeys(ids) if is_special(self.tokenizer, token)]

    def writes(self, name: str) -> bool:
        """Whether the template uses a field of messages, or an argument."""
        return _uses(str(self.tokenizer.chat_template) if self.uses_chat else "", name)

    def has_markers(self, messages: Sequence[Message]) -> bool:
        """Whether messages contain special tokens that the template writes, as if it were applied already."""
        return any(marker in str(message.get("content")) for message in messages for marker in self._markers)

    def header(self) -> str:
        """The text before an answer that the policy has to sample, because the template has no generation prompt."""
        if not self.uses_chat:
            return ""
        question = {"role": "user", "content": "?"}
        try:
            text = self.render([question], ())
            whole = self.render([question, {"role": "assistant", "content": _MARK}], (), answered=True)
            has_prompt = text != self.render([question], (), answered=True)
        except ConversationError:
            return ""
        return "" if has_prompt or not whole.startswith(text) else whole.removeprefix(text).partition(_MARK)[0].strip()

    def closing_text(self) -> str:
        """The template's text after an answer that ends a conversation, without spaces around it."""
        with suppress(ConversationError):
            return self._closing(()).strip()
        return ""

    def closing_id(self) -> int | None:
        """First token that the template writes after an answer, before the next question; None without a template."""
        if not self.uses_chat:
            return None
        question = {"role": "user", "content": "?"}
        try:
            text = self.render([question, {"role": "assistant", "content": _MARK}, question], ())
        except ConversationError:
            return None
        rest = text.rpartition(_MARK)[2].lstrip() if _MARK in text else ""
        ids = self.tokenizer.encode(rest, add_special_tokens=False)  # later characters may be unknown
        return ids[0] if ids and ids[0] != self.tokenizer.unk_token_id else None

    def _closing(self, tools: Sequence[Any]) -> str:
        """The template's text after an answer, such as end token and line break."""
        if not self.uses_chat:
            return ""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        return self.render(probe, tools, answered=True).rpartition(_MARK)[2]

    def render(self, messages: Sequence[Message], tools: Sequence[Any], *, answered: bool = False) -> str:
        """The text of ``messages``, with the start of an answer unless they are ``answered``. Raises ConversationError
        for messages that the chat template refuses."""
        if not self.uses_chat:
            return "".join(plain(message)["content"] for message in messages)
        keeps_developers = "developer" in str(self.tokenizer.chat_template)
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message, keeps_developers=keeps_developers) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=not answered,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:  # a template can raise any error
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConversationError(f"the chat template refuses the messages ({roles}): {error}") from None
        for message in messages:
            role, content = message.get("role"), plain(message)["content"].strip()
            if role not in ("assistant", "tool") and content not in text:  # which templates may rewrite
                remedy = "correct the template" if role in _ROLES else f"use one of {', '.join(_ROLES)}"
                problem = (
                    f"the chat template leaves out or changes a message of role {role!r}: {content[:60]!r}; {remedy}"
                )
                raise LeftOutError(problem, text)
            if role not in _ROLES and not self.writes(str(role)):  # it only repeats the word
                raise ConversationError(
                    f"the chat template does not know the role {role!r} of a message; use one of {', '.join(_ROLES)}"
                )
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return encode(self.tokenizer, text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ConversationError(str(error)) from None


def plain(message: Message) -> dict[str, Any]:
    """Reduce a message to its role, text and tool calls. Raises ConversationError if it is not a message."""
    try:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        calls = [(call["function"]["name"], _arguments(call)) for call in message.get("tool_calls") or ()]
        if not isinstance(content or "", str):
            raise TypeError(f"content of type {type(content).__name__}")
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConversationError(f"{message!r:.300} is not a message ({problem})") from None
    reduced = {"role": message.get("role"), "content": content or ""}
    if calls:
        reduced["tool_calls"] = calls
    return reduced


def _arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call as an object, or as text if they are not JSON."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _uses(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _for_template(message: Message, *, keeps_developers: bool) -> dict[str, Any]:
    """Convert content to text and arguments to objects, as templates expect. Without ``keeps_developers``, messages of
    role developer become system messages, as in vLLM's server."""
    converted = {**message, "content": plain(message)["content"]}
    if message.get("role") == "developer" and not keeps_developers:
        converted["role"] = "system"
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        converted["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls
        ]
    return converted
