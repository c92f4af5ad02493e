"""Parses tool calls in sampled text with vLLM's parsers, on trainer rank 0."""

import difflib
import functools
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_TRIAL_S = 300.0
_PROBLEM = "problem: "


class ToolCalls:
    """``parser`` is the name of a vLLM tool parser; "" parses no calls."""

    def __init__(self, parser: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._name, self._tokenizer = parser, tokenizer
        self._has_warned = False

    def message(self, text: str, tools: Sequence[Any]) -> dict[str, Any]:
        """Return ``content`` and, if any, ``tool_calls``. A call that cannot be parsed stays text.

        ``text`` contains the special tokens, because the markers of many parsers are special tokens. A parser that
        vLLM's server calls without special tokens gets them only if it finds no call without them.
        """
        if not self._name or not tools:
            return {"content": text}
        request = _request(tools)
        texts = [text]
        if self._parser(request).adjust_request(request).skip_special_tokens:
            texts.insert(0, self._special_tokens.sub("", text))
        for candidate in dict.fromkeys(texts):
            if (message := self._parsed(candidate, request)) is not None:
                return message
        return {"content": text}

    def load(self) -> None:
        """Import and try the parser, which takes seconds. Raises ValueError with similar names, or its reason."""
        if not self._name:
            return
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if self._name not in known:
            near = difflib.get_close_matches(self._name, known, n=3, cutoff=0.5)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}"
            raise ValueError(f"--session.tool_parser = {self._name!r}: vLLM has no such parser. {hint}")
        request = _request([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
        try:
            self._parser_class(self._tokenizer)
        except Exception as error:  # a marker has no token, or a package is missing
            reason = error.__cause__ or error
            problem = "cannot be loaded" if isinstance(reason, ImportError) else "does not fit the tokenizer"
            text = " ".join(str(reason).split())
            raise ValueError(
                f"--session.tool_parser = {self._name!r} {problem} ({text}). Choose the parser of the model"
            ) from None
        try:
            parser = self._parser(request)
            parser.parse("?", parser.adjust_request(request), enable_auto_tools=True)
        except Exception as error:  # it parses no text, or needs a part that this vLLM lacks
            raise ValueError(
                f"--session.tool_parser = {self._name!r}: vLLM's parser does not work here ({error}). Choose another"
            ) from None

    def _parsed(self, text: str, request: Any) -> dict[str, Any] | None:
        """Return the message with its calls; None if there are none, or if the parser raises."""
        from vllm.entrypoints.openai.engine.protocol import ToolCall

        try:
            _, content, calls = self._parser(request).parse(text, request, enable_auto_tools=True)
        except Exception as error:  # parsers raise many kinds; vLLM's server answers the request with status 500
            if not self._has_warned:
                self._has_warned = True
                reason = f"{type(error).__name__}: {error}"
                _log.warning(
                    "--session.tool_parser %s fails for %.200r (%s); such calls stay text", self._name, text, reason
                )
            return None
        if not calls:
            return None
        tool_calls = [ToolCall(function=call, **({"id": call.id} if call.id else {})) for call in calls]
        fields = {"id": True, "type": True, "function": {"name", "arguments"}}
        return {"content": content, "tool_calls": [call.model_dump(include=fields) for call in tool_calls]}

    def _parser(self, request: Any) -> Any:
        """Return a new parser, because a parser has state."""
        return self._parser_class(self._tokenizer, request.tools)

    @functools.cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    @functools.cached_property
    def _parser_class(self) -> Any:
        from vllm.parser import ParserManager

        return ParserManager.get_parser(tool_parser_name=self._name, enable_auto_tools=True)


def _request(tools: Sequence[Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=list(tools), model="policy")


def load_problem(parser: str, tokenizer: str) -> str:
    """Why a parser cannot be used with the tokenizer of a folder; empty if it can, or if vLLM is not installed. Tried
    in another process: importing vLLM sets environment variables, which trainer and engines would inherit."""
    command = [sys.executable, "-m", "megatron_fp8rl.rollout.agents.tool_calls", parser, tokenizer]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, check=False)
    lines = ran.stdout.splitlines()
    return lines[-1].removeprefix(_PROBLEM) if lines and lines[-1].startswith(_PROBLEM) else ""


def _main(parser: str, tokenizer: str) -> None:
    """Print the problem of a parser, if there is one, without the name of the field."""
    from megatron_fp8rl.data.tokenizer import load_tokenizer

    try:
        ToolCalls(parser, load_tokenizer(tokenizer)).load()
    except ValueError as error:
        text = " ".join(str(error).split())
        print(_PROBLEM + text.removeprefix(f"--session.tool_parser = {parser!r}").lstrip(": ").rstrip("?."))


def before_stop(text: str, stops: Sequence[str], *, included: bool = False) -> str:
    """The text before the stop string that ended it, or with it if ``included``, as vLLM's server returns it. An engine
    looks for the strings in their order after each token, so only the last token can have several."""
    for stop in stops:
        if stop in text:
            return text[: text.index(stop) + len(stop) * included]
    return text


if __name__ == "__main__":
    _main(*sys.argv[1:])
