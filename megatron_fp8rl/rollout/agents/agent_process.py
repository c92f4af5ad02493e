"""Starts one agent worker process, exchanges messages with it, and ends it after a crash or hang.

In: sessions to run. Out: the outcome of each. Runs on trainer rank 0, on the fleet's event loop;
``envs/agent_worker.py`` runs in the worker.
"""

import asyncio
import contextlib
import json
import logging
import mmap
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_fp8rl.config import ScoringConfig
from megatron_fp8rl.envs.agent_worker import MARK as SESSION_MARK
from megatron_fp8rl.envs.agent_worker import MARKS_BYTES, place
from megatron_fp8rl.envs.scorer_process import MARK as PROCESS_MARK
from megatron_fp8rl.envs.scorer_process import START_DEADLINE_S, Output, ScorePoolError, environ_of, kill_marked
from megatron_fp8rl.envs.worker_memory import is_nearly_full
from megatron_fp8rl.rollout.agents.session import Session
from megatron_fp8rl.types import Prompt

_log = logging.getLogger(__name__)

_PING_S = 1.0
BLOCKED_S = 60.0  # a worker's event loop that does not answer longer is blocked
CANCEL_S = 5.0  # time for an agent to end after its session
_LINE_BYTES = 64 << 20
# Python's report of a crash: the thread, and what ran in it, innermost first.
_CRASHED = re.compile(r"Current thread 0x(?P<thread>[0-9a-f]+)[^\n]*\n(?P<frames>(?:  .*\n?)*)", re.IGNORECASE)
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')


