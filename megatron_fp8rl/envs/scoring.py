"""Scores completions in worker processes.

In: prompts and completion texts. Out: rewards. Runs on: rank 0, or score servers on other nodes (envs/score_server.py),
to which rank 0 sends requests (envs/remote_scoring.py).

A scorer is user code: it may loop forever, backtrack endlessly in a regular expression or crash the interpreter. Here
that costs one completion its score, with the reason in ``Rollout.detail``, and kills one worker; the run continues.

Why not pebble.ProcessPool: release 5.2 does not kill the child processes of a scorer that timed out, reports neither
why a worker died nor why it failed to start, and imports the trainer's ``__main__`` into each worker.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from megatron_fp8rl.config import DataConfig, EnvironmentConfig
from megatron_fp8rl.envs.environment import environments_by_key
from megatron_fp8rl.envs.rewards.configured import takes_batches
from megatron_fp8rl.types import Prompt

_log = logging.getLogger(__name__)


class Score(NamedTuple):
    """The verdict on one completion."""

    reward: float
    status: Literal["scored", "score_failed"]
    detail: str = ""  # why it failed
    parts: dict[str, float] = {}  # of the reward, by name

    @classmethod
    def failed(cls, detail: str) -> Score:
        return cls(0.0, "score_failed", detail)


MAX_BATCH = 64  # completions in one call of a reward function that takes several
START_DEADLINE_S = 180.0  # covers importing all environments on a busy machine
_STDERR_TAIL_BYTES = 400
_MAX_STDERR_BYTES = 1 << 20  # of what a scorer prints; looked at once a second
_LARGEST_REWARD = 1e15  # sums of larger ones overflow
_TOKEN = "MEGATRON_FP8RL_SCORER"  # environment variable that marks a worker and all that it starts
# Variables that scorers see; the rest of the trainer's environment, with its keys, is not theirs.
_VARIABLES = re.compile(
    r"FP8RL_RUN_DIR|PATH|HOME|USER|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON.*|VIRTUAL_ENV|OMP_.*|HF_HOME|HF_.*_OFFLINE|SSL_CERT_.*|"
    r".*_(?:proxy|PROXY)|MEGATRON_FP8RL_.*|SLURM_JOB_ID"
)


class ScorePoolError(RuntimeError):
    """Scoring is impossible: the workers cannot be started, or no score server answers."""


class CompletionScorer(abc.ABC):
    """Scores completions for the rollout stream. Usable from any thread and event loop."""

    @abc.abstractmethod
    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        """:meth:`score` for callers without an event loop."""

    @abc.abstractmethod
    def close(self) -> None:
        """Abort the scores in progress and release all resources. Idempotent."""

    async def score(self, prompt: Prompt, text: str) -> Score:
        """The score of one completion; 0.0 and "score_failed" with the reason if the scorer fails or times out.

        The deadline starts when a worker begins to score the completion, not when it is queued.

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

    ``environments`` are keyed by ``Prompt.environment``. Workers start immediately, in the background; a worker that
    crashes or times out is killed with all its children and restarted.

    If a reward function of a source takes several completions, a worker gets those that wait, MAX_BATCH at most, in one
    call with one deadline. A call that fails is repeated one by one, so that a bad completion costs only its own score.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentConfig],
        *,
        num_workers: int,
        deadline_s: float,
        memory_gib: float | None = None,
        variables: Sequence[str] = (),
    ):
        """``memory_gib`` limits the address space of a worker, ``variables`` are further ones that it sees."""
        self._environments = dict(environments)
        self._deadline_s = deadline_s
        greeting = {
            "environments": {key: dataclasses.asdict(cfg) for key, cfg in self._environments.items()},
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
        }
        environ = _environ([*variables, *keys_of(self._environments.values())])
        self._workers = [_Worker(greeting, environ) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._batched = {key for key, cfg in self._environments.items() if takes_batches(cfg.rewards)}
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="score")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of _waiting

    @classmethod
    def build(cls, cfg: DataConfig) -> ScorePool:
        """Build the pool of a configuration; starts the workers."""
        return cls(
            environments_by_key(cfg.environments),
            num_workers=cfg.num_score_workers,
            deadline_s=cfg.score_deadline_s,
            memory_gib=cfg.score_memory_gib,
            variables=cfg.score_variables,
        )

    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        if self._closed.is_set():
            raise ScorePoolError("the score pool is closed")
        waiting = _Waiting(prompt, text, Future())
        with self._lock:
            self._waiting.append(waiting)
        self._threads.submit(self._score_next)
        return waiting.score

    def close(self) -> None:
        """Kill the workers, even in the middle of a score. Idempotent."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for one in self._waiting:
                one.score.cancel()
        for worker in self._workers:
            worker.kill()  # unblocks its thread
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()  # in case its thread was restarting it
            worker.close_pipes()

    def _score_next(self) -> None:
        """Thread: score what has waited longest, with what else fits in one call."""
        batch = [one for one in self._take() if one.score.set_running_or_notify_cancel()]
        try:
            scores = self._score([one.prompt for one in batch], [one.text for one in batch]) if batch else []
            if len(batch) > 1 and any(score.status != "scored" for score in scores):
                scores = [self._score([one.prompt], [one.text])[0] for one in batch]
        except Exception as error:
            for one in batch:
                one.score.set_exception(error)
        else:
            for one, score in zip(batch, scores, strict=True):
                one.score.set_result(score)

    def _take(self) -> list[_Waiting]:
        """Remove and return the next batch; empty if another thread has taken it."""
        with self._lock:
            batch: list[_Waiting] = []
            others: list[_Waiting] = []
            while self._waiting and len(batch) < MAX_BATCH:
                one = self._waiting.popleft()
                is_next = not batch or one.prompt.environment == batch[0].prompt.environment
                (batch if is_next else others).append(one)
                if batch[0].prompt.environment not in self._batched:
                    break
            self._waiting.extendleft(reversed(others))
        return batch

    def _score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Score]:
        """The scores of completions of one environment, from one call."""
        prompt = prompts[0]
        if prompt.environment not in self._environments:
            known = ", ".join(self._environments)
            raise ScorePoolError(
                f"prompt {prompt.prompt_id}: no environment {prompt.environment!r} (there are: {known})"
            )
        fields = [dataclasses.asdict(one) for one in prompts]
        request = {"prompts": fields, "texts": list(texts), "deadline_s": self._deadline_s}
        worker = self._idle.get()  # never blocks: there are as many workers as threads
        try:
            reply = self._ask(worker, request)
        except _WorkerLost as lost:
            return [Score.failed(f"scorer of {prompt.environment} {lost}")] * len(prompts)
        finally:
            self._idle.put(worker)
        if "error" in reply:
            return [Score.failed(f"scorer of {prompt.environment} raised {reply['error']}")] * len(prompts)
        return [_verdict(one, prompt.environment) for one in reply["scores"]]

    def _ask(self, worker: _Worker, request: dict[str, Any], *, is_again: bool = False) -> dict[str, Any]:
        """The reply; a lost worker is started again, and asked once more if it was killed, likely from outside."""
        try:
            worker.ensure_started()
            return worker.ask(request, self._deadline_s)
        except _WorkerLost as lost:
            was_killed = worker.was_killed()
            worker.kill()
            if self._closed.is_set():
                raise
            worker.close_pipes()
            worker.start()
            if is_again or not was_killed:
                raise
            _log.warning("a scorer %s; its completions are scored again", lost)
            return self._ask(worker, request, is_again=True)


class _Waiting(NamedTuple):
    """A completion to be scored."""

    prompt: Prompt
    text: str
    score: Future[Score]


def _verdict(reply: Mapping[str, Any], environment: str) -> Score:
    values = {**reply["parts"], "reward": reply["reward"]}
    if bad := {name: value for name, value in values.items() if not abs(value) <= _LARGEST_REWARD}:
        return Score.failed(f"scorer of {environment} returned {bad}")
    return Score(reply["reward"], "scored", "", reply["parts"])


class _WorkerLost(Exception):
    """A worker crashed or did not answer in time; the message completes "scorer of X ..."."""


def _environ(names: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: what programs need to run, and the variables of these names."""
    found = {name: value for name, value in os.environ.items() if name in names or _VARIABLES.fullmatch(name)}
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **found}


