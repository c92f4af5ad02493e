"""The session interface for agents.

    async def rollout(session, row):
        answer = await session.ask()                      # the policy answers the prompt
        session.say(str(evaluate(answer)), role="tool")   # only sampled tokens are trained
        return float(await session.ask() == row["answer"])

Runs in an agent worker (envs/agent_worker.py). Token ids stay in the trainer (``rollout/agents/session.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CHARACTERS_PER_TOKEN = 64  # upper bound for ordinary text
LARGEST_REWARD = 1e15  # as in envs/scoring.py
AT_LIMIT = "is at its limit"  # in the text of every refusal because of a limit of the session
ASIDE = "."  # separates a session's API key from the number of a side conversation


class AgentError(RuntimeError):
    """The session rejected a request of the agent; the message gives the reason."""


class SessionLimit(AgentError):
    """The session used up its turns, tokens or time. Uncaught, it ends the session truncated, with reward 0."""


class AgentSession:
    """A conversation with the policy. Messages use OpenAI's chat format: role, content, tool_calls."""

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
        self.name = name  # rollout name, as in records
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.base_url, self.api_key = base_url, api_key  # for agents that use an OpenAI endpoint
        self.finish_reason = ""  # of the last answer: stop or length
        self._request = request
        self._max_characters = max_tokens * CHARACTERS_PER_TOKEN
        self._number = number  # 0: the session that is trained
        self._turn: int | None = None  # of the last answer to ask()
        self._num_asides = 0

    def say(self, content: str | bytes, role: str = "user", **fields: Any) -> None:
        """Add a message that is not sampled, from a user, a tool, the system or another player. Invalid UTF-8 is
        replaced. Raises SessionLimit if the message is longer than a whole session."""
        text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
        if len(text) > self._max_characters:
            raise SessionLimit(
                f"a message of role {role} has {len(text)} characters, more than the session limit of "
                f"{self._max_characters}; shorten the tool output"
            )
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates
        self.messages.append({"role": role, "content": text, **fields})

    async def ask(
        self, *, max_tokens: int | None = None, stop: str | Sequence[str] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Sample the policy's answer, append it to the messages and return its text. Its tokens are trained.

        The text ends before ``stop``, a text or several.
        ``tools``: JSON schemas for the chat template. With ``session.tool_parser`` set, tool calls are in
        ``self.messages[-1]["tool_calls"]``. Raises SessionLimit or AgentError.
        """
        stops = [stop] if isinstance(stop, str) else list(stop)
        request = {"do": "ask", "messages": self.messages, "max_tokens": max_tokens, "stop": stops}
        answer = await self._request(request | {"tools": list(tools), "aside": self._number})
        self.finish_reason, self._turn = answer["finish_reason"], answer["turn"]
        self.messages.append(answer["message"])
        return answer["text"]

    async def reward(self, value: float) -> None:
        """Add a reward for the last turn, used by ``algo.advantage_unit`` "turn". It also counts in the total. The last
        turn is that of :meth:`ask`; for agents that only use the endpoint, the last one of the session."""
        number = float(value)
        if not abs(number) <= LARGEST_REWARD:
            raise AgentError(f"session.reward({value!r}): a reward is a finite number of at most {LARGEST_REWARD:g}")
        await self._request({"do": "reward", "value": number, "turn": self._turn, "aside": self._number})

    def aside(self, *messages: Mapping[str, Any]) -> AgentSession:
        """Open a side conversation with the policy, such as a game opponent's. It is not trained on."""
        if self._number:
            raise AgentError("a side conversation cannot open another; call aside() on the session")
        self._num_asides = number = self._num_asides + 1
        return AgentSession(
            self._request,
            name=f"{self.name} aside {number}",
            messages=messages,
            max_tokens=self._max_characters // CHARACTERS_PER_TOKEN,
            number=number,
            base_url=self.base_url,
            api_key=f"{self.api_key}{ASIDE}{number}",
        )


def openai_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """The OpenAI client of an endpoint, with one session's key. It has no timeout because sessions have deadlines."""
    return _shared_client(base_url).with_options(api_key=api_key)


@functools.lru_cache(maxsize=8)
def _shared_client(base_url: str) -> AsyncOpenAI:
    """The client shared by all sessions of a process; creating a client takes 50 ms."""
    import httpx
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="of a session", timeout=httpx.Timeout(None, connect=5.0))
