"""Agent worker process: ``python -m megatron_fp8rl.envs.agent_worker``.

Supervised by rollout/agents/agent_process.py. Runs many sessions on one event loop. Reads one JSON object per line:

    {"agents": {key: {"agent": spec, "options": {}}}, "memory_bytes": n, "base_url": url, "max_tokens": n}
    {"start": id, "environment": key, "row": {}, "messages": [], "name": str, "api_key": str}
    {"answer": [id, call], ...} | {"answer": [id, call], "error": text, "kind": str} | {"cancel": id} | {"ping": n}

and writes {"ready": true} or {"error": text}, {"request": [id, call], ...}, {"pong": n}, and at the end of a session
{"done": id, "status": str, "address_bytes": n, ...}. Status ``exhausted``: memory, threads or files are used up.

The worker keeps the id of the running session in a memory-mapped file, whose descriptor is a command-line argument.
The trainer reads it to identify a session that crashed or blocked the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megatron_fp8rl.envs import agent_function
from megatron_fp8rl.envs.agent_session import AgentError, AgentSession, SessionLimit
from megatron_fp8rl.envs.rewards.configured import reward_and_parts
from megatron_fp8rl.envs.worker_memory import RESERVE_BYTES, AddressSpace, is_exhausted

MARK = struct.Struct("q")
_NUM_THREADS = 256
_LARGEST_REWARD = 1e15  # as in envs/scoring.py
_LINE_BYTES = 64 << 20


class _Marked(Awaitable[Any]):
    """A coroutine that records its session id before each step."""

    def __init__(self, coroutine: Any, note: Callable[[int], None], session: int) -> None:
        self._coroutine, self._note, self._session = coroutine, note, session

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        value: Any = None
        failure: BaseException | None = None
        while True:
            self._note(self._session)
            try:
                waited = steps.send(value) if failure is None else steps.throw(failure)
            except StopIteration as end:
                return end.value
            finally:
                self._note(-1)
            value = failure = None
            try:
                value = yield waited
            except BaseException as error:
                failure = error


class Worker:
    """The sessions of this process."""

    def __init__(self, write: Callable[[dict[str, Any]], None], note: Callable[[int], None]) -> None:
        self._write, self._note = write, note
        self._agents: dict[str, partial[Any]] = {}
        self._base_url, self._max_tokens = "", 1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[tuple[int, int], asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._memory = AddressSpace()
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle one message from the trainer."""
        if "answer" in message:
            call = self._calls.pop(tuple(message["answer"]), None)
            if call is not None and not call.done():
                call.set_result(dict(message))
        elif "start" in message:
            task = asyncio.ensure_future(self._play(message))
            self._tasks[message["start"]] = task
        elif "cancel" in message:
            task = self._tasks.get(message["cancel"])
            if task is not None:
                task.cancel()
        elif "ping" in message:
            self._write({"pong": message["ping"]})  # proves that no session blocks the event loop
        else:
            self._begin(message)

    def _begin(self, greeting: Mapping[str, Any]) -> None:
        try:
            self._memory.limit(greeting["memory_bytes"])
            self._base_url, self._max_tokens = greeting["base_url"], greeting["max_tokens"]
            for key, fields in greeting["agents"].items():
                self._agents[key] = agent_function.load(fields["agent"], fields["options"])
        except agent_function.AgentSpecError as error:
            return self._write({"error": str(error)})
        except Exception as error:
            traceback.print_exc()
            return self._write({"error": f"the agents cannot be loaded: {type(error).__name__}: {error}"})
        self._write({"ready": True})

    async def _play(self, start: Mapping[str, Any]) -> None:
        number, in_model_s, began_s = start["start"], [0.0], time.monotonic()
        session = AgentSession(
            partial(self._request, number, in_model_s),
            name=start["name"],
            messages=start["messages"],
            max_tokens=self._max_tokens,
            base_url=self._base_url,
            api_key=start["api_key"],
        )
        agent = self._agents[start["environment"]]
        outcome: dict[str, Any]
        try:
            playing = agent(session, start["row"])
            if not inspect.isawaitable(playing):
                raise AgentError(f"the agent is not async: write {agent_function.SIGNATURE}")
            value = await _Marked(playing, self._note, number)
            outcome = _outcome(value, start["environment"])
        except SessionLimit as error:
            outcome = {"status": "truncated", "detail": str(error)}
        except asyncio.CancelledError:
            outcome = {"status": "cancelled", "detail": "it was cancelled"}
        except Exception as error:
            status = "raised"
            if is_exhausted(error):
                status, self._reserve = "exhausted", None
            traceback.print_exc()
            outcome = {"status": status, "detail": f"the agent raised {type(error).__name__}: {error}"[:2000]}
        finally:
            self._tasks.pop(number, None)
            for key in [key for key in self._calls if key[0] == number]:
                del self._calls[key]
        tools_s = time.monotonic() - began_s - in_model_s[0]
        size = {"address_bytes": self._memory.num_bytes()}
        self._write({"done": number, "tools_s": tools_s, **size, **outcome})

    async def _request(self, number: int, in_model_s: list[float], request: dict[str, Any]) -> dict[str, Any]:
        self._num_calls += 1
        key = (number, self._num_calls)
        self._calls[key] = asyncio.get_running_loop().create_future()
        began_s = time.monotonic()
        self._write({"request": key, **request})
        try:
            answer = await self._calls[key]
        finally:
            in_model_s[0] += time.monotonic() - began_s
            self._calls.pop(key, None)
        if "error" in answer:
            raise (SessionLimit if answer["kind"] == "limit" else AgentError)(answer["error"])
        return answer


def _outcome(value: Any, environment: str) -> dict[str, Any]:
    """Convert an agent's return value: a reward, its parts by name, or None to score with the source's rewards."""
    if value is None:
        return {"status": "unscored"}
    reward, parts = reward_and_parts(value, environment)
    if bad := [number for number in (reward, *parts.values()) if not abs(number) <= _LARGEST_REWARD]:
        raise AgentError(f"{environment} returned {bad[0]}, which is not a valid reward")
    return {"status": "scored", "reward": reward, "parts": parts}


async def serve(requests: Any, replies: Any, note: Callable[[int], None]) -> None:
    """Handle messages until end of file."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)

    def write(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    worker = Worker(write, note)
    while line := await reader.readline():
        worker.take(json.loads(line))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer closes the pool
    # Agents may print: reserve standard output for replies and redirect their output to standard error.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    shared = mmap.mmap(int(sys.argv[1]), MARK.size)

    def note(session: int) -> None:
        shared[:] = MARK.pack(session)

    asyncio.run(serve(sys.stdin.buffer, replies, note))
    os._exit(0)  # do not wait for tool threads that hang


if __name__ == "__main__":
    main()
