"""Agent worker process: ``python -m megatron_fp8rl.envs.agent_worker``.

Supervised by rollout/agents/agent_process.py. Runs many sessions on one event loop. Reads one JSON object per line:

    {"agents": {key: {"agent": spec, "options": {}}}, "memory_bytes": n, "base_url": url, "max_tokens": n}
    {"start": id, "environment": key, "row": {}, "messages": [], "name": str, "api_key": str}
    {"answer": [id, call], ...} | {"answer": [id, call], "error": text, "kind": str} | {"cancel": id} | {"ping": n}

and writes {"ready": true, "thread": id} or {"error": text}, {"request": [id, call], ...}, {"withdraw": [id, call]} if
the agent no longer waits for the answer, {"pong": n}, and at the end of a session
{"done": id, "status": str, "address_bytes": n, ...}. Status ``exhausted``: memory, threads or files are used up.

The worker keeps the ids of the sessions whose code runs in a memory-mapped file: one for the event loop and one for
each thread of its executor. After a crash, a second file has Python's report of the thread that crashed. The trainer
reads both to identify a session that crashed or blocked the event loop. Their descriptors are command-line arguments.

An exception of a session stays in that session, also ``sys.exit()`` and those of its tasks and threads.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import itertools
import json
import mmap
import os
import signal
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fp8rl.envs import agent_function
from megatron_fp8rl.envs.agent_session import AT_LIMIT, LARGEST_REWARD, AgentError, AgentSession, SessionLimit
from megatron_fp8rl.envs.rewards.configured import reward_and_parts
from megatron_fp8rl.envs.worker_memory import RESERVE_BYTES, AddressSpace, is_exhausted

NUM_THREADS = 256
MARK = struct.Struct("q")  # the session of the event loop; then one of each thread
MARKS_BYTES = (1 + NUM_THREADS) * MARK.size
_MAX_REASON = 1500  # characters
_LIBRARIES = (str(Path(__file__).parents[1]), *(sysconfig.get_paths()[n] for n in ("stdlib", "purelib", "platlib")))
_LINE_BYTES = 64 << 20


_session: ContextVar[int] = ContextVar("session", default=-1)  # whose code runs; tasks and threads inherit it


class _Loop(asyncio.SelectorEventLoop):
    """Marks the session whose code runs, in tasks, callbacks and threads of the default executor.

    ``sys.exit()`` and KeyboardInterrupt end the session that raised them, and not the loop. Each session has its own
    current folder. A session cannot stop what all sessions need.
    """

    def __init__(self, note: Callable[[int, int], None], fail: Callable[[int, BaseException], None]) -> None:
        super().__init__()
        self._note, self._fail = note, fail
        self._folder = os.getcwd()
        self._folders: dict[int, str] = {}  # of sessions that have changed it

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        return super().call_soon(self._marked, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._marked, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._marked, callback, *args, context=context)

    def set_default_executor(self, executor: Any) -> None:
        self._refuse("set_default_executor")
        super().set_default_executor(executor)

    def stop(self) -> None:
        self._refuse("stop")
        super().stop()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._refuse("shutdown_default_executor")
        await super().shutdown_default_executor(timeout)

    def forget(self, session: int) -> None:
        self._folders.pop(session, None)

    def _marked(self, callback: Callable[..., Any], *args: Any) -> None:
        session = _session.get()
        if session < 0:
            callback(*args)
            return
        process = os.getpid()
        self._note(0, session)
        self._enter(self._folders.get(session, self._folder))
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            self._fail(session, error)
        finally:
            if os.getpid() != process:  # a copy of this process that the session has made by os.fork()
                os._exit(0)
            self._note(0, -1)
            if (folder := _current_folder()) != self._folder or session in self._folders:
                self._folders[session] = folder

    def _enter(self, folder: str) -> None:
        if folder != _current_folder():
            with contextlib.suppress(OSError):  # it was removed
                os.chdir(folder)

    def _refuse(self, name: str) -> None:
        if _session.get() >= 0:
            raise AgentError(f"an agent called {name}() of the event loop, which other sessions use too")


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


class _Threads(ThreadPoolExecutor):
    """Threads that mark the session whose code they run."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        super().__init__(NUM_THREADS)
        self._note, self._numbers, self._thread = note, itertools.count(1), threading.local()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, _session.get(), partial(fn, *args, **kwargs))

    def _run(self, session: int, function: Callable[[], Any]) -> Any:
        if not hasattr(self._thread, "number"):
            self._thread.number = next(self._numbers)
        self._note(self._thread.number, session)
        try:
            return function()
        finally:
            self._note(self._thread.number, -1)