class Answers(Protocol):
    """Answers the requests of one session's agent; a key identifies a request."""

    async def answer(self, key: tuple[int, int], request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer, or the error of the request. Raises nothing."""
        ...

    def withdraw(self, key: tuple[int, int]) -> None:
        """Take an answer back that the agent did not get."""
        ...


class AgentLostError(Exception):
    """A worker crashed, hung or used up its memory while a session ran in it; ``by_this`` if that session caused it.
    ``by_other`` if another session caused it, which has failed; neither if the cause is unknown."""

    def __init__(self, why: str, *, by_this: bool = False, by_other: bool = False) -> None:
        super().__init__(why)
        self.by_this, self.by_other = by_this, by_other


class AgentProcess:
    """One worker process, from construction to :meth:`kill`."""

    def __init__(self, greeting: Mapping[str, Any], scoring: ScoringConfig) -> None:
        self.num_sessions = 0
        self.is_retired = False  # takes no further sessions: one did not end, or they have used up the memory
        self.is_alive = True
        self._greeting, self._variables = greeting, scoring.variables
        self._token = os.urandom(8).hex()
        self._outcomes: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._answers: dict[int, Answers] = {}
        self._replies: dict[tuple[int, int], asyncio.Task[None]] = {}  # in progress
        self._number = 0
        self._num_ended = 0
        self._first_bytes = 0  # of the worker's address space, after its first session
        self._lost = ""
        self._culprit = -1  # the session that caused the end
        self._main_thread = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keep = asyncio.ensure_future(self._live())

    async def ready(self) -> None:
        """Wait until the agents are loaded. Raises ScorePoolError."""
        await asyncio.shield(self._ready)

    async def run_agent(
        self, session: Session, prompt: Prompt, answers: Answers, deadline_s: float, api_key: str
    ) -> dict[str, Any]:
        """Run one agent, which ``num_sessions`` already includes. Raises AgentLostError."""
        self._number += 1
        number = self._number
        self._outcomes[number] = outcome = asyncio.get_running_loop().create_future()
        self._answers[number] = answers
        row = {**prompt.metadata, "prompt": prompt.text, "answer": prompt.answer}
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        try:
            if not self.is_alive:
                raise AgentLostError(self._lost)
            start = {"start": number, "environment": prompt.environment, "row": row, "messages": messages}
            self._send(start | {"name": session.name, "api_key": api_key})
            done, _ = await asyncio.wait({outcome}, timeout=deadline_s)
            if not done:
                return await self._give_up(session, number, outcome, deadline_s)
            result = outcome.result()
            if result["status"] == "lost":
                by_this = self._culprit == number
                raise AgentLostError(self._lost, by_this=by_this, by_other=self._culprit >= 0 and not by_this)
            self._note_memory(result["address_bytes"])
            if result["status"] == "interrupted":
                raise AgentLostError(f"lost the session's task: {result['detail']}")
            if result["status"] == "exhausted":
                self.is_retired = True
                why = f"has no memory, threads or files left: {result['detail']}"
                raise AgentLostError(why, by_this=self._num_ended == 1 and self.num_sessions == 1)
            return result
        finally:
            if not outcome.done():
                self._send({"cancel": number})
            self.num_sessions -= 1
            del self._outcomes[number], self._answers[number]

    async def _give_up(
        self, session: Session, number: int, outcome: asyncio.Future[dict[str, Any]], deadline_s: float
    ) -> dict[str, Any]:
        session.end(f"it has not ended within {deadline_s:g} s (--session.deadline_s)")
        self._send({"cancel": number})
        await asyncio.wait({outcome}, timeout=CANCEL_S)
        self.is_retired = True  # a thread of a tool may hang in it
        return {
            "status": "failed",
            "detail": f"the session did not end within {deadline_s:g} s (--session.deadline_s); it had taken "
            f"{session.num_turns} turns",
        }

    def _note_memory(self, address_bytes: int) -> None:
        """Retire a worker in which sessions have left too much behind."""
        self._num_ended += 1
        self._first_bytes = self._first_bytes or address_bytes
        if is_nearly_full(self._first_bytes, address_bytes, self._greeting["memory_bytes"]) and not self.is_retired:
            self.is_retired = True
            _log.warning("a worker of agents has filled most of scoring.memory_gib: a new one takes its place")

    async def kill(self, why: str) -> None:
        self._lost = self._lost or why
        self._keep.cancel()
        await asyncio.gather(self._keep, return_exceptions=True)

    # ---- the process

    async def _live(self) -> None:
        """Start the process, read its messages, and end it after a crash or hang."""
        shared = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        errors = Output()
        crash = tempfile.TemporaryFile()  # noqa: SIM115 - Python's report of a crash
        shared.truncate(MARKS_BYTES)
        marks = mmap.mmap(shared.fileno(), MARKS_BYTES)
        marks[:] = SESSION_MARK.pack(-1) * (MARKS_BYTES // SESSION_MARK.size)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megatron_fp8rl.envs.agent_worker"),
                *(str(shared.fileno()), str(crash.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors.file,
                pass_fds=(shared.fileno(), crash.fileno()),
                env={**environ_of(self._variables), PROCESS_MARK: self._token},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
            self._send(self._greeting)
            await self._read(errors)
        except asyncio.CancelledError:
            pass
        except ValueError:
            self._lost = f"wrote a line of more than {_LINE_BYTES >> 20} MiB"
            marks[:] = SESSION_MARK.pack(-1) * (MARKS_BYTES // SESSION_MARK.size)  # the session is unknown
        finally:
            await self._end(marks, crash, errors)
            marks.close()
            for file in (shared, crash, errors.file):
                file.close()

    async def _read(self, errors: Output) -> None:
        """Read until the process ends or its event loop does not answer."""
        started_s, pinged_s, num_silent = time.monotonic(), 0.0, 0
        read = asyncio.ensure_future(self._process.stdout.readline())
        try:
            while True:
                done, _ = await asyncio.wait({read}, timeout=_PING_S)
                # Counted in questions, not by the clock: this process may have been suspended itself.
                num_silent = 0 if done else num_silent + 1
                if done:
                    line = read.result()
                    if not line:
                        return
                    self._take(json.loads(line))
                    read = asyncio.ensure_future(self._process.stdout.readline())
                now_s = time.monotonic()
                if not self._ready.done():
                    if now_s - started_s > START_DEADLINE_S:
                        self._lost = f"did not start within {START_DEADLINE_S:g} s"
                        return
                elif num_silent * _PING_S > BLOCKED_S:
                    self._lost = f"answered nothing for {BLOCKED_S:g} s: its event loop was blocked"
                    return
                elif now_s - pinged_s > _PING_S:
                    pinged_s = now_s
                    self._send({"ping": 1})
                    errors.bound()
        finally:
            read.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        if "request" in message:
            key = tuple(message["request"])
            self._replies[key] = task = asyncio.ensure_future(self._reply(key, message))
            task.add_done_callback(lambda _: self._replies.pop(key))
        elif "withdraw" in message:
            key = tuple(message["withdraw"])
            if key in self._replies:
                self._replies[key].cancel()
            elif (answers := self._answers.get(key[0])) is not None:
                answers.withdraw(key)
        elif "done" in message:
            outcome = self._outcomes.get(message["done"])
            if outcome is not None and not outcome.done():
                outcome.set_result(message)
        elif "ready" in message:
            self._main_thread = message["thread"]
            self._ready.set_result(None)
        elif "error" in message:
            self._fail_start(message["error"])

    async def _reply(self, key: tuple[int, int], message: Mapping[str, Any]) -> None:
        if (answers := self._answers.get(key[0])) is not None:
            self._send({"answer": key, **await answers.answer(key, message)})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _fail_start(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ScorePoolError(why))
            self._ready.exception()  # marks the error as retrieved

    async def _end(self, marks: mmap.mmap, crash: Any, errors: Output) -> None:
        self.is_alive = False
        process = self._process
        if process is not None:
            loop = asyncio.get_running_loop()
            in_loop, *in_threads = (session for (session,) in SESSION_MARK.iter_unpack(marks[:]))
            running = {in_loop}
            if not self._lost:  # it ended by itself
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), CANCEL_S)
                crash.seek(0)
                report = crash.read().decode(errors="replace")
                crashed = _CRASHED.search(report)
                if crashed is None or int(crashed["thread"], 16) != self._main_thread:
                    running = {*in_threads} if crashed else {in_loop, *in_threads}
                if crashed:
                    why = place((file, int(line)) for file, line in _FRAME.findall(crashed["frames"]))
                else:
                    lines = (await loop.run_in_executor(None, errors.tail)).splitlines()
                    why = f": {lines[-1]}" if lines else ""
                self._lost = f"ended with exit code {process.returncode}{why}"
                if process.returncode == -signal.SIGKILL:  # by the system or a person: any session may have run
                    running = set()
            running &= self._outcomes.keys()
            self._culprit = running.pop() if len(running) == 1 else -1
            if self._culprit >= 0 and len(self._outcomes) > 1:
                num_others = len(self._outcomes) - 1
                _log.warning("%d other sessions are played again: an agent's process %s", num_others, self._lost)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
            await loop.run_in_executor(None, kill_marked, self._token)
            process.stdin.close()
            await asyncio.sleep(0)  # the pipe is closed by the event loop
        self._fail_start(f"an agent's worker {self._lost}")
        for task in self._replies.values():
            task.cancel()
        for outcome in self._outcomes.values():
            if not outcome.done():
                outcome.set_result({"status": "lost"})


def load_problem(agents: Mapping[str, Mapping[str, Any]], scoring: ScoringConfig) -> str:
    """Why a worker cannot load the agents, with the variables and the memory that it has in a run; empty if it can.
    ``agents``: {"agent": spec, "options": {}} by source."""
    greeting = {"agents": agents, "memory_bytes": int(scoring.memory_gib * 2**30), "base_url": "", "max_tokens": 1}

    async def load() -> str:
        worker = AgentProcess(greeting, scoring)
        try:
            await worker.ready()
        except ScorePoolError as error:
            return str(error)
        finally:
            await worker.kill("was only started to load the agents")
        return ""

    return asyncio.run(load())