def keys_of(environments: Iterable[EnvironmentConfig]) -> list[str]:
    """Names of the variables in which rewards find the keys of servers."""
    options = [reward.options for one in environments for reward in one.rewards]
    return [str(one["key_env"]) for one in options if one.get("key_env")]


class _Worker:
    """One scoring process and its two pipes. Used by one thread at a time, except :meth:`kill`."""

    def __init__(self, greeting: Mapping[str, Any], environ: Mapping[str, str]):
        self._greeting = greeting
        self._environ = environ
        self._lock = threading.Lock()
        self._number = 0  # of the last request
        self.start()

    def start(self) -> None:
        """Start the process and send the environments, without waiting for a reply."""
        # A temporary file instead of a pipe: it needs no reader, and its tail explains a crash.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # it is cut while the process writes
        self._token = os.urandom(8).hex()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fp8rl.envs.score_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**self._environ, _TOKEN: self._token},
            start_new_session=True,  # own process group, to kill all child processes of a scorer
            bufsize=0,
        )
        self._is_alive = True
        self._state = "started"  # then "ready" or the reason of the failure
        self._buffer = b""
        self._started_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # reported, with its reason, when the reply is read
            self._send(self._greeting)

    def ensure_started(self) -> None:
        """Wait until the environments are built; a build failure is final for this process."""
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
        """Send one request and return the reply."""
        try:
            self._send(request)
        except BrokenPipeError:
            raise _WorkerLost(self._obituary()) from None
        return self._receive(deadline_s)

    def kill(self) -> None:
        """Kill the process and its children. Once per process: its PID may be reused later."""
        with self._lock:
            if not self._is_alive:
                return
            self._is_alive = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            _kill_marked(self._token)

    def close_pipes(self) -> None:
        """Close the file descriptors of a killed process once no thread reads them."""
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._number += 1
        data = memoryview(json.dumps({**message, "number": self._number}).encode() + b"\n")
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        stop_at = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while (reply := self._next_reply()) is None:
            remaining_s = stop_at - time.monotonic()
            if remaining_s <= 0:
                raise _WorkerLost(f"did not answer within {deadline_s:.3g} s")
            if poll.poll(min(remaining_s, 1.0) * 1000):
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise _WorkerLost(self._obituary())
                self._buffer += chunk
            self._bound_output()
        return reply

    def _next_reply(self) -> dict[str, Any] | None:
        """The reply to the last request, if it is there; others are dropped."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            reply = json.loads(line)
            if reply.get("number") == self._number:
                return reply
        return None

    def was_killed(self) -> bool:
        """Whether the process has ended by SIGKILL, before :meth:`kill`."""
        return self._process.poll() == -signal.SIGKILL

    def _bound_output(self) -> None:
        """Forget what the scorer has printed, beyond a limit."""
        if os.fstat(self._stderr.fileno()).st_size > _MAX_STDERR_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(self._stderr.tell() - _STDERR_TAIL_BYTES, 0))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"ended with exit code {code}" + (f": {tail}" if tail else "")


def _kill_marked(token: str) -> None:
    """Kill what a worker has started in sessions of their own: such processes have its mark in their environment."""
    mark = f"{_TOKEN}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
