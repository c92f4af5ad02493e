"""Scores completions out of process. Prompts and texts in, rewards out; runs on rank 0 beside the engines' client, or
in score servers on other nodes (envs/score_server.py), which rank 0 asks (envs/remote_scoring.py).

A scorer is somebody's code: it may loop for ever, exhaust a regular expression or crash its interpreter. Here that
costs one completion its score, with the reason in ``Rollout.detail``, and one worker its life; the run goes on.

The workers are our own, and not those of pebble.ProcessPool: its release 5.2 does not end the processes that a late
scorer has started, says neither why a worker ended nor why it could not begin, and imports the trainer's ``__main__``
into each of them.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Self

from megatron_fp8rl.config import DataConfig, EnvironmentConfig
from megatron_fp8rl.envs.environment import environments_by_key
from megatron_fp8rl.types import Prompt

Score = tuple[float, Literal["scored", "score_failed"], str]  # reward, status, why it failed

START_DEADLINE_S = 180.0  # imports of all environments, on a busy machine
_STDERR_TAIL_BYTES = 400


class ScorePoolError(RuntimeError):
    """No completion could ever be scored: the workers cannot be started, or no score server answers."""


class CompletionScorer(abc.ABC):
    """Scores completions for the rollout stream. May be used from any thread and event loop."""

    @abc.abstractmethod
    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        """:meth:`score` for callers without an event loop."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what is being scored and give up what it takes. Idempotent."""

    async def score(self, prompt: Prompt, text: str) -> Score:
        """(reward, status, detail) of one completion; (0.0, "score_failed", reason) when the scorer fails or is late.

        The deadline counts from when a worker takes the completion up, not from when it was queued.

        Raises:
            ScorePoolError: a worker does not start, for instance because an environment cannot be imported, or no
                score server answers.
        """
        return await asyncio.wrap_future(self.submit(prompt, text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ScorePool(CompletionScorer):
    """``num_workers`` persistent processes that score completions, each within ``deadline_s``.

    ``environments`` are keyed like ``Prompt.environment``. Workers start at once and in the background; a worker that
    crashes or is late is killed with all its children and started anew.
    """

    def __init__(self, environments: Mapping[str, EnvironmentConfig], *, num_workers: int, deadline_s: float):
        self._environments = dict(environments)
        self._deadline_s = deadline_s
        self._workers = [_Worker(self._environments) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="score")
        self._closed = threading.Event()

    @classmethod
    def build(cls, cfg: DataConfig) -> ScorePool:
        """The pool of a configuration; starts its workers."""
        return cls(
            environments_by_key(cfg.environments), num_workers=cfg.num_score_workers, deadline_s=cfg.score_deadline_s
        )

    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        if self._closed.is_set():
            raise ScorePoolError("the score pool is closed")
        return self._threads.submit(self._score, prompt, text)

    def close(self) -> None:
        """Kill the workers, also in the middle of a score. Idempotent."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # ends the wait of its thread
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()  # one that its thread was starting meanwhile
            worker.close_pipes()

    def _score(self, prompt: Prompt, text: str) -> Score:
        if prompt.environment not in self._environments:
            known = ", ".join(self._environments)
            raise ScorePoolError(
                f"prompt {prompt.prompt_id}: no environment {prompt.environment!r} (there are: {known})"
            )
        request = {"prompt": dataclasses.asdict(prompt), "text": text, "deadline_s": self._deadline_s}
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            worker.ensure_started()
            reply = worker.ask(request, self._deadline_s)
        except _WorkerLost as lost:
            worker.kill()
            if not self._closed.is_set():
                worker.close_pipes()
                worker.start()
            return 0.0, "score_failed", f"scorer of {prompt.environment} {lost}"
        finally:
            self._idle.put(worker)
        if "error" in reply:
            return 0.0, "score_failed", f"scorer of {prompt.environment} raised {reply['error']}"
        if not math.isfinite(reply["reward"]):
            return 0.0, "score_failed", f"scorer of {prompt.environment} returned {reply['reward']}"
        return reply["reward"], "scored", ""


class _WorkerLost(Exception):
    """A worker crashed or did not answer in time; the message completes "scorer of X ..."."""


class _Worker:
    """One scoring process and its two pipes. Used by one thread at a time, except for :meth:`kill`."""

    def __init__(self, environments: Mapping[str, EnvironmentConfig]):
        self._greeting = {"environments": {key: dataclasses.asdict(cfg) for key, cfg in environments.items()}}
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start the process and send it its environments, without waiting for it."""
        # Anonymous file rather than a pipe: nobody needs to read along, and the tail explains a crash.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        environ.setdefault("OMP_NUM_THREADS", "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fp8rl.envs.score_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environ,
            start_new_session=True,  # a process group of its own, to be killed with all that a scorer starts
            bufsize=0,
        )
        self._is_alive = True
        self._state = "started"  # then "ready", or the reason why it will never be
        self._buffer = b""
        self._started_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # noticed, with its reason, when the answer is read
            self._send(self._greeting)

    def ensure_started(self) -> None:
        """Wait until the environments are built; a failure to build them is final for this process."""
        if self._state == "started":
            try:
                reply = self._receive(self._started_at + START_DEADLINE_S - time.monotonic())
                failure = reply.get("error", "")
            except _WorkerLost as lost:
                failure = f"it {lost}"
            self._state = failure or "ready"
        if self._state != "ready":
            raise ScorePoolError(f"a score worker cannot build its environments: {self._state}")

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one request and return its answer."""
        try:
            self._send(request)
        except BrokenPipeError:
            raise _WorkerLost(self._obituary()) from None
        return self._receive(deadline_s)

    def kill(self) -> None:
        """End the process and its children. Once per process: its number may belong to another one later."""
        with self._lock:
            if not self._is_alive:
                return
            self._is_alive = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close_pipes(self) -> None:
        """Release the file descriptors of a killed process that no thread reads any more."""
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        stop_at = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            remaining_s = stop_at - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                raise _WorkerLost(f"did not answer within {deadline_s:.3g} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise _WorkerLost(self._obituary())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(self._stderr.tell() - _STDERR_TAIL_BYTES, 0))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"ended with exit code {code}" + (f": {tail}" if tail else "")
