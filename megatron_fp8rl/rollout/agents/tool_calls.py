"""Parses tool calls in sampled text with vLLM's parsers.

In: the text of an answer. Out: the message as agents expect it. Runs on trainer rank 0.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


class ToolCalls:
    """``parser`` is the name of a vLLM tool parser; "" parses no calls."""

    def __init__(self, parser: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._name, self._tokenizer = parser, tokenizer

    def message(self, text: str, tools: Sequence[Any]) -> dict[str, Any]:
        """Return ``content`` and, if any, ``tool_calls``. A call that cannot be parsed stays text."""
        if not self._name or not tools:
            return {"content": text}
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=list(tools), model="policy")
        parsed = self._parser_class(self._tokenizer, request.tools).extract_tool_calls(text, request)
        if not parsed.tools_called:
            return {"content": text}
        calls = [call.model_dump(include={"id", "type", "function"}) for call in parsed.tool_calls]
        return {"content": parsed.content, "tool_calls": calls}

    def load(self) -> None:
        """Import the parser, which takes seconds. Raises ValueError with similar names."""
        if not self._name:
            return
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if self._name not in known:
            near = difflib.get_close_matches(self._name, known, n=3, cutoff=0.5)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}"
            raise ValueError(f"--session.tool_parser = {self._name!r}: vLLM has no such parser. {hint}")
        _ = self._parser_class

    @functools.cached_property
    def _parser_class(self) -> Any:
        from vllm.tool_parsers import ToolParserManager

        return ToolParserManager.get_tool_parser(self._name)
