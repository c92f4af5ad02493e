"""What an agent holds of its session: ``async def rollout(session, row) -> reward``.

    async def rollout(session, row):
        answer = await session.ask()                      # the policy answers the prompt
        session.say(str(evaluate(answer)), role="tool")   # what is not sampled is not trained
        return float(await session.ask() == row["answer"])

Runs in an agent worker (envs/agent_worker.py). The trainer's end is ``rollout/agents/session.py``: it holds the token ids.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CHARACTERS_PER_TOKEN = 64  # more than any tokenizer makes of ordinary text
ASIDE = "."  # between the API key of a session and the number of a conversation beside it


class AgentError(RuntimeError):
    """The session refuses what the agent asks; the message says why."""


class SessionLimit(AgentError):
    """The session has used up its turns, tokens or time. An agent that does not catch it ends truncated, with reward 0."""


class AgentSession:
    """A conversation with the policy. Messages are those of OpenAI's chat completions: role, content, tool_calls."""

    def __init__(
        self,
        request: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        *,
        name: str,
        messages: Sequence[Mapping[str, Any]] = (),
        max_tokens: int,
        base_url: str = "",
        api_key: str = "",
        number: int = 0,
    ) -> None:
        self.name = name  # of the rollout, as in records
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.base_url, self.api_key = base_url, api_key  # of this session, for agents that take an OpenAI endpoint
        self.finish_reason = ""  # of the last answer: stop or length
        self._request = request
        self._max_characters = max_tokens * CHARACTERS_PER_TOKEN
        self._number = number  # 0: the session that is trained
        self._num_asides = 0

    def say(self, content: str | bytes, role: str = "user", **fields: Any) -> None:
        """Add a message that is not sampled: of a user, a tool, a system or another player.

        Raises SessionLimit if it is longer than a whole session; bytes that are no UTF-8 become replacement characters.
        """
        text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
        if len(text) > self._max_characters:
            raise SessionLimit(
                f"a message of role {role} has {len(text)} characters, more than a whole session holds "
                f"({self._max_characters}); shorten what tools return"
            )
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates
        self.messages.append({"role": role, "content": text, **fields})

    async def ask(
        self, *, max_tokens: int | None = None, stop: Sequence[str] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The policy's answer to the messages so far, which becomes one of them. Its tokens are trained.

        ``tools``: JSON schemas for the chat template; the calls in the answer are ``self.messages[-1]["tool_calls"]`` if
        ``session.tool_parser`` is set. Raises SessionLimit or AgentError.
        """
        request = {"do": "ask", "messages": self.messages, "max_tokens": max_tokens, "stop": list(stop)}
        answer = await self._request(request | {"tools": list(tools), "aside": self._number})
        self.finish_reason = answer["finish_reason"]
        self.messages.append(answer["message"])
        return answer["text"]

    async def reward(self, value: float) -> None:
        """Give the last turn a reward of its own, which ``algo.advantage_unit`` "turn" compares; it adds to the whole."""
        await self._request({"do": "reward", "value": float(value), "aside": self._number})

    def aside(self, *messages: Mapping[str, Any]) -> AgentSession:
        """Another conversation with the policy, such as an opponent's in a game, of which nothing is trained."""
        self._num_asides += 1
        number = self._num_asides if self._number == 0 else None
        if number is None:
            raise AgentError("a conversation beside the session has none beside itself; ask the session for it")
        characters = self._max_characters // CHARACTERS_PER_TOKEN
        return AgentSession(
            self._request,
            name=f"{self.name} aside {number}",
            messages=messages,
            max_tokens=characters,
            number=number,
            base_url=self.base_url,
            api_key=f"{self.api_key}{ASIDE}{number}",
        )


def openai_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """The official client of an endpoint, with the key of one session. Sessions have deadlines, so its answers have none."""
    return _shared_client(base_url).with_options(api_key=api_key)


@functools.lru_cache(maxsize=8)
def _shared_client(base_url: str) -> AsyncOpenAI:
    """One for all sessions of a process: making one takes a twentieth of a second."""
    import httpx
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="of a session", timeout=httpx.Timeout(None, connect=5.0))
