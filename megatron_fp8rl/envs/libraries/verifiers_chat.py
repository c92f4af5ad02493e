"""The chat loop of ``verifiers``' tasks, in the process that plays the session.

The library's own harnesses start a program for each session. The library records the requests to its endpoint.
"""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from megatron_fp8rl.envs.agent_session import openai_client

__all__ = ["ChatHarness"]

_CONNECT_S = 60.0  # to all tool servers of a task

Message = dict[str, Any]


class ChatHarness(Harness[HarnessConfig]):
    """Ask, call the tools that the answer names, ask again, until an answer calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run the task's conversation; an error of the endpoint ends it with status 1."""
        client = openai_client(endpoint, secret)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        messages = self._opening(data)
        async with AsyncExitStack() as stack:
            tools, names, open_servers = await asyncio.wait_for(
                connect_mcp({"mcpServers": servers}, stack), timeout=_CONNECT_S
            )
            run = functools.partial(call_mcp, open_servers, names)
            may_call = functools.partial(_allowed, client, tool_interception_url)
            try:
                while calls := await _ask(client, ctx.model, messages, tools):
                    for call in calls:
                        messages.append(await _called(call, names, run, may_call))
            except (APIStatusError, _Stopped) as error:
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[Message]:
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or ())]


class _Stopped(Exception):
    """The task ends its run."""


async def _ask(client: AsyncOpenAI, model: str, messages: list[Message], tools: list[Message]) -> list[Any]:
    """Append the policy's next message to ``messages`` and return its tool calls."""
    options = {"tools": tools} if tools else {}
    answer = await client.chat.completions.create(model=model, messages=messages, **options)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.tool_calls or []


async def _called(
    call: Any,
    names: dict[str, Any],
    run: Callable[[str, Message], Awaitable[Any]],
    may_call: Callable[[str, str, Any], Awaitable[Message | None]],
) -> Message:
    """The message with a tool's result, or with the error of the call."""
    name, arguments = call.function.name, call.function.arguments or "{}"
    problem = None
    try:
        arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            problem = f"error: the arguments are {type(arguments).__name__}, not a JSON object"
    except ValueError as error:
        problem = f"error: the arguments are not JSON ({error})"
    refusal = await may_call(call.id, name, arguments)
    if refusal is not None:
        return refusal
    if problem is None and name not in names:
        problem = f"error: there is no tool {name!r}"
    content = await run(name, arguments) if problem is None else problem
    return {"role": "tool", "tool_call_id": call.id, "name": name, "content": content}


async def _allowed(client: AsyncOpenAI, url: str | None, call_id: str, name: str, arguments: Any) -> Message | None:
    """None, or the message with which the task's hooks replace the call. Raises _Stopped."""
    if url is None:
        return None
    body = {"tool_call_id": call_id, "name": name, "arguments": arguments}
    decision: Any = await client.post(url, body=body, cast_to=object)
    if decision["action"] == "stop":
        raise _Stopped(decision["reason"])
    return decision["message"] if decision["action"] == "deny" else None