class Worker:
    """The sessions of this process. Runs on ``loop``."""

    def __init__(self, write: Callable[[dict[str, Any]], None], loop: asyncio.AbstractEventLoop) -> None:
        self._write, self._loop = write, loop
        self._agents: dict[str, partial[Any]] = {}
        self._base_url, self._max_tokens = "", 1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._api_keys: dict[int, str] = {}
        self._calls: dict[tuple[int, int], asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._cancelled: set[int] = set()  # sessions that the trainer cancelled
        self._failures: dict[int, str] = {}  # of tasks and callbacks of sessions
        self._memory = AddressSpace()
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle one message from the trainer."""
        if "answer" in message:
            call = self._calls.get(tuple(message["answer"]))
            if call is not None and not call.done():
                call.set_result(dict(message))
        elif "start" in message:
            context = copy_context()
            context.run(_session.set, message["start"])
            self._api_keys[message["start"]] = message["api_key"]
            self._tasks[message["start"]] = task = self._loop.create_task(self._play(message), context=context)
            task.add_done_callback(partial(self._ended, message["start"]))
        elif "cancel" in message:
            task = self._tasks.get(message["cancel"])
            if task is not None:
                self._cancelled.add(message["cancel"])
                task.cancel()
        elif "ping" in message:
            self._write({"pong": message["ping"]})  # proves that no session blocks the event loop
        else:
            self._begin(message)

    def fail(self, number: int, error: BaseException) -> None:
        """End a session because one of its tasks or callbacks has called ``sys.exit()`` or was interrupted."""
        if (task := self._tasks.get(number)) is not None:
            self._failures.setdefault(number, f"a task of the agent raised {_reason(error)}")
            task.cancel()

    def check(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: raise AgentError if a session puts its API key where other sessions would use it."""
        key = self._api_keys.get(_session.get()) if event == "os.putenv" and len(self._api_keys) > 1 else None
        if key is not None and key.encode() in arguments[1]:
            raise AgentError(
                f"the agent puts its API key into the environment variable {os.fsdecode(arguments[0])}, which all "
                "sessions of its process share. Pass session.api_key and session.base_url as arguments of the client"
            )

    def _begin(self, greeting: Mapping[str, Any]) -> None:
        try:
            self._memory.limit(greeting["memory_bytes"])
            self._base_url, self._max_tokens = greeting["base_url"], greeting["max_tokens"]
            for key, fields in greeting["agents"].items():
                self._agents[key] = agent_function.load(fields["agent"], fields["options"])
        except agent_function.AgentSpecError as error:
            return self._write({"error": str(error)})
        except (Exception, SystemExit) as error:
            return self._write({"error": f"the agents cannot be loaded: {_reason(error)}"})
        self._write({"ready": True, "thread": threading.get_ident()})

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
            value = await playing
            outcome = _outcome(value, start["environment"])
        except BaseException as error:
            outcome = self._failure(number, error)
        if number in self._failures:
            outcome = {"status": "raised", "detail": self._failures.pop(number)}
        tools_s = time.monotonic() - began_s - in_model_s[0]
        size = {"address_bytes": self._memory.num_bytes()}
        self._forget(number)
        self._write({"done": number, "tools_s": tools_s, **size, **outcome})

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Report a session that ended without an outcome, such as one that was cancelled before it began."""
        if number in self._tasks:
            reason = "the code of a session cancelled it" if task.cancelled() else _reason(task.exception())
            outcome = {"status": "interrupted" if task.cancelled() else "raised", "detail": reason}
            self._forget(number)
            self._write({"done": number, "tools_s": 0.0, "address_bytes": self._memory.num_bytes(), **outcome})

    def _failure(self, number: int, error: BaseException) -> dict[str, Any]:
        if isinstance(error, asyncio.CancelledError):
            if number in self._cancelled:
                return {"status": "cancelled", "detail": "it was cancelled"}
            if asyncio.current_task().cancelling():  # such as by a loop over asyncio.all_tasks()
                return {"status": "interrupted", "detail": "the code of a session cancelled it"}
        if isinstance(error, SessionLimit):
            return {"status": "truncated", "detail": _text(error)}
        status = "limited" if _is_limit(error) else "raised"
        if is_exhausted(error):
            status, self._reserve = "exhausted", None
        frames = reversed(traceback.extract_tb(error.__traceback__))
        where = place((frame.filename, frame.lineno) for frame in frames)
        return {"status": status, "detail": f"the agent raised {_reason(error)}{where}"}

    def _forget(self, number: int) -> None:
        """Forget a session; its tasks may run on, but get no further answers."""
        del self._tasks[number], self._api_keys[number]
        self._cancelled.discard(number)
        if isinstance(self._loop, _Loop):
            self._loop.forget(number)
        for key in [key for key in self._calls if key[0] == number]:
            self._write({"withdraw": key})
            call = self._calls.pop(key)
            if not call.done():
                call.set_exception(AgentError("the session has ended"))

    async def _request(self, number: int, in_model_s: list[float], request: dict[str, Any]) -> dict[str, Any]:
        if asyncio.get_running_loop() is not self._loop:
            raise AgentError("the session was used on another event loop; use it on that of rollout(), or use base_url")
        if number not in self._tasks:
            await asyncio.sleep(0)  # so that a task that asks for ever does not block the loop
            raise AgentError("the session has ended")
        num_bytes = len(json.dumps(request))
        if num_bytes > _LINE_BYTES // 2:
            raise SessionLimit(f"a request of {num_bytes} bytes is longer than {_LINE_BYTES // 2}")
        self._num_calls += 1
        key = (number, self._num_calls)
        self._calls[key] = call = self._loop.create_future()
        began_s = time.monotonic()
        self._write({"request": key, **request})
        try:
            answer = await call
        except BaseException:
            if key in self._calls:
                self._write({"withdraw": key})
            raise
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
    if bad := [number for number in (reward, *parts.values()) if not abs(number) <= LARGEST_REWARD]:
        raise AgentError(f"{environment} returned {bad[0]}, which is not a valid reward")
    return {"status": "scored", "reward": reward, "parts": parts}


def _is_limit(error: BaseException) -> bool:
    """Whether an exception is, or was raised from, the refusal of a request at a limit of the session. A limit that the
    agent caught before it raised another error does not count."""
    if isinstance(error, SessionLimit):
        return True
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_limit, error.exceptions))
    # Clients keep the answer of the server in a field, programs that were started write it to their output.
    sources = (error, getattr(error, "response", None))
    fields = [_text(getattr(source, name, "")) for source in sources for name in ("text", "body", "stdout", "stderr")]
    if any(AT_LIMIT in text for text in (_text(error), *fields)):
        return True
    return error.__cause__ is not None and _is_limit(error.__cause__)


def _text(value: Any) -> str:
    """The text of an exception or of a field of it, whatever it contains."""
    try:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    except Exception as unprintable:
        text = f"its text cannot be read ({type(unprintable).__name__})"
    return text.encode("utf-8", "replace").decode()


def _reason(error: BaseException) -> str:
    text = _text(error)
    if isinstance(error, BaseExceptionGroup):  # of tasks; its text does not name them
        text = "; ".join([text, *map(_reason, error.exceptions[:3])])
    return f"{type(error).__name__}: {text}"[:_MAX_REASON]


def place(frames: Iterable[tuple[str, int | None]]) -> str:
    """The first of some (file, line) that is in an agent's own code; empty if there is none."""
    own = ((file, line) for file, line in frames if not file.startswith((*_LIBRARIES, "<")))
    return next((f" ({Path(file).name}, line {line})" for file, line in own), "")


async def serve(requests: Any, worker: Worker) -> None:
    """Handle messages until end of file."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)

    while True:
        try:
            line = await reader.readline()
        except asyncio.CancelledError:  # an agent has cancelled all tasks of the loop
            asyncio.current_task().uncancel()
            continue
        if not line:
            return
        worker.take(json.loads(line))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer closes the pool
    # Agents and their programs may read standard input and print: reserve the pipes for messages.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close = lambda: None  # all sessions use them
    shared = mmap.mmap(int(sys.argv[1]), MARKS_BYTES)
    faulthandler.enable(os.fdopen(int(sys.argv[2]), "w"))

    def write(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def note(thread: int, session: int) -> None:
        MARK.pack_into(shared, thread * MARK.size, session)

    def separate() -> None:
        """Take the pipes and the report of crashes from a copy of this process."""
        faulthandler.disable()
        null = os.open(os.devnull, os.O_RDWR)
        for file in (requests, replies):
            os.dup2(null, file.fileno())

    os.register_at_fork(after_in_child=separate)

    def new_loop() -> asyncio.AbstractEventLoop:
        return _Loop(note, lambda session, error: worker.fail(session, error))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        loop = runner.get_loop()
        loop.set_default_executor(_Threads(note))
        worker = Worker(write, loop)
        sys.addaudithook(worker.check)
        runner.run(serve(requests, worker))
        os._exit(0)  # do not wait for tool threads that hang


if __name__ == "__main__":
    main()
