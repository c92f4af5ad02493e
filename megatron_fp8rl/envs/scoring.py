"""Score completions in worker processes.

In: prompts and completion texts. Out: rewards. Runs on: rank 0.

A scorer is user code and may hang or crash the interpreter. Then only its completion loses its score
(``Rollout.detail`` has the reason), the worker is restarted, and the run continues.

pebble.ProcessPool 5.2 is not used. It does not kill the children of a scorer that timed out, gives no reason for a
dead worker or a failed start, and imports the trainer's ``__main__`` into each worker.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Self

from megatron_fp8rl.config import EnvironmentConfig, ScoringConfig
from megatron_fp8rl.envs.environment import environments_by_key
from megatron_fp8rl.envs.rewards.configured import takes_batches
from megatron_fp8rl.envs.scorer_process import ScorePoolError, Worker, WorkerLost, environ_of
from megatron_fp8rl.types import Prompt

_log = logging.getLogger(__name__)


class Score(NamedTuple):
    """The score of one completion."""

    reward: float
    status: Literal["scored", "score_failed"]
    detail: str = ""  # reason of a failure
    parts: dict[str, float] = {}  # noqa: RUF012  reward parts by name; a NamedTuple has no default_factory

    @classmethod
    def failed(cls, detail: str) -> Score:
        return cls(0.0, "score_failed", detail)


MAX_BATCH = 64  # completions per call of a batched reward function
_MOST_STARTS = 5  # worker starts per request, if the worker is killed from outside
_LARGEST_REWARD = 1e15  # sums of larger rewards overflow


class ScorePool:
    """``num_workers`` persistent processes that score completions, each within ``deadline_s``.

    ``environments`` are keyed by ``Prompt.environment``. Workers start immediately, in the background. A worker that
    crashes or times out is killed with its children and restarted. A worker whose memory, threads or files are used up
    by earlier scores is restarted too, and its completion is scored again.

    Batched reward functions get up to MAX_BATCH waiting completions per call, with one deadline. A failed batch is
    scored again one completion at a time, so that a bad completion affects no other.
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
        """``memory_gib`` limits a worker's address space. ``variables``: more environment variables to pass on."""
        self._environments = dict(environments)
        self._deadline_s = deadline_s
        greeting = {
            "environments": {key: dataclasses.asdict(cfg) for key, cfg in self._environments.items()},
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
        }
        environ = environ_of([*variables, *keys_of(self._environments.values())])
        self._workers = [Worker(greeting, environ) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._batched = {key for key, cfg in self._environments.items() if takes_batches(cfg.rewards)}
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="score")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of _waiting
        self._has_told_of_leak = False

    @classmethod
    def build(cls, cfg: ScoringConfig, environments: Sequence[EnvironmentConfig]) -> ScorePool:
        """Build the pool of a configuration; starts the workers."""
        return cls(
            environments_by_key(environments),
            num_workers=cfg.num_workers,
            deadline_s=cfg.deadline_s,
            memory_gib=cfg.memory_gib,
            variables=cfg.variables,
        )

    async def score(self, prompt: Prompt, text: str) -> Score:
        """Score one completion; if the scorer fails or times out: 0.0, "score_failed" and the reason.

        Queueing time does not count toward the deadline.

        Raises:
            ScorePoolError: a worker does not start, for instance because an environment cannot be imported.
        """
        return await asyncio.wrap_future(self.submit(prompt, text))

    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        """:meth:`score` for callers without an event loop."""
        if self._closed.is_set():
            raise ScorePoolError("the score pool is closed")
        waiting = _Waiting(prompt, text, Future())
        with self._lock:
            self._waiting.append(waiting)
        self._threads.submit(self._score_next)
        return waiting.score

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, even in the middle of a score. Idempotent."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for waiting in self._waiting:
                waiting.score.cancel()
        for worker in self._workers:
            worker.kill()  # unblocks its thread
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()  # in case its thread was restarting it
            worker.close_pipes()

    def _score_next(self) -> None:
        """Thread: score the oldest waiting completion, with others that fit in the same call."""
        batch = [item for item in self._take() if item.score.set_running_or_notify_cancel()]
        try:
            scores = self._score([item.prompt for item in batch], [item.text for item in batch]) if batch else []
            # A mistake of the function, such as a list of another length, is none of a single completion.
            is_mistaken = any("raised RewardError" in score.detail for score in scores)
            if len(batch) > 1 and not is_mistaken and any(score.status != "scored" for score in scores):
                scores = [self._score([item.prompt], [item.text])[0] for item in batch]
        except Exception as error:
            for item in batch:
                item.score.set_exception(error)
        else:
            for item, score in zip(batch, scores, strict=True):
                item.score.set_result(score)

    def _take(self) -> list[_Waiting]:
        """Remove and return the next batch; empty if another thread has taken it."""
        with self._lock:
            batch: list[_Waiting] = []
            others: list[_Waiting] = []
            while self._waiting and len(batch) < MAX_BATCH:
                item = self._waiting.popleft()
                is_next = not batch or item.prompt.environment == batch[0].prompt.environment
                (batch if is_next else others).append(item)
                if batch[0].prompt.environment not in self._batched:
                    break
            self._waiting.extendleft(reversed(others))
        return batch

    def _score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Score]:
        """Score completions of one environment in one call."""
        prompt = prompts[0]
        if prompt.environment not in self._environments:
            known = ", ".join(self._environments)
            raise ScorePoolError(
                f"prompt {prompt.prompt_id}: no environment {prompt.environment!r} (there are: {known})"
            )
        request = {"prompts": [p.fields() for p in prompts], "texts": list(texts), "deadline_s": self._deadline_s}
        worker = self._idle.get()  # never blocks: there are as many workers as threads
        try:
            has_scored = worker.has_scored
            reply = self._ask(worker, request)
            if reply.get("is_exhausted") and has_scored:
                self._renew(worker, reply["error"])
                reply = self._ask(worker, request)
            if reply.get("is_exhausted") or worker.is_nearly_full:
                self._renew(worker, "it has filled most of scoring.memory_gib")
        except WorkerLost as lost:
            return [Score.failed(f"scorer of {prompt.environment} {lost}")] * len(prompts)
        finally:
            self._idle.put(worker)
        if "error" in reply:
            return [Score.failed(f"scorer of {prompt.environment} raised {reply['error']}")] * len(prompts)
        return [_checked(score, prompt.environment) for score in reply["scores"]]

    def _ask(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the reply; restart a lost worker.

        If the worker was killed or stopped from outside, the request is sent once more. Workers may also be killed
        during startup; that is never the completion's fault.
        """
        asks_left, starts_left = 2, _MOST_STARTS
        while True:
            is_asked = False
            try:
                worker.ensure_started()
                is_asked = True
                return worker.ask(request, self._deadline_s)
            except WorkerLost as lost:
                was_killed = worker.was_killed()
                self._restart(worker)
                if self._closed.is_set():
                    raise
                asks_left, starts_left = asks_left - is_asked, starts_left - 1
                if not (was_killed and asks_left and starts_left):
                    raise
                _log.warning("a scorer %s; its completions are scored again", lost)

    def _renew(self, worker: Worker, reason: str) -> None:
        """Restart a worker in which scores have left too much behind."""
        if not self._has_told_of_leak:
            self._has_told_of_leak = True
            _log.warning("a scorer keeps memory, threads or files of earlier scores and is restarted: %s", reason)
        self._restart(worker)

    def _restart(self, worker: Worker) -> None:
        """Kill a worker and start it again, unless the pool is closed."""
        worker.kill()
        if not self._closed.is_set():
            worker.close_pipes()
            worker.start()


class _Waiting(NamedTuple):
    """A completion that waits for its score."""

    prompt: Prompt
    text: str
    score: Future[Score]


def _checked(reply: Mapping[str, Any], environment: str) -> Score:
    values = {**reply["parts"], "reward": reply["reward"]}
    if bad := {name: value for name, value in values.items() if not abs(value) <= _LARGEST_REWARD}:
        return Score.failed(f"scorer of {environment} returned {bad}; a finite number of at most 1e15 is needed")
    return Score(reply["reward"], "scored", "", reply["parts"])


def keys_of(environments: Iterable[EnvironmentConfig]) -> list[str]:
    """Names of the environment variables that contain API keys of reward servers."""
    all_options = [reward.options for cfg in environments for reward in cfg.rewards]
    return [str(options["key_env"]) for options in all_options if options.get("key_env")]
