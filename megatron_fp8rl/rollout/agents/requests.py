"""Sends sampling requests to replicas, and again if a replica dies. Runs on the fleet's event loop.

In: token ids and seeds. Out: completions. Requests of a session go to the replica that has cached its prefix; others to
the replica with the fewest running requests. If a replica dies, its requests go to another, with the same seeds.

A request may be the cause of the death. So the requests of a dead replica start one after another at the next one: each
must outlast a second there. The request that does not is the cause, and is lost. If a replica dies and the cause is
still unknown, for example because it acts late, the requests with two dead replicas run one by one, to the end. A
replica that SIGKILL ended is not counted, because an operator or the kernel sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.net import open_files
from megatron_fp8rl.observe.spans import add_seconds
from megatron_fp8rl.rollout.client import OUTLAST_S, EngineClient
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError, RequestLostError
from megatron_fp8rl.types import Completion, Prompt

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet


class _Requests:
    """The requests of one replica, among them the possible causes of its death."""

    def __init__(self) -> None:
        self.start = asyncio.Lock()  # of the possible cause that has not yet outlasted its start
        self.running: set[object] = set()
        self.at_death: frozenset[object] | None = None  # those that ran when the replica died
        self.death = "the replica has ended"
        self.is_cause_known = False


class Requests:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        open_files.raise_limit()
        self._replica_of: weakref.WeakKeyDictionary[Any, EngineClient] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakKeyDictionary[Any, _Requests] = weakref.WeakKeyDictionary()
        self._num_sampling = 0  # active requests, and since when there are any
        self._sampling_since_s = 0.0

    async def ask(
        self,
        token_ids: Sequence[int],
        num_completions: int,
        seed: int,
        *,
        temperature: float | None = None,
        session: Any = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Sample completions of a prompt; completion i has seed ``seed + i``. None stands for the run's value. Raises
        EngineDeadError if no replica is left and none comes back, RequestLostError if the request has cost two
        replicas, or another error of the request."""
        lost: list[str] = []  # for each replica that died with this request, the error
        while True:
            if not self._fleet.clients:
                await self._fleet.wait_for_members()
            client = self._choose(session)
            sampling: Sampling = client.sampling
            changes = {"temperature": temperature, "max_tokens": max_tokens}
            sampling = replace(sampling, **{name: value for name, value in changes.items() if value is not None})
            if stop:
                sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *stop))
            generate = partial(client.generate, token_ids, num_completions, seed, sampling=sampling)
            try:
                return await self._run(client, generate, lost)
            except EngineDeadError as error:
                self._fleet.remove(client, str(error), num_retried=1)
                if not error.is_innocent:
                    lost.append(error.summary)
            except RequestLostError as error:
                self._fleet.remove(client, str(error))
                raise

    async def _run(
        self, client: EngineClient, generate: Callable[[], Coroutine[Any, Any, list[Completion]]], lost: Sequence[str]
    ) -> list[Completion]:
        """Sample at one replica. ``lost``: the errors of replicas that died with this request.

        Raises RequestLostError if the request is the cause of a second death; otherwise an EngineDeadError, which is
        innocent if another request is the cause.
        """
        others = self._running.setdefault(client, _Requests())
        request, task, is_starting = object(), None, bool(lost)
        if is_starting:
            await others.start.acquire()
        others.running.add(request)
        try:
            if not lost:
                return await generate()
            if client not in self._fleet.clients:
                raise EngineDeadError(others.death, is_innocent=True)  # it died during the wait for the start
            task = asyncio.ensure_future(generate())
            if len(lost) == 1 and await _outlasts(client, task):
                is_starting = False
                others.start.release()
            return await task
        except EngineDeadError as error:
            if others.at_death is None:
                others.at_death, others.death = frozenset(others.running), str(error)
                others.is_cause_known = others.start.locked()
            if lost and not error.is_innocent and (is_starting or len(others.at_death) == 1):
                others.is_cause_known = True
                raise RequestLostError(
                    f"the request has cost two rollout replicas and is not sent to a third: {lost[-1]}; {error.summary}"
                ) from error
            error.is_innocent |= others.is_cause_known
            raise
        finally:
            others.running.discard(request)
            if is_starting:
                others.start.release()
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _choose(self, session: Any) -> EngineClient:
        client = None if session is None else self._replica_of.get(session)
        if client is None or client not in self._fleet.clients:
            client = min(self._fleet.clients, key=self._load)
            if session is not None:
                self._replica_of[session] = client
        return client

    def _load(self, client: EngineClient) -> tuple[int, int]:
        """Return (running requests, sessions assigned to this replica)."""
        return client.num_running, sum(other is client for other in self._replica_of.values())

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count as "generate" the time during which at least one request runs; overlapping requests count once."""
        if self._num_sampling == 0:
            self._sampling_since_s = time.monotonic()
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._num_sampling == 0:
                add_seconds("generate", time.monotonic() - self._sampling_since_s)


async def _outlasts(client: EngineClient, task: asyncio.Future[Any]) -> bool:
    """Whether the replica still answers after a second of this task. False if the task ends before."""
    await asyncio.wait({task}, timeout=OUTLAST_S)
    if task.done():
        return False
    probe = asyncio.ensure_future(client.outlast())
    try:
        await asyncio.wait({task, probe}, return_when=asyncio.FIRST_COMPLETED)
        return not task.done() and probe.exception() is None
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)


def seed_of(run_seed: int, prompt: Prompt) -> int:
    """Return the seed of a prompt's first completion, 0 <= seed < 2**40; completion i uses this plus i."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{prompt.prompt_id}".encode(), digest_size=5).digest(), "big")
